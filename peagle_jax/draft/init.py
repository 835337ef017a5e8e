"""What a head's parameters are before training.

Its layers are random, copies of its target's last layer (`init: target` of a recipe), or those of a
trained head (`init_from`). Placeholders begin as ordinary aux hidden states and tokens.
"""

import dataclasses
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.draft.placeholders import (
    FIXED_DESIGNS,
    HIDDEN_DESIGNS,
    TOKEN_DESIGNS,
    InitInputs,
)
from peagle_jax.types import InputError, Model, Params
from peagle_jax.weights import flatten_params, unflatten_params

# How much of the random fusion stays beside the identity on the last aux hidden state.
FC_NOISE = 0.1
SMALL = 0.02  # standard deviation of what begins at random
OF_DRAFT_VOCAB = ("d2t", "markov.w2.kernel")  # beside the output matrix
SAME_AS_TARGET = ("dim", "heads", "kv_heads", "head_dim", "attention_bias")


def init_from_target(head: Model, target: Model) -> Model:
    """A head that begins as the target's last layer, reading the last aux hidden state.

    It learns several times faster than a random one (LOG.md). Every layer gets the target's last
    MLP, norm and attention; in the first layer, whose attention is twice as wide, they read its
    hidden-state half. Injected keys and values begin as those of fused hidden states alone, behind
    the target's norm. A narrower MLP gets the neurons of largest weights. `fc` passes the last aux
    hidden state on (EAGLE-1: the final one). The final norm is the target's.

    Args:
      head: from `random_head`; what is not named above stays as it is.
      target: the head's target.

    Raises:
      InputError: the head's layers have another shape than the target's, or a wider MLP.
    """
    cfg, blocks = head.config, target.params["blocks"]
    last = blocks[max(blocks)]
    _check_shapes(cfg, target)
    names = [*"qkvo", *(("q_norm", "k_norm") if cfg.qk_norm else ())]
    attention = {name: last["attn"][name] for name in names}
    mlp = _largest_neurons(last["mlp"], cfg.mlp_dim)
    params = jax.tree.map(lambda x: x, head.params)  # a copy of the containers
    for layer in params["layers"].values():
        layer |= {"mlp": mlp, "mlp_norm": last["mlp_norm"]}
        if "hidden_norm" in layer:
            layer["attn"] = _widened_attention(layer["attn"], last["attn"], cfg.dim)
        else:
            layer["attn"] = {**layer["attn"], **attention}
            if "input_norm" in layer:
                layer["input_norm"] = last["attn_norm"]
        if "context_norm" in layer:
            silent = jax.tree.map(jnp.zeros_like, layer["context_token_norm"])
            layer |= {"context_norm": last["attn_norm"], "context_token_norm": silent}
    fc = params["fc"] if cfg.predicts_features else params["fusion"]["fc"]
    identity = jnp.eye(cfg.dim, dtype=fc["kernel"].dtype)
    fc["kernel"] = (FC_NOISE * fc["kernel"]).at[-cfg.dim :].add(identity)
    if not cfg.predicts_features:
        params["norm"] = target.params["norm"]
    return dataclasses.replace(head, params=_with_dtypes_of(head.params, params))


