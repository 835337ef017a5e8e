"""What the compiled loop of `decode` does with caches: for this machine, or for an H200.

    PYTHONPATH=tests:scripts/generate python tests/decode/cache_copies.py

prints, as JSON, what a program for an H200 does with them otherwise than in place; it needs an
environment of scripts/gpu/install_cuda.sh.
"""

import contextlib
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import tiny
from jax.sharding import SingleDeviceSharding

from peagle_jax.decode import loop, prefill
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.kernels.launch import H200, target_gpu
from peagle_jax.layers.rope import Rope
from peagle_jax.types import RowOptions

METHODS = (None, "eagle3", "peagle", "tree", "eagle", "markov", "sampled")
NUM_NODES = 9
# operations that make no array; what is called has lines of its own
PASSED_ON = ("parameter", "get-tuple-element", "bitcast", "tuple", "while", "call")
# XLA's names of dtypes
DTYPES = {"f32": "float32", "bf16": "bfloat16", "u16": "uint16"}


def compiled_loop(
    method: str | None, batch: int, dtype: str, device: Any = None
) -> tuple[str, set[tuple]]:
    """As `lowered_loop`, but the compiled program's text."""
    lowered, of_caches = lowered_loop(method, batch, dtype, device)
    return lowered.compile().as_text(), of_caches


def lowered_loop(
    method: str | None, batch: int, dtype: str, device: Any = None
) -> tuple[Any, set[tuple]]:
    """The lowered program of `loop.decode`, and (dtype, shape) of the arrays of its caches.

    Args:
      method: of METHODS. "tree", "markov" and "sampled" are P-EAGLE with these.
      device: a GPU to compile for, with its kernels; None for the device at hand.
    """
    # the kernels want keys of 16 numbers
    changes = {"head_dim": 16, "rope": Rope.from_hf({"rope_theta": 777.0}, 16, "")}
    changes = {"dtype": jnp.dtype(dtype), **changes}
    target, head = tiny.pair(method if method == "eagle" else "peagle", **changes)
    if method == "markov":
        head = tiny.head(**changes, markov_rank=3)
    is_peagle = method not in (None, "eagle", "eagle3")
    drafter = make_drafter(head, 5, "peagle" if is_peagle else method) if method else None
    spec = DecodeSpec(
        target.graph,
        target.config,
        drafter,
        sample_drafts=method == "sampled",
        num_nodes=NUM_NODES if method == "tree" else None,
    )
    sampling = None
    if method == "sampled":
        sampling = sampling_params(batch, 0.7, 5, 0.9, range(batch), 0.05)
    limits = jnp.full(batch, 40), jnp.full((batch, 1), -1)
    structures, of_caches = [], set()  # noted when prefill is traced

    # the state passes as a list of arrays: its classes check their fields, and shapes are no arrays
    def prefill_leaves(params, limits):
        prompts, lengths = jnp.ones((batch, 7), jnp.int32), jnp.full(batch, 7)
        options = RowOptions(*limits, sampling)
        reading = prefill.prefill(spec, 256, *params, prompts, lengths, options, chunk=7)
        state = prefill.run_to_end(reading)
        caches = [state.cache] + ([state.draft.cache] if state.draft.cache else [])
        arrays = [x for cache in caches for group in cache.groups for x in (*group.k, *group.v)]
        of_caches.update((str(x.dtype), tuple(x.shape)) for x in arrays)
        leaves, structure = jax.tree.flatten(state)
        structures.append(structure)
        return leaves

    def decode_leaves(params, limits, leaves):
        state = jax.tree.unflatten(structures[0], leaves)
        options = RowOptions(*limits, sampling)
        return jax.tree.leaves(loop.decode.__wrapped__(spec, *params, options, batch, 99, state))

    def with_device(x):
        sharding = SingleDeviceSharding(device) if device else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(with_device, (target.params, head.params))
    limits = jax.tree.map(with_device, limits)
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(target_gpu(H200))
            stack.enter_context(jax.default_device(device))
        leaves = jax.tree.map(with_device, jax.eval_shape(prefill_leaves, params, limits))
        traced = jax.jit(decode_leaves, donate_argnums=2).trace(params, limits, leaves)
        lowered = traced.lower(lowering_platforms=("cuda",) if device is not None else None)
    return lowered, of_caches


def operations(text: str, arrays: set[tuple]) -> list[tuple[str, str, bool]]:
    """(operation, its name, whether it works in place) of all that makes an array of a cache.

    Args:
      text: a compiled program.
      arrays: (dtype, shape) of the caches' arrays.
    """
    # heads may have been merged with rows
    merged = {(dtype, (rows * heads, *rest)) for dtype, (rows, heads, *rest) in arrays}
    made = []
    for line in text.splitlines():
        found = re.search(r"%?([\w.\-]+) = (.*?) ([\w\-]+)\(", line)
        if not found or found[3] in PASSED_ON:
            continue
        name, results, operation = found.groups()
        results = {
            (DTYPES[dtype], tuple(map(int, shape.split(","))))
            for dtype, shape in re.findall(r"\b(f32|bf16|u16)\[([\d,]+)\]", results)
        }
        if results & (arrays | merged):
            in_place = (
                operation == "dynamic-update-slice"
                or "dynamic_update_slice_fusion" in name.replace("-", "_")
                or (operation == "custom-call" and "output_to_operand_aliasing" in line)
            )
            made.append((operation, name, in_place))
    return made


def main() -> None:
    import size_table

    device, found = size_table.cuda_device(), {}
    for method in METHODS:
        for batch in (1, 8):
            made = operations(*compiled_loop(method, batch, "bfloat16", device))
            copies = [what for *what, in_place in made if not in_place]
            found[f"{method or 'plain'}, batch {batch}"] = {"made": len(made), "copies": copies}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
