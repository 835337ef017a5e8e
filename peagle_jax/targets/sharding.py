"""Where the parameters and the cache of a target, or of a draft head, lie on a mesh of devices.

Heads and MLPs are split by tensor parallelism, experts by expert parallelism, both over the mesh
axis "model". What the size of that axis does not divide is replicated, for example two key-value
heads over eight devices, or a vocabulary of odd size. On a mesh that has an axis "fsdp" every
matrix is split over that, too, along another of its axes.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from peagle_jax.layers.moe import AXIS
from peagle_jax.types import Device, InputError, KVCache, Params

# The axes of a mesh: rows of a batch; rows and matrices; heads, MLPs and experts.
DATA, FSDP, MODEL = "data", "fsdp", AXIS


@runtime_checkable
class HasHeads(Protocol):
    """What is read of the configuration of a target or of a draft head."""

    @property
    def heads(self) -> int:
        """Attention heads of a layer."""
        ...

    def kv_heads_of(self, layer: int) -> int:
        """Key-value heads of a layer."""
        ...


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the one axis "model".

    Args:
      devices: of `jax.devices()`; None: all devices of all processes.
    """
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))


def parallel_mesh(tensor_parallel_size: int, data_parallel_size: int = 1) -> Mesh | None:
    """A mesh over the first devices of this process; None for one device.

    Args:
      tensor_parallel_size: devices that share heads, MLPs, experts and vocabulary.
      data_parallel_size: groups of so many devices that share the rows of a batch.

    Raises:
      InputError: a size is below 1, or there are too few devices.
    """
    sizes = {"--tensor-parallel-size": tensor_parallel_size}
    sizes |= {"--data-parallel-size": data_parallel_size}
    for option, size in sizes.items():
        if size < 1:
            raise InputError(option, "must be 1 or more", size, f"give {option} 1")
    devices, size = jax.devices(), tensor_parallel_size * data_parallel_size
    if size > len(devices):
        options = [option for option, size in sizes.items() if size > 1]
        rule = f"a target is spread over at most the {len(devices)} devices there are"
        raise InputError(" x ".join(options), rule, size, "give less, or start with more devices")
    return None if size == 1 else mesh_of_sizes(data_parallel_size, 1, tensor_parallel_size)


def mesh_of_sizes(data: int, fsdp: int, model: int) -> Mesh:
    """A mesh with the axes "data", "fsdp" and "model" over the first devices."""
    devices = np.asarray(jax.devices()[: data * fsdp * model]).reshape(data, fsdp, model)
    return Mesh(devices, (DATA, FSDP, MODEL), axis_types=(AxisType.Auto,) * 3)


def spec(path: str, shape: tuple[int, ...], config: HasHeads, axis_size: int) -> P:
    """On which of its axes a parameter is split.

    Args:
      path: dotted path of the parameter.
      axis_size: devices on the mesh axis.
    """

    def split_if_divisible(count: int, *axes: str | None) -> P:
        return P(*axes) if count % axis_size == 0 else P()

    if match := re.search(r"(?:blocks|layers)\.(\d+)\.attn\.([qkvo])\.(kernel|bias)$", path):
        layer, projection, part = match.groups()
        heads = config.heads if projection in "qo" else config.kv_heads_of(int(layer))
        if projection == "o":
            return split_if_divisible(heads, AXIS, None) if part == "kernel" else P()
        axes = (None, AXIS) if part == "kernel" else (AXIS,)
        return split_if_divisible(heads, *axes)
    if path.endswith("attn.sinks"):
        return split_if_divisible(config.heads, AXIS)
    if ".experts." in path:
        return split_if_divisible(shape[0], AXIS)
    if match := re.search(r"mlp\.(gate|up|down)\.(kernel|bias)$", path):
        matrix, part = match.groups()
        if matrix == "down":
            return split_if_divisible(shape[0], AXIS, None) if part == "kernel" else P()
        axes = (None, AXIS) if len(shape) == 2 else (AXIS,)
        return split_if_divisible(shape[-1], *axes)
    if path == "embed.table":
        return split_if_divisible(shape[0], AXIS, None)
    if path in ("lm_head.kernel", "ple_embed.table", "ple_in"):
        return split_if_divisible(shape[1], None, AXIS)
    return P()


def _fully_sharded(axes: P, shape: tuple[int, ...], size: int) -> P:
    """`axes` with the largest axis of a matrix that is not split, and can be, split over "fsdp"."""
    entries = [*axes, *[None] * (len(shape) - len(axes))]
    free = [i for i, entry in enumerate(entries) if entry is None and shape[i] % size == 0]
    if len(shape) > 1 and free:
        entries[max(free, key=lambda i: shape[i])] = FSDP
    return P(*entries)


def placement(config: HasHeads, mesh: Mesh | AbstractMesh) -> Callable[[str, Any], NamedSharding]:
    """(path, shape) of a parameter -> its sharding, as `weights.load_params` asks for it."""

    def sharding_of(path: str, param: Any) -> NamedSharding:
        axes = spec(path, param.shape, config, mesh.shape[AXIS])
        if mesh.shape.get(FSDP, 1) > 1:
            axes = _fully_sharded(axes, param.shape, mesh.shape[FSDP])
        return NamedSharding(mesh, axes)

    return sharding_of


def cache_sharding(cache: KVCache, mesh: Mesh | AbstractMesh) -> KVCache:
    """The sharding of every array of a cache, as a cache of shardings.

    Keys and values are split by their heads where the mesh divides these.
    """

    def sharding_of(x: Any) -> NamedSharding:
        is_split = len(x.shape) == 4 and x.shape[1] % mesh.shape[AXIS] == 0
        return NamedSharding(mesh, P(None, AXIS) if is_split else P())

    return jax.tree.map(sharding_of, cache)


def mesh_of(params: Params) -> Mesh | None:
    """The mesh that parameters are spread over; None if they lie on one device."""
    leaf = jax.tree.leaves(params)[0]
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


def device_of(params: Params) -> Device | None:
    """A device of this process that parameters lie on; None of what is no array of JAX."""
    leaf = jax.tree.leaves(params)[0]
    return leaf.addressable_shards[0].device if isinstance(leaf, jax.Array) else None
