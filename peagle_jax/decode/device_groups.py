"""Groups of devices that each have a whole target, for engines side by side: data parallelism.

    target = load_target(folder, mesh=parallel_mesh(tensor_parallel_size=2, data_parallel_size=4))
    engine = make_engine(target, drafter, head.params, max_batch=256)

Each place along the mesh's axis "data" is a group. It has a copy of the target, which "model" may
spread over several devices, and decodes requests of its own; nothing is exchanged between groups.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from peagle_jax.targets.sharding import DATA, FSDP, mesh_of
from peagle_jax.types import Device, Model


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """The models of one engine.

    Attributes:
      target: a whole copy.
      draft_params: of its draft head; None without one.
      device: the group's first; None where the models are wherever they were.
    """

    target: Model
    draft_params: Any
    device: Device | None


def device_groups(target: Model, draft_params: Any) -> list[DeviceGroup]:
    """A group for each place along the axis "data" of the target's mesh.

    The arrays of a group are those that its devices hold already, and take no memory of their own.

    Returns:
      One group with both as they are where there is no such axis; and where one engine must use all
      devices, because matrices are spread over "fsdp", or other processes have some of them.
    """
    mesh = mesh_of(target.params)
    if mesh is None or not _has_groups(mesh):
        return [DeviceGroup(target, draft_params, None)]
    groups = []
    for devices in np.moveaxis(mesh.devices, mesh.axis_names.index(DATA), 0):
        shape = [1 if name == DATA else mesh.shape[name] for name in mesh.axis_names]
        part = Mesh(devices.reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)
        params, head = jax.tree.map(
            lambda x, part=part: _in_group(x, part, mesh), (target.params, draft_params)
        )
        group = dataclasses.replace(target, params=params)
        groups.append(DeviceGroup(group, head, devices.flat[0]))
    return groups


def _has_groups(mesh: Mesh) -> bool:
    sizes = mesh.shape
    is_whole = sizes.get(DATA, 1) > 1 and sizes.get(FSDP, 1) == 1
    return is_whole and set(mesh.devices.flat) <= set(jax.local_devices())


def _sharding(mesh: Mesh, axes: PartitionSpec) -> Sharding:
    """On the devices of a group; the kernels of a GPU take arrays of one device alone."""
    if mesh.size == 1:
        return SingleDeviceSharding(mesh.devices.flat[0])
    return NamedSharding(mesh, axes)


def _in_group(x: Any, group: Mesh, everyone: Mesh) -> jax.Array:
    """The copy that a group has of an array; of one that lies elsewhere a new copy."""
    whole = getattr(x, "sharding", None)
    if not (isinstance(whole, NamedSharding) and whole.mesh == everyone):
        return jax.device_put(x, _sharding(group, PartitionSpec()))
    devices = set(group.devices.flat)
    shards = [shard.data for shard in x.addressable_shards if shard.device in devices]
    sharding = _sharding(group, whole.spec)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
