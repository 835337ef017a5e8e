"""Do the tests notice a mistake? Draws small mistakes at random and says which tier finds them.

    .venv/bin/python scripts/measure/mutants.py --count 30 --seed 0 [--record results/mutants.jsonl]

Each mutant is one changed operator, comparison, constant or condition in peagle_jax/decode,
peagle_jax/train or peagle_jax/checkpoints. It is made in a copy of the checkout, never in the
checkout itself. The tests of the same room run first and stop at the first failure, then the rest
of `make test`, and, if the mutant is still alive, what `make test-all` has beyond it. Mutants that
the recorded file has already are not judged again.
"""

import argparse
import ast
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("decode", "train", "checkpoints")
FAST = "not slow and not long and not peer"
REST = "(slow or long) and not peer"
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str  # relative to the checkout
    line: int
    start: int  # offsets in characters of the file
    end: int
    before: str
    after: str


def offsets(source: str) -> list[int]:
    """Where each line of a file begins."""
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    return begins


def candidates(file: str, source: str) -> Iterator[Mutant]:
    """Every mutant of one file; annotations, docstrings and error messages are left alone."""
    begins = offsets(source)
    tree = ast.parse(source)
    skipped = {
        id(part)
        for node in ast.walk(tree)
        for part in _uninteresting(node)
        for part in ast.walk(part)
    }

    def between(left: ast.expr, right: ast.expr) -> tuple[int, int]:
        assert left.end_lineno is not None and left.end_col_offset is not None
        start = begins[left.end_lineno - 1] + left.end_col_offset
        return start, begins[right.lineno - 1] + right.col_offset

    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            start, end = between(node.left, node.comparators[0])
            sign = COMPARISONS.get(type(node.ops[0]))
        elif isinstance(node, ast.BinOp):
            start, end = between(node.left, node.right)
            sign = OPERATORS.get(type(node.op))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            start = begins[node.lineno - 1] + node.col_offset
            end = start + len(ast.get_source_segment(source, node) or "")
            sign = repr(not node.value if isinstance(node.value, bool) else node.value + 1)
            yield Mutant(file, node.lineno, start, end, source[start:end], sign)
            continue
        else:
            continue
        before = source[start:end]
        if sign is not None and before.strip() in _spellings():  # no bracket or comment in between
            yield Mutant(file, node.lineno, start, end, before, f" {sign} ")


def _spellings() -> set[str]:
    signs = {*COMPARISONS.values(), *OPERATORS.values(), "*", "/", "//", "-", "+"}
    return signs


def _uninteresting(node: ast.AST) -> list[ast.AST]:
    """Parts of a node whose change is no mistake of the program: types, decorators, messages."""
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.args, *node.args.kwonlyargs]
        annotations = [a.annotation for a in arguments if a.annotation is not None]
        return [*annotations, *node.decorator_list, *([node.returns] if node.returns else [])]
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return [node]
    return []


def draw(root: Path, rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, every room with about the same number, at most two a file."""
    generator = random.Random(seed)
    drawn: list[Mutant] = []
    for number, room in enumerate(rooms):
        pool = [
            mutant
            for path in sorted((root / "peagle_jax" / room).glob("*.py"))
            for mutant in candidates(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
        ]
        generator.shuffle(pool)
        wanted = count // len(rooms) + (number < count % len(rooms))
        per_file: dict[str, int] = {}
        for mutant in pool:
            if wanted and per_file.get(mutant.file, 0) < 2:
                per_file[mutant.file] = per_file.get(mutant.file, 0) + 1
                drawn.append(mutant)
                wanted -= 1
    return drawn


def run_tests(copy: Path, marker: str, paths: Sequence[str], timeout: float) -> bool:
    """Whether any of these tests fails (or hangs, or cannot be collected). No paths: no tests."""
    if not paths:
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marker]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            [*command, *paths], cwd=copy, env=environment, capture_output=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)  # 5: no test has this marker


def judge(
    copy: Path, mutant: Mutant, timeout: float, fast: str, rest: str, near_only: bool
) -> dict:
    """Which tier finds a mutant: "test", "test-all" or None."""
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source[: mutant.start] + mutant.after + source[mutant.end :], encoding="utf-8")
    room = Path(mutant.file).parts[1]
    near = [str(p) for p in (Path("tests") / room, Path("tests/pipelines")) if (copy / p).exists()]
    began = time.monotonic()
    try:
        tier = None
        everything = [] if near_only else ["tests"]
        for name, marker in (("test", fast), ("test-all", rest)):
            is_found = any(run_tests(copy, marker, paths, timeout) for paths in (near, everything))
            if is_found:
                tier = name
                break
    finally:
        path.write_text(source, encoding="utf-8")
    return {"found_by": tier, "seconds": round(time.monotonic() - began, 1)}


def recorded(path: Path | None, seed: int) -> set[int]:
    """Numbers of the mutants that an earlier call, which was stopped, has judged."""
    if path is None or not path.exists():
        return set()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["number"] for row in rows if row["seed"] == seed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=30, help="mutants (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help=f"default: {' '.join(ROOMS)}")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to test (default: this)")
    # `--out` is the former spelling
    parser.add_argument(
        "--record", "--out", type=Path, help="JSONL to append to (default: print only)"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds (default: 1800)")
    parser.add_argument("--fast", default=FAST, help=f"marker of `make test` (default: {FAST})")
    parser.add_argument("--rest", default=REST, help=f"what test-all adds (default: {REST})")
    parser.add_argument(
        "--near-only",
        action="store_true",
        help="only the tests of the mutant's folder and of pipelines: half an hour, not hours",
    )
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    args = parser.parse_args()
    mutants = draw(args.root, args.rooms, args.count, args.seed)
    judged = recorded(args.record, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        if not args.list:
            ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__")
            shutil.copytree(args.root, copy, ignore=ignored)
        for number, mutant in enumerate(mutants):
            if number in judged:
                continue
            row = dataclasses.asdict(mutant) | {"number": number, "seed": args.seed}
            if not args.list:
                row |= judge(copy, mutant, args.timeout, args.fast, args.rest, args.near_only)
            print(json.dumps(row), flush=True)
            if args.record is not None and not args.list:
                with args.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
