"""scripts/gpu/install_cuda.sh with a Python that only notes what it is asked for."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# in the place of Python 3.12: makes "environments" of itself, and notes what they install
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) ! grep -q "^# old" "$0" ;;
--version) echo Python 3.12 ;;
"-m venv"*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
*install*) echo "$@" >>"$NOTES" ;;
*) echo 1.0 ;;
esac
"""


def install(env: Path, notes: Path, kind: str, python: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ROOT / "scripts" / "gpu" / "install_cuda.sh", env, kind],
        env=os.environ | {"PYTHON": str(python), "NOTES": str(notes)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def python(tmp_path):
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


def test_nothing_is_installed_twice(tmp_path, python):
    env, notes = tmp_path / "env", tmp_path / "notes"
    first = install(env, notes, "compiling", python)
    assert first.returncode == 0, first.stderr
    installed = notes.read_text()
    assert "jax-cuda13-plugin==1.0" in installed
    again = install(env, notes, "compiling", python)
    assert again.returncode == 0 and again.stdout == first.stdout
    assert notes.read_text() == installed
    assert install(env, notes, "gpu-machine", python).returncode == 0
    assert "triton==3.6.0" in notes.read_text().removeprefix(installed)


@pytest.mark.parametrize(
    "kind, has, lacks",
    [
        ("newest", [".[cuda,kernels]"], ["plugin", "triton==3.6.0"]),
        ("gpu-machine", ["jax[cuda13]==0.11.2 triton==3.6.0", "jax-triton==0.4.1"], ["plugin"]),
        ("compiling", [".[kernels]", "plugin", "nvidia-cuda-nvcc"], ["cuda13]", "triton==3.6.0"]),
        (
            "compiling-gpu-machine",
            ["jax==0.11.2 triton==3.6.0", "jax-triton==0.4.1", "plugin", "nvidia-cuda-nvcc"],
            ["cuda13]", ".[kernels]"],
        ),
    ],
)
def test_what_each_kind_installs(tmp_path, python, kind, has, lacks):
    notes = tmp_path / "notes"
    assert install(tmp_path / "env", notes, kind, python).returncode == 0
    installed = notes.read_text()
    assert all(text in installed for text in has) and not any(text in installed for text in lacks)


def test_an_environment_of_an_older_python_is_made_anew(tmp_path, python):
    env, notes = tmp_path / "env", tmp_path / "notes"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python").write_text(PYTHON + "# old\n")
    (env / "bin" / "python").chmod(0o755)
    done = install(env, notes, "newest", python)
    assert done.returncode == 0, done.stderr
    assert "is of another Python" in done.stdout
    assert "old\n" not in (env / "bin" / "python").read_text()


def test_an_unknown_kind_makes_nothing(tmp_path, python):
    done = install(tmp_path / "env", tmp_path / "notes", "oldest", python)
    assert done.returncode == 2 and done.stderr.startswith("usage:")
    assert not (tmp_path / "env").exists()
