"""Floors and predictions for an H200: arithmetic on what the code launches, reads and multiplies.

    python scripts/gpu/predictions.py [--doc docs/kernels.md]

Nothing here is a measurement. Launches are those that XLA compiled (results/compiled_ahead.jsonl),
bytes are those of the models' shapes, and passes over arrays in memory are counted in the code of
the references, by hand. The ceilings were measured by others on an H200, and what a launch of an
empty kernel costs in a CUDA graph by the suite. Times are those of a kernel that reaches the
ceilings; one that reaches 70 % of them takes 1.4 times as long.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterable, Mapping  # noqa: E402
from pathlib import Path  # noqa: E402

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu import step_bytes, steps, training  # noqa: E402
from gpu.numerics_attention import chains  # noqa: E402
from gpu.page import markdown_table, with_table  # noqa: E402
from peagle_jax.atomic_write import write_atomically  # noqa: E402
from peagle_jax.kernels.launch import Launch, interpret_kernels  # noqa: E402
from peagle_jax.kernels.packed_attention import AttentionIntervals  # noqa: E402
from peagle_jax.train.attention import PrefixChain  # noqa: E402
from peagle_jax.weights import flatten_params  # noqa: E402

COPY, BF16_FLOP = 4.3e12, 790e12  # a second, of an H200 (docs/kernels.md)
LAUNCH = 2.5e-6  # seconds of a launch in a CUDA graph, as an H200 has them (results/gpu.jsonl)
COMPILED = ROOT / "results" / "compiled_ahead.jsonl"


@dataclasses.dataclass(frozen=True)
class Work:
    """What a program does, one operation after another.

    Attributes:
      num_bytes: read and written.
      flop: in bfloat16; what is multiplied while it is read costs nothing more.
      launches: of kernels.
    """

    num_bytes: float = 0
    flop: float = 0
    launches: int = 0

    @property
    def floor(self) -> float:
        """Seconds that bytes or arithmetic take at least."""
        return max(self.num_bytes / COPY, self.flop / BF16_FLOP)

    @property
    def seconds(self) -> float:
        """The floor and the launches: a launch waits for the one before, and reads nothing."""
        return self.floor + LAUNCH * self.launches


# ---------------------------------------------------------------- kernels


def product(M: int, N: int, K: int, num_bytes: int, launches: int) -> Work:
    """x @ w.T, M x N x K, with a matrix of so many bytes a number."""
    flop = 2 * M * N * K
    # float8 is multiplied twice as fast
    return Work(num_bytes * N * K + 2 * M * (N + K), flop * num_bytes / 2, launches)


def cached_attention(
    kernel: bool, fp8: bool, tokens: int, lengths: Iterable[int], slots: int
) -> Work:
    """Attention of `tokens` queries a row over caches of so many slots; 32 and 4 heads of 128.

    The kernel reads what a row has. XLA's form reads every slot, and its scores [B N T S] are
    written in float32, read, written in bfloat16 and read: three passes of float32. Of a float8
    cache it first makes a bfloat16 one.
    """
    N, G, H = 32, 4, 128
    lengths = list(lengths)
    vector = H + 4 if fp8 else 2 * H  # bytes of a key, with its scale
    if kernel:
        # parts of one row at a time are few beside the cache, and stay in the L2 cache
        return Work(2 * G * vector * sum(lengths), launches=2)
    B = len(lengths)
    scores = 3 * 4 * B * N * tokens * slots
    if not fp8:
        return Work(2 * G * vector * B * slots + scores, launches=3)
    return Work(2 * G * (vector + 2 * 2 * H) * B * slots + scores, launches=5)


def packed_attention(kernel: bool, P: int, keys: int, pairs: float) -> Work:
    """Training attention with gradients, of a layer with 32 heads of 128.

    The kernel multiplies the pairs of query and key that see each other: twice forward, five times
    backward. XLA's form multiplies all, and eight times, because it computes scores again; the
    float32 scores go through memory in 5 passes forward and 10 backward.

    Args:
      keys: of depth 0.
    """
    N, H = 32, 128
    if kernel:
        return Work(flop=7 * 2 * pairs * N * H, launches=3)
    return Work(15 * 4.0 * P * keys * N, 8 * 2.0 * P * keys * N * H)


def pairs_of(intervals: AttentionIntervals) -> float:
    """Pairs of a query and a key that it sees."""
    first, last, chain_len = (
        np.asarray(x, np.float64) for x in (intervals.first, intervals.last, intervals.chain_len)
    )
    return float(np.maximum(last - first + 1, 0).sum() + chain_len.sum())


def losses(P: int, D: int, V: int) -> tuple[float, float]:
    """Seconds of KL with gradients: (products, float32 logits that pass through memory).

    Logits of head and target, and the gradients of hidden states and of the output matrix, are a
    product each. Passes: each of the two logits is written and read three times, probabilities are
    written and read twice, and the gradient is written once and read twice: 14.
    """
    return 4 * 2.0 * P * D * V / BF16_FLOP, 14 * 4.0 * P * V / COPY


def training_step(n: int) -> dict:
    """A step of the Qwen3-Coder head on n tokens in two documents, as scripts/gpu/training.py.

    Returns:
      `rows` packed; seconds of matrices, of losses, and of attention with the kernel and by XLA.
    """
    _, head = steps.models(steps.Case(steps.QWEN, "peagle", 7, 1), False)
    c = head.config
    segment_ids, _, cod = training.sampled(n)
    P = n + cod.anchor.shape[1]
    arrays = map(jnp.asarray, (cod.anchor, cod.depth, segment_ids))
    pairs = pairs_of(PrefixChain(*arrays, training.COD.num_depths).intervals(None))
    sizes = {path: math.prod(x.shape) for path, x in flatten_params(head.params)}
    layers = sum(size for path, size in sizes.items() if path.startswith("layers."))
    fusion = sum(size for path, size in sizes.items() if path.startswith("fusion."))
    layer = {form: packed_attention(form == "kernel", P, n, pairs) for form in ("kernel", "xla")}
    return {
        "rows": P,
        "matrices": 3 * 2.0 * (P * layers + n * fusion) / BF16_FLOP,
        "losses": sum(losses(P, c.dim, c.vocab)),
        **{f"attention, {form}": c.layers * work.floor for form, work in layer.items()},
    }


# ---------------------------------------------------------------- steps


def experts_of(count: int, k: int, tokens: int) -> float:
    """Experts that so many tokens choose, each k of `count` by itself."""
    return count * (1 - (1 - k / count) ** tokens)


def launches_of(rows: Iterable[Mapping], program: str, rounds: int) -> int:
    """Launches of a compiled step; `rounds` of a loop, if it has one."""
    row = next((r for r in rows if r["program"] == program and r["kernels"]), None)
    if row is None:
        raise KeyError(f"{COMPILED} has no row of {program}: run scripts/gpu/compile_ahead.py")
    return row["thunks"] + (rounds - 1) * row["thunks_in_loops"]


def launch_nothing(launch: Launch) -> tuple:
    """A launcher where nothing is launched."""
    raise AssertionError("a size needs no launch")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of batch 1: where tokens go, what it does, and tokens that it brings."""

    case: steps.Case
    routing: str
    experts: float
    work: Work
    tokens: float