def init_placeholders(
    head: Model,
    mean_aux_hidden_states: Float[Array, " A"] | None,
    *,
    seed: int,
    starts_at_mean: bool = True,
) -> Model:
    """Placeholders begin as what is most ordinary, in the form that each design has for it.

    The hidden side begins as the mean of the target's aux hidden states, and the token side as the
    mean token embedding.

    Args:
      head: with the embedding and the fusion that its training begins with.
      mean_aux_hidden_states: over some text; None begins with small random numbers, and leaves the
        mask token's row as it is.
      seed: of random numbers.
      starts_at_mean: False begins as None does, except for designs that are not learned and whose
        vector is the mean, or has its size.
    """
    cfg = head.config
    module = cast(DraftHead, head.bind(head.params))
    table = module.embed.table[...]
    keys = jax.random.split(jax.random.key(seed))
    is_at_mean = starts_at_mean or cfg.placeholder_hidden in FIXED_DESIGNS
    if mean_aux_hidden_states is None or not is_at_mean:
        aux_hidden_states = SMALL * jax.random.normal(keys[0], (cfg.sizes.aux_dim,))
    else:
        aux_hidden_states = mean_aux_hidden_states
    inputs = InitInputs(
        sizes=cfg.sizes,
        aux_hidden_states=aux_hidden_states.astype(cfg.dtype),
        fuse=module.fuse,
        mask_embedding=table[cfg.mask_token],
        mean_embedding=table.mean(axis=0),
        key=keys[1],
    )
    hidden = HIDDEN_DESIGNS[cfg.placeholder_hidden].init(inputs)
    token = TOKEN_DESIGNS[cfg.placeholder_token].init(inputs)
    placeholder = {**hidden, **token}
    params = dict(head.params)
    if "mask_hidden" in placeholder:
        params["mask_hidden"] = placeholder.pop("mask_hidden")
    if placeholder:
        params["placeholder"] = placeholder
    resets_mask_token = starts_at_mean and mean_aux_hidden_states is not None
    if resets_mask_token and cfg.placeholder_token == "mask":
        params["embed"] = {"table": table.at[cfg.mask_token].set(inputs.mean_embedding)}
    return dataclasses.replace(head, params=_with_dtypes_of(head.params, params))


def init_from_head(head: Model, trained: Model, where: str | Path) -> Model:
    """Takes over a trained head's parameters, wherever both heads have one of that name and shape.

    Norms of injected keys and values, if the trained head has none, begin as its own norms.

    Args:
      head: the new head; its other parameters stay as they are.
      trained: the head to take them from.
      where: the trained head's folder, for errors.

    Raises:
      InputError: they have no parameter in common, or read other aux hidden states; or the trained
        head has a Markov head, which its layers rely on, and the new one has no such Markov head.
    """
    if trained.config.aux_hidden_state_layers != head.config.aux_hidden_state_layers:
        wanted = list(head.config.aux_hidden_state_layers)
        trained_with = list(trained.config.aux_hidden_state_layers)
        raise InputError(
            where,
            rule=f"a head to start from must read the aux hidden states of layers {wanted}",
            got=trained_with,
            next_step=f"use another head, or set head.aux_hidden_state_layers: {trained_with}",
        )
    if trained.config.markov_rank is not None and _markov(trained) != _markov(head):
        rank, kind = _markov(trained)
        raise InputError(
            where,
            rule="a head to start from must have the new one's Markov head, or none",
            got=f"one of rank {rank}, {kind}",
            next_step=f"set markov: {{rank: {rank}, kind: {kind}}}, or start from "
            "what peagle convert --drop-markov makes of it",
        )
    old, new = dict(flatten_params(trained.params)), dict(flatten_params(head.params))
    common = {
        path: old[path]
        for path, leaf in new.items()
        if path in old and old[path].shape == leaf.shape
    }
    if "d2t" in common and "lm_head.kernel" not in common:
        # the columns of the new output matrix are tokens of the new draft vocabulary
        common = {path: x for path, x in common.items() if path not in OF_DRAFT_VOCAB}
    if not common:
        raise InputError(
            where,
            rule="a head to start from must have parameters of the new one's shape",
            got="none",
            next_step="set init_from to a head of the same width",
        )
    params = unflatten_params({**new, **common, **_injected_norms(new, common)})
    return dataclasses.replace(head, params=_with_dtypes_of(head.params, params))


