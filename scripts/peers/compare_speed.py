"""Tokens per second beside vLLM and transformers: same models, prompts, K, dtype and machine.

    scripts/peers/install_vllm.sh .venv-vllm
    .venv/bin/python scripts/peers/compare_speed.py --vllm .venv-vllm [--record results/peers.jsonl]

Every engine decodes every prompt greedily, with plain decoding and with the draft heads, at each
dtype and batch size. All engines of a dtype are started first. Then they take turns: a round times
each of them once, and a number is the median over rounds, so that a slow moment of the machine
concerns all of them. Without options the packaged models continue excerpts of Python source.

Batches follow one another, each begun when the last is done. With `--continuous` all prompts wait
from the start, and one enters wherever another is done, as at a server; transformers cannot do that
and is left out. `--target FOLDER --methods plain` compares plain decoding of any target. With
`--stream` the host gets the new tokens of every step, as a server hands them out; vLLM and ours.

Texts are compared with our own plain decoding in the same dtype. Only in float32 is equality
promised; a text that differs first at a near tie (two best logits within 1e-4) is counted apart.
Counters, how often was drafted and how many drafts were accepted at each position, are compared
with vLLM's (`counters_of_vllm`).

Exit code 0: float32 texts agree, and so do counters where all texts do. 1: one differs. 2: bad
arguments.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# engines share a GPU, and this process checks their texts on it
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax.numpy as jnp
from line_process import LineProcess
from rich.console import Console
from rich.table import Table

from peagle_jax import load_target, text
from peagle_jax.bench.exact import compare
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows
from peagle_jax.report import peers
from peagle_jax.types import InputError

HERE = Path(__file__).parent
WORKERS = {
    "peagle_jax": "speed_ours.py",
    "vllm": "speed_vllm.py",
    "transformers": "speed_transformers.py",
}
METHODS = {
    "peagle_jax": ("plain", "eagle3", "peagle"),
    "vllm": ("plain", "eagle3", "peagle"),
    "transformers": ("plain", "prompt_lookup"),
}
# engines in which a prompt enters while others are decoded, and which hand out tokens by steps
CONTINUOUS_BATCHING = {name: WORKERS[name] for name in ("peagle_jax", "vllm")}
# what an engine decodes with where --static-cache asks for it
STATIC = {"transformers": ("static",)}


@dataclasses.dataclass
class Engine:
    """One engine with one method in one dtype, in a process of its own.

    Attributes:
      name: a key of WORKERS.
      method: a name in METHODS or STATIC.
      dtype: "float32" or "bfloat16".
      k: tokens drafted per step; 0 for plain decoding.
      worker: its process.
      seconds: batch size -> the seconds of each round.
      answers: batch size -> the last answer.
    """

    name: str
    method: str
    dtype: str
    k: int
    worker: LineProcess
    seconds: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    answers: dict[int, dict] = dataclasses.field(default_factory=dict)


def start_engine(
    name: str, method: str, dtype: str, args: argparse.Namespace, longest: int
) -> Engine:
    """Starts a worker, and waits until its models are loaded."""
    drafter = {"peagle": args.peagle, "eagle3": args.eagle3}.get(method)
    python = args.vllm / "bin/python" if name == "vllm" else Path(sys.executable)
    k = 0 if method in ("plain", "static") else args.k
    job = {
        "target": str(args.target.resolve()),
        "drafter": None if drafter is None else str(drafter.resolve()),
        "method": method,
        "dtype": dtype,
        "k": k,
        "batch_sizes": args.batch_sizes,
        "max_model_len": longest + args.max_new_tokens + 64,
        "compile": args.vllm_compile,
    }
    worker = LineProcess(
        f"{name}, {method}, {dtype}",
        [python, HERE / WORKERS[name]],
        job,
        rule="the engine must decode the prompts",
        next_step="see what it prints with --verbose, or leave it out with --engines",
        verbose=args.verbose,
        environment={"LD_PRELOAD": args.vllm_preload or ""} if name == "vllm" else None,
    )
    return Engine(name, method, dtype, k, worker)


def measure(
    engines: Sequence[Engine],
    prompts: list[list[int]],
    args: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    """Warms every engine up at every batch size, then times them in turns."""
    for batch_size in args.batch_sizes:
        taking_part = [e for e in engines if can_decode(e, batch_size)]
        request = {
            "prompts": prompts,
            "max_new_tokens": args.max_new_tokens,
            "batch_size": batch_size,
            "continuous": args.continuous,
            "stream": args.stream,
        }
        for number in range(args.rounds + 1):
            for engine in taking_part:
                engine.answers[batch_size] = engine.worker.ask(request)
                if number:  # the first round compiles
                    taken = engine.answers[batch_size]["seconds"]
                    engine.seconds.setdefault(batch_size, []).append(taken)
                progress(f"batch {batch_size}, round {number}: {engine.name} {engine.method}")


def can_decode(engine: Engine, batch_size: int) -> bool:
    """Assisted decoding of transformers takes one prompt at a time."""
    return batch_size == 1 or engine.method != "prompt_lookup"


def rows_of(
    engines: Sequence[Engine], prompts: list[list[int]], args: argparse.Namespace
) -> list[dict]:
    """A result row for each engine and batch size, without provenance."""
    rows = []
    dtype = engines[0].dtype
    target = load_target(args.target, dtype=jnp.dtype(dtype))
    for batch_size in args.batch_sizes:
        reference = next(
            (e for e in engines if e.name == "peagle_jax" and e.method == "plain"), engines[0]
        ).answers[batch_size]["outputs"]
        for engine in engines:
            if batch_size not in engine.seconds:
                continue
            answer = engine.answers[batch_size]
            comparison = compare(target, prompts, reference, answer["outputs"])
            num_tokens = sum(map(len, answer["outputs"]))
            seconds = engine.seconds[batch_size]
            rows.append(
                {
                    "vllm_compiled": args.vllm_compile,
                    "vllm_preload": Path(args.vllm_preload).name if args.vllm_preload else None,
                    "name": "peers",
                    "engine": engine.name,
                    "engine_version": engine.worker.version,
                    "engine_device": answer.get("device", "cpu"),
                    "method": engine.method,
                    "k": engine.k,
                    "dtype": dtype,
                    "batch_size": batch_size,
                    "continuous": args.continuous,
                    "stream": args.stream,
                    "target": args.target.name,
                    "num_prompts": len(prompts),
                    "max_new_tokens": args.max_new_tokens,
                    "seconds": seconds,
                    "tokens_per_second": num_tokens / statistics.median(seconds),
                    "acceptance_length": answer.get("acceptance_length"),
                    "num_drafts": answer.get("num_drafts"),
                    "num_accepted_per_pos": answer.get("num_accepted_per_pos"),
                    "same": comparison.same,
                    "near_ties": comparison.near_ties,
                    "different": comparison.different,
                }
            )
    return rows


def add_counters_of_vllm(rows: Sequence[dict]) -> None:
    """Says in every row whether its counters are those of vLLM's row with the same method.

    None where vLLM has none, and where one of the two has not all texts: counters then differ, too.
    """
    of_vllm = rows_of_vllm(rows)
    for row in rows:
        theirs = of_vllm.get((row["method"], row["dtype"], row["batch_size"]))
        row["counters_of_vllm"] = None
        if theirs is None or row["engine"] == "vllm":
            continue
        if None in (row["num_drafts"], theirs["num_drafts"]):
            continue
        if all(one["same"] == one["num_prompts"] for one in (row, theirs)):
            names = "num_drafts", "num_accepted_per_pos"
            row["counters_of_vllm"] = all(row[name] == theirs[name] for name in names)


def rows_of_vllm(rows: Sequence[dict]) -> dict[tuple, dict]:
    """(method, dtype, batch size) -> vLLM's row."""
    return {(r["method"], r["dtype"], r["batch_size"]): r for r in rows if r["engine"] == "vllm"}


