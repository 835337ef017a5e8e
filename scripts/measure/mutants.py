"""Do the tests notice a mistake? Draws mutants of the code and says which tests find them.

    .venv/bin/python -m pip install cosmic-ray==8.7.0
    .venv/bin/python scripts/measure/mutants.py [--per-area 10] [--seed 0] [--areas AREA ...]
        [--until near|room|test|slow|all] [--record results/mutants.jsonl]
    .venv/bin/python scripts/measure/mutants.py --explain AREA NUMBER "why no test can find it"
        --record results/mutants.jsonl

cosmic-ray (https://cosmic-ray.readthedocs.io) makes the mutants: one operator, comparison, number,
truth value, `not`, loop or exception of one file of `peagle_jax` is another one. Of every area so
many are drawn, in areas of more than three files at most four a file, no two on one place;
annotations, decorators and the texts of errors are left alone. Each is made in a copy of the
checkout, never in the checkout itself.

Tests run in five stages until one fails: the test files that name the module, the folders of its
area, all of `make test`, the slow tests of the first two, and all of `make test-all`. `--until`
ends after a stage. The same call with a later one goes on with the mutants that are still alive,
and does not judge the others again. Of the rows of a mutant the last one stands; it names the test.
`--explain` repeats the last row of a mutant that is alive with a reason. docs/mutations.md has a
table of the rows, by scripts/generate/support_table.py.
"""

import argparse
import ast
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# area -> (files within peagle_jax, folders within tests that run first)
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "decode": (("decode/*.py",), ("decode",)),
    "cod": (("train/cod.py",), ("train",)),
    "attention": (
        ("layers/attention.py", "train/attention.py", "draft/placeholder_attention.py"),
        ("draft", "train", "decode", "targets"),
    ),
    "losses": (("train/*loss.py", "train/divergence.py"), ("train",)),
    "placeholders": (
        ("draft/placeholders.py", "checkpoints/export_placeholders.py"),
        ("draft", "train", "checkpoints", "decode"),
    ),
    "checkpoints": (("checkpoints/*.py",), ("checkpoints", "pipelines", "cli")),
    "weights": (("weights/*.py",), ("weights", "checkpoints", "targets")),
}
STAGES = ("near", "room", "test", "slow", "all")
FAST, SLOW = "not slow and not long and not peer", "(slow or long) and not peer"
MOST_OF_A_FILE = 4
HANGS = {FAST: 240, SLOW: 900}  # seconds of one test


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed place.

    Attributes:
      file: relative to the checkout.
      line: where it begins.
      operator: cosmic-ray's name of what was done.
      occurrence: which of the places in the file where it can be done.
      before: the line, stripped.
      after: the same one, mutated.
    """

    file: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str


def mutate(source: str, operator: str, occurrence: int) -> str | None:
    """The source with one mutation; None if it has no such place."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return mutate_code(source, get_operator(operator)(), occurrence)


def places(source: str) -> dict[tuple, list[tuple[str, int]]]:
    """Place in a file -> the (operator, occurrence) that change something there."""
    import cosmic_ray.plugins as plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    skipped = [span for node in ast.walk(ast.parse(source)) for span in _uninteresting(node)]
    nodes = list(ast_nodes(get_ast(source)))
    found: dict[tuple, list[tuple[str, int]]] = {}
    for name in sorted(plugins.operator_names()):
        operator = plugins.get_operator(name)
        if operator.arguments() or name.endswith("RemoveDecorator"):
            continue
        spans = (span for node in nodes for span in operator().mutation_positions(node))
        for occurrence, (start, end) in enumerate(spans):
            if not any(a <= start and end <= b for a, b in skipped):
                found.setdefault((start, end), []).append((name, occurrence))
    return found


