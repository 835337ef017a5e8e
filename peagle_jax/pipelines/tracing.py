"""Targets and heads at full size without their weights, on any number of devices.

They are built as shapes, sized by arithmetic, and lowered (traced to XLA programs, not compiled).
So the published models can be checked on any machine.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.stages import Lowered
from jax.typing import DTypeLike

from peagle_jax.decode.drafters import METHODS
from peagle_jax.decode.engine import PREFILL_CHUNK
from peagle_jax.decode.loop import step
from peagle_jax.decode.memory import cache_bytes
from peagle_jax.decode.prefill import prefill, run_to_end
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.layers.fp8 import with_fp8_layers
from peagle_jax.layers.moe import AXIS
from peagle_jax.targets import gpt_oss, read_config, sharding
from peagle_jax.targets.config import TargetConfig
from peagle_jax.train.config import HeadRun, load_run
from peagle_jax.train.head_config import head_config
from peagle_jax.types import InputError, Model, Params, RowOptions
from peagle_jax.weights import flatten_params, unflatten_params

# (path, shape) of a parameter -> how it is laid out over the devices
Placement = Callable[[str, Any], NamedSharding]


def abstract_target(
    path: Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    aux_hidden_state_layers: Sequence[int] | None = None,
    packed: bool = False,
    fp8: str | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """The model of a config.json, with shapes as its parameters.

    Args:
      path: the config.json.
      dtype: of weights and activations.
      aux_hidden_state_layers: that a head reads; None: vLLM's choice.
      packed: experts of GPT-OSS in MXFP4.
      fp8: the other matrices in float8 with a scale for each of their "rows" or "blocks"; None: in
        `dtype`.
      mesh: the shapes then say how they are laid out over its devices.
    """
    family, config = read_config(
        json.loads(Path(path).read_text()),
        aux_hidden_state_layers=aux_hidden_state_layers,
        dtype=dtype,
        where=path,
    )
    if packed and isinstance(config, gpt_oss.GptOssConfig):
        config = dataclasses.replace(config, packed=True)

    def make() -> nnx.Module:
        return family.module(config, rngs=nnx.Rngs(0))

    placement = None if mesh is None else sharding.placement(config, mesh)
    if fp8 is None:
        return _abstract(make, config, placement)
    return _abstract(with_fp8_layers(make, blocks=fp8 == "blocks"), config, placement)


def abstract_head(config: HeadConfig, mesh: Mesh | None = None, *, fp8: bool = False) -> Model:
    """A draft head with shapes as its parameters.

    Args:
      config: the head's.
      mesh: the shapes then say that every device has the whole head.
      fp8: matrices in float8 with a scale for each row, as `peagle generate --dtype fp8` makes
        them.
    """

    def make() -> nnx.Module:
        return DraftHead(config, rngs=nnx.Rngs(0))

    def replicated(path: str, shape: Any) -> NamedSharding:
        return NamedSharding(cast(Mesh, mesh), PartitionSpec())

    placement = None if mesh is None else replicated
    if not fp8:
        return _abstract(make, config, placement)
    return _abstract(with_fp8_layers(make, blocks=False, keep=()), config, placement)


def _abstract(
    make: Callable[[], nnx.Module], config: TargetConfig | HeadConfig, placement: Placement | None
) -> Model:
    """A module with shapes as its parameters."""
    graph, state = nnx.split(nnx.eval_shape(make))
    shapes = dict(flatten_params(nnx.to_pure_dict(state)))
    if placement is not None:
        for path, x in shapes.items():
            shapes[path] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement(path, x))
    return Model(config, graph, unflatten_params(shapes))


def recipe(path: Path, targets: Path) -> tuple[HeadRun, Model, Model]:
    """(run, target, head) of a training recipe, both models with shapes as their parameters.

    Args:
      path: the recipe.
      targets: a folder with the target's config.json under its hub name, in lower case.

    Raises:
      InputError: the recipe trains no head, or its head does not fit the target.
    """
    run = load_run(path)
    if not isinstance(run, HeadRun):
        rule, next_step = "must be the recipe of a head", "name one with task: peagle"
        raise InputError(path, rule, f"task: {run.task}", next_step)
    target = abstract_target(
        targets / f"{run.target.split('/')[-1].lower()}.json",
        dtype=jnp.dtype(run.target_dtype),
        aux_hidden_state_layers=run.aux_hidden_state_layers,
    )
    return run, target, abstract_head(head_config(run, target, None))


def lower(
    target: Model,
    head: Model | None,
    k: int,
    *,
    prompt: int,
    cache_size: int,
    method: str = "peagle",
    mesh: Mesh | None = None,
    device: Any = None,
) -> tuple[Lowered, Lowered]:
    """Lowers prefill and one step of a single row.

    Args:
      target: from `abstract_target`.
      head: from `abstract_head`; None for plain decoding.
      k: tokens drafted in the step; 0 without a head.
      prompt: tokens of the prompt.
      cache_size: positions of the cache.
      method: how the head drafts, a name of `drafters.METHODS`.
      mesh: over which the parameters' shapes are laid out.
      device: a GPU that is only compiled for, which this machine need not have; in the place of a
        mesh.

    Returns:
      (prefill, step), not compiled.
    """
    drafter = head and METHODS[method](head.graph, head.config, k)
    spec = DecodeSpec(target.graph, target.config, drafter, sample_drafts=False)

    def on_device(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if device is None:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

    def int_array(*shape: int) -> jax.ShapeDtypeStruct:
        return on_device(jax.ShapeDtypeStruct(shape, jnp.int32))

    params, draft_params = jax.tree.map(on_device, (target.params, head and head.params))
    prompts, lengths = int_array(1, prompt), int_array(1)
    limits = int_array(1), int_array(1, 1)  # the arrays of `RowOptions`
    structures = []  # of the state, noted when prefill is traced

    # both programs pass the state as a flat list of arrays, because its classes check their fields
    # and shapes are no arrays
    def prefill_leaves(params, draft_params, prompts, lengths, limits):
        max_new_tokens, stop_ids = limits
        options = RowOptions(max_new_tokens, stop_ids, None)
        models = params, draft_params
        reading = prefill(spec, cache_size, *models, prompts, lengths, options, chunk=prompt)
        leaves, structure = jax.tree.flatten(run_to_end(reading))
        structures.append(structure)
        return leaves

    def step_leaves(params, draft_params, limits, leaves):
        state = jax.tree.unflatten(structures[0], leaves)
        max_new_tokens, stop_ids = limits
        options = RowOptions(max_new_tokens, stop_ids, None)
        state = step(spec, params, draft_params, options, state)
        return jax.tree.leaves(state)

    platforms = None if device is None else ("cuda",)
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        if device is not None:
            stack.enter_context(jax.default_device(device))
        traced_prefill = jax.jit(prefill_leaves).trace(
            params, draft_params, prompts, lengths, limits
        )
        leaves = [
            on_device(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in traced_prefill.out_info
        ]
        traced_step = jax.jit(step_leaves, donate_argnums=3).trace(
            params, draft_params, limits, leaves
        )
        return (
            traced_prefill.lower(lowering_platforms=platforms),
            traced_step.lower(lowering_platforms=platforms),
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a target, in bytes on the fullest device.

    Attributes:
      parameters: how many numbers the whole model has.
      bf16: its weights in bfloat16.
      fp8: matrices and experts in one byte with a bfloat16 scale for each row; the rest in
        bfloat16.
      mxfp4: experts in 4.25 bits, the rest in bfloat16; None without experts.
      cache: of 1,000 tokens of one row, in bfloat16.
      ring_cache: of 1,000 tokens, averaged over a row of 100,000, with ring caches in sliding
        layers.
    """

    parameters: int
    bf16: int
    fp8: int
    mxfp4: int | None
    cache: int
    ring_cache: int


