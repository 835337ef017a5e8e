"""Decodes on four simulated devices, in groups, and prints what came of it as JSON.

python data_parallel.py, which test_device_groups.py runs. A line for each case.
"""

import dataclasses
import json
import os

os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"

import jax  # noqa: E402
from groups import CASES, MAX_BATCH, models, requests  # noqa: E402

from peagle_jax.decode import first_call, memory, parallel_engine  # noqa: E402
from peagle_jax.decode.parallel_engine import ParallelEngine, make_engine  # noqa: E402
from peagle_jax.free_memory import free_bytes  # noqa: E402
from peagle_jax.kernels import launch  # noqa: E402
from peagle_jax.targets.sharding import DATA, MODEL, mesh_of, parallel_mesh, placement  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")


def spread(target, mesh):
    """The target on a mesh, as `load_target` reads it."""
    sharding_of = placement(target.config, mesh)

    def place(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.device_put(x, sharding_of(name, x))

    return dataclasses.replace(
        target, params=jax.tree_util.tree_map_with_path(place, target.params)
    )


def devices(params) -> list[int]:
    """The devices that each array of parameters lies on."""
    [numbers] = {tuple(sorted(d.id for d in x.devices())) for x in jax.tree.leaves(params)}
    return list(numbers)


def memory_devices(several) -> list[int]:
    """Whose memory is asked for where each device has its own, as a GPU has."""
    asked = []
    memory.free_bytes = lambda device: asked.append(device.id)
    parallel_engine.platform = lambda: "gpu"
    apart = ParallelEngine(several.engines, list(several._device_of.values()))
    parallel_engine.platform = launch.platform
    apart.add(requests()[0])
    memory.free_bytes = free_bytes
    apart.cancel(0)
    return asked


def pointers(params) -> set[int]:
    """Where the arrays of parameters lie in memory."""
    shards = [shard for x in jax.tree.leaves(params) for shard in x.addressable_shards]
    return {shard.data.unsafe_buffer_pointer() for shard in shards}


for name, (sizes, options) in CASES.items():
    target, drafter, head_params = models()
    target = spread(target, parallel_mesh(sizes[MODEL], sizes[DATA]))
    several = make_engine(target, drafter, head_params, max_batch=MAX_BATCH, **options)
    assert isinstance(several, ParallelEngine)
    engines = several.engines
    answers = dict(several.run(requests()))
    parts = set().union(*(pointers(engine.target.params) for engine in engines))
    result = {
        "answers": [answers[i].output_token_ids for i in range(len(answers))],
        "max_batch": [engine.max_batch for engine in engines],
        "has_worked": [engine.stats.num_steps > 0 for engine in engines],
        "devices": [devices(engine._batch.params) for engine in engines],
        "is_on_a_mesh": [mesh_of(engine.target.params) is not None for engine in engines],
        "num_copied": len(parts - pointers(target.params)),
        "asked_for_memory": memory_devices(several),
        "compiled_for": sorted(
            {f"{program[-1].platform}:{program[-1].id}" for program in first_call._called}
        ),
        "num_programs": len(several.stats.programs),
    }
    first_call.let_go()
    print(json.dumps({"name": name, **result}), flush=True)