def predicted_steps(rows: list[dict]) -> list[Step]:
    """The steps of both targets at batch 1 that the suite measures whole."""
    found = []
    for target, method, k, program in STEPS:
        case = steps.Case(target, method, k, 1)
        model, head = steps.models(case, False)
        c = model.config
        for routing in ("even", "alike") if k else ("even",):
            tokens = k + 1 if routing == "even" else 1
            experts = experts_of(c.experts, c.experts_per_token, tokens)
            with interpret_kernels(launch_nothing):  # sizes as on a GPU
                num_bytes = step_bytes.floor_bytes(case, model, head, experts)
            rounds = k - 1 if method == "eagle3" else 1
            launches = launches_of(rows, f"{target}: {program}", rounds)
            chances = np.asarray(steps.chances(method, k)) if k else np.zeros(0)
            length = 1 + float(np.cumprod(chances).sum())
            found.append(Step(case, routing, experts, Work(num_bytes, 0, launches), length))
    return found


STEPS = [
    (target, method, k, program)
    for target in (steps.QWEN, steps.OSS)
    for method, k, program in (
        ("none", 0, "a plain step"),
        ("peagle", 7, "a step, K = 7"),
        ("eagle3", 3, "an EAGLE-3 step, K = 3"),
    )
]


# ---------------------------------------------------------------- tables


def us(seconds: float) -> str:
    """Microseconds, with three digits."""
    return f"{1e6 * seconds:.3g}" if seconds < 1e-3 else f"{1e6 * seconds:,.0f}"


