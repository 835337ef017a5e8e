"""What only a GPU can say: numerics, times beside XLA's and beside floors, steps at real sizes, drafting, training steps.

    pip install -e ".[cuda,kernels]"                                     from a bare checkout; a driver for CUDA 13
    python scripts/gpu_suite.py --out results/gpu.jsonl [--minutes 8] [--only PART ...]

The most telling parts come first and fit one call of eight minutes; all of them take perhaps ten such calls. Every row is written
when it is known, and a call with the same --out goes on where the last one stopped: what this code has finished on this device is not
run again, what no longer fits into --minutes waits. Exit code 1: a number is wrong, or a part failed; 2: nothing was run. Without
jax-triton only the references and Mosaic GPU run, and the first line says so. `--tiny` is a dry run for any machine.
"""

import argparse
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from gpu import numerics, speed, steps, timing, training  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from peagle_jax.atomic_write import write_atomically  # noqa: E402
from peagle_jax.kernels.launch import gpu, unavailable_reason  # noqa: E402
from peagle_jax.provenance import CODE, provenance  # noqa: E402

CONSOLE = Console(width=180, stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="rows as JSON lines, added to what is there"
    )
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--only", nargs="+", metavar="PART", help="beginnings of parts' names")
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 2**32,
        help="of the numerics' operands; fresh by default",
    )
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if jax.default_backend() != "gpu" and not args.tiny:
        print(
            f"gpu_suite: needs a GPU, and JAX runs on {jax.default_backend()}; --tiny is a dry run",
            file=sys.stderr,
        )
        return 2
    begun = time.monotonic()
    command = " ".join(["python scripts/gpu_suite.py", *sys.argv[1:]])
    here = provenance(command) | {
        "suite": "tiny" if args.tiny else "whole",
        "triton": unavailable_reason("triton") or "yes",
    }
    if here["triton"] != "yes":
        CONSOLE.print(f"[yellow]without Triton kernels[/yellow]: {here['triton']}")
    here["code"] = fingerprint()
    same = ("code", "device", "suite", "triton", "jax")
    known = [row for row in read(args.out) if all(row.get(key) == here[key] for key in same)]
    done = {row["done"]: row["time"] for row in known if "done" in row}
    known = [
        row for row in known if done.get(row.get("unit")) == row["time"]
    ]  # of the call that finished the part
    every = parts(args.tiny, args.seed, known)
    for name, part in every.items():
        if name in done or args.only and not any(name.startswith(prefix) for prefix in args.only):
            continue
        left = 60 * args.minutes - (time.monotonic() - begun)
        if left < 0 or not args.tiny and left < expected(name):
            continue  # a shorter one may fit
        CONSOLE.print(f"[bold]{name}[/bold] ({time.monotonic() - begun:.0f} s)")
        try:
            for row in part():
                known.append(here | {"unit": name} | row)
                write(args.out, known[-1])
        except Exception as error:  # one part that fails must not take the others' time
            CONSOLE.print(f"[red]{name} failed[/red]: {type(error).__name__}: {str(error)[:500]}")
            write(
                args.out,
                here | {"failed": name, "error": f"{type(error).__name__}: {str(error)[:2000]}"},
            )
            known.append({"failed": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})
            continue
        finally:
            jax.clear_caches()
        write(args.out, here | {"done": name})
        done[name] = here["time"]
    show(known)
    CONSOLE.print(
        f"{len(done)} of {len(every)} parts are done in {args.out}; the same command goes on"
    )
    wrong = [
        row for row in known if row.get("right") is False or isinstance(row.get("failed"), str)
    ]
    return 1 if wrong else 0


