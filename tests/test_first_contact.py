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
    env = {key: value for key, value in os.environ.items() if key not in ("OUT", "KEPT")} | env
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


def test_keep_adds_what_is_new(tmp_path):
    """Rows that another machine gave stay; a second call changes nothing."""
    kept, out = tmp_path / "results" / "gpu.jsonl", tmp_path / "out"
    kept.parent.mkdir()
    out.mkdir()
    old, shared, new = (f'{{"suite": "whole", "row": {i}}}\n' for i in range(3))
    kept.write_text(old + shared)
    (out / "gpu.jsonl").write_text(shared + new + '{"suite": "wh')  # a kill, while one was written
    for added in (1, 0):
        done = first_contact("keep", str(out), KEPT=str(kept))
        assert done.returncode == 0 and f"3 rows, {added} of them new" in done.stdout, done.stderr
        assert kept.read_text() == old + shared + new
    assert list(kept.parent.iterdir()) == [kept]
    for content, words in (('{"suite": "tiny"}\n' + new, "--tiny"), ("", "no rows")):
        (out / "gpu.jsonl").write_text(content)
        done = first_contact("keep", str(out), KEPT=str(kept))
        assert done.returncode == 2 and words in done.stderr
        assert kept.read_text() == old + shared + new


@pytest.mark.parametrize("is_too_large", [False, True])
def test_carry_replaces_wheels_only(tmp_path, is_too_large):
    """A folder's other files stay, and so do its wheels where new ones cannot be carried."""
    wheels, python = tmp_path / "wheels", tmp_path / "python"
    wheels.mkdir()
    for name in ("old.whl", "notes.txt"):
        (wheels / name).write_text("mine")
    size = 60 * 2**20 + 1 if is_too_large else 5
    # in the place of pip: makes one wheel of that size in the folder that stands last
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nfor last; do :; done\n'
        f'truncate -s {size} "$last/new.whl"\n'
    )
    python.chmod(0o755)
    done = first_contact("carry", WHEELS=str(wheels), PYTHON=str(python), TMPDIR=str(tmp_path))
    names = {path.name for path in wheels.iterdir()}
    assert done.returncode == (2 if is_too_large else 0), done.stderr
    assert names == {"old.whl" if is_too_large else "new.whl", "notes.txt"}
    assert (wheels / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"wheels", "python"}  # nothing is left
