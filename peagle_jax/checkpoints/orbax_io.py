"""Training state on disk, by Orbax: parameters, optimizer and step.

The position in the data follows from the step.
"""

import contextlib
import functools
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from peagle_jax.checkpoints.checksums import check_checksums, write_checksums
from peagle_jax.old_names import TRAINING_STATE_KEYS
from peagle_jax.types import InputError
from peagle_jax.weights import LazyTensor, flatten_params

# How often an unfinished checkpoint is looked for, how many looks in a row must find none, and the
# seconds between two looks: tensorstore's threads create files after the error has been raised.
REMOVAL_LOOKS, EMPTY_LOOKS, REMOVAL_PAUSE = 40, 3, 0.1

STEP_ITEM = "default"  # Orbax's name of the tree within a step's folder
SAVING_FAILED = "make room on the disk if it is full; otherwise change what the error names"


class Checkpoints:
    """The newest training states of a run.

    States are saved in the background, and get checksums when they are on disk. One whose saving
    was cut short by a kill is never read.

    Args:
      folder: where the states are; it is made.
      keep: how many states stay: when another is saved, the oldest is deleted. None: all.

    Attributes:
      protected: the step of a state that stays although there are newer ones; None for none.

    Raises:
      InputError: the folder cannot be written.
    """

    def __init__(self, folder: Path, keep: int | None = 2):
        self.protected: int | None = None
        self._without_checksums: list[int] = []
        self._summing = ThreadPoolExecutor(1)  # a pass over gigabytes, while steps go on
        self.folder = Path(folder).absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                folder, "the output folder must be writable", error.strerror, "choose another place"
            ) from None
        policy = preservation_policy.AnyPreservationPolicy(
            [preservation_policy.LatestN(keep), _Protection(self)]
        )
        self.manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(preservation_policy=policy)
        )

    def latest(self) -> int | None:
        """The step of the newest finished state; None where there is none."""
        return self.manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Begins to save a state; the one before is on disk when this returns.

        Raises:
          InputError: the one before could not be written.
        """
        with self._saving():
            self.manager.save(step, args=ocp.args.StandardSave(state))
        self._add_checksums()
        self._without_checksums.append(step)

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step; a state saved under former parameter names is read as well.

        Raises:
          InputError: it is not as it was saved.

        Args:
          step: a finished one, as `latest` gives it.
          like: a state of the same structure; only shapes, dtypes and shardings are used.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        path = self.folder / str(step) / STEP_ITEM
        check_checksums(path, _advice_on_step(path))
        former_names = _former_names(path, like)
        new_names = {former: new for new, former in former_names.items()}
        saved = self.manager.restore(
            step, args=ocp.args.StandardRestore(_rename_keys(abstract, former_names))
        )
        return _rename_keys(saved, new_names)

    def wait(self) -> None:
        """Returns when every state that was saved is on disk, with its checksums.

        Raises:
          InputError: one could not be written.
        """
        with self._saving():
            self.manager.wait_until_finished()
        self._add_checksums()
        self._summing.submit(lambda: None).result()  # the one worker has done what came before

    def close(self) -> None:
        """Waits for states that are still being written."""
        self.wait()
        self.manager.close()
        self._summing.shutdown()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Turns what Orbax raises where a state cannot be written into one line."""
        try:
            yield
        except (ValueError, OSError) as error:  # ValueError is tensorstore's word for a full disk
            kept = self.manager.all_steps()
            got = str(error).partition("\n")[0]
            last = f"step {max(kept):,} is kept" if kept else "no step was saved before"
            next_step = f"make room on the disk, and run this again ({last})"
            _remove_unfinished(self.folder, "*")
            rule = "a checkpoint must be written to the end"
            raise InputError(self.folder, rule, got, next_step) from None

    def _add_checksums(self) -> None:
        """Begins to write the checksums of states that are on disk. One process does it for all."""
        for step in self._without_checksums:
            path = self.folder / str(step) / STEP_ITEM
            if jax.process_index() == 0 and path.exists():
                self._summing.submit(_write_checksums_of_kept, path)
        self._without_checksums = []


def _remove_unfinished(folder: Path, name: str) -> None:
    """Removes checkpoints in a folder that could not be written to the end.

    Args:
      name: theirs; "*" for all.
    """
    empty_looks = 0
    for _ in range(REMOVAL_LOOKS):
        unfinished = list(folder.glob(f"{name}.orbax-checkpoint-tmp*"))
        for path in unfinished:
            shutil.rmtree(path, ignore_errors=True)
        empty_looks = 0 if unfinished else empty_looks + 1
        if empty_looks == EMPTY_LOOKS:
            return
        time.sleep(REMOVAL_PAUSE)


def _write_checksums_of_kept(path: Path) -> None:
    """Writes the checksums of a state, unless a newer one's saving deletes it meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        write_checksums(path)


class _Protection(preservation_policy.PreservationPolicy):
    """Keeps the protected state of a run."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        return [info.step == self._checkpoints.protected for info in checkpoints]