def sizes(target: Model, parts: int) -> Sizes:
    """Computes the sizes of a target over `parts` devices from its shapes."""
    config: TargetConfig = target.config
    count = bf16 = fp8 = mxfp4 = 0
    has_experts = False
    for path, x in flatten_params(target.params):
        axes = jax.tree.leaves(tuple(sharding.spec(path, x.shape, config, parts)))
        share = parts if AXIS in axes else 1
        n = math.prod(x.shape)
        is_matrix = len(x.shape) >= 2 and path.endswith(("kernel", "ple_in"))
        is_expert = ".experts." in path and len(x.shape) == 3
        has_experts |= is_expert
        fp8_bytes = n + 2 * n // x.shape[-2] if is_matrix else 2 * n
        mxfp4_bytes = n * 4.25 / 8 if is_expert else 2 * n
        count += n
        bf16 += 2 * n // share
        fp8 += fp8_bytes // share
        mxfp4 += int(mxfp4_bytes) // share
    bytes_of_cache = functools.partial(
        cache_bytes, config.cache_shapes(), 1, dtype=jnp.bfloat16, parts=parts
    )
    return Sizes(
        parameters=count,
        bf16=bf16,
        fp8=fp8,
        mxfp4=mxfp4 if has_experts else None,
        cache=bytes_of_cache(cache_size=1000),
        ring_cache=bytes_of_cache(cache_size=100_000, block=PREFILL_CHUNK + 8) // 100,
    )


def parameter_bytes(params: Params) -> int:
    """Bytes of all parameters, or of their shapes."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for _, x in flatten_params(params))
