"""Training state on disk, by Orbax: parameters, optimizer, step. The data's position follows from the step."""

import functools
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from peagle_jax.types import InputError
from peagle_jax.weights import LazyTensor, flatten_params


class Checkpoints:
    """The two newest states of a run. Saves in the background; a save that a kill cut short is never read."""

    def __init__(self, folder: Path):
        self.folder = Path(folder).absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                folder, "the output folder must be writable", error.strerror, "choose another place"
            ) from None
        self.manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, step: int, state) -> None:
        self.manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, like):
        """The state of a step, shaped as `like` (only its structure, shapes and dtypes are used)."""
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        return self.manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self.manager.wait_until_finished()
        self.manager.close()


def newest(folder: Path) -> Path:
    """The newest finished state under a run's `checkpoints`.

    Raises:
      InputError: there is none.
    """
    if not Path(folder).is_dir():  # a manager would make it
        raise InputError(
            folder, "must hold a finished Orbax checkpoint", "nothing", "let the run save once"
        )
    manager = ocp.CheckpointManager(
        Path(folder).absolute(), options=ocp.CheckpointManagerOptions(read_only=True)
    )
    step = manager.latest_step()
    manager.close()
    if step is None:
        raise InputError(
            folder, "must hold a finished Orbax checkpoint", "none", "let the run save once"
        )
    return Path(folder).absolute() / str(step) / "default"


def open_tree(path: Path, *inside: str) -> dict[str, LazyTensor]:
    """Dotted path -> array, each read from disk when it is asked for, of one saved tree (or of a part `inside` it).

    A training state is three times its parameters, and a head need not fit the memory twice to be converted.
    """
    reader = ocp.PyTreeCheckpointer()
    try:
        tree = reader.metadata(path.absolute()).item_metadata.tree
        for key in inside:
            tree = tree[key]
    except (AttributeError, KeyError, FileNotFoundError, ValueError) as error:
        raise InputError(
            path,
            "must be a finished Orbax checkpoint of this package",
            error,
            "let the run save once",
        ) from None

    def read(keys: list[str]):
        def around(leaf):
            return functools.reduce(lambda tree, key: {key: tree}, reversed([*inside, *keys]), leaf)

        how = ocp.args.PyTreeRestore(
            item=around(0),
            restore_args=around(ocp.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        try:
            tree = reader.restore(path.absolute(), args=how)
        except ValueError as error:  # tensorstore's word for damaged files
            raise InputError(
                path, f"{'.'.join(keys)} must be readable", error, "take an earlier checkpoint"
            ) from None
        return functools.reduce(lambda tree, key: tree[key], [*inside, *keys], tree)

    return {
        name: LazyTensor(
            tuple(leaf.shape), np.dtype(leaf.dtype), functools.partial(read, name.split("."))
        )
        for name, leaf in flatten_params(tree)
    }