def disagrees(row: dict) -> bool:
    """Whether a float32 row has other texts, or of the same texts other counters than vLLM."""
    other_counters = row["counters_of_vllm"] is False
    return row["dtype"] == "float32" and bool(row["different"] or other_counters)


def table_of(rows: Sequence[dict]) -> Table:
    """Tokens per second of every engine; ratios are to vLLM with the same method, if it ran."""
    columns = "engine", "method", "K", "dtype", "batch", "tokens/s", "beside vLLM", "length"
    table = Table(*columns, "same texts", "counters")
    of_vllm = rows_of_vllm(rows)
    said = {None: "", True: "vLLM's", False: "others"}
    for row in rows:
        theirs = of_vllm.get((row["method"], row["dtype"], row["batch_size"]))
        length = row["acceptance_length"]
        near_ties = f" ({row['near_ties']} near ties)" if row["near_ties"] else ""
        table.add_row(
            row["engine"],
            row["method"],
            str(row["k"] or ""),
            row["dtype"],
            str(row["batch_size"]),
            f"{row['tokens_per_second']:.0f}",
            f"{peers.speed_ratio(row, theirs):.2f}" if theirs else "",
            f"{length:.2f}" if length else "",
            f"{row['same']}/{row['num_prompts']}{near_ties}",
            said[row["counters_of_vllm"]],
        )
    return table


