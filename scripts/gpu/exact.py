"""What kernels are compared with, in float64 and without any of this package's products."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from peagle_jax.layers.moe import AnyExpertLinear
from peagle_jax.targets.gpt_oss import ClampedSwiGLU


def to_float64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
    kv_positions: np.ndarray,
    window: int | None,
    scale: float,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """q [B T N H] at `positions` over k and v [B G S H].

    Slot s of row b holds position `kv_positions[b, s]`, or none where that is negative.
    """
    out = np.zeros(q.shape)
    window = window or positions.max() + 2
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        g = n // (q.shape[2] // k.shape[1])
        key, query = kv_positions[b][None], positions[b][:, None]
        visible = (key >= 0) & (key <= query) & (key > query - window)
        x = np.where(visible, q[b, :, n] @ k[b, g].T * scale, -np.inf)
        top = x.max(axis=1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, sinks[n])
        weights = np.exp(x - top)
        total = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[n] - top)
        out[b, :, n] = weights / total @ v[b, g]
    return out


def written(cache: Sequence, k, v, slots: np.ndarray) -> list[np.ndarray]:
    """The cache after k and v [B T G H] went to `slots` [B T]; those from S on are dropped.

    Args:
      cache: keys and values [B G S H]; of float8 then the scales of both [B G S].
    """
    out = [np.array(x) for x in cache]
    for b, t in np.ndindex(*slots.shape):
        slot = slots[b, t]
        if slot >= out[0].shape[2]:
            continue
        for i, x in enumerate((k, v)):
            heads = np.asarray(x[b, t], np.float32)
            if len(out) == 4:
                scale = np.abs(heads).max(axis=1) / np.float32(448)
                out[2 + i][b, :, slot] = scale
                heads = heads / scale[:, None]
            out[i][b, :, slot] = heads.astype(out[i].dtype)
    return out


def attention_gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dy: np.ndarray, mask: np.ndarray, scale: float
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(output, gradients in q, k and v) of one row [P N H] under a mask [P P]."""
    out, dq, dk, dv = np.zeros(q.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    R = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        g = head // R
        x = np.where(mask, q[:, head] @ k[:, g].T * scale, -np.inf)
        p = np.exp(x - x.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        out[:, head] = p @ v[:, g]
        dp = dy[:, head] @ v[:, g].T
        ds = p * (dp - (dp * p).sum(axis=1, keepdims=True)) * scale
        dq[:, head] = ds @ k[:, g]
        dk[:, g] += ds.T @ q[:, head]
        dv[:, g] += p.T @ dy[:, head]
    return out, (dq, dk, dv)


def normed_and_rotated(
    x: np.ndarray,
    gain: np.ndarray,
    positions: np.ndarray,
    frequencies: np.ndarray,
    eps: float,
    scale: float,
) -> np.ndarray:
    """x [n N H] with a root mean square of 1, times the gain, rotated by positions [n]."""
    y = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * gain
    angle = to_float64(positions)[:, None, None] * to_float64(frequencies)
    a, b = np.split(y, 2, axis=-1)
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def distill_losses(
    x: np.ndarray,
    w: np.ndarray,
    teacher_x: np.ndarray,
    teacher_w: np.ndarray,
    cap: float | None,
    kl_weight: np.ndarray,
    hard_weight: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(KL, cross entropy) of each row, and the gradients in x and w of their weighted sum."""
    student, teacher = x @ w, teacher_x @ teacher_w
    teacher = teacher if cap is None else cap * np.tanh(teacher / cap)
    log_q, log_p = (y - np.log(np.exp(y).sum(axis=1, keepdims=True)) for y in (student, teacher))
    p, q = np.exp(log_p), np.exp(log_q)
    hard = np.zeros(student.shape)
    hard[np.arange(len(x)), teacher.argmax(axis=1)] = 1
    logit_grads = kl_weight[:, None] * (q - p) + hard_weight[:, None] * (q - hard)
    return (
        (p * (log_p - log_q)).sum(axis=1),
        -(hard * log_q).sum(axis=1),
        logit_grads @ w.T,
        x.T @ logit_grads,
    )


def mixture(
    x: np.ndarray,
    topk_ids: np.ndarray,
    routing_weights: np.ndarray,
    linears: Sequence[AnyExpertLinear],
    act: Callable,
) -> np.ndarray:
    """The sum over the chosen experts, from their decoded matrices.

    Pairs that choose no expert count nothing.

    Args:
      linears: gate and up in one, and down.
      act: a `ClampedSwiGLU`, or a `GLU` with SiLU.
    """
    up, down = (to_float64(y.matrices(slice(None), jnp.float32)) for y in linears)
    biases = [
        np.zeros(w.shape[::2]) if y.bias is None else to_float64(y.bias[...])
        for y, w in zip(linears, (up, down), strict=True)
    ]
    out = np.zeros(x.shape)
    for t, j in np.ndindex(*topk_ids.shape):
        e = topk_ids[t, j]
        if e == len(up):
            continue
        y = x[t] @ up[e] + biases[0][e]
        if isinstance(act, ClampedSwiGLU):
            gate, value = np.minimum(y[::2], act.limit), np.clip(y[1::2], -act.limit, act.limit)
            hidden = (value + 1) * gate / (1 + np.exp(-act.alpha * gate))
        else:
            gate, value = np.split(y, 2)
            hidden = gate / (1 + np.exp(-gate)) * value
        out[t] += routing_weights[t, j] * (hidden @ down[e] + biases[1][e])
    return out
