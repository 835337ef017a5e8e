"""Launches of one layer in a plain decoding step, compiled for an H200 that is not here.

    .venv-compiling/bin/python scripts/gpu/layer_launches.py [--out results/layer_launches.jsonl]

The step is compiled with one layer more and one less; the difference is a layer. The embedding, the
output matrix and what decoding adds after a step are in neither. Of GPT-OSS, whose layers see a
window and everything in turns, both kinds are counted. It needs an environment of
`scripts/gpu/install_cuda.sh ENV compiling`, and some minutes.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # otherwise the plugin looks for a driver

import argparse  # noqa: E402
import collections  # noqa: E402
import functools  # noqa: E402
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
from peagle_jax.atomic_write import write_atomically  # noqa: E402
from peagle_jax.decode import loop  # noqa: E402
from peagle_jax.kernels.launch import H200, target_gpu  # noqa: E402
from peagle_jax.provenance import provenance  # noqa: E402

SLOTS = 4096  # of the cache
# target -> kind of a layer -> its number: the step has so many layers, and one less
LAYERS = {
    steps.QWEN: {"every layer": 4},
    steps.OSS: {"layer that sees everything": 4, "layer with a window": 5},
}


@functools.cache
def step_thunks(name: str, layers: int, tokens: int) -> collections.Counter:
    """How many thunks of each kind a step over `tokens` tokens has, batch 1, FP8."""
    device = size_table.cuda_device()
    with target_gpu(H200), jax.default_device(device):
        target, _ = steps.models(steps.Case(name, "none", 0, 1, layers), False)
        cache = jax.eval_shape(lambda: target.config.empty_cache(1, SLOTS))
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


def layer_thunks(name: str, layer: int, tokens: int) -> dict[str, int]:
    """The thunks that the layer of a number, from 1 on, brings."""
    without, with_layer = (step_thunks(name, layers, tokens) for layers in (layer - 1, layer))
    return dict(with_layer - without)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="rows as JSON lines")
    args = parser.parse_args()
    facts = provenance(" ".join(["python scripts/gpu/layer_launches.py", *sys.argv[1:]]))
    rows = []
    for name, layers in LAYERS.items():
        for kind, layer in layers.items():
            for tokens in (1, 8):
                found = layer_thunks(name, layer, tokens)
                row = {"target": name, "layer": kind, "tokens": tokens}
                row |= {"launches": sum(found.values()), "by": found}
                rows.append(facts | row)
                print(json.dumps(row), flush=True)
    if args.out:
        write_atomically(args.out, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
