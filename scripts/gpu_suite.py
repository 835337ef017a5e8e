"""What only a GPU can say: numerics, times beside XLA's and floors, steps, drafting, training.

    pip install -e ".[cuda,kernels]"          from a bare checkout; a driver for CUDA 13
    python scripts/gpu_suite.py --record results/gpu.jsonl [--minutes 8] [--only PART ...]

The most telling parts come first; all of them take perhaps ten calls of eight minutes. Every row is
written when it is known, and a call with the same --record goes on where the last one stopped: what
this code has finished on this device is not run again, and what no longer fits into --minutes
waits. Exit code 1: a number is wrong, or a part failed; 2: nothing was run. Without jax-triton only
the references and Mosaic GPU run, and the first line says so. `--tiny` is a dry run for any
machine, in which interpreters run the kernels.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from gpu import (  # noqa: E402
    contact,
    libraries,
    numerics,
    profiling,
    speed,
    steps,
    timing,
    training,
    variants,
)
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from peagle_jax.assembler import check_assembler  # noqa: E402
from peagle_jax.atomic_write import append_line, write_atomically  # noqa: E402
from peagle_jax.kernels.launch import gpu, interpret_kernels, unavailable_reason  # noqa: E402
from peagle_jax.provenance import CODE, provenance, without_folders  # noqa: E402
from peagle_jax.types import InputError  # noqa: E402

CONSOLE = Console(width=180, stderr=True)


# rows with these facts in common are of one state of the code, on one machine
SAME = ("code", "device", "suite", "triton", "jax")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # `--out` is the former spelling
    parser.add_argument(
        "--record", "--out", type=Path, required=True, help="append rows as JSON lines"
    )
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--only", nargs="+", metavar="PART", help="beginnings of parts' names")
    parser.add_argument(
        "--seed",
        type=int,
        default=secrets.randbits(32),
        help="of the numerics' operands; fresh by default",
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run at small sizes")
    args = parser.parse_args()
    if jax.default_backend() != "gpu" and not args.tiny:
        print(
            f"gpu_suite: needs a GPU, and JAX runs on {jax.default_backend()}; --tiny is a dry run",
            file=sys.stderr,
        )
        return 2
    try:
        check_assembler()
    except InputError as error:
        print(f"gpu_suite: {error}", file=sys.stderr)
        return 2
    with interpreted() if args.tiny else contextlib.nullcontext():
        return run_parts(args)


def interpreted() -> contextlib.AbstractContextManager:
    """A context in which Triton's interpreter runs the kernels, where there is one that works."""
    try:
        from gpu.interpreter import interpret_later, unusable_reason
    except ImportError as error:
        reason = str(error)
    else:
        if (reason := unusable_reason()) is None:
            return interpret_kernels(interpret_later)
    CONSOLE.print(f"[yellow]without Triton's interpreter[/yellow]: {reason}")
    return contextlib.nullcontext()


def run_parts(args: argparse.Namespace) -> int:
    """Runs what is not done yet and fits, and prints all rows; the exit code."""
    started_at = time.monotonic()
    facts = suite_facts(args.tiny)
    if facts["triton"] != "yes":
        CONSOLE.print(f"[yellow]without Triton kernels[/yellow]: {facts['triton']}")
    rows = [row for row in read(args.record) if all(row.get(key) == facts[key] for key in SAME)]
    done = {row["done"]: row["time"] for row in rows if "done" in row}
    # of each part, those of the call that finished it
    rows = [row for row in rows if done.get(row.get("unit")) == row["time"]]
    all_parts = parts(args.tiny, args.seed, rows)
    for name, part in all_parts.items():
        is_wanted = not args.only or any(name.startswith(prefix) for prefix in args.only)
        if name in done or not is_wanted:
            continue
        seconds = time.monotonic() - started_at
        seconds_left = 60 * args.minutes - seconds
        if seconds_left < 0 or not args.tiny and seconds_left < expected(name):
            continue  # a shorter one may fit
        CONSOLE.print(f"[bold]{name}[/bold] ({seconds:.0f} s)")
        if run_part(name, part, facts, args.record, rows):
            done[name] = facts["time"]
    show(rows)
    CONSOLE.print(
        f"{len(done)} of {len(all_parts)} parts are done in {args.record}; the same command goes on"
    )
    return 1 if any(is_wrong(row) for row in rows) else 0


def suite_facts(tiny: bool) -> dict:
    """What every row of this call says of itself."""
    command = " ".join(["python scripts/gpu_suite.py", *sys.argv[1:]])
    return provenance(command) | {
        "suite": "tiny" if tiny else "whole",
        "triton": unavailable_reason("triton") or "yes",
        "code": fingerprint(),
    }


