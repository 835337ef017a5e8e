"""scripts/gpu/first_contact.sh: the wheels that are carried, and a call that goes on."""

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "gpu" / "first_contact.sh"
WHEEL = re.compile(r"^([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}  # (\d+); (\S.*)$")
# in the place of Python: unpacks wheels, and says how the suite would have been called
PYTHON = """#!/bin/sh
if [ "$2" = zipfile ]; then exec python3 "$@"; fi
echo "$PYTHONPATH $@"
ls "$PYTHONPATH"
exit 3
"""


def first_contact(*args: str, **env: str) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key != "OUT"} | env
    return subprocess.run([SCRIPT, *args], env=env, capture_output=True, text=True, timeout=60)


def test_listed_wheels_can_be_carried():
    """All are exact, and together they are small beside what may be carried with the checkout."""
    lines = (ROOT / "scripts" / "gpu" / "wheels.txt").read_text().splitlines()
    wheels = [WHEEL.match(line) for line in lines if not line.startswith("#")]
    assert all(wheels) and {"jax-triton", "flax", "optax", "rich"} < {w[1] for w in wheels if w}
    assert sum(int(w[3]) for w in wheels if w) < 60 * 2**20
    bridge = next(w[2] for w in wheels if w and w[1] == "jax-triton")
    assert f"jax-triton=={bridge};" in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def machine(tmp_path):
    """A folder with one wheel, and an interpreter that only says how it was called."""
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "one-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one_module.py", "")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return {"WHEELS": str(tmp_path / "wheels"), "PYTHON": str(python), "PYTHONPATH": ""}


@pytest.mark.parametrize("by_argument", [False, True])
def test_the_suite_is_called_with_the_wheels(machine, tmp_path, by_argument):
    out = str(tmp_path / "out")
    args = [out] if by_argument else []
    env = machine if by_argument else machine | {"OUT": out}
    done = first_contact("run", *args, "--minutes", "2", **env)
    assert done.returncode == 3, done.stderr  # the suite's
    call, *modules = done.stdout.splitlines()
    assert f"scripts/gpu_suite.py --record {out}/gpu.jsonl --minutes 7 --minutes 2" in call
    assert modules == ["one_module.py"]
    assert not Path(call.split()[0]).exists()
    assert Path(out).is_dir()


def test_refusals(machine, tmp_path):
    done = first_contact("run", str(tmp_path), **machine | {"WHEELS": str(tmp_path / "none")})
    assert done.returncode == 2 and "carry them" in done.stderr
    for args in ([], ["run"], ["fly", str(tmp_path)]):
        done = first_contact(*args, **machine)
        assert done.returncode == 2 and done.stderr.startswith("usage:"), args