def run(args: argparse.Namespace) -> list[dict]:
    """All rows, dtype after dtype: engines of one dtype share the memory and the rounds."""
    tokenizer = text.load_tokenizer(args.target)
    if args.prompts is None:
        prompts = standard_prompts(tokenizer, args.num_prompts)
    else:
        prompts = text.read_prompts(args.prompts, tokenizer)[: args.num_prompts]
    prompts = [list(map(int, prompt)) for prompt in prompts]
    longest = max(map(len, prompts))
    rows = []
    methods = {
        name: tuple(method for method in METHODS[name] if method in args.methods)
        for name in args.engines
    }
    if args.static_cache:
        methods |= {name: methods[name] + STATIC[name] for name in STATIC if name in methods}
    cases = [(name, method) for name in methods for method in methods[name]]
    for name, of_engine in methods.items():
        if not of_engine:
            rule, next_step = f"{name} has {', '.join(METHODS[name])}", "name one, or no --methods"
            raise InputError("--methods", rule, " ".join(args.methods), next_step)
    if "plain" not in methods.get("peagle_jax", ("plain",)):
        rule, next_step = "texts are compared with plain decoding's", "name plain, too"
        raise InputError("--methods", rule, " ".join(args.methods), next_step)
    turns = len(args.dtypes) * len(cases) * (1 + len(args.batch_sizes) * (args.rounds + 1))
    with ProgressReport("compare", turns, unit="turns") as report:
        done = 0

        def progress(note: str) -> None:
            nonlocal done
            done += 1
            report.update(done, note=note)

        for dtype in args.dtypes:
            engines: list[Engine] = []
            try:
                for name, method in cases:
                    engines.append(start_engine(name, method, dtype, args, longest))
                    progress(f"started {name} {method} in {dtype}")
                measure(engines, prompts, args, progress)
            finally:
                for engine in engines:
                    engine.worker.close()
            new = rows_of(engines, prompts, args)
            add_counters_of_vllm(new)
            if args.record:
                append_rows(args.record, new, "scripts/peers/compare_speed.py")
            rows += new
    return rows


def check_engines(args: argparse.Namespace, option: str) -> None:
    """Raises InputError where an engine cannot do what an option asks for."""
    if not set(args.engines) <= CONTINUOUS_BATCHING.keys():
        rule, next_step = (
            f"{option} has {' and '.join(CONTINUOUS_BATCHING)}",
            "leave out transformers",
        )
        raise InputError("--engines", rule, " ".join(args.engines), next_step)


def check_continuous(args: argparse.Namespace) -> None:
    """Raises InputError where prompts cannot enter while others are decoded."""
    check_engines(args, "--continuous")
    if len(args.batch_sizes) > 1:  # vLLM has one for all its requests
        rule, next_step = "--continuous takes one", "call compare_speed once for each"
        raise InputError("--batch-sizes", rule, args.batch_sizes, next_step)
    if args.num_prompts <= args.batch_sizes[0]:
        rule, next_step = "--continuous takes more than --batch-sizes", "ask for 32"
        raise InputError("--num-prompts", rule, args.num_prompts, next_step)