def _injected_norms(new: Params, common: Params) -> Params:
    """By path, what norms of injected keys and values begin as, where a trained head has none.

    As in `init_from_target`: the norm that its keys and values were trained with, and nothing of
    the embeddings.
    """
    norms = {}
    for path in new.keys() - common.keys():
        input_norm = path.replace(".context_norm.", ".input_norm.")
        if input_norm != path and input_norm in common:
            norms[path] = common[input_norm]
            of_tokens = path.replace(".context_norm.", ".context_token_norm.")
            norms[of_tokens] = jnp.zeros_like(new[of_tokens])
    return norms


def _markov(head: Model) -> tuple[int | None, str]:
    """Rank and kind of a head's Markov head."""
    return head.config.markov_rank, head.config.markov_kind


def _check_shapes(cfg: HeadConfig, target: Model) -> None:
    """Raises InputError unless a head's layer can be a copy of the target's last one."""
    blocks = target.params["blocks"]
    last = blocks[max(blocks)]
    is_like_a_heads = (
        last.keys() == {"attn_norm", "attn", "mlp_norm", "mlp"}
        and "gate" in last["mlp"]
        and "sinks" not in last["attn"]
    )
    if not is_like_a_heads:
        raise InputError(
            "init: target",
            rule="the target's last layer must be one that a head has: pre-norm, without sinks, "
            "with a gated MLP",
            got=type(target.config).__name__.removesuffix("Config"),
            next_step="set init: random",
        )
    for name in SAME_AS_TARGET:
        value, targets = getattr(cfg, name), getattr(target.config, name)
        if value != targets:
            # attention_bias is no key of a recipe: a new head has none
            is_key = name != "attention_bias"
            next_step = f"set head.{name}: {targets}, or init: random"
            raise InputError(
                f"init: target, head.{name}",
                rule=f"the head's {name} must be the target's, {targets}",
                got=value,
                next_step=next_step if is_key else "set init: random",
            )
    if cfg.mlp_dim > target.config.mlp_dim:
        raise InputError(
            "init: target, head.mlp_dim",
            rule=f"the head's mlp_dim must be at most the target's, {target.config.mlp_dim}",
            got=cfg.mlp_dim,
            next_step=f"set head.mlp_dim: {target.config.mlp_dim}, or init: random",
        )
    has_norms = "q_norm" in last["attn"]
    if cfg.qk_norm != has_norms:
        raise InputError(
            "init: target, head.qk_norm",
            rule="queries and keys must have norms where the target's last layer has them",
            got=cfg.qk_norm,
            next_step=f"set head.qk_norm: {str(has_norms).lower()}, or init: random",
        )


def _widened_attention(attention: Params, last: Params, dim: int) -> Params:
    """Attention of the first layer, whose queries, keys and values read [embedding, hidden state].

    The half of the embedding stays as it is; that of the hidden state becomes the target's.
    """
    widened = {}
    for name in ("q", "k", "v"):
        old, targets = attention[name], last[name]["kernel"]
        widened[name] = {**old, "kernel": jnp.concatenate([old["kernel"][:dim], targets])}
    return {**attention, **widened, "o": last["o"]}


def _largest_neurons(mlp: Params, count: int) -> Params:
    """The `count` neurons of a gated MLP with the largest weights, in their order.

    The size of a neuron is the product of the norms of its three weight vectors.
    """

    def norms(name: str, axis: int) -> Float[Array, " M"]:
        return jnp.linalg.norm(mlp[name]["kernel"].astype(jnp.float32), axis=axis)

    sizes = norms("gate", 0) * norms("up", 0) * norms("down", 1)
    largest = jnp.sort(jax.lax.top_k(sizes, count)[1])

    def take(name: str, axis: int) -> Params:
        return {"kernel": jnp.take(mlp[name]["kernel"], largest, axis=axis)}

    return {"gate": take("gate", 1), "up": take("up", 1), "down": take("down", 0)}


def _with_dtypes_of(like: Params, params: Params) -> Params:
    """`params` in the dtypes of `like`."""
    return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), like, params)
