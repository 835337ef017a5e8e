"""A folder that may not be written is named in one line, and nothing is left behind."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import pytest

CAPABILITY_VERSION_3 = 0x20080522
OVERRIDES = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, capabilities(7)


class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class Sets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextlib.contextmanager
def modes_hold() -> Iterator[None]:
    """A context in which the modes of files hold for this thread, also if the user is root."""
    if os.geteuid():
        yield
        return
    libc, header, sets = ctypes.CDLL(None), Header(CAPABILITY_VERSION_3, 0), (Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0].effective
    sets[0].effective = before & ~OVERRIDES
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0


RECIPE = """
task: peagle
target: {folders}/target
out: {closed}/run
data: {{source: {tmp}/code, held_out: 0, seq_len: 32, batch_size: 2}}
head: {{layers: 1}}
cod: {{num_depths: 2}}
optimizer: {{steps: 6, warmup: 1}}
eval: {{every: null}}
"""
COMMANDS = {
    "bench": (
        "bench --target {folders}/target --drafter {folders}/peagle --prompts {tmp}/p.jsonl "
        "-k 3 --max-new-tokens 4 --out {closed}/b"
    ),
    "convert": "convert {folders}/peagle {closed}/out --to vllm",
    "convert to orbax": "convert {folders}/peagle {closed}/out --to orbax",
    "demo": "demo --budget smoke --out {closed}/demo",
    "extract": (
        "extract --target {folders}/target --data {tmp}/code --seq-len 32 --out {closed}/states"
    ),
    "generate": (
        "generate --target {folders}/target --prompt x --max-new-tokens 4 --out {closed}/o.jsonl"
    ),
    "init-config": "init-config --target {folders}/target --data {tmp}/code --out {closed}/r.yaml",
    "plan": "plan --target {folders}/target --device h200 --context 256 --out {closed}/plan",
    "regenerate": (
        "regenerate --target {folders}/target --data {tmp}/code --held-out 0 --num-samples 3 "
        "--max-new-tokens 5 --prompt-tokens 8 --out {closed}/r.jsonl"
    ),
    "train": "train {tmp}/recipe.yaml",
}


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_read_only_folder(command, folders, peagle, tmp_path):
    closed = tmp_path / "closed"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "f.py").write_text("def f(x):\n    return x\n" * 40)
    (tmp_path / "p.jsonl").write_text('{"prompt": "def f"}\n')
    places = {"folders": folders, "tmp": tmp_path, "closed": closed}
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(**places))
    before = sorted(tmp_path.rglob("*"))
    closed.mkdir(mode=0o555)
    with modes_hold():
        code, _, err = peagle(command.format(**places))
    assert code == 2 and err.count("\n") == 1, err
    assert f"{closed}/" in err and "must be writable; got Permission denied" in err
    assert sorted(tmp_path.rglob("*")) == sorted([*before, closed])
