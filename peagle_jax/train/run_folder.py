"""The folder of a run: whose it is, which settings and data it began with, and its result."""

import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peagle_jax import weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.file_lock import try_lock
from peagle_jax.provenance import provenance
from peagle_jax.train.config import Run, dump, load_run
from peagle_jax.train.data import PackedRows
from peagle_jax.train.mesh import is_first_process
from peagle_jax.train.settings import differences
from peagle_jax.types import InputError

# Keys that may differ when a run is resumed. A run may be extended: its learning rate then follows
# the schedule of the new number of steps.
MAY_CHANGE = (
    "out",  # it is the folder that these settings lie in; it may be moved, or named another way
    "mesh",
    "gradient_accumulation",
    "cod.partitions",
    "compute.recompute",
    "optimizer.steps",
    "max_seconds",
    "log_every",
    "save_every",
    "keep_checkpoints",
    "trackers",
)
RESULT_FILE = "result.json"
DATA_FILE = "data.json"
LOCK_FILE = "lock"


@contextlib.contextmanager
def locked_run_folder(run: Run) -> Iterator[None]:
    """Makes `run.out` the folder of this run, as `init_run_dir`, and keeps other processes out.

    The lock is the operating system's: it ends with the process, however that ends. Of several
    processes that train together, the first has it.

    Raises:
      InputError: another process trains in the folder, or `init_run_dir` refuses it.
    """
    if not is_first_process():
        init_run_dir(run)
        yield
        return
    path = Path(run.out) / LOCK_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise _not_writable(Path(run.out), error) from None
    with file:
        if not try_lock(file):
            file.seek(0)
            owner = file.read().strip() or "another process"
            next_step = "wait for it, end it, or set out to another folder"
            raise InputError(run.out, "one run at a time", f"{owner} runs", next_step)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        init_run_dir(run)
        yield


def init_run_dir(run: Run) -> None:
    """Makes `run.out` the folder of this run.

    It is called before anything else is read or written, because it is the cheapest refusal. Of
    several processes the first writes.

    Raises:
      InputError: the folder cannot be written, or has checkpoints or the result of a run with other
        settings.
    """
    out = Path(run.out)
    path = out / "config.yaml"
    try:
        if has_checkpoints(run):
            if not path.exists():
                rule = "a run that goes on needs the settings that it began with"
                next_step = "copy the file from a backup, or set out to another folder"
                raise InputError(path, rule, "nothing", next_step)
            old = load_run(path)
            _check_same_settings(old, run)
            if old != run and is_first_process():
                write_atomically(path, dump(run))
            return
        if not is_first_process():
            return
        if (out / RESULT_FILE).exists() and path.exists():
            _check_same_settings(load_run(path), run)  # else its result would be taken for this one
        out.mkdir(parents=True, exist_ok=True)
        # machine, versions and commit that began the run, for the model card
        write_atomically(out / "origin.json", json.dumps(provenance(), indent=2) + "\n")
        write_atomically(path, dump(run))
    except OSError as error:
        raise _not_writable(out, error) from None


def _not_writable(out: Path, error: OSError) -> InputError:
    rule, next_step = "the output folder must be writable", "set out to a folder you may write to"
    return InputError(out, rule, error.strerror, next_step)


def check_same_data(run: Run, rows: PackedRows, target: str | None = None) -> None:
    """Checks that a run that goes on trains on the rows and for the target that it began with.

    The recipe names a corpus, which may have changed: with it the order of rows would, and the
    tokens of a reduced draft vocabulary.

    Of several processes the first writes what the run began with.

    Args:
      run: the run.
      rows: its packed rows.
      target: the `target_hash` of a head's target.

    Raises:
      InputError: the rows, or the target, are others.
    """
    path = Path(run.out) / DATA_FILE
    data = {"num_rows": len(rows), "digest": rows.digest(), "padding": round(rows.padding, 6)}
    if target is not None:
        data["target"] = target
    if has_checkpoints(run) and path.exists():
        former = weights.read_json(
            path, f"copy {DATA_FILE} from a backup, or set out to another folder"
        )
        if any(former.get(key) != data[key] for key in ("num_rows", "digest")):
            rule = "a run is resumed only with the data that it began with"
            got = f"{len(rows):,} other rows, were {former.get('num_rows')}"
            next_step = f"restore {run.data.source}, or set out to another folder"
            raise InputError(run.out, rule, got, next_step)
        if former.get("target", target) != target:  # older runs did not write it
            rule = "a run is resumed only with the target that it began with"
            next_step = f"restore {getattr(run, 'target', '')}, or set out to another folder"
            raise InputError(run.out, rule, "one with other weights", next_step)
        return
    if is_first_process():
        write_atomically(path, json.dumps(data) + "\n")


def _check_same_settings(old: Run, new: Run) -> None:
    """Raises InputError if a run cannot be resumed, naming the keys that differ."""
    if changed := differences(old, new, may_change=MAY_CHANGE):
        rule = "a run is resumed only with the settings that it began with"
        next_step = "restore them in the recipe, or set out to another folder to begin a new run"
        raise InputError(new.out, rule, "; ".join(changed), next_step)


def has_checkpoints(run: Run) -> bool:
    """Whether the run was begun and has saved a checkpoint."""
    # Orbax writes a checkpoint under a longer name, and renames it when it is whole
    return any(path.name.isdecimal() for path in (Path(run.out) / "checkpoints").glob("[0-9]*"))


def read_result(run: Run, kind: type, say: Callable[[str], None] = print) -> Any:
    """The result of a run that has nothing left to train, to export and to measure.

    Args:
      run: the run.
      kind: the dataclass of its result; one of its fields is `folder`.
      say: is told if nothing is left to do.

    Returns:
      An instance of `kind`; None if there is something left to do.
    """
    path = Path(run.out) / RESULT_FILE
    if not path.exists():
        return None
    try:
        result = weights.read_json(path)
    except InputError:
        return None  # damaged: it is written again
    fields = {field.name for field in dataclasses.fields(kind)}
    if result.keys() != fields or not isinstance(result["folder"], str):
        return None  # written by another version
    step = result["step"] if isinstance(result["step"], int) else -1
    is_over = step >= run.optimizer.steps or result.get("stopped_early", False)
    if not is_over or not os.path.isdir(result["folder"]):  # of any text, without an error
        return None
    if not Path(os.path.realpath(result["folder"])).is_relative_to(os.path.realpath(run.out)):
        return None  # of the run that this one was copied from, or moved
    say(f"{run.out} was finished before; without its {RESULT_FILE} it would be measured again")
    return kind(**result | {"folder": Path(result["folder"])})


def write_result(run: Run, result: dict) -> None:
    """Writes result.json into `run.out`: what the run came to, for model cards and reports.

    A session that had nothing left to train keeps the speed that an earlier one measured.
    """
    path = Path(run.out) / RESULT_FILE
    result = {key: str(v) if isinstance(v, Path) else v for key, v in result.items()}
    if result["tokens_per_second"] is None and path.exists():
        with contextlib.suppress(InputError):  # damaged: no speed is known then
            result["tokens_per_second"] = weights.read_json(path).get("tokens_per_second")
    write_atomically(path, json.dumps(result, indent=2) + "\n")