def kernel_rows() -> list[list[str]]:
    """What a kernel and XLA's best take: (what, ours, XLA's, times as fast)."""
    rows = []
    for N, K in ((4096, 4096), (24576, 4096)):
        ours, xla = product(8, N, K, 1, 1), product(8, N, K, 2, 1)
        rows.append((f"FP8 product, 8 x {N} x {K}, beside bfloat16", ours, xla))
    lengths = np.linspace(2048, 6144, 8).astype(int)
    for tokens in (1, 8):
        xla = cached_attention(False, False, tokens, lengths, 8192)
        for fp8 in (False, True):
            ours = cached_attention(True, fp8, tokens, lengths, 8192)
            queries = "1 query" if tokens == 1 else f"{tokens} queries"
            name = f"attention, 8 rows of 4,096 tokens in 8,192 slots, {queries}"
            rows.append((name + ", FP8" * fp8, ours, xla))
    rng = np.random.default_rng(0)
    for n, P in ((2048, 5120), (8192, 20_480)):  # as scripts/gpu/speed.py draws them
        intervals = chains(rng, n, P)
        pairs = pairs_of(intervals)
        ours, xla = (packed_attention(kernel, P, n, pairs) for kernel in (True, False))
        rows.append((f"training attention, {P:,} rows, {n:,} keys", ours, xla))
    V, D = 151_936, 2048
    argmax = Work(2 * D * V, launches=1)
    logits = Work(2 * D * V + 3 * 4 * 8 * V, launches=2)
    rows.append((f"argmax, 8 x {D} x {V}", argmax, logits))
    rows.append((f"argmax, 8 x {D} x {V}, FP8", Work(D * V, launches=1), logits))
    return [
        [name, us(ours.seconds), us(xla.seconds), f"{xla.seconds / ours.seconds:.1f}"]
        for name, ours, xla in rows
    ]


def step_rows(rows: list[dict]) -> list[list[str]]:
    """A line a step."""
    found = predicted_steps(rows)
    plain = {step.case.target: step for step in found if step.case.method == "none"}
    lines = []
    for step in found:
        work = step.work
        base = plain[step.case.target]
        speedup = step.tokens / work.seconds * base.work.seconds / base.tokens
        names = {"none": "plain", "peagle": "P-EAGLE", "eagle3": "EAGLE-3"}
        name = f"{step.case.target}, {names[step.case.method]}"
        if step.case.k:
            name += f", K = {step.case.k}, {step.routing}"
        lines.append(
            [
                name,
                f"{step.experts:.0f}",
                f"{work.num_bytes / 1e9:.1f}",
                f"{1e3 * work.floor:.2f}",
                str(work.launches),
                f"{1e3 * work.seconds:.2f}",
                f"{100 * work.floor / work.seconds:.0f} %",
                f"{step.tokens:.2f}",
                f"{speedup:.2f}",
            ]
        )
    return lines


def training_rows() -> list[list[str]]:
    """A line a context."""
    lines = []
    for n in (8192, 20_000):
        step = training_step(n)
        shared = step["matrices"] + step["losses"]
        ours, xla = (shared + step[f"attention, {form}"] for form in ("kernel", "xla"))
        parts = ("matrices", "losses", "attention, kernel", "attention, xla")
        seconds = [f"{1e3 * x:,.0f}" for x in (*(step[part] for part in parts), ours, xla)]
        lines.append([f"{n:,}", f"{step['rows']:,}", *seconds, f"{xla / ours:.1f}"])
    return lines


TABLES = {
    "kernels": ("kernel", "us", "XLA's, us", "times as fast"),
    "steps": (
        "step at batch 1",
        "experts a layer",
        "GB",
        "floor, ms",
        "launches",
        "predicted, ms",
        "of the copy's speed",
        "tokens",
        "of plain",
    ),
    "training": (
        "tokens",
        "packed rows",
        "matrices, ms",
        "losses",
        "attention, kernel",
        "attention, XLA",
        "step, kernels",
        "step, XLA",
        "times as fast",
    ),
}


def tables() -> dict[str, str]:
    """Markdown tables by the names of TABLES."""
    compiled = [json.loads(line) for line in COMPILED.read_text().splitlines()]
    rows = {"kernels": kernel_rows(), "steps": step_rows(compiled), "training": training_rows()}
    return {name: markdown_table(header, rows[name]) for name, header in TABLES.items()}


def filled(text: str, found: Mapping[str, str]) -> str:
    """A page with tables between `<!-- predicted NAME -->` and `<!-- end -->`."""
    for name, table in found.items():
        text = with_table(text, f"predicted {name}", table)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--doc", type=Path, help="a Markdown file whose tables are written anew")
    args = parser.parse_args()
    found = tables()
    print("\n\n".join(found.values()))
    if args.doc:
        write_atomically(args.doc, filled(args.doc.read_text(encoding="utf-8"), found))


if __name__ == "__main__":
    main()
