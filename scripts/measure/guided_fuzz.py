"""Do the readers of binary files survive inputs that are searched for by coverage?

    .venv/bin/python scripts/measure/guided_fuzz.py [--seconds 300] [--only safetensors]
        [--record results/guided_fuzz.jsonl]

atheris (libFuzzer for Python) mutates small valid files and keeps what reaches new branches. Every
input must be read as the safetensors library reads it, or be refused by our own error in one line
(tests/weights/test_fuzz.py says the same of inputs that are drawn). An input that does something
else is left in runs/guided_fuzz and named.

Exit code 0: nothing was found. 1: something was.
"""

import argparse
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

MAX_BYTES = 2048  # of an input
MAX_MEMORY = 2048  # MB, of the process: a small file must not ask for more
WORK = ROOT / "runs" / "guided_fuzz"


@dataclasses.dataclass(frozen=True)
class Reader:
    """What is fuzzed.

    Attributes:
      seeds: valid inputs, from which the search begins.
      words: what an input may contain.
      check: reads one input in a folder, and raises where it is neither read nor refused.
    """

    seeds: Callable[[], list[bytes]]
    words: tuple[str, ...]
    check: Callable[[Path, bytes], None]


def of_tests(name: str) -> Any:
    """A module of tests/weights."""
    return importlib.import_module(f"weights.{name}")


def weight_files() -> list[bytes]:
    """Small safetensors files, and headers with data behind a zero byte (`check_weights`)."""
    container, f32 = of_tests("files").container, of_tests("files").f32
    parts = [
        ({}, b""),
        ({"a": f32(0, 8), "b": f32(8, 8)}, bytes(8)),
        ({"__metadata__": {"format": "pt"}, "a": f32(0, 4)}, bytes(4)),
        ({"x": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}, bytes(12)),
        ({"x": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [0, 1]}}, bytes(1)),
    ]
    headers = [json.dumps(header).encode() + b"\0" + data for header, data in parts]
    return [container(*part) for part in parts] + headers


def indices() -> list[bytes]:
    """Indices over the two files that `check_index` writes."""
    where = {"a": "x-1.safetensors", "b": "x-2.safetensors"}
    both = {"metadata": {"total_size": 20}, "weight_map": where}
    return [json.dumps(both).encode(), json.dumps({"weight_map": {"a": where["a"]}}).encode()]


def check_weights(folder: Path, content: bytes) -> None:
    """Checks a whole file, or a header with its length put before it.

    A changed header hardly ever has the length that is written before it.
    """
    if content.startswith(b"{"):
        header, _, data = content.partition(b"\0")
        content = of_tests("files").container(header, data)
    of_tests("test_fuzz").check(folder, content)


def check_index(folder: Path, content: bytes) -> None:
    of_tests("test_fuzz").check_index(folder, content)


VALUES = ("null", "[]", "{}", "[0,1]", '""', "-1", "1e9", "NaN", "true", "18446744073709551616")
READERS = {
    "safetensors": Reader(
        weight_files,
        ('"dtype":', '"shape":', '"data_offsets":', "__metadata__", '"F32"', '"I64"', *VALUES),
        check_weights,
    ),
    "index": Reader(
        indices,
        ("weight_map", "metadata", '"x-1.safetensors"', "../", "/dev/zero", *VALUES),
        check_index,
    ),
}


def search(name: str, seconds: int, folder: Path) -> None:
    """Runs libFuzzer in this process, which ends with it."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["peagle_jax.weights"]):
        importlib.import_module("peagle_jax.weights")
    reader = READERS[name]
    corpus = folder / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(reader.seeds()):
        (corpus / str(i)).write_bytes(seed)
    dictionary = folder / "words"
    dictionary.write_text("\n".join(map(json.dumps, reader.words)), encoding="utf-8")
    place = folder / "model"
    place.mkdir()
    WORK.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={MAX_BYTES}",
        f"-rss_limit_mb={MAX_MEMORY}",
        "-timeout=20",
        f"-dict={dictionary}",
        f"-artifact_prefix={WORK}/{name}-",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda x: reader.check(place, x))
    atheris.Fuzz()


def run(name: str, seconds: int) -> dict:
    """Searches in a process of its own; what libFuzzer says of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peagle-fuzz-") as folder:
        words = [sys.executable, __file__, "--seconds", str(seconds), "--search", name, folder]
        process = subprocess.run(words, capture_output=True, text=True, errors="replace")
    log = process.stdout + process.stderr
    done = re.search(r"Done (\d+) runs", log)
    found = re.findall(r"Test unit written to (\S+)", log)
    reached = re.findall(r"cov: (\d+) ft: (\d+)", log)
    memory = re.findall(r"rss: (\d+)Mb", log)
    if not done and not found:
        raise SystemExit(f"{name}: the search ended without a result: {log[-2000:]}")
    return {
        "reader": name,
        "seconds": round(time.monotonic() - began, 1),
        "inputs": int(done.group(1)) if done else None,
        "branches": int(reached[-1][0]) if reached else None,
        "branches_of_seeds": int(reached[0][0]) if reached else None,
        "largest_memory_mb": max(map(int, memory), default=None),
        "found": found,
        "said": re.findall(r"(?m)^\s*(\w*(?:Error|Exception)\b.*)$", log)[:3] if found else [],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=300, help="of each reader (default: 300)")
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument("--record", type=Path, help="JSONL to append to (default: print only)")
    parser.add_argument("--search", nargs=2, metavar=("READER", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.search:
        search(args.search[0], args.seconds, Path(args.search[1]))
        return 0
    from peagle_jax.atomic_write import append_line
    from peagle_jax.provenance import provenance

    of_this = provenance(" ".join(["python scripts/measure/guided_fuzz.py", *sys.argv[1:]]))
    failed = 0
    for name in args.only:
        row = {"name": "guided_fuzz"} | of_this | run(name, args.seconds)
        failed += bool(row["found"])
        say = f"found {row['found']}: {row['said']}" if row["found"] else "nothing found"
        print(
            f"{name}: {row['inputs']} inputs in {row['seconds']} s, {row['branches']} branches "
            f"({row['branches_of_seeds']} by the first inputs): {say}",
            flush=True,
        )
        if args.record is not None:
            append_line(args.record, json.dumps(row))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
