"""Where a target's parameters and cache lie on a mesh: heads and MLPs by tensor parallelism, experts by expert parallelism.

One axis, "model". What its size does not divide is replicated: a KV head more than a device, an odd vocabulary.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from peagle_jax.layers.moe import AXIS
from peagle_jax.targets.config import TargetConfig
from peagle_jax.types import KVCache


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices, of all processes, on the axis "model"."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))


def spec(path: str, shape: tuple[int, ...], config: TargetConfig, parts: int) -> P:
    """Of the parameter at a dotted path, on an axis of `parts` devices."""

    def over(count, *axes):
        return P(*axes) if count % parts == 0 else P()

    if found := re.search(r"blocks\.(\d+)\.attn\.([qkvo])\.(kernel|bias)$", path):
        heads = config.heads if found[2] in "qo" else config.kv_heads_of(int(found[1]))
        if found[2] == "o":
            return over(heads, AXIS, None) if found[3] == "kernel" else P()
        return over(heads, None, AXIS) if found[3] == "kernel" else over(heads, AXIS)
    if path.endswith("attn.sinks"):
        return over(config.heads, AXIS)
    if ".experts." in path:
        return over(shape[0], AXIS)
    if found := re.search(r"mlp\.(gate|up|down)\.(kernel|bias)$", path):
        if found[1] == "down":
            return over(shape[0], AXIS, None) if found[2] == "kernel" else P()
        return over(shape[-1], *(None, AXIS)[2 - len(shape) :])
    if path == "embed.table":
        return over(shape[0], AXIS, None)
    if path in ("lm_head.kernel", "ple_embed.table", "ple_in"):
        return over(shape[1], None, AXIS)
    return P()


def placement(config: TargetConfig, mesh: Mesh) -> Callable[[str, Any], NamedSharding]:
    """What `weights.load` asks for: path and shape of a parameter -> its sharding."""
    return lambda path, leaf: NamedSharding(mesh, spec(path, leaf.shape, config, mesh.shape[AXIS]))


def cache_sharding(cache: KVCache, mesh: Mesh) -> KVCache:
    """The sharding of every array of a cache, as a cache: by KV heads where they divide."""

    def of(x):
        heads = len(x.shape) == 4 and x.shape[1] % mesh.shape[AXIS] == 0
        return NamedSharding(mesh, P(None, AXIS) if heads else P())

    return jax.tree.map(of, cache)


def mesh_of(params) -> Mesh | None:
    """The mesh that parameters were spread over, if they were."""
    leaf = jax.tree.leaves(params)[0]
    sharding = getattr(leaf, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None
