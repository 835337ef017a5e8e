"""Where a head's training starts: random layers, or what its target already knows. Parts are chosen by name."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.types import Model

PARTS = ("mask", "self", "half", "layers", "l0f", "fc", "small")


def warm_start(head: Model, target: Model, taps: Float[Array, " A"], parts) -> Model:
    params = jax.tree.map(lambda x: x, head.params)
    cfg, D = head.config, head.config.dim
    last = target.params["blocks"][max(target.params["blocks"])]
    if "layers" in parts:
        for i in range(1, cfg.layers):
            layer = params["layers"][i]
            layer["attn"] = {**layer["attn"], **last["attn"]} if cfg.qk_norm else {**layer["attn"], **{k: last["attn"][k] for k in "qkvo"}}
            layer["mlp"], layer["mlp_norm"], layer["input_norm"] = last["mlp"], last["mlp_norm"], last["attn_norm"]
        params["layers"][0]["mlp"] = last["mlp"]
        params["norm"] = target.params["norm"]
    if "l0f" in parts:
        a = params["layers"][0]["attn"]
        for k in "qkv":
            a[k] = {"kernel": jnp.concatenate([a[k]["kernel"][:D], last["attn"][k]["kernel"]])}
        a["o"] = last["attn"]["o"]
    if "self" in parts:
        a = params["layers"][0]["attn"]
        k = a["k"]["kernel"].reshape(-1, cfg.kv_heads, cfg.head_dim)
        a["q"] = {"kernel": jnp.repeat(k, cfg.heads // cfg.kv_heads, axis=1).reshape(k.shape[0], -1)}
    if "half" in parts:  # the first KV head's queries only
        a = params["layers"][0]["attn"]
        k = a["k"]["kernel"].reshape(-1, cfg.kv_heads, cfg.head_dim)
        r = cfg.heads // cfg.kv_heads
        q = a["q"]["kernel"].reshape(k.shape[0], cfg.heads, cfg.head_dim)
        a["q"] = {"kernel": q.at[:, :r].set(jnp.repeat(k[:, :1], r, axis=1)).reshape(k.shape[0], -1)}
    if "fc" in parts:
        fc = params["fusion"]["fc"]["kernel"]
        params["fusion"] = {**params["fusion"], "fc": {"kernel": (0.1 * fc).at[-D:].add(jnp.eye(D))}}
    if "small" in parts:  # fused features of RMS 1
        fc = params["fusion"]["fc"]["kernel"]
        params["fusion"] = {**params["fusion"], "fc": {"kernel": fc / jnp.sqrt(jnp.mean(taps**2))}}
    if "mask" in parts and cfg.parallel:
        params["mask_hidden"] = jnp.asarray(taps, cfg.dtype)
        table = params["embed"]["table"]
        params["embed"] = {"table": table.at[cfg.mask_token].set(table.mean(axis=0))}
    return dataclasses.replace(head, params=params)
