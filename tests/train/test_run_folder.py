"""A run's folder is locked while a process trains in it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from recipes import load, minimal

from peagle_jax.train.run_folder import locked_run_folder
from peagle_jax.types import InputError

HOLD = """
import sys, time
from peagle_jax.train.config import load_run
from peagle_jax.train.run_folder import locked_run_folder
with locked_run_folder(load_run(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(300)
"""


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path):
    run = load(tmp_path, minimal("peagle", out=str(tmp_path / "run")))
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "recipe.yaml")],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(InputError) as caught, locked_run_folder(run):
            pass
        message = str(caught.value)
        assert message.startswith(f"{tmp_path / 'run'}: one run at a time; got process ")
        assert f"process {process.pid} on " in message and message.endswith("another folder")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with locked_run_folder(run):
        text = (tmp_path / "run" / "lock").read_text()
    assert text.startswith(f"process {os.getpid()} on ") and text.count("\n") == 1
    with locked_run_folder(run):  # again, after an end that was in order
        pass


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    run = load(tmp_path, minimal("peagle", out=str(tmp_path / "file" / "run")))
    with (
        pytest.raises(InputError, match="output folder must be writable; got Not a directory"),
        locked_run_folder(run),
    ):
        pass
