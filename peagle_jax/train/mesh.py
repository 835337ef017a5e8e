"""Training on several devices: which part of what lies where.

The devices form one mesh with three axes, whose sizes a recipe gives (`mesh`):

    data    each device has a share of the rows of a batch, and all parameters
    fsdp    each device has a share of the rows, and of every matrix and its optimizer state: a
            matrix is put together when a step computes with it (fully sharded, ZeRO-3)
    model   heads, MLPs, experts and vocabulary are divided (tensor parallelism)

XLA adds the communication. What a size does not divide lies on every device.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # where Orbax and Flax, too, find the processes' common notes
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from peagle_jax.targets import sharding
from peagle_jax.targets.sharding import DATA, FSDP
from peagle_jax.train.recipe_sections import MeshConfig
from peagle_jax.types import InputError, Model
from peagle_jax.weights import flatten_params, unflatten_params

# Notes that the first process has written for the others.
_note_numbers = itertools.count()


def make_training_mesh(config: MeshConfig) -> Mesh | None:
    """The mesh of a recipe, over the devices of all processes; None for one device.

    Raises:
      InputError: there are not as many devices.
    """
    sizes = (config.data, config.fsdp, config.model)
    wanted, devices = int(np.prod(sizes)), jax.devices()
    if wanted == 1 and jax.process_count() == 1:
        return None
    if wanted != len(devices) and (wanted > len(devices) or jax.process_count() > 1):
        rule = f"data x fsdp x model must be the number of devices, {len(devices)}"
        got = f"{config.data} x {config.fsdp} x {config.model} = {wanted}"
        raise InputError("mesh", rule, got, f"set mesh.data: {len(devices)}, and the others to 1")
    return sharding.mesh_of_sizes(*sizes)


def unused_devices(mesh: Mesh | None, use: str = "set mesh in the recipe") -> str | None:
    """What to tell of devices that a run does not use; None where it uses all.

    A CPU has as many as somebody simulates. `use` says what would use them.
    """
    num_used, num_all = 1 if mesh is None else mesh.size, len(jax.devices())
    if num_used == num_all or jax.devices()[0].platform == "cpu":
        return None
    return f"{num_used} of {num_all} devices are used: {use} to use others"


def on_mesh(model: Model, mesh: Mesh | None) -> Model:
    """A head or a target with its parameters spread over the mesh."""
    if mesh is None:
        return model
    placed = sharding.placement(model.config, mesh)
    params = [(path, put(x, placed(path, x))) for path, x in flatten_params(model.params)]
    return dataclasses.replace(model, params=unflatten_params(dict(params)))


def put(x: Any, where: Sharding) -> jax.Array:
    """An array of this process, or of all, spread as `where` says.

    Every process has the same numbers, and gives its own devices their parts.
    """
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=where)(x)
    if jax.process_count() == 1:
        return jax.device_put(x, where)
    local = np.asarray(x)
    return jax.make_array_from_callback(local.shape, where, lambda index: local[index])


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Of an array of a batch: its rows are divided among the devices."""
    return NamedSharding(mesh, P((DATA, FSDP)))


def put_rows(batch: Any, mesh: Mesh | None) -> Any:
    """A batch with the rows of all its arrays divided among the devices."""
    if mesh is None:
        return batch
    rows = row_sharding(mesh)
    return jax.tree.map(lambda x: put(x, rows), batch)


def rows_here(count: int, mesh: Mesh | None) -> list[int]:
    """Which rows of a batch of `count` `put_rows` gives to devices of this process."""
    if mesh is None:
        return list(range(count))
    rows = row_sharding(mesh)
    parts = rows.addressable_devices_indices_map((count,)).values()
    return sorted({row for part in parts if part for row in range(count)[part[0]]})


def shardings_of(tree: Any) -> Any:
    """The sharding of every array."""
    return jax.tree.map(lambda x: x.sharding, tree)


def without_fsdp(shardings: Any) -> Any:
    """The shardings of arrays that a step has put together to compute with them."""

    def together(where: NamedSharding) -> NamedSharding:
        axes = [None if axis == FSDP else axis for axis in where.spec]
        return NamedSharding(where.mesh, P(*axes))

    return jax.tree.map(together, shardings)


def to_host(tree: Any) -> Any:
    """Arrays of any devices as NumPy's, in every process."""

    def fetch(x: jax.Array) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            assert isinstance(x.sharding, NamedSharding)
            x = put(x, NamedSharding(x.sharding.mesh, P()))
        return np.asarray(x)

    return jax.tree.map(fetch, tree)


def is_first_process() -> bool:
    """Whether this process writes files and reports progress."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set in one of the processes. All of them must call it."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def wait_for_all(name: str) -> None:
    """Returns when all processes have come here. `name` says where that is."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_first_process(work: Callable[[], str], what: str, seconds: float) -> str:
    """What `work` returns, which only the first of several processes does, for all of them.

    The others wait without a computation on devices, whose time limits are shorter than the work.
    If the first process dies, they end as in every other moment of training.

    Args:
      work: returns a text.
      what: the work in words, for errors: "encode the corpus".
      seconds: that the others wait at most.

    Raises:
      InputError: in the first process that of `work`; in the others where it has failed there, or
        takes too long.
    """
    if jax.process_count() == 1:
        return work()
    client, note = distributed.global_state.client, f"peagle_jax/{next(_note_numbers)}"
    assert client is not None  # there are several processes
    if is_first_process():
        try:
            result = work()
        except BaseException as error:
            client.key_value_set(note, f"failed: {' '.join(str(error).split())}")
            raise
        client.key_value_set(note, f"done: {result}")
        return result
    rule = f"process 1 must {what}, for which this one waits {seconds / 60:,.0f} minutes"
    try:
        text = client.blocking_key_value_get(note, round(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        got = str(error).partition("\n")[0]
        raise InputError("--process", rule, got, "look at what process 1 says") from None
    outcome, _, result = text.partition(": ")
    if outcome != "done":
        raise InputError("--process", rule, result, "start all again when that is mended")
    return result
