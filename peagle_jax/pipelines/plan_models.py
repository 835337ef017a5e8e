"""The target and the heads of `peagle plan`, from a config.json and a few choices."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from peagle_jax import weights
from peagle_jax.checkpoints.runs import open_head
from peagle_jax.checkpoints.target_tensors import quantization_of, stored_format
from peagle_jax.draft.confidence import NO_CONFIDENCE
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.markov import NO_MARKOV
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.pipelines.decoding_plan import EAGLE3, PEAGLE
from peagle_jax.pipelines.model_costs import ModelCosts, cached_bytes, model_costs
from peagle_jax.pipelines.tracing import abstract_head, abstract_target
from peagle_jax.targets.config import TargetConfig, default_aux_layers
from peagle_jax.types import InputError

DTYPES = ("auto", "float32", "bfloat16", "fp8", "mxfp4")
# of a head where the target's layers have experts: as wide as those of the published heads
MLP_OF_DIM = 3


@dataclasses.dataclass(frozen=True)
class PlannedTarget:
    """A target.

    Attributes:
      config: what its config.json says.
      dtype: one of DTYPES, never "auto".
      costs: of its forwards.
      cache_dtype: of keys and values.
    """

    config: TargetConfig
    dtype: str
    costs: ModelCosts
    cache_dtype: Any


def planned_target(
    path: Path, dtype: str, kv_cache_dtype: str, on_cpu: bool = False
) -> PlannedTarget:
    """The target of a config.json.

    Args:
      path: the config.json.
      dtype: of its weights, one of DTYPES; "auto" is what the config says of its quantization, or
        else bfloat16.
      kv_cache_dtype: "auto", bfloat16 or, with float32 weights, float32; or "fp8".
      on_cpu: "auto" is instead what engines take on this machine.

    Raises:
      InputError: it is no config of a target, its experts cannot be MXFP4, or "auto" does not
        know its quantization.
    """
    raw = weights.read_json(path)
    if dtype == "auto":
        dtype = stored_dtype(raw, path)
    numbers = jnp.dtype("float32" if dtype == "float32" else "bfloat16")
    plain = abstract_target(path, dtype=numbers, aux_hidden_state_layers=())
    if dtype == "mxfp4" and raw.get("model_type") != "gpt_oss":
        rule = "mxfp4 is a storage of GPT-OSS's experts"
        raise InputError("--dtype", rule, raw.get("model_type"), "give --dtype fp8")
    stored = plain
    if dtype in ("fp8", "mxfp4"):
        stored = abstract_target(
            path,
            dtype=numbers,
            aux_hidden_state_layers=(),
            packed=dtype == "mxfp4",
            fp8="rows" if dtype == "fp8" else None,
        )
    cache_dtype = plain.config.kv_cache_dtype if on_cpu else numbers
    if kv_cache_dtype == "fp8":
        cache_dtype = jnp.float8_e4m3fn
    costs = model_costs(stored, plain, cache_dtype)
    return PlannedTarget(plain.config, dtype, costs, cache_dtype)


def stored_dtype(raw: dict, path: Path) -> str:
    """What a config.json says of its weights: "mxfp4", "fp8" or, without quantization, bfloat16.

    compressed-tensors is "fp8" where all of its groups store weights as 8-bit floats.

    Args:
      path: of the config.json, for messages.

    Raises:
      InputError: it says a quantization that is none of DTYPES.
    """
    stored = stored_format(raw)
    if stored is not None:
        return "bfloat16" if stored == "plain" else stored
    quantization = quantization_of(raw)
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    rule = "weights of this quantization cannot be planned with: MXFP4 and 8-bit floats can"
    next_step = "give --dtype, what they become: fp8, bfloat16 or float32"
    raise InputError(str(path), rule, f"quant_method {method!r}", next_step)


def default_head(target: TargetConfig, method: str, layers: int) -> HeadConfig:
    """A head as published ones are: as wide as its target, with the target's whole vocabulary."""
    has_experts = bool(getattr(target, "experts", None))
    return HeadConfig(
        **PAPER_DESIGN,
        **NO_MARKOV,
        **NO_CONFIDENCE,
        vocab=target.vocab,
        draft_vocab=target.vocab,
        dim=target.dim,
        layers=layers,
        mlp_dim=MLP_OF_DIM * target.dim if has_experts else target.mlp_dim,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        rope=target.rope,
        norm_eps=target.norm_eps,
        context=target.context,
        target_dim=target.dim,
        aux_hidden_state_layers=default_aux_layers(target.layers),
        mask_token=0 if method == PEAGLE else None,
        num_depths=None,
        qk_norm=False,
        attention_bias=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        windows=(None,) * layers,
        dtype=jnp.bfloat16,
    )


def planned_heads(
    target: PlannedTarget, layers: int, folders: Sequence[str]
) -> dict[str, HeadConfig]:
    """A P-EAGLE and an EAGLE-3 head: those of the folders, and `default_head` where none is given.

    Args:
      layers: of a P-EAGLE head that is not given. An EAGLE-3 head has one.
      folders: heads in any form that `peagle inspect` reads. Only their shapes count.

    Raises:
      InputError: a folder is no head, two have one method, or the head is an EAGLE-1 head.
    """
    heads = {
        EAGLE3: default_head(target.config, EAGLE3, 1),
        PEAGLE: default_head(target.config, PEAGLE, layers),
    }
    given = set()
    for folder in folders:
        config = open_head(folder, target.config.layers).config
        if config.method not in heads or config.method in given:
            rule = "one P-EAGLE and one EAGLE-3 head can be planned with"
            next_step = "give --drafter once for each method"
            raise InputError("--drafter", rule, f"{folder}: {config.method}", next_step)
        if config.target_dim != target.config.dim or config.vocab != target.config.vocab:
            rule = f"must be a head of a target {target.config.dim} wide with {target.config.vocab}"
            got = f"one of {config.target_dim} with {config.vocab}"
            raise InputError(folder, f"{rule} tokens", got, "name a head of this target")
        given.add(config.method)
        heads[config.method] = config
    return heads


def head_costs(
    config: HeadConfig, dtype: DTypeLike = jnp.bfloat16, on_cpu: bool = False
) -> ModelCosts:
    """The costs of a head whose weights have a dtype; `on_cpu` as of `planned_target`."""
    model = abstract_head(dataclasses.replace(config, dtype=dtype))
    return model_costs(model, model, model.config.kv_cache_dtype if on_cpu else dtype)


def cache_sizes(
    target: PlannedTarget, heads: dict[str, HeadConfig], on_cpu: bool = False
) -> Callable[[int, int], int]:
    """(concurrency, context) -> bytes of all caches, of the target and of its largest head.

    Heads are in bfloat16; `on_cpu` as of `planned_target`.
    """
    configs = [dataclasses.replace(head, dtype=jnp.bfloat16) for head in heads.values()]
    caches = [(c, c.kv_cache_dtype if on_cpu else c.dtype) for c in configs]

    def size(rows: int, tokens: int) -> int:
        of_heads = [cached_bytes(head, dtype, rows, tokens) for head, dtype in caches]
        of_target = cached_bytes(target.config, target.cache_dtype, rows, tokens)
        return of_target + max(of_heads, default=0)

    return size
