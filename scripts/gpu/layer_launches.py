"""Launches of one layer in a plain decoding step, compiled for an H200 that is not here.

    .venv-compiling/bin/python scripts/gpu/layer_launches.py

The step is compiled with three layers and with four; the difference is a layer. The embedding, the
output matrix and what decoding adds after a step are in neither. It needs an environment of
`scripts/gpu/install_cuda.sh ENV compiling`.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # otherwise the plugin looks for a driver

import collections  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "generate")]

import size_table  # noqa: E402

from gpu import steps, thunks  # noqa: E402
from peagle_jax.decode import loop  # noqa: E402
from peagle_jax.kernels.launch import H200, target_gpu  # noqa: E402

SLOTS = 4096  # of the cache


def step_thunks(name: str, layers: int, tokens: int) -> collections.Counter:
    """How many thunks of each kind a step over `tokens` tokens has, batch 1, FP8."""
    device = size_table.cuda_device()
    with target_gpu(H200), jax.default_device(device):
        target, _ = steps.models(steps.Case(name, "none", 0, 1, layers), False)
        config = dataclasses.replace(target.config, cache_dtype=jnp.dtype(jnp.float8_e4m3fn))
        cache = jax.eval_shape(lambda: config.empty_cache(1, SLOTS))
        leaves, tree = jax.tree.flatten(cache)

        def step(params, tokens, leaves):
            module = target.bind(params)
            out, cache = loop.verify_forward(module, tokens, jax.tree.unflatten(tree, leaves))
            return module.argmax_logits(out.hidden), jax.tree.leaves(cache)

        def on_device(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

        block = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        args = jax.tree.map(on_device, (target.params, block, leaves))
        traced = jax.jit(step, donate_argnums=2).trace(*args)
        _, listed = thunks.compile_program(traced.lower(lowering_platforms=("cuda",)))
    return collections.Counter(thunk.kind for thunk in listed)


def layer_thunks(name: str, tokens: int) -> dict[str, int]:
    """The thunks that one more layer brings."""
    three, four = (step_thunks(name, layers, tokens) for layers in (3, 4))
    return dict(four - three)


def main() -> None:
    for name in (steps.QWEN, steps.OSS):
        for tokens in (1, 8):
            found = layer_thunks(name, tokens)
            row = {"target": name, "tokens": tokens, "launches": sum(found.values()), "by": found}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
