"""Attention of packed rows whose scores all exist at one time: the fastest form of few of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.kernels.attention import MASKED
from peagle_jax.kernels.packed_attention_chains import BLOCK, Chains


def attend_dense(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B n G H"],
    v: Float[Array, "B n G H"],
    first: Int[Array, "B P"],
    last: Int[Array, "B P"],
    chains: Chains | None,
    scale: float,
) -> tuple[Float[Array, "B P N H"], Float[Array, "B P N"]]:
    """Attention over keys `first` .. `last` and, if there are any, `chains`; its log-sum-exp.

    With chains P is a multiple of BLOCK.
    """
    key = jnp.arange(k.shape[1])[None, None]
    visible = (key >= first[..., None]) & (key <= last[..., None])
    parts: list[tuple] = [(Depth0Scores(q.shape, k.shape[2]), k, v, visible[:, None, None])]
    if chains is not None:
        form = ChainScores(q.shape, k.shape[2])
        parts.append((form, chains.keys, chains.values, chains.visible()[:, :, None, None]))
    forms, keys, values, visible = zip(*parts, strict=True)
    return _attend(forms, scale, q, keys, values, visible)


@dataclasses.dataclass(frozen=True)
class Depth0Scores:
    """Scores [B G R P n] of P queries over n keys that all of them share.

    One matrix product for a row and KV head, with its queries grouped, takes half the time of one
    einsum over all axes on a CPU (LOG.md).

    Attributes:
      shape: of the queries, (B, P, N, H).
      kv_heads: G; R is N / G.
    """

    shape: tuple[int, ...]
    kv_heads: int

    def scores(self, q: Float[Array, "B P N H"], k: Float[Array, "B n G H"]) -> Array:
        """Products of queries and keys."""
        B, P, N, H = self.shape
        G, R = self.kv_heads, N // self.kv_heads
        grouped = q.reshape(B, P, G, R, H).transpose(0, 2, 3, 1, 4).reshape(B * G, R * P, H)
        keys = k.transpose(0, 2, 3, 1).reshape(B * G, H, -1)
        scores = jnp.matmul(grouped, keys, preferred_element_type=jnp.float32)
        return scores.reshape(B, G, R, P, -1)

    def outputs(self, weights: Array, v: Float[Array, "B n G H"]) -> Float[Array, "B P N H"]:
        """Sums of values, by weights in the place of scores."""
        B, P, N, H = self.shape
        G, R = self.kv_heads, N // self.kv_heads
        values = v.transpose(0, 2, 1, 3).reshape(B * G, -1, H)
        y = jnp.matmul(weights.reshape(B * G, R * P, -1), values)
        return y.reshape(B, G, R, P, H).transpose(0, 3, 1, 2, 4).reshape(B, P, N, H)

    def of_rows(self, x: Float[Array, "B P N"]) -> Array:
        """A number of each query and head, in the place of its scores."""
        B, P, N, _ = self.shape
        G = self.kv_heads
        return x.reshape(B, P, G, N // G).transpose(0, 2, 3, 1)[..., None]

    def to_rows(self, x: Array) -> Float[Array, "B P N"]:
        """The inverse of `of_rows`, without its last axis."""
        B, P, N, _ = self.shape
        return x.transpose(0, 3, 1, 2).reshape(B, P, N)


@dataclasses.dataclass(frozen=True)
class ChainScores:
    """Scores [B blocks G R BLOCK c] of blocks of queries over c keys around each block.

    A chain has few keys. As a product of a block's queries and keys, most of it for nothing, its
    scores take a fraction of the time that a sum for every distance of a key takes (LOG.md).

    Attributes: as of `Depth0Scores`.
    """

    shape: tuple[int, ...]
    kv_heads: int

    def scores(self, q: Float[Array, "B P N H"], k: Float[Array, "B b c G H"]) -> Array:
        """Products of queries and keys."""
        B, P, N, H = self.shape
        G, R = self.kv_heads, N // self.kv_heads
        blocks = P // BLOCK
        grouped = q.reshape(B, blocks, BLOCK, G, R, H).transpose(0, 1, 3, 4, 2, 5)
        grouped = grouped.reshape(B * blocks * G, R * BLOCK, H)
        keys = k.transpose(0, 1, 3, 4, 2).reshape(B * blocks * G, H, -1)
        scores = jnp.matmul(grouped, keys, preferred_element_type=jnp.float32)
        return scores.reshape(B, blocks, G, R, BLOCK, -1)

    def outputs(self, weights: Array, v: Float[Array, "B b c G H"]) -> Float[Array, "B P N H"]:
        """Sums of values, by weights in the place of scores."""
        B, P, N, H = self.shape
        G, R = self.kv_heads, N // self.kv_heads
        blocks = P // BLOCK
        values = v.transpose(0, 1, 3, 2, 4).reshape(B * blocks * G, -1, H)
        y = jnp.matmul(weights.reshape(B * blocks * G, R * BLOCK, -1), values)
        y = y.reshape(B, blocks, G, R, BLOCK, H).transpose(0, 1, 4, 2, 3, 5)
        return y.reshape(B, P, N, H)

    def of_rows(self, x: Float[Array, "B P N"]) -> Array:
        """A number of each query and head, in the place of its scores."""
        B, _, N, _ = self.shape
        G = self.kv_heads
        return x.reshape(B, -1, BLOCK, G, N // G).transpose(0, 1, 3, 4, 2)[..., None]

    def to_rows(self, x: Array) -> Float[Array, "B P N"]:
        """The inverse of `of_rows`, without its last axis."""
        B, P, N, _ = self.shape
        return x.transpose(0, 1, 4, 2, 3).reshape(B, P, N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(forms, scale, q, keys, values, visible) -> tuple[Array, Array]:
    """Attention over several sets of keys with one softmax, and its log-sum-exp.

    Its gradient is written out: exponentials are computed once, and kept for the backward pass,
    where autodiff computes them again from scores.

    Args:
      forms: of each set of keys, where scores stand.
      visible: of each set, which scores count.
    """
    return _attend_forward(forms, scale, q, keys, values, visible)[0]


def _attend_forward(forms, scale, q, keys, values, visible):
    scores = [
        jnp.where(is_visible, form.scores(q, k) * scale, MASKED)
        for form, k, is_visible in zip(forms, keys, visible, strict=True)
    ]
    peaks = [form.to_rows(x.max(axis=-1)) for form, x in zip(forms, scores, strict=True)]
    peak = functools.reduce(jnp.maximum, peaks)
    exps = [jnp.exp(x - form.of_rows(peak)) for form, x in zip(forms, scores, strict=True)]
    totals = [form.to_rows(x.sum(axis=-1)) for form, x in zip(forms, exps, strict=True)]
    total = sum(totals[1:], totals[0])
    sums = [
        form.outputs(x.astype(v.dtype), v) for form, x, v in zip(forms, exps, values, strict=True)
    ]
    y = sum(sums[1:], sums[0]) / total[..., None].astype(q.dtype)
    return (y, peak + jnp.log(total)), (q, keys, values, exps, total, y)


def _attend_backward(forms, scale, saved, cotangents):
    q, keys, values, exps, total, y = saved
    dy, dlse = cotangents
    # of weights p = exp / total: d score = p * (dp - sum(dy * y) + dlse), dp = dy . v
    shift = dlse - jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    dy_share = dy / total[..., None].astype(dy.dtype)
    dq, dkeys, dvalues = jnp.zeros_like(q), [], []
    for form, k, v, x in zip(forms, keys, values, exps, strict=True):
        weights, narrow = x, x.astype(v.dtype)
        pull_outputs = jax.linear_transpose(lambda w, form=form, v=v: form.outputs(w, v), narrow)
        (dweights,) = pull_outputs(dy_share)
        pull_values = jax.linear_transpose(lambda v, form=form, w=narrow: form.outputs(w, v), v)
        dvalues += pull_values(dy_share)
        dscores = weights * (dweights.astype(jnp.float32) + form.of_rows(shift / total)) * scale
        _, pull_scores = jax.vjp(form.scores, q, k)
        of_q, of_k = pull_scores(dscores)
        dq += of_q
        dkeys.append(of_k)
    return dq, tuple(dkeys), tuple(dvalues), tuple(None for _ in forms)


_attend.defvjp(_attend_forward, _attend_backward)
