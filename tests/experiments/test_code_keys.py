"""The key of code: which modules it follows, and what changes it."""

import shutil

import pytest

from experiments import code_keys, folders, jobs
from experiments.code_keys import WITHOUT_INFLUENCE, code_key, imported_modules
from experiments.registry import EXPERIMENTS
from experiments.stages.cache import WITHOUT

SOURCE = '''
"""What it is."""
LEAST = 3

def double(x):
    """Twice."""
    return 2 * x  # two of them
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with an empty package that is read in the place of the checkout."""
    monkeypatch.setattr(folders, "ROOT", tmp_path)
    write(tmp_path, init="")
    code_keys.forget()
    yield tmp_path
    code_keys.forget()


def write(root, **modules) -> None:
    """Files of a package `peagle_jax`; `a__b` is the module a.b, and `init` an __init__.py."""
    for name, source in modules.items():
        path = root / "peagle_jax" / f"{name.replace('__', '/')}.py"
        path = path.with_name("__init__.py") if path.name == "init.py" else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    code_keys.forget()


def key_of(root, source: str) -> str:
    write(root, part=source)
    return code_key(("peagle_jax.part",))


# ---------------------------------------------------------------- what counts in a file


@pytest.mark.parametrize(
    "change",
    [
        ("# two of them", "# in other words"),
        ("  # two of them", ""),
        ("LEAST = 3", "# why\nLEAST = 3\n\n"),
        ('"""Twice."""', '"""x + x,\n    that is."""'),
        ("What it is", "What it was"),
        ("2 * x", "(2\n            * x)"),
        ("def double(x):", "def double(\n    x,\n):"),
    ],
)
def test_words_and_layout_are_not_code(root, change):
    before = key_of(root, SOURCE)
    assert SOURCE.replace(*change) != SOURCE
    assert key_of(root, SOURCE.replace(*change)) == before


@pytest.mark.parametrize(
    "change",
    [
        ("LEAST = 3", "LEAST = 4"),
        ("2 * x", "x * 2"),
        ("2 * x", "2.0 * x"),
        ("double", "twice"),
        ("(x)", "(x=1)"),
        ("LEAST = 3", "LEAST: int = 3"),
        ("return 2 * x", "return '2 * x'"),
    ],
)
def test_a_change_of_code_is_noticed(root, change):
    before = key_of(root, SOURCE)
    assert SOURCE.replace(*change) != SOURCE
    assert key_of(root, SOURCE.replace(*change)) != before


def test_an_expression_that_is_no_docstring_is_code(root):
    assert key_of(root, "def f():\n    1\n") != key_of(root, "def f():\n    pass\n")
    assert key_of(root, "if x:\n    'a'\nelse:\n    y()\n") != key_of(root, "if x:\n    'a'\n")


# ---------------------------------------------------------------- which files count


def test_imports_are_followed(root):
    write(
        root,
        entry="import numpy\nfrom peagle_jax.near import f\nfrom peagle_jax import beside\n",
        near="def f():\n    from peagle_jax.lazy import g\n    return g\n",
        lazy="import peagle_jax.deep.far as far\ndef g(): pass\n",
        deep__init="",
        deep__far="FAR = 1\n",
        beside="",
        stranger="STRANGER = 1\n",
    )
    modules = imported_modules(("peagle_jax.entry",))
    names = ("beside", "deep.far", "entry", "lazy", "near")
    assert modules == [f"peagle_jax.{name}" for name in names]

    before = code_key(("peagle_jax.entry",))
    write(root, stranger="STRANGER = 2\n")
    assert code_key(("peagle_jax.entry",)) == before
    write(root, deep__far="FAR = 2\n")  # which a function imports when it runs
    assert code_key(("peagle_jax.entry",)) != before


def test_names_of_a_package_lead_to_the_module_that_defines_them(root):
    write(
        root,
        entry="from peagle_jax.room import wanted, LIMIT\n",
        room__init="from peagle_jax.room.one import something as wanted\n"
        "from peagle_jax.room.two import other\nfrom peagle_jax.room import three\n",
        room__one="def something(): pass\n",
        room__two="def other(): pass\n",
        room__three="",
    )
    with pytest.raises(ValueError, match="import LIMIT: must be a module, or named in"):
        imported_modules(("peagle_jax.entry",))
    write(root, entry="from peagle_jax.room import wanted, three\n")
    names = ("entry", "room.one", "room.three")
    assert imported_modules(("peagle_jax.entry",)) == [f"peagle_jax.{name}" for name in names]
    # a name that the package defines itself needs the package, and with it all that it imports
    write(root, entry="from peagle_jax.room import LIMIT\n")
    source = (root / "peagle_jax" / "room" / "__init__.py").read_text()
    write(root, room__init=f"{source}LIMIT = 3\n")
    names = ("entry", "room", "room.one", "room.three", "room.two")
    assert imported_modules(("peagle_jax.entry",)) == [f"peagle_jax.{name}" for name in names]


def test_relative_imports_and_imports_for_type_checkers(root):
    write(
        root,
        init="from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from peagle_jax.public import api\n",
        entry="from .room import near\nfrom peagle_jax import api\n",
        room__init="",
        room__near="from typing import TYPE_CHECKING\nfrom ..top import T\n"
        "if TYPE_CHECKING:\n    from peagle_jax.types import U\n",
        top="T = 1\n",
        types="U = 1\n",
        public="def api(): pass\n",
    )
    names = ("entry", "public", "room.near", "top")
    assert imported_modules(("peagle_jax.entry",)) == [f"peagle_jax.{name}" for name in names]


def test_a_package_that_sets_something_counts(root):
    write(root, init='"""About."""\n__all__ = []\n', part="A = 1\n")
    assert imported_modules(("peagle_jax.part",)) == ["peagle_jax.part"]
    write(root, init='import jax\njax.config.update("jax_enable_x64", True)\n')
    assert imported_modules(("peagle_jax.part",)) == ["peagle_jax", "peagle_jax.part"]


def test_what_cannot_be_followed_is_refused(root):
    write(root, entry="from peagle_jax.gone import f\n")
    with pytest.raises(ValueError, match="peagle_jax.gone: must be a module of this repository"):
        code_key(("peagle_jax.entry",))


# ---------------------------------------------------------------- this repository


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of this repository's code, which a test may change."""
    for package in code_keys.PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "assets", "pictures")
        shutil.copytree(folders.ROOT / package, tmp_path / package, ignore=ignored)
    monkeypatch.setattr(folders, "ROOT", tmp_path)
    code_keys.forget()
    yield tmp_path
    code_keys.forget()


def keys() -> dict[tuple[str, ...], str]:
    """By entry modules: of training, measuring and every stage."""
    code_keys.forget()
    of_heads = {modules: code_key(modules) for modules in HEADS}
    return of_heads | {modules: code_key(modules, WITHOUT) for modules in STAGES}


JOB = jobs.Job(EXPERIMENTS["sampling"], "0", 0, "sampled")
HEADS = [jobs.TRAINING, jobs.MEASURING]
STAGES = list({s.modules: s for one in JOB.stages() for s in one.with_parents()})
ENTRIES = [*HEADS, *STAGES]


def test_a_new_design_makes_heads_anew_and_no_stage(checkout):
    before = keys()
    designs = checkout / "peagle_jax" / "draft" / "placeholders.py"
    designs.write_text(f"{designs.read_text()}\nONE_MORE = 1\n")
    changed = {modules for modules, key in keys().items() if key != before[modules]}
    assert changed == {*HEADS} and len(STAGES) == 6


def test_shared_types_and_lazily_imported_kernels_change_the_keys(checkout):
    """Two files that the hand-written lists of before had left out."""
    before = keys()
    types = checkout / "peagle_jax" / "types.py"
    types.write_text(f"{types.read_text()}\nONE_MORE = 1\n")
    assert not set(before.values()) & set(keys().values())

    before = keys()
    kernel = checkout / "peagle_jax" / "kernels" / "cache_write.py"
    kernel.write_text(f"{kernel.read_text()}\nONE_MORE = 1\n")
    changed = {modules for modules, key in keys().items() if key != before[modules]}
    assert {jobs.TRAINING, jobs.MEASURING} <= changed
    assert ("experiments.stages.text",) not in changed  # cutting texts runs no kernel


@pytest.mark.parametrize(
    ("name", "addition"),
    [
        ("peagle_jax/types.py", "# a comment\n"),
        ("peagle_jax/report/page.py", "ONE_MORE = 1\n"),
        ("peagle_jax/cli/__init__.py", "ONE_MORE = 1\n"),
        ("peagle_jax/provenance.py", "ONE_MORE = 1\n"),
        ("peagle_jax/progress.py", "ONE_MORE = 1\n"),
        ("experiments/report.py", "ONE_MORE = 1\n"),
        ("experiments/questions/sampling.py", "ONE_MORE = 1\n"),
        ("experiments/new_file.py", "ONE_MORE = 1\n"),
    ],
)
def test_what_cannot_change_a_number_does_not_change_the_keys(checkout, name, addition):
    before = keys()
    with (checkout / name).open("a") as file:
        file.write(f"\n{addition}")
    assert keys() == before


def test_every_import_of_the_entries_can_be_followed():
    modules = imported_modules(tuple(name for names in ENTRIES for name in names))
    assert {"peagle_jax.types", "peagle_jax.kernels.cache_write", "experiments.texts"} <= {*modules}
    assert all(module.split(".")[0] in code_keys.PACKAGES for module in modules)


def test_what_is_left_out_exists_and_has_a_reason():
    for module, reason in WITHOUT_INFLUENCE.items():
        assert code_keys._path(module) is not None and len(reason) > 10, module
