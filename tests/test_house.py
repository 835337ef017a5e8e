"""Rules of the code that ruff does not know."""

import ast
import re
import runpy
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "peagle_jax"
MAX_COLUMNS = 100
# next steps that do not say what to do
EMPTY_ADVICE = re.compile(
    r"^(mend (it|them|one|the (config|file|line|value)s?)\b"
    r"|restore the (config|file|folder|index|original)s?\b|restore (it|them)$"
    r"|leave it out\b|leave out one of them$|remove it$|add it: $"
    r"|(use|name|take) an?(other| earlier) (checkpoint|target)$"
    r"|choose one of them$|fetch (it|the (file|folder)) again$"
    r"|check (its quotes|that this is )|correct the line it names$|convert it with safetensors$"
    r"|give a positive size$|make room and try again$|let the run go on\b"
    r"|:? VALUE$)"
)
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_errors_say_what_to_do():
    """ "mend the config" says nothing: an error names the key and a value that works.

    "leave it out" does not name the option, and "restore the file" does not say from where.
    """
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and EMPTY_ADVICE.match(node.value)
    ]
    assert not found, f"say what to do: {found}"


def test_every_input_error_has_four_parts():
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "InputError"
        and len(node.args) + len(node.keywords) != 4
        and not any(isinstance(argument, ast.Starred) for argument in node.args)
    ]
    assert not found, found


@pytest.mark.parametrize("folder", ["peagle_jax", "scripts", "experiments"])
def test_no_line_is_too_long(folder):
    found = [
        f"{name_of(path)}:{number}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    assert not found, f"over {MAX_COLUMNS} columns: {found}"


def test_no_lambda_has_a_name():
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda)
    ]
    assert not found, f"write a function: {found}"


def imports_of(path: Path) -> list[tuple[str, str]]:
    """(module, imported name) of every import; the name is empty for `import module`."""
    pairs = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            pairs += [(node.module or "", alias.name) for alias in node.names]
    return pairs


@pytest.mark.parametrize("folder", ["peagle_jax", "experiments", "scripts"])
def test_no_duration_depends_on_the_clock_of_the_wall(folder):
    """It may step back. `time.monotonic` and `time.perf_counter` do not."""
    wall = re.compile(r"\btime\.time(_ns)?\b|\bfrom time import\b|\bdatetime\.now\(")
    found = [
        f"{name_of(path)}:{number}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if wall.search(line)
    ]
    assert not found, found


def test_argparse_stays_in_the_command_line():
    found = [
        name_of(path)
        for path in FILES
        if room_of(path) != "cli" and any(module == "argparse" for module, _ in imports_of(path))
    ]
    assert not found, found


def test_private_names_stay_in_their_room():
    """Neither `from peagle_jax.other.file import _name` nor `other_file._name`."""
    found = []
    for path in FILES:
        foreign = {}  # name here -> module of another room
        for module, name in imports_of(path):
            if not module.startswith("peagle_jax"):
                continue
            parts = [*module.split(".")[1:], *([name] if name else [])]
            if not parts or parts[0] == room_of(path):
                continue
            if name.startswith("_") and not name.startswith("__"):
                found.append(f"{name_of(path)} imports {module}.{name}")
            foreign[name or module] = module
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in foreign
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
            ):
                found.append(f"{name_of(path)}:{node.lineno} uses {node.value.id}.{node.attr}")
    assert not found, found


def test_patterns_of_tiers_name_tests_that_exist():
    """A renamed test would otherwise return to `make test`, or leave it, without a word."""
    stale = []
    for pattern in (*tiers.SLOW, *tiers.LONG, *tiers.KEPT):
        file, _, test = pattern.partition("::")
        path = ROOT / file.removesuffix("*")
        begin = re.split(r"[*[]", test)[0]
        if not path.exists() or f"def {begin}" not in path.read_text():
            stale.append(pattern)
    assert not stale, stale


def test_mistakes_made_by_hand_can_still_be_made():
    """What scripts/measure/mutants_by_hand.py replaces stands in its file, once."""
    script = runpy.run_path(str(ROOT / "scripts" / "measure" / "mutants_by_hand.py"))
    for name, mistake in script["MISTAKES"].items():
        source = (ROOT / "peagle_jax" / mistake.file).read_text(encoding="utf-8")
        assert source.count(mistake.before) == 1, name
        assert mistake.before != mistake.after, name