def find_tcmalloc() -> str | None:
    """The library that vLLM's installation page for CPUs says to preload (libtcmalloc-minimal4).

    Its other one, Intel's OpenMP, made vLLM slower in this comparison (LOG.md, 2026-11-28).
    """
    return max(map(str, Path("/usr/lib").glob("*/libtcmalloc_minimal.so.*")), default=None)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    packaged = "default: the package's"
    parser.add_argument("--vllm", type=Path, help="environment made by install_vllm.sh")
    parser.add_argument("--target", type=Path, default=ASSETS / "target", help=packaged)
    parser.add_argument("--peagle", type=Path, default=ASSETS / "peagle", help=packaged)
    parser.add_argument("--eagle3", type=Path, default=ASSETS / "eagle3", help=packaged)
    parser.add_argument("-k", type=int, default=7, help="tokens drafted per step (default: 7)")
    parser.add_argument("--engines", nargs="+", choices=WORKERS, help="default: all that can do it")
    known = list(dict.fromkeys(method for of_engine in METHODS.values() for method in of_engine))
    help_ = "default: all; another --target without heads takes plain"
    parser.add_argument("--methods", nargs="+", choices=known, default=known, help=help_)
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="default: both")
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="default: 1 8")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--prompts", type=Path, help="JSONL (default: held-out Python source)")
    parser.add_argument("--num-prompts", type=int, default=8, help="default: 8")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: 128")
    parser.add_argument(
        "--continuous", action="store_true", help="a prompt enters where another is done (batch: 8)"
    )
    parser.add_argument("--stream", action="store_true", help="outputs after every step")
    parser.add_argument(
        "--vllm-compile", action="store_true", help="vLLM with torch.compile (default: eager)"
    )
    parser.add_argument(
        "--vllm-preload",
        metavar="LIBRARY",
        default=find_tcmalloc(),
        help="what vLLM allocates memory with; '' for none (default: tcmalloc, where it is "
        "installed)",
    )
    parser.add_argument(
        "--static-cache",
        action="store_true",
        help="transformers also with a static cache, with which it compiles on a GPU",
    )
    parser.add_argument("--verbose", action="store_true", help="show what engines print")
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    parser.add_argument("--picture", type=Path, help="draw the rows of the last dtype to this PNG")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args: Any = options().parse_args(argv)
    args.engines = args.engines or list(
        CONTINUOUS_BATCHING if args.continuous or args.stream else WORKERS
    )
    args.batch_sizes = args.batch_sizes or ([8] if args.continuous else [1, 8])
    try:
        if "vllm" in args.engines and args.vllm is None:
            rule = "vLLM runs in an environment of its own"
            next_step = "make it with scripts/peers/install_vllm.sh, or choose --engines"
            raise InputError("--vllm", rule, "none", next_step)
        if "vllm" in args.engines and not (args.vllm / "bin/python").exists():
            next_step = f"make it: scripts/peers/install_vllm.sh {args.vllm}"
            raise InputError(args.vllm, "must be vLLM's environment", "no bin/python", next_step)
        counts = {"--rounds": args.rounds, "-k": args.k, "--max-new-tokens": args.max_new_tokens}
        for option, value in counts.items() | {("--batch-sizes", min(args.batch_sizes))}:
            if value < 1:
                raise InputError(option, "must be 1 or more", value, f"give {option} 1 or more")
        if args.continuous:
            check_continuous(args)
        if args.stream:
            check_engines(args, "--stream")
        rows = run(args)
    except InputError as error:
        print(f"compare_speed: {error}", file=sys.stderr)
        return 2
    console = Console(width=130)
    console.print(table_of(rows))
    if args.picture:
        peers.draw([row for row in rows if row["dtype"] == args.dtypes[-1]], args.picture)
    return int(any(map(disagrees, rows)))


if __name__ == "__main__":
    sys.exit(main())
