"""The package as it is shipped: what an archive holds, and what an import brings and costs."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(folder: Path, kind: str) -> Path:
    """A wheel or an sdist, by the build backend alone: pip would fetch one from an index."""
    call = f"import setuptools.build_meta as b, sys; print(b.build_{kind}(sys.argv[1]))"
    words = [sys.executable, "-W", "ignore", "-c", call, str(folder)]
    done = subprocess.run(words, cwd=source_of(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.splitlines()[-1]


def source_of(folder: Path) -> Path:
    """A copy of what git has, so that nothing is built into the checkout."""
    copy = folder / "source"
    if not copy.exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "peagle_jax", "pyproject.toml", "README.md", "LICENSE"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if listed.returncode:
            pytest.skip("not a git checkout")
        for name in filter(None, listed.stdout.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():  # a link to a folder
                shutil.copytree(ROOT / name, copy / name)
            else:
                shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("package")


@pytest.fixture(scope="module")
def wheel(folder):
    return build(folder, "wheel")


def test_a_wheel_runs_without_the_repository(wheel, tmp_path):
    """With the packaged models, the mark of a typed package, and kernels to compile."""
    installed = tmp_path / "installed"
    words = ["install", "-q", "--no-deps", "--no-index", "--no-compile", "--target", installed]
    subprocess.run([sys.executable, "-m", "pip", *words, wheel], check=True)
    names = {path.relative_to(installed).as_posix() for path in installed.rglob("*")}
    assert "peagle_jax/py.typed" in names and "peagle_jax/assets/peagle/config.json" in names
    kernels = (ROOT / "peagle_jax" / "kernels" / "native").iterdir()
    assert {f"peagle_jax/kernels/native/{path.name}" for path in kernels} <= names
    assert not [name for name in names if name.startswith(("tests", "scripts", "experiments"))]
    models = installed / "peagle_jax" / "assets"
    words = ["generate", "--target", str(models / "target"), "--drafter", str(models / "peagle")]
    words += ["-k", "3", "--max-new-tokens", "6", "--prompt", "def copy_file(src, dst):"]
    done = subprocess.run(
        [sys.executable, installed / "bin" / "peagle", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "acceptance length" in done.stderr, done.stderr[-2000:]


def test_an_sdist_holds_what_a_wheel_needs(folder, wheel):
    with tarfile.open(build(folder, "sdist")) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    with zipfile.ZipFile(wheel) as file:
        shipped = {name for name in file.namelist() if name.startswith("peagle_jax/")}
    assert shipped <= names and {"pyproject.toml", "LICENSE", "README.md"} <= names


IMPORTS = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder
FOREIGN = {"torch", "jax_triton", "triton", "vllm", "speculators", "datasets"}

class WithoutForeign(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_foreign = name.partition(".")[0] in FOREIGN
        return None if is_foreign else super().find_spec(name, path, target)

import peagle_jax
peagle_jax.generate, peagle_jax.load_pair, peagle_jax.Engine
assert not FOREIGN & sys.modules.keys(), FOREIGN & sys.modules.keys()
# transformers, which tokenizers need, imports torch where it finds it
sys.meta_path = [WithoutForeign if f is PathFinder else f for f in sys.meta_path]
for module in pkgutil.walk_packages(peagle_jax.__path__, "peagle_jax."):
    if not module.name.endswith(("_triton", "__main__")):
        importlib.import_module(module.name)
assert not FOREIGN & sys.modules.keys()
"""


def test_no_import_of_torch_or_jax_triton():
    """What decodes brings none of them, and everything can be imported where they are absent."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


QUICK = """
import sys

import peagle_jax
assert "jax" not in sys.modules  # names are looked up when they are used
peagle_jax.generate, peagle_jax.load_pair
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_the_import_is_quick():
    """Libraries of other work than decoding are imported by that work.

    scripts/measure/versions.py measures the seconds: processor time differs by machine and load.
    """
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(done.stdout.split())
    slow = {"datasets", "grain", "huggingface_hub", "matplotlib", "orbax", "pandas", "pyarrow"}
    slow |= {"scipy", "tokenizers", "torch", "transformers"}
    assert "flax" in imported and not slow & imported, slow & imported
