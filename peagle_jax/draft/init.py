"""Where a head's training starts: at random, from its target's last layer, or from another head; and what placeholders begin as."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.placeholders import HIDDEN_DESIGNS, TOKEN_DESIGNS
from peagle_jax.types import InputError, Model, Params
from peagle_jax.weights import flatten_params, unflatten_params

FC_NOISE = 0.1  # of the random fusion that stays beside the identity on the last tap


def init_from_target(head: Model, target: Model) -> Model:
    """A head that begins as the target's last layer reading the last tap, which learns several times faster (LOG.md).

    Every layer gets the target's last MLP, norm and attention; the first one, whose attention is twice as wide, on its
    feature half. A narrower MLP gets the neurons of largest weights. `fc` passes the last tap on. The final norm is the
    target's.

    Args:
      head: from `random_head`; what is not named above stays as it is.

    Raises:
      InputError: the head's layers have another shape than the target's, or a wider MLP.
    """
    cfg, last = head.config, target.params["blocks"][max(target.params["blocks"])]
    _check_shapes(cfg, target)
    attention = {
        name: last["attn"][name]
        for name in (*"qkvo", *(("q_norm", "k_norm") if cfg.qk_norm else ()))
    }
    mlp = _largest_neurons(last["mlp"], cfg.mlp_dim)
    params = jax.tree.map(lambda x: x, head.params)  # a copy of the containers
    for index, layer in params["layers"].items():
        layer |= {"mlp": mlp, "mlp_norm": last["mlp_norm"]}
        if index > 0:
            layer |= {"attn": {**layer["attn"], **attention}, "input_norm": last["attn_norm"]}
            continue
        wide = {
            name: {
                **old,
                "kernel": jnp.concatenate([old["kernel"][: cfg.dim], last["attn"][name]["kernel"]]),
            }
            for name, old in layer["attn"].items()
            if name in ("q", "k", "v")
        }
        layer["attn"] = {**layer["attn"], **wide, "o": last["attn"]["o"]}
    fc = params["fusion"]["fc"]["kernel"]
    params["fusion"]["fc"]["kernel"] = (
        (FC_NOISE * fc).at[-cfg.dim :].add(jnp.eye(cfg.dim, dtype=fc.dtype))
    )
    params["norm"] = target.params["norm"]
    return dataclasses.replace(head, params=_as(head.params, params))


def init_placeholders(
    head: Model, mean_aux_hidden_states: Float[Array, " A"] | None, *, seed: int
) -> Model:
    """Placeholders begin as what is most ordinary: the mean token embedding, and `mean_taps`; each design says in which form.

    Args:
      head: its embedding and fusion are what they will begin with.
      mean_taps: mean of the target's taps over some text; None begins with a small random vector.
    """
    cfg = head.config
    module = head.bind(head.params)
    table, draw = module.embed.table[...], jax.random.split(jax.random.key(seed))
    like = (
        0.02 * jax.random.normal(draw[0], (cfg.sizes.aux_dim,))
        if mean_aux_hidden_states is None
        else mean_aux_hidden_states
    )
    row, mean = table[cfg.mask_token], table.mean(axis=0)
    own = {}
    for design in (HIDDEN_DESIGNS[cfg.placeholder_hidden], TOKEN_DESIGNS[cfg.placeholder_token]):
        own |= design.init(cfg.sizes, like.astype(cfg.dtype), module.fuse, row, mean, draw[1])
    params = dict(head.params)
    if "mask_hidden" in own:
        params["mask_hidden"] = own.pop("mask_hidden")
    if own:
        params["placeholder"] = own
    if mean_aux_hidden_states is not None and cfg.placeholder_token == "mask":
        params["embed"] = {"table": table.at[cfg.mask_token].set(mean)}
    return dataclasses.replace(head, params=_as(head.params, params))


def _check_shapes(cfg: HeadConfig, target: Model) -> None:
    last = target.params["blocks"][max(target.params["blocks"])]
    if (
        {"attn_norm", "attn", "mlp_norm", "mlp"} != last.keys()
        or "gate" not in last["mlp"]
        or "sinks" in last["attn"]
    ):
        rule = "the target's last layer must be one that a head has: pre-norm, without sinks, with a gated MLP"
        raise InputError(
            "start: target",
            rule,
            type(target.config).__name__.removesuffix("Config"),
            "use start: random",
        )
    target = target.config
    for name in ("dim", "heads", "kv_heads", "head_dim", "attention_bias"):
        mine, theirs = getattr(cfg, name), getattr(target, name)
        if mine != theirs:
            raise InputError(
                "start: target",
                f"the head's {name} must be the target's, {theirs}",
                mine,
                "use start: random",
            )
    if cfg.mlp_dim > target.mlp_dim:
        rule = f"the head's mlp_dim must be at most the target's, {target.mlp_dim}"
        raise InputError("start: target", rule, cfg.mlp_dim, "use start: random")


def _largest_neurons(mlp: Params, count: int) -> Params:
    """The `count` neurons of a gated MLP whose three weight vectors have the largest product of norms, in their order."""

    def norm(name, axis):
        return jnp.linalg.norm(mlp[name]["kernel"].astype(jnp.float32), axis=axis)

    kept = jnp.sort(jax.lax.top_k(norm("gate", 0) * norm("up", 0) * norm("down", 1), count)[1])

    def take(name, axis):
        return {"kernel": jnp.take(mlp[name]["kernel"], kept, axis=axis)}

    return {"gate": take("gate", 1), "up": take("up", 1), "down": take("down", 0)}


def _as(like: Params, params: Params) -> Params:
    """`params` in the dtypes of `like`."""
    return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), like, params)


def init_from_head(head: Model, trained: Model, where) -> Model:
    """`trained`'s parameters in the place of `head`'s, wherever both have one of that name and shape.

    Raises:
      InputError: they have none in common, or read other taps.
    """
    if trained.config.aux_hidden_state_layers != head.config.aux_hidden_state_layers:
        rule = (
            f"a head to start from must read the taps {list(head.config.aux_hidden_state_layers)}"
        )
        raise InputError(
            where,
            rule,
            list(trained.config.aux_hidden_state_layers),
            "use another, or set head.taps",
        )
    old, new = dict(flatten_params(trained.params)), dict(flatten_params(head.params))
    taken = {
        path: old[path]
        for path, leaf in new.items()
        if path in old and old[path].shape == leaf.shape
    }
    if not taken:
        raise InputError(
            where,
            "a head to start from must have parameters of the new one's shape",
            "none",
            "use one of the same width",
        )
    return dataclasses.replace(head, params=_as(head.params, unflatten_params({**new, **taken})))
