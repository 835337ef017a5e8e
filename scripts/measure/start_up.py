"""Seconds until `peagle generate` has answered, in its first process and in later ones.

    .venv/bin/python scripts/measure/start_up.py [--rounds 3] [--code FOLDER ...]
        [--record results/start_up.jsonl]

In every round each folder of code answers one prompt of the packaged models three times, in a
process each: with an empty cache of compiled programs, and twice with what the first has left in
it. The second and third differ from the first by what is compiled.

Args are folders with a `peagle_jax` in them, this repository where none is named; another state of
it, in a worktree, is measured in the same rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import sys; from peagle_jax.cli import main; sys.exit(main())"
RUNS = "empty cache", "second run", "third run"


def seconds(code: Path, cache: Path) -> float:
    """Of one process that answers a prompt."""
    assets = code / "peagle_jax" / "assets"
    words = ["generate", "--target", assets / "target", "--drafter", assets / "peagle"]
    words += ["-k", "5", "--max-new-tokens", "64", "--prompt", "def f(x):"]
    places = {"PYTHONPATH": str(code), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        env=os.environ | places,
        cwd=code,
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - start


def commit(code: Path) -> str:
    """Of a folder of code."""
    words = ["git", "-C", str(code), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--code", type=Path, nargs="+", default=[ROOT], metavar="FOLDER")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    total = len(RUNS) * args.rounds * len(args.code)
    measured: dict[Path, list[list[float]]] = {code: [] for code in args.code}
    with ProgressReport("start-up", total, unit="processes") as report:
        for _ in range(args.rounds):
            for code, rounds in measured.items():
                with tempfile.TemporaryDirectory() as cache:
                    rounds.append([])
                    for run in RUNS:
                        rounds[-1].append(seconds(code.resolve(), Path(cache)))
                        report.update(report.completed + 1, note=run)
    rows = [
        {
            "name": "start_up",
            "code": commit(code),
            "run": run,
            "seconds": statistics.median(times[i] for times in rounds),
            "rounds": [times[i] for times in rounds],
        }
        for code, rounds in measured.items()
        for i, run in enumerate(RUNS)
    ]
    table = Table(title="Seconds of peagle generate with 64 new tokens")
    for column in ("commit", "run", "median", "rounds"):
        table.add_column(column)
    for row in rows:
        rounds = "  ".join(f"{x:.1f}" for x in row["rounds"])
        table.add_row(row["code"], row["run"], f"{row['seconds']:.1f}", rounds)
    Console().print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/start_up.py")


if __name__ == "__main__":
    main()
