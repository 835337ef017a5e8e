"""How does drafting time grow with K, and how far is it from its floor?

    python -m experiments.drafting_time [--layers 8 --dim 512 --repeats 7]

The floor is the least time that the bytes, or the arithmetic, of a drafting allow. Weights are
random: a Qwen3 target, a P-EAGLE head of 2 layers and an EAGLE-3 head of 1; batch 1, a cache of 256
tokens, float32. A drafting takes in two committed tokens; "all accepted" is the drafting after a
step that accepted all K drafts.
Expects: P-EAGLE takes at most 3.5 times as long at K = 16 as at K = 1 on a CPU, EAGLE-3 about 16
times; 3 minutes on 2 cores.
Result: see LOG.md, 2026-11-20, and results/drafting_time.jsonl.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from peagle_jax.atomic_write import append_line
from peagle_jax.bench import timing
from peagle_jax.decode.generate import make_drafter
from peagle_jax.draft.confidence import NO_CONFIDENCE
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.draft.markov import NO_MARKOV
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.layers import Rope
from peagle_jax.provenance import provenance
from peagle_jax.targets.config import default_aux_layers
from peagle_jax.targets.qwen3 import Qwen3, Qwen3Config
from peagle_jax.types import Model

KS, CONTEXT, VOCAB, STEPS = (1, 2, 4, 8, 11, 16), 256, 4096, 20


def make_target(layers: int, dim: int) -> Model:
    """A Qwen3 with random weights."""
    config = Qwen3Config(
        vocab=VOCAB,
        layers=layers,
        dim=dim,
        mlp_dim=3 * dim,
        heads=dim // 64,
        kv_heads=max(1, dim // 128),
        head_dim=64,
        rope=Rope.from_hf({"rope_theta": 1e4}, 64, ""),
        norm_eps=1e-6,
        attention_bias=False,
        tied_embeddings=False,
        windows=(None,) * layers,
        context=4096,
        aux_hidden_state_layers=default_aux_layers(layers),
        dtype=jnp.float32,
        stop_ids=(),
        source=None,
    )
    return Model.from_module(Qwen3(config, rngs=nnx.Rngs(0)), config)


def make_head(target: Model, layers: int, parallel: bool) -> Model:
    """A head with random weights: P-EAGLE's if it drafts in parallel, else EAGLE-3's."""
    t = target.config
    config = HeadConfig(
        vocab=t.vocab,
        draft_vocab=t.vocab,
        dim=t.dim,
        layers=layers,
        mlp_dim=t.mlp_dim,
        heads=t.heads,
        kv_heads=t.kv_heads,
        head_dim=t.head_dim,
        rope=t.rope,
        norm_eps=t.norm_eps,
        context=t.context,
        target_dim=t.dim,
        aux_hidden_state_layers=t.aux_hidden_state_layers,
        mask_token=1 if parallel else None,
        num_depths=16,
        qk_norm=False,
        attention_bias=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        **PAPER_DESIGN,
        **NO_MARKOV,
        **NO_CONFIDENCE,
        windows=(None,) * layers,
        dtype=t.dtype,
    )
    return Model.from_module(DraftHead(config, rngs=nnx.Rngs(1)), config)


def machine_speed(repeats: int) -> tuple[float, float]:
    """Bytes per second of matrix-vector products, and FLOP per second of a large matrix product."""
    # 134 MB, which is more than the processor's caches hold
    matrices = [jax.random.normal(jax.random.key(i), (1024, 2048)) for i in range(16)]
    x = jax.random.normal(jax.random.key(99), (1, 1024))

    @jax.jit
    def read(x: jax.Array, matrices: list[jax.Array]) -> jax.Array:
        return sum((x @ matrix).sum() for matrix in matrices)

    num_bytes = sum(matrix.nbytes for matrix in matrices)
    read_seconds = timing.median_seconds(functools.partial(read, x, matrices), repeats)

    square = jax.random.normal(jax.random.key(1), (1536, 1536))

    @jax.jit
    def multiply(a: jax.Array) -> jax.Array:
        return a @ a

    product_seconds = timing.median_seconds(functools.partial(multiply, square), repeats)
    return num_bytes / read_seconds, 2 * 1536**3 / product_seconds


def matmul_weights(head: Model) -> tuple[int, int, int]:
    """Parameters in the matrix products of fusion, layers and lm_head."""

    def size(part: dict) -> int:
        return sum(x.size for x in jax.tree.leaves(part) if x.ndim == 2)

    return size(head.params["fusion"]), size(head.params["layers"]), size(head.params["lm_head"])


def floor(head: Model, k: int, bandwidth: float, flops: float) -> dict:
    """What one P-EAGLE drafting must at least do.

    It reads each weight once, and multiplies 2 + K - 1 rows (K of them through lm_head).
    """
    fusion, layers, lm_head = matmul_weights(head)
    arithmetic = 2 * (2 * fusion + (k + 1) * layers + k * lm_head)
    size = 4 * (fusion + layers + lm_head)
    return {
        "bytes": size,
        "flop": arithmetic,
        "bytes_seconds": size / bandwidth,
        "flop_seconds": arithmetic / flops,
    }


def matmul_seconds(head: Model, k: int, repeats: int) -> dict:
    """Seconds of the matrix products of fusion, layers and lm_head alone.

    They have the rows that drafting gives them.
    """
    num_committed = k + 1

    def matrices_of(part: dict) -> list[jax.Array]:
        return [x for x in jax.tree.leaves(part) if x.ndim == 2]

    work = {
        "fusion": (num_committed, matrices_of(head.params["fusion"])),
        "layers": (num_committed + k - 1, matrices_of(head.params["layers"])),
        "lm_head": (k, matrices_of(head.params["lm_head"])),
    }

    @functools.partial(jax.jit, static_argnums=1)
    def multiply(matrices: list[jax.Array], num_rows: int) -> jax.Array:
        def body(_: jax.Array, total: jax.Array) -> jax.Array:
            one = 1 + 0 * total  # depends on the last round, so that no round can be dropped
            return sum((one * jnp.ones((num_rows, w.shape[0])) @ w).sum() for w in matrices)

        return jax.lax.fori_loop(0, STEPS, body, 0.0)

    return {
        name: timing.median_seconds(functools.partial(multiply, weights, num_rows), repeats) / STEPS
        for name, (num_rows, weights) in work.items()
    }


def measure(target: Model, heads: dict[str, Model], repeats: int) -> list[dict]:
    """A row for every method and K, without where and when it was measured."""
    bandwidth, flops = machine_speed(repeats)
    settings = {"batch": 1, "context": CONTEXT, "repeats": repeats, "steps": STEPS}
    plain = timing.verifying_seconds(target, 0, **settings)
    rows, at_first_k = [], {}
    for k in KS:
        verify = timing.verifying_seconds(target, k, **settings)
        for method, head in heads.items():
            drafter = make_drafter(head, k, method)
            seconds = timing.drafting_seconds(head, drafter, **settings)
            at_first_k.setdefault(method, seconds)
            row = {
                "name": "drafting_time",
                "method": method,
                "k": k,
                "draft_seconds": seconds,
                "over_k1": seconds / at_first_k[method],
                "verify_seconds": verify,
                "plain_step_seconds": plain,
                "break_even": (seconds + verify) / plain,
            }
            if method == "peagle":
                row["draft_seconds_after_all_accepted"] = timing.drafting_seconds(
                    head, drafter, **settings, committed=k + 1
                )
                row["floor"] = floor(head, k, bandwidth, flops)
                row["matmul_seconds"] = matmul_seconds(head, k, repeats)
            rows.append(row | {"bandwidth": bandwidth, "flops": flops, **_shape(target)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8, help="layers of the target (default: 8)")
    parser.add_argument(
        "--dim", type=int, default=512, help="width of target and heads (default: 512)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/drafting_time.jsonl"),
        help="rows are appended (default: results/drafting_time.jsonl)",
    )
    args = parser.parse_args()
    target = make_target(args.layers, args.dim)
    heads = {"peagle": make_head(target, 2, True), "eagle3": make_head(target, 1, False)}
    command = (
        f"python -m experiments.drafting_time --layers {args.layers} --dim {args.dim} "
        f"--repeats {args.repeats}"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.open("a").close()  # before minutes of work, not after
    origin = provenance(command)
    rows = measure(target, heads, args.repeats)
    append_line(args.out, "\n".join(json.dumps(origin | row) for row in rows))
    bandwidth, flops, plain = (rows[0][key] for key in ("bandwidth", "flops", "plain_step_seconds"))
    speeds = f"{bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s"
    Console(width=150).print(f"{speeds}; plain step {1e3 * plain:.2f} ms", _table(rows))


def _shape(target: Model) -> dict:
    """The target's sizes, for a row."""
    config = {f.name: getattr(target.config, f.name) for f in dataclasses.fields(target.config)}
    return {"target": {key: config[key] for key in ("layers", "dim", "mlp_dim", "vocab")}}


def _table(rows: list[dict]) -> Table:
    table = Table(
        "method",
        "K",
        "draft ms",
        "over K=1",
        "all accepted ms",
        "floor ms: bytes, arithmetic",
        "products ms: fusion, layers, lm_head",
        "rest ms",
        "verify ms",
        "break-even AL",
    )
    for row in rows:
        table.add_row(
            row["method"],
            str(row["k"]),
            _milliseconds(row["draft_seconds"]),
            f"{row['over_k1']:.2f}",
            *(_parallel_cells(row) if row["method"] == "peagle" else ("", "", "", "")),
            _milliseconds(row["verify_seconds"]),
            f"{row['break_even']:.2f}",
        )
    return table


def _parallel_cells(row: dict) -> tuple[str, str, str, str]:
    """What is only known of P-EAGLE: after all accepted, the floor, the products, the rest."""
    least, products = row["floor"], row["matmul_seconds"].values()
    floors = least["bytes_seconds"], least["flop_seconds"]
    return (
        _milliseconds(row["draft_seconds_after_all_accepted"]),
        " , ".join(map(_milliseconds, floors)),
        " , ".join(map(_milliseconds, products)),
        _milliseconds(row["draft_seconds"] - sum(products)),
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


if __name__ == "__main__":
    main()
