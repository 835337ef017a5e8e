"""Training state on disk, by Orbax: parameters, optimizer, step. The data's position follows from the step."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from peagle_jax.types import InputError


class Checkpoints:
    """The two newest states of a run. Saves in the background; a save that a kill cut short is never read."""

    def __init__(self, folder: Path):
        self.folder = Path(folder).absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(folder, "the output folder must be writable", error.strerror, "choose another place") from None
        self.manager = ocp.CheckpointManager(self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, step: int, state) -> None:
        self.manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, like):
        """The state of a step, shaped as `like` (only its structure, shapes and dtypes are used)."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        return self.manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self.manager.wait_until_finished()
        self.manager.close()


def restore_params(folder: Path):
    """The newest parameters of a run, as a pure dict of NumPy-restorable arrays; what `peagle convert` reads."""
    folder = Path(folder).absolute()
    manager = ocp.CheckpointManager(folder)
    step = manager.latest_step()
    if step is None:
        raise InputError(folder, "must hold a finished Orbax checkpoint", "none", "let the run save once")
    state = manager.restore(step, args=ocp.args.StandardRestore())
    manager.close()
    return step, state["params"]
