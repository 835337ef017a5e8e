"""What a forward of a model reads and multiplies, from shapes alone.

`peagle plan` and `peagle train --dry-run` count with it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from peagle_jax.decode.memory import cache_bytes
from peagle_jax.draft.head import HeadConfig
from peagle_jax.targets.config import TargetConfig
from peagle_jax.types import CacheShape, Model, Params
from peagle_jax.weights import flatten_params

EMBEDDINGS = ("embed", "ple_embed")
ROUTINGS = ("even", "alike")


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a model, over all of its layers.

    Attributes:
      count: of a layer.
      per_token: how many of them a token goes to.
      bytes_each: of one expert, summed over layers.
      numbers_each: likewise, how many numbers its matrices have.
    """

    count: int
    per_token: int
    bytes_each: int | float
    numbers_each: int | float


@dataclasses.dataclass(frozen=True)
class CachedLayers:
    """Layers whose keys and values have one shape.

    Attributes:
      window: of their attention, in tokens; None: all.
      token_bytes: of the keys and values of a token, summed over the layers that read them.
      pair_flops: multiplications and additions for a query and a key, summed over the layers.
    """

    window: int | None
    token_bytes: int | float
    pair_flops: int | float

    def tokens_read(self, context: int) -> int:
        """How many tokens of a context a query sees."""
        return context if self.window is None else min(context, self.window)


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """What the forwards of one model are made of.

    Attributes:
      layers: how many there are.
      weight_bytes: of everything, as it lies in memory.
      dense_bytes: that every forward reads: matrices and norms of the layers, without experts.
      dense_numbers: of the matrices that every row is multiplied with.
      fusion_bytes: of a head's fusion of aux hidden states, which only some of its forwards read.
      fusion_numbers: likewise.
      output_bytes: of the output matrix.
      output_numbers: likewise.
      row_bytes: of the embeddings of one token.
      experts: None: the model has none.
      caches: groups of layers.
      number_bytes: of a number that is multiplied, which decides the rate of products.
    """

    layers: int
    weight_bytes: int | float
    dense_bytes: int | float
    dense_numbers: int | float
    fusion_bytes: int | float
    fusion_numbers: int | float
    output_bytes: int | float
    output_numbers: int | float
    row_bytes: int | float
    experts: Experts | None
    caches: tuple[CachedLayers, ...]
    number_bytes: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What one forward costs.

    Attributes:
      bytes: that are read, of weights and embeddings.
      cache_bytes: of keys and values.
      flops: multiplications and additions.
      layers: that are gone through.
      number_bytes: as of `ModelCosts`.
    """

    bytes: int | float
    cache_bytes: int | float
    flops: int | float
    layers: int
    number_bytes: int


def model_costs(stored: Model, plain: Model, cache_dtype: Any) -> ModelCosts:
    """The costs of a model whose parameters are shapes.

    Args:
      stored: as its weights lie in memory, maybe in FP8 or MXFP4. Whole matrices are counted.
      plain: the same model with its weights as ordinary matrices.
      cache_dtype: of keys and values.
    """
    config = stored.config
    sizes: dict[str, float] = {}
    for path, x in flatten_params(stored.params):
        group = _group(path)
        size = math.prod(x.shape) * np.dtype(x.dtype).itemsize
        sizes[group] = sizes.get(group, 0.0) + size
    names = {path.split(".")[0] for path, _ in flatten_params(plain.params)}
    blocks = sorted(names - {*EMBEDDINGS, "lm_head", "fusion"})
    tied = "lm_head" not in sizes
    embedding = _tables(plain.params)
    output_numbers = matrix_sizes(plain.params, ("lm_head",))
    expert_numbers = matrix_sizes(plain.params, blocks, experts=True)
    count, per_token = experts_of(config)
    experts = None
    if count:
        each = sizes["experts"] / count, expert_numbers / count
        experts = Experts(count, per_token, *each)
    return ModelCosts(
        layers=config.layers,
        weight_bytes=sum(sizes.values()),
        dense_bytes=sizes["dense"],
        dense_numbers=matrix_sizes(plain.params, blocks, experts=False),
        fusion_bytes=sizes.get("fusion", 0.0),
        fusion_numbers=matrix_sizes(plain.params, ("fusion",)),
        output_bytes=embedding["embed"][0] if tied else sizes["lm_head"],
        output_numbers=embedding["embed"][1] if tied else output_numbers,
        row_bytes=sum(size / rows for size, _, rows in embedding.values()),
        experts=experts,
        caches=_cached_layers(config, cache_dtype),
        number_bytes=_number_bytes(stored),
    )


def _group(path: str) -> str:
    """Which part of a model a parameter belongs to."""
    first = path.split(".")[0]
    if first in EMBEDDINGS:
        return "embeddings"
    if first in ("lm_head", "fusion"):
        return first
    return "experts" if ".experts." in path else "dense"


def _tables(params: Params) -> dict[str, tuple[int, int, int]]:
    """By name: bytes, numbers and rows of the embeddings."""
    tables = {}
    for path, x in flatten_params(params):
        name = path.split(".")[0]
        if name in EMBEDDINGS and path.endswith("table"):
            numbers = math.prod(x.shape)
            tables[name] = numbers * np.dtype(x.dtype).itemsize, numbers, x.shape[0]
    return tables


def _number_bytes(model: Model) -> int:
    """1 where matrices are float8; otherwise those of the model's dtype, in which it multiplies."""
    is_fp8 = any(str(x.dtype).startswith("float8") for _, x in flatten_params(model.params))
    return 1 if is_fp8 else np.dtype(model.config.dtype).itemsize