def newest(folder: Path) -> Path:
    """The newest finished state under a run's `checkpoints`.

    Raises:
      InputError: there is none.
    """
    if not Path(folder).is_dir():  # a manager would make it
        raise _no_checkpoint(folder, "nothing")
    manager = ocp.CheckpointManager(
        Path(folder).absolute(), options=ocp.CheckpointManagerOptions(read_only=True)
    )
    step = manager.latest_step()
    manager.close()
    if step is None:
        raise _no_checkpoint(folder, "none")
    return Path(folder).absolute() / str(step) / STEP_ITEM


def open_tree(path: Path, *subtree: str) -> dict[str, LazyTensor]:
    """Opens one saved tree; each array is read from disk when it is asked for.

    A training state is three times as large as its parameters, and a head need not fit into memory
    twice to be converted.

    Args:
      path: of the saved tree, as `newest` gives it.
      *subtree: keys that lead to the part that is wanted, for example "params".

    Returns:
      Dotted path -> array.

    Raises:
      InputError: there is no such tree; an array that turns out to be damaged raises when read.
    """
    check_checksums(path, _advice(path, _advice_on_step(path)))
    reader = ocp.PyTreeCheckpointer()
    try:
        tree = _saved_structure(path.absolute())
        for key in subtree:
            tree = tree[key]
    except (AttributeError, KeyError, FileNotFoundError, ValueError) as error:
        raise InputError(
            path,
            rule="must be a finished Orbax checkpoint of this package",
            got=error,
            next_step=_advice(
                path,
                "if the run has not saved yet, continue it with peagle train; otherwise delete "
                f"{path.parent}",
            ),
        ) from None

    def read(keys: list[str]) -> np.ndarray:
        def nest(leaf: Any) -> Any:
            """The leaf inside the dictionaries that lead to it."""
            return functools.reduce(lambda tree, key: {key: tree}, reversed(all_keys), leaf)

        all_keys = [*subtree, *keys]
        restore_only_this = ocp.args.PyTreeRestore(
            item=nest(0),
            restore_args=nest(ocp.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        try:
            restored = reader.restore(path.absolute(), args=restore_only_this)
        except ValueError as error:  # tensorstore's word for damaged files
            next_step = _advice(path, _advice_on_step(path))
            rule = f"{'.'.join(keys)} must be readable"
            raise InputError(path, rule, error, next_step) from None
        return functools.reduce(lambda tree, key: tree[key], all_keys, restored)

    return {
        name: LazyTensor(
            tuple(leaf.shape), np.dtype(leaf.dtype), functools.partial(read, name.split("."))
        )
        for name, leaf in flatten_params(tree)
    }


def save_tree(path: Path, tree: Any) -> None:
    """Writes one tree of arrays with its checksums. All processes of a run must call it.

    Raises:
      InputError: it cannot be written to the end.
    """
    try:
        with ocp.StandardCheckpointer() as writer:
            writer.save(path.absolute(), jax.tree.map(np.asarray, tree), force=True)
        if jax.process_index() == 0:
            write_checksums(path)
    except (ValueError, OSError) as error:  # ValueError is tensorstore's word for a full disk
        _remove_unfinished(path.parent, path.name)
        raise InputError(
            path, "the checkpoint must be written to the end", error, SAVING_FAILED
        ) from None


def _saved_structure(path: Path) -> dict[str, Any]:
    """Keys, shapes and dtypes of a saved tree."""
    metadata: Any = ocp.PyTreeCheckpointer().metadata(path).item_metadata
    return metadata.tree


def _no_checkpoint(folder: Path, got: str) -> InputError:
    rule = "must hold a finished Orbax checkpoint"
    next_step = "continue the run with peagle train until it has saved, or name another run"
    return InputError(folder, rule, got, next_step)


def _advice(path: Path, of_step: str) -> str:
    """What to do about a damaged tree: `of_step` if it is a step's, which others may stand beside.

    The parameters that a run did not train are saved once.
    """
    if path.name == STEP_ITEM:
        return of_step
    return f"copy {path.name} from a backup, or train again with another out:"


def _advice_on_step(path: Path) -> str:
    """What to do about a damaged state of a step."""
    step = path.parent
    others = [other for other in step.parent.glob("[0-9]*") if other.name.isdecimal()]
    if any(int(other.name) < int(step.name) for other in others if step.name.isdecimal()):
        return f"delete {step}, so that the step before it is used"
    return f"copy {step} from a backup, or train again with another out:"


def _former_names(saved_at: Path, state: Any) -> dict[str, str]:
    """New -> former name of the state's parameters that were saved under a former one."""
    if not isinstance(state, Mapping) or "params" not in state:
        return {}
    saved = _saved_structure(saved_at)["params"]
    return {
        new: former
        for former, new in TRAINING_STATE_KEYS.items()
        if new in state["params"] and former in saved and new not in saved
    }


def _rename_keys(tree: Any, new_names: Mapping[str, str]) -> Any:
    """The tree with other keys in its dictionaries; also in those of an optimizer's moments."""
    if not new_names:
        return tree
    if isinstance(tree, dict):
        return {
            new_names.get(key, key): _rename_keys(value, new_names) for key, value in tree.items()
        }
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple, as Optax has them
        return type(tree)(*(_rename_keys(value, new_names) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_rename_keys(value, new_names) for value in tree)
    return tree