def run_part(name: str, part: Callable, facts: dict, record: Path, rows: list[dict]) -> bool:
    """Runs a part, and adds its rows to `record` and to `rows`; False where it fails."""
    try:
        for row in part():
            rows.append(facts | {"unit": name} | row)
            write(record, rows[-1])
    except Exception as error:  # the other parts still have their turn
        text = without_folders(f"{type(error).__name__}: {error}")
        CONSOLE.print(f"[red]{name} failed[/red]: {text[:500]}")
        write(record, facts | {"failed": name, "error": text[:2000]})
        rows.append({"failed": name, "error": text[:300]})
        return False
    finally:
        jax.clear_caches()
    write(record, facts | {"done": name})
    return True


def is_wrong(row: dict) -> bool:
    """Whether a row says that a number is wrong, or that a part failed."""
    return row.get("right") is False or isinstance(row.get("failed"), str)


def fingerprint() -> str:
    """A hash of every file that the numbers depend on, whatever git knows about it."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    paths = [path for folder in CODE for path in [root / folder, *(root / folder).rglob("*")]]
    for path in sorted(path for path in paths if path.suffix in (".py", ".yaml", ".json")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def expected(name: str) -> int:
    """Seconds that a part may take, by guess: it is not begun with less time left."""
    if name.startswith("steps"):
        return 30 if "layers" in name else 100
    if name.startswith("small n"):
        return 20
    if name.startswith("profile"):
        return 60
    seconds = {"environment": 5, "launches": 20, "ceilings": 10, "drafting": 30}
    seconds |= dict.fromkeys(("matmul", "mosaic matmul", "experts", "training", "losses"), 100)
    return seconds.get(name, 40)


def parts(tiny: bool, seed: int, rows: list[dict]) -> dict[str, Callable[[], Iterator[dict]]]:
    """All parts by name, in the order of what matters most.

    Args:
      rows: known so far; ceilings that are among them are not measured again.
    """
    size = 1e-3 if tiny else 1

    @functools.cache
    def ceilings():
        known = (row for row in rows if row.get("part") == "ceilings")
        return next(known, None) or timing.ceilings(size)

    def measure_ceilings():
        description = f"sm_{gpu().capability}, {gpu().num_sms} multiprocessors"
        yield {"part": "ceilings", **timing.ceilings(size), "gpu": description}

    def check(part):
        return lambda: part(np.random.default_rng(seed), tiny)

    def measure(part):
        return lambda: part(ceilings(), tiny)

    def measure_step(case):
        return lambda: steps.measure(case, ceilings(), tiny)

    def profile(case):
        return lambda: profiling.measure(case, tiny)

    def check_small(part):
        return lambda: part(np.random.default_rng(seed), True)

    def draft(*ks):
        return lambda: steps.drafting(ceilings(), tiny, ks)

    by_name = {"environment": lambda: contact.environment(tiny), "ceilings": measure_ceilings}
    by_name["launches"] = lambda: contact.launches(tiny)
    if not tiny:
        by_name |= {f"small numerics: {n}": check_small(p) for n, p in numerics.PARTS.items()}
    by_name |= {f"numerics: {name}": check(part) for name, part in numerics.PARTS.items()}
    timed = speed.PARTS | libraries.PARTS | variants.PARTS
    by_name |= {name: measure(part) for name, part in timed.items()}
    by_name["drafting"] = draft(1, 3) if tiny else draft(1, 16)
    if not tiny:
        by_name["drafting, more K"] = draft(1, 3, 5, 7, 11)
    by_name["training"] = measure(training.measure)
    by_name |= {f"steps: {case.name}": measure_step(case) for case in steps.cases(tiny)}
    profiles = {f"profile: {case.name}": profile(case) for case in profiling.cases(tiny)}
    by_name |= profiles
    # First what takes seconds: versions, launches, and every kernel at small sizes, where the
    # interpreter ran it. Then whole steps of both targets and what K costs; large sizes and tables
    # after them; and last what has never run anywhere and might hang.
    late = [name for name in by_name if "mosaic" in name]
    whole = [name for name in by_name if name.startswith("steps") and "layers" not in name]
    small = [name for name in by_name if name.startswith("small n") and name not in late]
    checks = [name for name in by_name if name.startswith("numerics") and name not in late]
    at_batch_1 = [name for name in whole if name.endswith("batch 1")]
    first = ["environment", "launches", "ceilings", *small, *at_batch_1[:1], "drafting"]
    first += [
        *at_batch_1[1:],
        *profiles,
        *checks,
        *(name for name in whole if name not in at_batch_1),
    ]
    first += ["matmul", "attention", "experts"]
    others = [name for name in by_name if name not in (*first, *late)]
    return {name: by_name[name] for name in (*first, *others, *late)}


def read(path: Path) -> list[dict]:
    """Rows so far. A last line that a kill cut short is taken out of the file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        write_atomically(path, text)
    return [json.loads(line) for line in text.splitlines()]