def experts_of(config: Any) -> tuple[int, int]:
    """(experts of a layer, those of a token); zeros where there are none."""
    count = getattr(config, "experts", None) or 0
    return count, getattr(config, "experts_per_token", None) or 0


def _cached_layers(config: TargetConfig | HeadConfig, dtype: Any) -> tuple[CachedLayers, ...]:
    """The layers by their window, also those that read another layer's keys and values."""
    groups = []
    for shape in _cache_shapes(config):
        readers = sum(window == shape.window for window in config.windows)
        token = cache_bytes([dataclasses.replace(shape, layers=(0,))], 1, 1, dtype)
        # two products of a query with a key and a value, each with two operations a number
        flops = 4 * config.heads * shape.head_dim
        groups.append(CachedLayers(shape.window, readers * token, readers * flops))
    return tuple(groups)


def _cache_shapes(config: TargetConfig | HeadConfig) -> Sequence[CacheShape]:
    if isinstance(config, TargetConfig):
        return config.cache_shapes()
    shapes = []
    for window in dict.fromkeys(config.windows):
        layers = tuple(i for i, other in enumerate(config.windows) if other == window)
        shapes.append(CacheShape(layers, config.kv_heads, config.head_dim, window))
    return shapes


def expected_experts(experts: Experts, rows: int | float, routing: str) -> int | float:
    """How many experts of a layer are read for some rows, on average.

    Args:
      rows: each goes to `per_token` experts.
      routing: "even": every set of experts is as likely as another, independently for every row,
        which is the most that is read: E (1 - (1 - k / E)^R). "alike": all rows go to the same.
    """
    if routing == "alike":
        return float(experts.per_token)
    share = experts.per_token / experts.count
    return experts.count * (1 - (1 - share) ** rows)


def forward_work(
    model: ModelCosts,
    *,
    rows: int | float,
    outputs: int | float,
    sequences: int | float,
    context: int,
    fused: int | float = 0,
    routing: str = "even",
) -> Work:
    """What a forward costs.

    Args:
      rows: tokens that are read, of all sequences together.
      outputs: rows whose logits are computed.
      sequences: whose caches are read.
      context: tokens in the cache of each.
      fused: rows of a head whose aux hidden states are fused.
      routing: see `expected_experts`.
    """
    read = model.dense_bytes + rows * model.row_bytes
    flops = 2.0 * rows * model.dense_numbers
    if outputs:
        read += model.output_bytes
        flops += 2.0 * outputs * model.output_numbers
    if fused:
        read += model.fusion_bytes
        flops += 2.0 * fused * model.fusion_numbers
    if model.experts is not None:
        distinct = expected_experts(model.experts, rows, routing)
        read += distinct * model.experts.bytes_each
        flops += 2.0 * rows * model.experts.per_token * model.experts.numbers_each
    cached = 0.0
    for group in model.caches:
        tokens = group.tokens_read(context)
        cached += sequences * tokens * group.token_bytes
        flops += rows * tokens * group.pair_flops
    return Work(read, cached, flops, model.layers, model.number_bytes)


def cached_bytes(config: TargetConfig | HeadConfig, dtype: Any, rows: int, tokens: int) -> int:
    """Bytes of a cache of so many tokens for so many sequences.

    Sliding layers of a target keep at most a window; heads keep everything (`HeadConfig`).
    """
    block = 0 if isinstance(config, TargetConfig) else None
    return cache_bytes(_cache_shapes(config), rows, tokens, dtype, block)


def matrix_sizes(params: Params, names: Sequence[str], experts: bool | None = None) -> int:
    """Numbers in the matrices below some names: with experts, without, or both."""
    return sum(
        math.prod(x.shape)
        for path, x in flatten_params(params)
        if path.split(".")[0] in names
        and len(x.shape) >= 2
        and not path.endswith(".bias")
        and (experts is None or experts == (".experts." in path))
    )
