"""The floors of the house: a file imports only from lower floors or its own room."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "peagle_jax"
FLOORS = [  # lowest first
    {"types"},
    {"kernels", "corpus", "weights", "provenance", "atomic_write", "old_names", "progress"},
    {"text"},
    {"layers"},
    {"targets", "draft"},
    {"checkpoints"},
    {"decode", "train"},
    {"bench", "report"},
    {"pipelines"},
    {"cli"},
]
FLOOR = {room: i for i, floor in enumerate(FLOORS) for room in floor}
FOREIGN = ("torch", "vllm", "speculators")


def imported(path: Path):
    """(module, first name) of every import, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "peagle_jax":
                yield from (f"peagle_jax.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_go_down(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imported(path):
        assert module.split(".")[0] not in FOREIGN, (
            f"{path.name} imports {module}: only tests/ and scripts/ may"
        )
        if room == "__init__" or not module.startswith("peagle_jax."):
            continue
        other = module.split(".")[1]
        assert other == room or FLOOR[other] < FLOOR[room], (
            f"{path.name} on floor {FLOOR[room]} imports {other} from floor {FLOOR[other]}"
        )


def test_every_room_has_a_floor():
    rooms = {p.stem for p in PACKAGE.glob("*.py")} | {
        p.parent.name for p in PACKAGE.glob("*/__init__.py")
    }
    assert rooms - {"__init__"} == FLOOR.keys()


def test_files_stay_rooms():
    long = {
        str(p.relative_to(ROOT)): n
        for p in PACKAGE.rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 450
    }
    assert not long, f"over 450 lines: {long}"


def test_no_drawer_files():
    assert not [
        p for p in PACKAGE.rglob("*.py") if p.stem in {"utils", "common", "helpers", "misc"}
    ]


def test_public_names_import():
    import peagle_jax

    for name in peagle_jax.__all__:
        assert (getattr(peagle_jax, name).__doc__ or "").strip(), name