def is_another_program(source: str, mutated: str) -> bool:
    """Whether a mutant can be parsed, and to something else."""
    try:
        return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def _uninteresting(node: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans whose change is no mistake of the program: types, decorators, messages of errors."""
    parts: list[ast.AST] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.args, *node.args.kwonlyargs]
        parts = [a.annotation for a in arguments if a.annotation is not None]
        parts += [*node.decorator_list, *([node.returns] if node.returns else [])]
    elif isinstance(node, ast.ClassDef):
        parts = [*node.decorator_list]
    elif isinstance(node, ast.AnnAssign):
        parts = [node.annotation]
    elif isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        parts = [node]
    for part in parts:
        assert isinstance(part, ast.expr | ast.stmt)
        assert part.end_lineno is not None and part.end_col_offset is not None
        yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def draw(root: Path, area: str, count: int, seed: int) -> list[Mutant]:
    """`count` mutants of one area: a place at random, then one of the changes there."""
    generator = random.Random(f"{area} {seed}")
    package = root / "peagle_jax"
    files = sorted({path for pattern in AREAS[area][0] for path in package.glob(pattern)})
    sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in files}
    pool = [
        (file, place, changes)
        for file, source in sources.items()
        for place, changes in places(source).items()
    ]
    generator.shuffle(pool)
    drawn: list[Mutant] = []
    limit = MOST_OF_A_FILE if len(files) > 3 else count
    for file, place, changes in pool:
        if len(drawn) == count:
            break
        if sum(mutant.file == file for mutant in drawn) == limit:
            continue
        operator, occurrence = generator.choice(changes)
        source = sources[file]
        mutated = mutate(source, operator, occurrence)
        if mutated is None or not is_another_program(source, mutated):
            continue
        line = place[0][0]
        before, after = (text.splitlines()[line - 1].strip() for text in (source, mutated))
        name = operator.removeprefix("core/")
        drawn.append(Mutant(file, line, name, occurrence, before, after))
    return drawn


def run_tests(copy: Path, marker: str, paths: Sequence[str], timeout: float) -> bool:
    """Whether any of these tests fails, hangs, or cannot be collected. No paths: no tests."""
    return failing_test(copy, marker, paths, timeout) is not None


def failing_test(copy: Path, marker: str, paths: Sequence[str], timeout: float) -> str | None:
    """The first of these tests that fails, or what else went wrong; None where all pass."""
    if not paths:
        return None
    hangs = HANGS.get(marker, max(HANGS.values()))
    options = ["-o", f"faulthandler_timeout={hangs}", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marker]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            [*command, *options, *paths],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode in (0, 5):  # 5: no test has this marker
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {done.returncode}"


def near(copy: Path, mutant: Mutant) -> list[str]:
    """The test files that name a module: in their own name first, then in an import.

    Those of kernels, which interpret GPU programs for minutes, only for a kernel's module.
    """
    path = Path(mutant.file)
    module = ".".join(path.with_suffix("").parts)
    package, stem = module.rpartition(".")[0], path.stem
    named = re.compile(
        rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{stem}\b|/{path.name}\b"
    )
    of_that_name = re.compile(rf"(^|_){stem}(_|$)")
    files = sorted((copy / "tests").rglob("test_*.py"))
    files.sort(key=lambda file: not of_that_name.search(file.stem))
    naming = [
        file
        for file in files
        if of_that_name.search(file.stem) or named.search(file.read_text("utf-8"))
    ]
    names = [str(file.relative_to(copy)) for file in naming]
    is_kernel = path.parent.name == "kernels"
    return [name for name in names if is_kernel or not name.startswith("tests/kernels")]


def judge(copy: Path, mutant: Mutant, area: str, stages: Sequence[str], timeout: float) -> dict:
    """The first of these stages that finds a mutant, or None."""
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    mutated = mutate(source, f"core/{mutant.operator}", mutant.occurrence)
    assert mutated is not None
    path.write_text(mutated, encoding="utf-8")
    named, folders = near(copy, mutant), [f"tests/{folder}" for folder in AREAS[area][1]]
    runs = {
        "near": (FAST, named),
        "room": (FAST, folders),
        "test": (FAST, ["tests"]),
        "slow": (SLOW, [*named, *folders]),
        "all": (SLOW, ["tests"]),
    }
    began, found_by, failed = time.monotonic(), None, None
    try:
        for stage in stages:
            if failed := failing_test(copy, *runs[stage], timeout):
                found_by = stage
                break
    finally:
        path.write_text(source, encoding="utf-8")
    seconds = round(time.monotonic() - began, 1)
    return {"found_by": found_by, "failed": failed, "seconds": seconds}


def recorded(path: Path | None) -> dict[tuple, dict]:
    """(area, seed, number) -> the last row, of earlier calls."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # rows of the tool before this one have no area
    rows = [row for row in rows if "area" in row]
    return {(row["area"], row["seed"], row["number"]): row for row in rows}


def explain(path: Path, area: str, number: int, seed: int, reason: str) -> int:
    """Adds a reason to a mutant that no test has found."""
    row = recorded(path).get((area, seed, number))
    if row is None or row["found_by"]:
        what = "was not judged" if row is None else f"was found by {row['found_by']}"
        print(f"mutants.py: {area} {number} {what}; name one that is alive", file=sys.stderr)
        return 2
    from peagle_jax.provenance import append_rows

    append_rows(path, [row | {"reason": reason}], "scripts/measure/mutants.py")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-area", type=int, default=10, help="mutants (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS), metavar="AREA")
    parser.add_argument("--until", choices=STAGES, default="all", help="the last stage")
    parser.add_argument("--record", type=Path, help="JSONL to append to (default: print only)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of a stage")
    parser.add_argument("--explain", nargs=3, metavar=("AREA", "NUMBER", "REASON"))
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    args = parser.parse_args()
    if args.explain:
        if args.record is None:
            parser.error("--explain: the rows' file is needed; give --record")
        area, number, reason = args.explain
        return explain(args.record, area, int(number), args.seed, reason)
    try:
        import cosmic_ray  # noqa: F401
    except ImportError:
        parser.error("cosmic-ray is not installed; run pip install cosmic-ray==8.7.0")
    from peagle_jax.provenance import append_rows

    known = recorded(args.record)
    last = STAGES.index(args.until)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        # with .git, which tests of provenance read
        ignored = shutil.ignore_patterns(".venv*", "runs", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for area in args.areas:
            for number, mutant in enumerate(draw(copy, area, args.per_area, args.seed)):
                which = {"area": area, "seed": args.seed, "number": number}
                before = known.get((area, args.seed, number), {})
                if any(before.get(key) != value for key, value in vars(mutant).items()):
                    before = {"until": None, "found_by": None}  # the code has changed since
                begun = STAGES.index(before["until"]) + 1 if before["until"] else 0
                row = which | dataclasses.asdict(mutant)
                if args.list:
                    print(json.dumps(row), flush=True)
                    continue
                if before["found_by"] or begun > last:
                    continue
                stages = STAGES[begun : last + 1]
                row |= {"until": args.until, **judge(copy, mutant, area, stages, args.timeout)}
                print(json.dumps(row), flush=True)
                if args.record is not None:
                    append_rows(
                        args.record, [{"name": "mutants"} | row], "scripts/measure/mutants.py"
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
