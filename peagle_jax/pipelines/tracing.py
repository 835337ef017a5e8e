"""A target and a head at full size without their weights: built, sized and lowered, on any number of devices."""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from peagle_jax.decode.drafters import ParallelDrafter
from peagle_jax.decode.generate import SLIDING_CHUNK
from peagle_jax.decode.loop import DecodeSpec, prefill, step
from peagle_jax.decode.memory import cache_bytes
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.layers.fp8 import with_fp8_layers
from peagle_jax.layers.moe import AXIS
from peagle_jax.targets import gpt_oss, read_config, sharding
from peagle_jax.targets.config import TargetConfig
from peagle_jax.train.config import HeadRun, load_run
from peagle_jax.train.new_head import head_config
from peagle_jax.types import Model
from peagle_jax.weights import flatten_params, unflatten_params


def abstract_target(
    path: Path,
    *,
    dtype=jnp.bfloat16,
    aux_hidden_state_layers: Sequence[int] | None = None,
    packed: bool = False,
    fp8: str | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """The model of a config.json, its parameters as shapes.

    Args:
      packed: GPT-OSS with its experts in MXFP4.
      fp8: what a scale of the other matrices is for, "rows" or "blocks"; None: they are in `dtype`.
      mesh: the shapes then say where they lie.
    """
    family, config = read_config(
        json.loads(Path(path).read_text()),
        aux_hidden_state_layers=aux_hidden_state_layers,
        dtype=dtype,
        where=path,
    )
    if packed and isinstance(config, gpt_oss.GptOssConfig):
        config = dataclasses.replace(config, packed=True)

    def make():
        return family.module(config, rngs=nnx.Rngs(0))

    return _abstract(
        with_fp8_layers(make, blocks=fp8 == "blocks") if fp8 else make,
        config,
        mesh and sharding.placement(config, mesh),
    )


def abstract_head(config: HeadConfig, mesh: Mesh | None = None, *, fp8: bool = False) -> Model:
    """Likewise; a head lies whole on every device. In FP8 it has a scale a row, as `to_model` makes it."""

    def make():
        return DraftHead(config, rngs=nnx.Rngs(0))

    place = mesh and (lambda *_: NamedSharding(mesh, PartitionSpec()))
    return _abstract(with_fp8_layers(make, blocks=False, keep=()) if fp8 else make, config, place)


def _abstract(make, config, place) -> Model:
    graph, state = nnx.split(nnx.eval_shape(make))
    shapes = dict(flatten_params(nnx.to_pure_dict(state)))
    if place is not None:
        shapes = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(path, x))
            for path, x in shapes.items()
        }
    return Model(config, graph, unflatten_params(shapes))


def recipe(path: Path, targets: Path) -> tuple[HeadRun, Model, Model]:
    """(run, abstract target, abstract head) of a training configuration whose target is one of the folder `targets`, by its hub name."""
    run = load_run(path)
    hf = targets / f"{run.target.split('/')[-1].lower()}.json"
    target = abstract_target(
        hf,
        dtype=jnp.dtype(run.target_dtype),
        aux_hidden_state_layers=run.head.aux_hidden_state_layers,
    )
    return run, target, abstract_head(head_config(run, target, None))


def lower(
    target: Model,
    head: Model,
    k: int,
    *,
    prompt: int,
    cache_size: int,
    mesh: Mesh | None = None,
    device=None,
):
    """(prefill, one step of K drafts) of one row, lowered and not compiled.

    Args:
      prompt: tokens of the prompt.
      slots: of the cache.
      mesh: that the parameters' shapes name.
      device: one that is only compiled for, in the place of a mesh.
    """
    spec = DecodeSpec(
        target.graph, target.config, ParallelDrafter(head.graph, head.config, k), cache_size, False
    )

    def onto(x):
        return (
            x
            if device is None
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
        )

    def whole(shape):
        return onto(jax.ShapeDtypeStruct(shape, jnp.int32))

    params, draft_params = jax.tree.map(onto, (target.params, head.params))
    limits, stops, lengths, tokens = whole((1,)), whole((1,)), whole((1,)), whole((1, prompt))
    trees = []

    def first(params, draft_params, tokens, lengths, limits, stops):
        leaves, tree = jax.tree.flatten(
            prefill(spec, params, draft_params, tokens, lengths, limits, stops, None)
        )
        trees.append(tree)
        return leaves

    def one(params, draft_params, limits, stops, leaves):
        return jax.tree.leaves(
            step(
                spec,
                params,
                draft_params,
                limits,
                stops,
                None,
                jax.tree.unflatten(trees[0], leaves),
            )
        )

    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        if device is not None:
            stack.enter_context(jax.default_device(device))
        platforms = None if device is None else ("cuda",)
        traced = jax.jit(first).trace(params, draft_params, tokens, lengths, limits, stops)
        leaves = [onto(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in traced.out_info]
        again = jax.jit(one, donate_argnums=4).trace(params, draft_params, limits, stops, leaves)
        return traced.lower(lowering_platforms=platforms), again.lower(lowering_platforms=platforms)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on the fullest device."""

    parameters: int  # numbers, of the whole model
    bf16: int
    fp8: int  # two-dimensional weights and experts in one byte and a bf16 scale a row; the rest in bf16
    mxfp4: int | None  # experts in 4.25 bits, the rest in bf16; None without experts
    cache: int  # of 1,000 tokens of one row, bf16
    ring_cache: int  # the same of a row of 100,000 tokens, sliding layers in rings


def sizes(target: Model, parts: int) -> Sizes:
    """By arithmetic, for `parts` devices."""
    config: TargetConfig = target.config
    count = bf16 = fp8 = mxfp4 = 0
    experts = False
    for path, x in flatten_params(target.params):
        share = (
            parts
            if AXIS in jax.tree.leaves(tuple(sharding.spec(path, x.shape, config, parts)))
            else 1
        )
        n = math.prod(x.shape)
        count, bf16 = count + n, bf16 + 2 * n // share
        matrix = len(x.shape) >= 2 and path.endswith(("kernel", "ple_in"))
        fp8 += (n + 2 * n // x.shape[-2] if matrix else 2 * n) // share
        expert = ".experts." in path and len(x.shape) == 3
        experts |= expert
        mxfp4 += int(n * 4.25 / 8 if expert else 2 * n) // share
    cached = functools.partial(
        cache_bytes, config.cache_shapes(), 1, dtype=jnp.bfloat16, parts=parts
    )
    rings = cached(cache_size=100_000, block=SLIDING_CHUNK + 8) // 100
    return Sizes(count, bf16, fp8, mxfp4 if experts else None, cached(cache_size=1000), rings)


def parameter_bytes(params: Mapping) -> int:
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for _, x in flatten_params(params))
