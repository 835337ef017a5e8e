"""Every fuzz test with many cases: how many were tried, in what time and memory.

    .venv/bin/python scripts/measure/fuzz.py [--cases 20000] [--only PART ...] [--jobs 2]
        [--record results/fuzz.jsonl]

A fuzz test makes inputs at random, and asks that whatever reads them succeeds or says in one line
what is wrong (tests/fuzzing.py). Each test runs in a process of its own with so many cases, other
ones in every run; kinds of one input, such as recipes, share this number. Exit code 1 if a test
fails, of which the input is printed, or if its process needs more memory than MOST_MEMORY_MB.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parents[2]
# Importing JAX, transformers and pyarrow takes 500; no input of a fuzz test is large.
MOST_MEMORY_MB = 2_000
SHOWN_LINES, SHOWN_WIDTH = 60, 200  # of what a test that fails prints, at the begin and the end
sys.path.insert(0, str(ROOT))
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "--show-capture=no",
    "--tb=short",
]


def fuzz_tests(parts: list[str]) -> list[str]:
    """The names of all fuzz tests that have one of these parts in them."""
    words = [*PYTEST, "--collect-only", "-m", "fuzz", "tests"]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    return [name for name in names if not parts or any(part in name for part in parts)]


def run(name: str, cases: int) -> tuple[dict, str]:
    """The row of one test, and what it printed."""
    began = time.monotonic()
    process = subprocess.Popen(
        [*PYTEST, name],
        cwd=ROOT,
        env=os.environ | {"PEAGLE_FUZZ_CASES": str(cases)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    tried = re.findall(r"^tried (\d+) inputs", output, re.MULTILINE)
    num_cases, memory = sum(map(int, tried)), usage.ru_maxrss // 1024
    if memory > MOST_MEMORY_MB:
        output += f"it took {memory:,} MB of memory, and may take {MOST_MEMORY_MB:,}"
    row = {
        "name": "fuzz",
        "test": name,
        "cases": num_cases,
        "passed": process.returncode == 0 and num_cases > 0 and memory <= MOST_MEMORY_MB,
        "seconds": round(time.monotonic() - began, 1),
        "largest_memory_mb": memory,
    }
    return row, output


def run_all(names: list[str], cases: int, jobs: int) -> Iterator[tuple[dict, str]]:
    """The rows as tests end, so many at a time."""
    with ThreadPoolExecutor(jobs) as threads:
        for future in as_completed([threads.submit(run, name, cases) for name in names]):
            yield future.result()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000, help="of every test")
    parser.add_argument("--only", nargs="+", default=[], help="tests with this in their names")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    from peagle_jax.progress import ProgressReport
    from peagle_jax.provenance import append_rows

    names = fuzz_tests(args.only)
    if not names:
        parser.error(f"--only: no fuzz test has {' or '.join(args.only)} in its name")
    table = Table("test", "cases", "seconds", "MB", "outcome")
    num_failed = 0
    with ProgressReport("fuzz", len(names), unit="tests") as report:
        for row, output in run_all(names, args.cases, args.jobs):
            report.update(report.completed + 1, note=row["test"])
            outcome = "passed" if row["passed"] else "FAILED"
            numbers = (f"{row[key]:,}" for key in ("cases", "seconds", "largest_memory_mb"))
            table.add_row(escape(row["test"]), *numbers, outcome)
            if not row["passed"]:
                num_failed += 1
                lines = [line[:SHOWN_WIDTH] for line in output.splitlines()]
                print(*lines[:SHOWN_LINES], "...", *lines[-SHOWN_LINES:], sep="\n", file=sys.stderr)
            if args.record:
                append_rows(args.record, [row], "scripts/measure/fuzz.py")
    Console(width=140).print(table)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