def write(path: Path, row: dict) -> None:
    """Adds a row to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(row))


def show(rows: list[dict]) -> None:
    """Prints all rows as tables."""
    out = Console(width=180)
    for row in rows:
        if row.get("part") == "ceilings":
            keys = "copy_bytes_per_s", "bf16_flop_per_s", "fp8_flop_per_s"
            copy, bf16, fp8 = (row[key] / 1e12 for key in keys)
            products = f"bfloat16 {bf16:.0f} TFLOP/s, float8 {fp8:.0f} TFLOP/s"
            out.print(f"{row['gpu']}: copy {copy:.2f} TB/s, {products}")
        if row.get("part") == "environment":
            versions = ", ".join(f"{name} {v}" for name, v in row["versions"].items() if v)
            out.print(f"{versions}; driver {row['driver']}; ptxas {row['ptxas']}")
        if row.get("part") == "launches":
            out.print(launches_line(row))
    out.print(numerics_table(rows))
    out.print(times_table(rows))
    out.print(drafting_table(rows))
    out.print(steps_table(rows))
    for row in rows:
        if row.get("part") == "profile":
            out.print(profile_table(row))
    for row in rows:
        if isinstance(row.get("failed"), str):
            out.print(f"failed: {row['failed']}: {row.get('error', '')[:300]}")


def launches_line(row: dict) -> str:
    """What a launch costs, one way beside the other."""
    if "not_run" in row:
        return f"{row['shape']}: {row['not_run']}"
    texts = [f"{name} {us:.2f} us" for name, us in row["us"].items()]
    texts += [f"{name} failed: {error}" for name, error in row["errors"].items()]
    return f"{row['shape']}, a launch: {', '.join(texts)}"


def numerics_table(rows: list[dict]) -> Table:
    table = Table("kernel", "form", "shape", "relative error", title="numerics, against float64")
    for row in rows:
        if row.get("part") == "numerics":
            error = f"{row['error']:.1e}{'' if row['right'] else ' WRONG'}"
            table.add_row(row["kernel"], row["form"], row["shape"], error)
    return table


def times_table(rows: list[dict]) -> Table:
    table = Table("part", "shape", "us (floor; times as fast as the first)", title="times")
    for row in rows:
        if "times_as_fast" in row:
            floor, ratios = row["floor_us"], row["times_as_fast"]
            texts = [
                f"{name} {us:.1f} ({floor[name]:.1f}; {ratios.get(name, float('nan')):.2f})"
                for name, us in row["us"].items()
            ]
            missing = row.get("not_run", {})
            texts += [f"{name} does not run: {reason}" for name, reason in missing.items()]
        elif "ms" in row:
            texts = [
                f"{name} {ms:.0f} ms and {row['temporary_gb'][name]:.1f} GB"
                for name, ms in row["ms"].items()
            ]
        else:
            continue
        table.add_row(row["part"], row["shape"], ", ".join(texts))
    return table


def profile_table(row: dict) -> Table:
    """The ten kernels that a step spends most time in."""
    title = f"{row['case']}, {row['way']}: {row['launches_a_step']:.0f} launches a step"
    table = Table("kernel", "a step", "us", "us a step", title=title)
    for kernel in row["kernels"][:10]:
        count, us = kernel["a_step"], kernel["us"]
        table.add_row(kernel["name"], f"{count:.0f}", f"{us:.2f}", f"{count * us:.0f}")
    table.add_row("all", "", "", f"{row['busy_us_a_step']:.0f} of {row['span_us_a_step']:.0f}")
    return table


def drafting_table(rows: list[dict]) -> Table:
    table = Table("drafting", "floor of K = 1, us", "us (times the cost of K = 1)")
    for row in rows:
        if "times_K=1" in row:
            ratios = row["times_K=1"]
            texts = [f"{name} {us:.1f} ({ratios[name]:.2f})" for name, us in row["us"].items()]
            table.add_row(row["shape"], f"{row['floor_us']['K=1']:.1f}", ", ".join(texts))
    return table


def steps_table(rows: list[dict]) -> Table:
    """Steps, with their speed beside that of plain decoding and of the best EAGLE-3 step."""
    title = "steps; acceptance is SYNTHETIC, at published rates; speedups of whole targets only"
    headers = ["step", "routing", "experts", "ms", "floor, ms", "tokens/s"]
    table = Table(*headers, "of plain", "of EAGLE-3", title=title)
    step_rows = [row for row in rows if row.get("part") == "steps"]

    def setting(row):
        return row["target"], row["layers"], row["batch"], row["routing"]

    # setting -> method -> tokens a second of its best step
    best: dict[tuple, dict[str, float]] = {}
    for row in step_rows:
        if row["layers"] is None:
            methods = best.setdefault(setting(row), {})
            methods[row["method"]] = max(row["tokens_per_s"], methods.get(row["method"], 0))
    for row in step_rows:
        others = [best.get(setting(row), {}).get(method) for method in ("none", "eagle3")]
        ratios = ["" if other is None else f"{row['tokens_per_s'] / other:.2f}" for other in others]
        numbers = (
            row["experts_read"],
            row["step_us"] / 1e3,
            row["floor_us"] / 1e3,
            row["tokens_per_s"],
        )
        table.add_row(row["case"], row["routing"], *map("{:.2f}".format, numbers), *ratios)
    return table


if __name__ == "__main__":
    sys.exit(main())
