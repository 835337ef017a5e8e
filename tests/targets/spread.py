"""Loads targets over all devices of all processes, and prints what they compute: run by test_sharding.py, its job as JSON."""

import json
import sys

import jax

job = json.loads(sys.argv[1])
if "address" in job:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(job["address"], num_processes=2, process_id=job["process"])
jax.config.update("jax_default_matmul_precision", "highest")

import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from peagle_jax import weights  # noqa: E402
from peagle_jax.checkpoints.target_io import load_target  # noqa: E402
from peagle_jax.decode.generate import generate  # noqa: E402
from peagle_jax.layers import CachedAttention, moe  # noqa: E402
from peagle_jax.targets.sharding import make_mesh  # noqa: E402
from peagle_jax.weights import flatten_params, param_table  # noqa: E402

T = 21
mesh, result = make_mesh(), {}
read: list[str] = []


def noticing(tensors):
    """Which tensors are looked into."""

    class Tensors(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    return Tensors(tensors)


check, load = param_table.check_tensors, param_table.load_params
param_table.check_tensors = lambda make, tensors, names, where: check(
    make, dict(tensors), names, where
)
weights.load_params = lambda make, config, tensors, *rest: load(
    make, config, noticing(tensors), *rest
)
for case, folder in job["folders"].items():
    read.clear()
    target = load_target(folder, aux_hidden_state_layers=(0, 1, 4), mesh=mesh)
    experts = sorted({name for name in read if ".experts." in name})
    tokens = np.random.default_rng(0).integers(0, 97, (2, T))[:1]
    positions = np.arange(T)[None]

    def forward(params, tokens, positions, target=target):  # noqa: B023
        module = target.bind(params)
        out, _ = module(
            tokens, positions, CachedAttention(positions), target.config.empty_cache(1, T)
        )
        return module.compute_logits(out.hidden)

    def compute(*args):
        everywhere = NamedSharding(
            mesh, PartitionSpec()
        )  # and one at a time: gloo mixes up what two programs send
        return jax.jit(lambda *args: forward(*args), out_shardings=everywhere)(
            *args
        ).block_until_ready()  # noqa: B023

    with jax.set_mesh(mesh):
        logits = compute(target.params, tokens, positions)
        few = grouped = None
        if (
            "address" not in job and case in job["answers"]
        ):  # the forms that a GPU gets: one gathers, one groups
            here, moe.platform = moe.platform, lambda: "gpu"
            few = compute(target.params, tokens[:, :2], positions[:, :2])
            grouped = compute(target.params, tokens, positions)
            moe.platform = here
    wanted = case in job["answers"]
    answers = (
        generate(target, None, job["prompts"], max_new_tokens=job["new"], stop_ids=())
        if wanted
        else []
    )
    leaves = dict(flatten_params(target.params))
    result[case] = {
        "logits": np.asarray(logits).tolist(),
        "gpu": [np.asarray(x).tolist() for x in ((few, grouped) if few is not None else ())],
        "answers": [a.output_token_ids for a in answers],
        "read": experts,
        "shards": {path: list(x.addressable_shards[0].data.shape) for path, x in leaves.items()},
    }
print(json.dumps(result))
