"""A run's folder is locked while a process trains in it."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from recipes import load, minimal

from peagle_jax.train.config import load_run
from peagle_jax.train.run_folder import (
    init_run_dir,
    locked_run_folder,
    read_result,
    write_result,
)
from peagle_jax.types import InputError

HOLD = """
import sys, time
from peagle_jax.train.config import load_run
from peagle_jax.train.run_folder import locked_run_folder
with locked_run_folder(load_run(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(300)
"""


def test_checkpoints_without_the_settings_that_they_began_with(tmp_path):
    """Nobody could say whether they are these; nothing is written over."""
    run = load(tmp_path, minimal("peagle", out=str(tmp_path / "run")))
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(InputError, match="run/config.yaml: a run that goes on needs the settings"):
        init_run_dir(run)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


def test_a_result_of_other_settings_is_not_this_runs(tmp_path):
    """Also where its checkpoints were deleted."""
    out = str(tmp_path / "run")
    run = load(tmp_path, minimal("peagle", out=out))
    init_run_dir(run)
    (tmp_path / "run" / "result.json").write_text("{}")
    other = load(tmp_path, minimal("peagle", out=out, seed=run.seed + 1))
    with pytest.raises(InputError, match="only with the settings that it began with.*seed"):
        init_run_dir(other)
    assert load_run(tmp_path / "run" / "config.yaml").seed == run.seed
    init_run_dir(run)
    (tmp_path / "run" / "result.json").unlink()
    init_run_dir(other)
    assert load_run(tmp_path / "run" / "config.yaml").seed == run.seed + 1


def test_a_folder_that_was_moved_is_its_own(tmp_path):
    """Its settings name the place where it was begun."""
    init_run_dir(load(tmp_path, minimal("peagle", out=str(tmp_path / "run"))))
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    run = load(tmp_path, minimal("peagle", out=str(tmp_path / "moved")))
    init_run_dir(run)
    assert load_run(tmp_path / "moved" / "config.yaml").out == str(tmp_path / "moved")
    other = load(tmp_path, minimal("peagle", out=str(tmp_path / "moved"), seed=run.seed + 1))
    with pytest.raises(InputError, match="only with the settings that it began with; got seed"):
        init_run_dir(other)


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


@dataclasses.dataclass
class Result:
    folder: Path
    step: int
    tokens_per_second: float | None


def test_a_copied_run_does_not_answer_with_the_original(tmp_path):
    run = load(tmp_path, minimal("peagle", out=str(tmp_path / "a")))
    init_run_dir(run)
    (tmp_path / "a" / "head").mkdir()
    result = {"folder": tmp_path / "a" / "head", "step": run.optimizer.steps}
    write_result(run, result | {"tokens_per_second": 5.0})
    assert read_result(run, Result, lambda line: None).folder == tmp_path / "a" / "head"
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = load(tmp_path, minimal("peagle", out=str(tmp_path / "b")))
    assert read_result(copied, Result, lambda line: None) is None
    (tmp_path / "link").symlink_to(tmp_path / "a")
    linked = load(tmp_path, minimal("peagle", out=str(tmp_path / "link")))
    assert read_result(linked, Result, lambda line: None) is not None
