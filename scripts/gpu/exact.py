"""What kernels are compared with, in float64 and without any of this package's products."""

import jax.numpy as jnp
import numpy as np

from peagle_jax.targets.gpt_oss import ClampedSwiGLU


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def attention(q, k, v, at, held, window, scale, sinks) -> np.ndarray:
    """q [B T N H], k and v [B G S H]; slot s of row b holds position `held[b, s]`, or none where that is negative."""
    out = np.zeros(q.shape)
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        g = n // (q.shape[2] // k.shape[1])
        p = held[b][None]
        seen = (p >= 0) & (p <= at[b][:, None]) & (p > at[b][:, None] - (window or at.max() + 2))
        x = np.where(seen, q[b, :, n] @ k[b, g].T * scale, -np.inf)
        top = (
            x.max(axis=1, keepdims=True)
            if sinks is None
            else np.maximum(x.max(axis=1, keepdims=True), sinks[n])
        )
        weights = np.exp(x - top)
        total = weights.sum(axis=1, keepdims=True) + (
            0 if sinks is None else np.exp(sinks[n] - top)
        )
        out[b, :, n] = weights / total @ v[b, g]
    return out


def written(held, k, v, slot) -> list[np.ndarray]:
    """The cache `held` (keys, values; of float8 their scales) after k and v [B T G H] went to `slot`; those from S on are dropped."""
    out = [np.array(x) for x in held]
    for b, t in np.ndindex(*slot.shape):
        if slot[b, t] < out[0].shape[2]:
            for i, x in enumerate((k, v)):
                rows = np.asarray(x[b, t], np.float32)
                if len(out) == 4:
                    out[2 + i][b, :, slot[b, t]] = scale = np.abs(rows).max(axis=1) / np.float32(
                        448
                    )
                    rows = rows / scale[:, None]
                out[i][b, :, slot[b, t]] = rows.astype(out[i].dtype)
    return out


def attention_gradients(q, k, v, dy, mask, scale):
    """Of one row [P N H]: its output, and the gradients in q, k and v."""
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


def distance(x, w, tx, tw, cap, of_kl, of_hard):
    """(KL, cross entropy) of each row, and the gradients in x and w of their sums weighted by row."""
    s, t = x @ w, tx @ tw
    t = t if cap is None else cap * np.tanh(t / cap)
    (log_q, log_p) = (y - np.log(np.exp(y).sum(axis=1, keepdims=True)) for y in (s, t))
    p, q, rows = np.exp(log_p), np.exp(log_q), np.arange(len(x))
    hard = np.zeros(s.shape)
    hard[rows, t.argmax(axis=1)] = 1
    slopes = of_kl[:, None] * (q - p) + of_hard[:, None] * (q - hard)
    return (
        (p * (log_p - log_q)).sum(axis=1),
        -(hard * log_q).sum(axis=1),
        slopes @ w.T,
        x.T @ slopes,
    )


def mixture(x, chosen, share, stacks, act) -> np.ndarray:
    """Sum of the same experts, decoded. `act`: `Clamped`, or `Gated` with SiLU. Pairs that choose no expert count nothing."""
    up, down = (wide(s.matrices(slice(None), jnp.float32)) for s in stacks)
    shifts = [
        np.zeros(w.shape[::2]) if s.bias is None else wide(s.bias[...])
        for s, w in zip(stacks, (up, down), strict=True)
    ]
    out = np.zeros(x.shape)
    for t, j in np.ndindex(*chosen.shape):
        if (e := chosen[t, j]) == len(up):
            continue
        y = x[t] @ up[e] + shifts[0][e]
        if isinstance(act, ClampedSwiGLU):
            gate, value = np.minimum(y[::2], act.limit), np.clip(y[1::2], -act.limit, act.limit)
            hidden = (value + 1) * gate / (1 + np.exp(-act.alpha * gate))
        else:
            gate, value = np.split(y, 2)
            hidden = gate / (1 + np.exp(-gate)) * value
        out[t] += share[t, j] * (hidden @ down[e] + shifts[1][e])
    return out