def fingerprint() -> str:
    """Of everything that the numbers depend on, whatever git knows about it."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    paths = [path for folder in CODE for path in [root / folder, *(root / folder).rglob("*")]]
    for path in sorted(path for path in paths if path.suffix in (".py", ".yaml", ".json")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def expected(name: str) -> int:
    """Seconds that a part may take, by guess until one was measured: it is not begun with less left."""
    if name.startswith("steps"):
        return 30 if "layers" in name else 100
    return {
        "ceilings": 10,
        "matmul": 100,
        "mosaic matmul": 100,
        "experts": 100,
        "training": 100,
        "drafting": 60,
    }.get(name, 40)


def parts(tiny: bool, seed: int, known: list[dict]) -> dict[str, Callable[[], Iterator[dict]]]:
    """By name, in the order of what matters most."""
    size = 1e-3 if tiny else 1
    ceilings = functools.cache(
        lambda: (
            next((row for row in known if row.get("part") == "ceilings"), None)
            or timing.ceilings(size)
        )
    )

    def measure_ceilings():
        yield {
            "part": "ceilings",
            **timing.ceilings(size),
            "gpu": f"sm_{gpu().capability}, {gpu().cores} multiprocessors",
        }

    def check(part):
        return lambda: part(np.random.default_rng(seed), tiny)

    def time_(part):
        return lambda: part(ceilings(), tiny)

    def step(case):
        return lambda: steps.measure(case, ceilings(), tiny)

    every = {f"numerics: {name}": check(part) for name, part in numerics.PARTS.items()}
    every |= {name: time_(part) for name, part in speed.PARTS.items()}
    every |= {"drafting": time_(steps.drafting), "training": time_(training.measure)}
    every |= {f"steps: {case.name}": step(case) for case in steps.cases(tiny)}
    # right before fast, whole steps before tables, and last what has never run anywhere and might hang
    whole = [name for name in every if name.startswith("steps") and "layers" not in name]
    late = ["numerics: mosaic", "mosaic matmul"]
    kernels = [name for name in every if name.startswith("numerics") and name not in late]
    first = [
        *kernels[:3],
        *whole[:2],
        "drafting",
        *kernels[3:],
        *whole[2:3],
        "matmul",
        "attention",
        "experts",
    ]
    order = ["ceilings", *first, *(name for name in every if name not in (*first, *late)), *late]
    every["ceilings"] = measure_ceilings
    return {name: every[name] for name in order}


def read(path: Path) -> list[dict]:
    """Rows so far; a line that a kill cut short is taken out of the file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        write_atomically(path, text)
    return [json.loads(line) for line in text.splitlines()]


def write(path: Path, row: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def show(rows: list[dict]) -> None:
    out = Console(width=180)
    for row in rows:
        if row.get("part") == "ceilings":
            copy, *rates = (
                row[key] / 1e12 for key in ("copy_bytes_per_s", "bf16_flop_per_s", "fp8_flop_per_s")
            )
            out.print(
                f"{row['gpu']}: copy {copy:.2f} TB/s, bfloat16 {rates[0]:.0f} TFLOP/s, float8 {rates[1]:.0f} TFLOP/s"
            )
    table = Table("kernel", "form", "shape", "relative error", title="numerics, against float64")
    for row in rows:
        if row.get("part") == "numerics":
            table.add_row(
                row["kernel"],
                row["form"],
                row["shape"],
                f"{row['error']:.1e}{'' if row['right'] else ' WRONG'}",
            )
    out.print(table)
    table = Table("part", "shape", "us (floor; times as fast as the first)", title="times")
    for row in rows:
        if "times_as_fast" in row:
            floor, times = row["floor_us"], row["times_as_fast"]
            said = [
                f"{k} {v:.1f} ({floor[k]:.1f}; {times.get(k, float('nan')):.2f})"
                for k, v in row["us"].items()
            ]
            table.add_row(row["part"], row["shape"], ", ".join(said))
        elif "ms" in row:
            said = ", ".join(
                f"{k} {v:.0f} ms and {row['temporary_gb'][k]:.1f} GB" for k, v in row["ms"].items()
            )
            table.add_row(row["part"], row["shape"], said)
    out.print(table)
    table = Table("drafting", "floor of K = 1, us", "us (times the cost of K = 1)")
    for row in rows:
        if "times_K=1" in row:
            said = ", ".join(
                f"{k} {v:.1f} ({row['times_K=1'][k]:.2f})" for k, v in row["us"].items()
            )
            table.add_row(row["shape"], f"{row['floor_us']['K=1']:.1f}", said)
    out.print(table)
    title = "steps; acceptance is SYNTHETIC, at published rates; speedups of whole targets only"
    table = Table(
        "step",
        "routing",
        "experts",
        "ms",
        "floor, ms",
        "tokens/s",
        "of plain",
        "of EAGLE-3",
        title=title,
    )
    found = [row for row in rows if row.get("part") == "steps"]

    def setting(row):
        return (row["target"], row["layers"], row["batch"], row["routing"])

    best: dict[tuple, dict[str, float]] = {}
    for row in found:
        if row["layers"] is None:
            methods = best.setdefault(setting(row), {})
            methods[row["method"]] = max(row["tokens_per_s"], methods.get(row["method"], 0))
    for row in found:
        others = [best.get(setting(row), {}).get(method) for method in ("none", "eagle3")]
        ratios = ["" if other is None else f"{row['tokens_per_s'] / other:.2f}" for other in others]
        numbers = (
            row["experts_read"],
            row["step_us"] / 1e3,
            row["floor_us"] / 1e3,
            row["tokens_per_s"],
        )
        table.add_row(row["case"], row["routing"], *map("{:.2f}".format, numbers), *ratios)
    out.print(table)
    for row in rows:
        if isinstance(row.get("failed"), str):
            out.print(f"failed: {row['failed']}: {row.get('error', '')[:300]}")


if __name__ == "__main__":
    sys.exit(main())
