"""Levels of the package: a file imports only from lower levels or from its own folder."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "peagle_jax"
LEVELS = [  # lowest first
    {"types", "file_lock"},
    {
        "documents",
        "dataset_rows",
        "free_memory",
        "allocator",
        "assembler",
        "atomic_write",
        "prompt_end",
        "user_cache",
    },
    {
        "kernels",
        "document_rows",
        "json_files",
        "weights",
        "provenance",
        "old_names",
        "openai_server",
        "progress",
    },
    {"chat", "corpus"},
    {"text"},
    {"layers"},
    {"targets", "draft"},
    {"checkpoints"},
    {"decode", "train"},
    {"bench", "report"},
    {"pipelines"},
    {"cli"},
]
LEVEL = {part: i for i, level in enumerate(LEVELS) for part in level}
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
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imported(path):
        assert module.split(".")[0] not in FOREIGN, (
            f"{path.name} imports {module}: only tests/ and scripts/ may"
        )
        if part == "__init__" or not module.startswith("peagle_jax."):
            continue
        other = module.split(".")[1]
        assert other == part or LEVEL[other] < LEVEL[part], (
            f"{path.name} on level {LEVEL[part]} imports {other} from level {LEVEL[other]}"
        )


def test_every_part_has_a_floor():
    parts = {p.stem for p in PACKAGE.glob("*.py")} | {
        p.parent.name for p in PACKAGE.glob("*/__init__.py")
    }
    assert parts - {"__init__"} == LEVEL.keys()


def test_files_stay_short():
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
