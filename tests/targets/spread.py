"""Loads targets over all devices of all processes, and prints what they compute as JSON.

test_sharding.py runs it and passes its job as JSON.
"""

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
tensors_read: list[str] = []


class RecordingDict(dict):
    """Tensors by name; records which of them are looked up."""

    def __getitem__(self, name):
        tensors_read.append(name)
        return super().__getitem__(name)


check_tensors, load_params = param_table.check_tensors, param_table.load_params


def check_without_recording(make, tensors, table, where):
    return check_tensors(make, dict(tensors), table, where)


def load_with_recording(make, config, tensors, *rest):
    return load_params(make, config, RecordingDict(tensors), *rest)


param_table.check_tensors = check_without_recording
weights.load_params = load_with_recording


def compute_logits(target, tokens, positions):
    def forward(params, tokens, positions):
        module = target.bind(params)
        cache = target.config.empty_cache(1, T)
        out, _ = module(tokens, positions, CachedAttention(positions), cache)
        return module.compute_logits(out.hidden)

    # the result on every device, and one program at a time: gloo mixes up what two of them send
    everywhere = NamedSharding(mesh, PartitionSpec())
    logits = jax.jit(forward, out_shardings=everywhere)(target.params, tokens, positions)
    return logits.block_until_ready()


def compute_as_on_gpu(target, tokens, positions):
    """Logits by the two forms of the experts that a GPU gets: one gathers, one groups."""
    real_platform, moe.platform = moe.platform, lambda: "gpu"
    gathered = compute_logits(target, tokens[:, :2], positions[:, :2])
    grouped = compute_logits(target, tokens, positions)
    moe.platform = real_platform
    return [gathered, grouped]


for case, folder in job["folders"].items():
    tensors_read.clear()
    target = load_target(folder, aux_hidden_state_layers=(0, 1, 4), mesh=mesh)
    experts_read = sorted({name for name in tensors_read if ".experts." in name})
    tokens = np.random.default_rng(0).integers(0, 97, (2, T))[:1]
    positions = np.arange(T)[None]
    wants_answers = case in job["answers"]
    with jax.set_mesh(mesh):
        logits = compute_logits(target, tokens, positions)
        gpu_logits = []
        if "address" not in job and wants_answers:
            gpu_logits = compute_as_on_gpu(target, tokens, positions)
    answers = []
    if wants_answers:
        answers = generate(target, None, job["prompts"], max_new_tokens=job["new"], stop_ids=())
    leaves = dict(flatten_params(target.params))
    result[case] = {
        "logits": np.asarray(logits).tolist(),
        "gpu": [np.asarray(x).tolist() for x in gpu_logits],
        "answers": [a.output_token_ids for a in answers],
        "read": experts_read,
        "shards": {path: list(x.addressable_shards[0].data.shape) for path, x in leaves.items()},
    }
print(json.dumps(result))
