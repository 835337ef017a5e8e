"""Attention layers, and the cached attention that decoding passes to them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.kernels import attention, cache_write, fp8_matmul, head_rotation, norm_rotate
from peagle_jax.kernels.fp8_matmul import Fp8Matrix
from peagle_jax.layers.basic import Linear, RMSNorm, joint_tiled_products, norm_of_kernel
from peagle_jax.layers.products import attention_operands
from peagle_jax.layers.rope import Rope
from peagle_jax.types import Attend, AttentionRule, KVCache, KVGroup


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """Writes this call's keys and values at `positions`, then attends over the whole cache.

    The positions of a row follow each other, and lie inside the cache where this is no ring.

    Rows may be followed by padding at later positions. No real token looks past its own position,
    and the next call overwrites what padding wrote. In a ring cache, though, padding would
    overwrite what is still needed: there `real` must say which tokens are real.

    The tokens may be a tree, of which each one sees its ancestors. `positions` are then the
    cache's length and the depth of each, and keys and values are written in the order of the
    tokens, as if they followed each other; see `keep_path`.
    """

    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"] | None = None  # None: all of them
    # of a tree: whether the second token is an ancestor of the first, or itself; of a drafting step
    # whose placeholders do not attend causally: whether the first sees the second
    ancestors: Bool[Array, "B T T"] | None = None

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B Q N H"],
        k: Float[Array, "B T G H"] | None,
        v: Float[Array, "B T G H"] | None,
        state: KVCache,
        rule: AttentionRule,
    ) -> tuple[Float[Array, "B Q N H"], KVCache]:
        """The attention of one layer, and the cache with its new keys and values.

        A layer without `k` and `v` reads what an earlier layer, which `layer` names, has written.
        """
        g, i = state.find(layer)
        group = state.groups[g]
        positions = self.positions
        if rule.rows is not None:
            assert self.ancestors is None, "all tokens of a tree have queries"
            positions = jnp.take_along_axis(positions, rule.rows, axis=1)
        visible = self._visible(group, state.length, rule.window)
        about: dict[str, Any] = {"window": rule.window, "scale": rule.scale, "sinks": rule.sinks}
        about |= {"visible": visible}
        is_plain = not group.ring and not group.k_scale
        can_write = is_plain and attention.is_native(q, group.k[i], rule.operands)
        if k is not None and v is not None and can_write:  # in one call: between two, threads wait
            caches = group.k[i], group.v[i]
            first = self._places(state.length)[:, 0]
            y, *written = attention.native_write(q, *caches, positions, k, v, first, **about)
            return y, _with_written(state, g, i, dict(zip("kv", written, strict=True)))
        if k is not None and v is not None:
            operands = attention.step_operands(rule.operands)
            read_as = attention.read_operands(rule.operands, q.shape[1])
            is_converted = attention.converts_cache(group.k[i].dtype, read_as, q.shape[1])
            if operands is not None:
                k, v = (attention.round_to(operands, x) for x in (k, v))
            written = self._write(group, i, k, v, state.length, is_converted)
            state = _with_written(state, g, i, written)
            group = state.groups[g]
        scales = {}
        if group.k_scale:
            scales = {"k_scale": group.k_scale[i], "v_scale": group.v_scale[i]}
        y = attention.attend(
            q,
            group.k[i],
            group.v[i],
            positions,
            self._slot_positions(group, state.length),
            operands=rule.operands,
            form="auto",
            **about,
            **scales,
        )
        return y, state

    def _places(self, length: Int[Array, " B"]) -> Int[Array, "B T"]:
        """Where the tokens are written: at their positions, or one after the other."""
        if self.ancestors is None:
            return self.positions
        return length[:, None] + jnp.arange(self.positions.shape[1])[None]

    def _write(
        self, group: KVGroup, i: int, k, v, length: Int[Array, " B"], is_converted: bool
    ) -> dict[str, Array]:
        """Keys and values of the group's i-th layer with the new ones, and their scales."""
        size = group.k[i].shape[2]
        places = self._places(length)
        slots = places % size if group.ring else places
        if group.ring and self.real is not None:
            slots = jnp.where(self.real, slots, size)  # there is no such slot
        names = ("k", "v", "k_scale", "v_scale") if group.k_scale else ("k", "v")
        old = tuple(getattr(group, name)[i] for name in names)
        written = cache_write.write(
            k, v, slots, old, are_consecutive=not group.ring, is_converted=is_converted
        )
        return dict(zip(names, written, strict=True))

    def _slot_positions(self, group: KVGroup, length: Int[Array, " B"]) -> Int[Array, "B S"] | None:
        """The position whose key and value lie in each slot; None: slot s holds position s.

        In a ring, position p lies in slot p mod S. A slot holds the latest of its positions that
        was written; below 0, none was.
        """
        if not group.ring:
            return None
        slots = jnp.arange(group.k[0].shape[2])[None]
        places = self._places(length)
        written = places if self.real is None else jnp.where(self.real, places, -1)
        latest = jnp.maximum(written.max(axis=1), length - 1)[:, None]
        return latest - (latest - slots) % slots.shape[1]

    def _visible(
        self, group: KVGroup, length: Int[Array, " B"], window: int | None
    ) -> Bool[Array, "B T S"] | None:
        """Which slots each token of a tree sees; None where positions alone say that."""
        if self.ancestors is None:
            return None
        places = self._slot_positions(group, length)
        if places is None:
            places = jnp.broadcast_to(
                jnp.arange(group.k[0].shape[2]), (len(length), group.k[0].shape[2])
            )
        node = places - length[:, None]
        in_tree = (node >= 0)[:, None]
        node = jnp.clip(node, 0, self.positions.shape[1] - 1)
        is_ancestor = jnp.take_along_axis(self.ancestors, node[:, None], axis=2)
        # what lies after the tree is from an earlier call
        is_written = places < length[:, None] + self.positions.shape[1]
        visible = jnp.where(in_tree, is_ancestor, True) & ((places >= 0) & is_written)[:, None]
        if window is not None:
            of_nodes = jnp.take_along_axis(self.positions, node, axis=1)[:, None]
            kv_positions = jnp.where(in_tree, of_nodes, places[:, None])
            visible &= kv_positions > self.positions[..., None] - window
        return visible


def _with_written(state: KVCache, g: int, i: int, written: dict[str, Array]) -> KVCache:
    """The cache with other arrays of the i-th layer of its g-th group."""
    group = state.groups[g]
    changes = {}
    for name, array in written.items():
        layers = getattr(group, name)
        changes[name] = (*layers[:i], array, *layers[i + 1 :])
    group = dataclasses.replace(group, **changes)
    groups = (*state.groups[:g], group, *state.groups[g + 1 :])
    return dataclasses.replace(state, groups=groups)


def keep_path(cache: KVCache, path: Int[Array, "B R"]) -> KVCache:
    """The cache with a path of a tree in the slots after its length, which stays as it is.

    Args:
      path: of the tokens of the tree that `CachedAttention` wrote, which are kept. They rise.
    """
    targets = cache.length[:, None] + jnp.arange(path.shape[1])[None]
    sources = cache.length[:, None] + path
    groups = []
    for group in cache.groups:
        changes = {}
        for name in ("k", "v", "k_scale", "v_scale"):
            changes[name] = tuple(
                cache_write.move(x, sources, targets, ring=group.ring) for x in getattr(group, name)
            )
        groups.append(dataclasses.replace(group, **changes))
    return dataclasses.replace(cache, groups=tuple(groups))


class Attention(nnx.Module):
    """Grouped-query attention.

    With `qk_norm` each head's q and k are normalized before the rotation (Qwen3). With `sinks` each
    head has one more logit, whose share of the softmax goes nowhere (GPT-OSS).
    """

    def __init__(
        self,
        inputs: int,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope,
        *,
        bias: bool,
        qk_norm: bool,
        eps: float,
        window: int | None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        sinks: bool = False,
    ):
        self.q = Linear(inputs, heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.k = Linear(inputs, kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.v = Linear(inputs, kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.o = Linear(heads * head_dim, dim, bias=bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(head_dim, eps, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, dtype=dtype) if qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(heads, dtype)) if sinks else None
        self.head_dim, self.rope, self.window = head_dim, rope, window
        self.operands = attention_operands(dtype)

    def __call__(
        self,
        x: Float[Array, "B R I"],
        positions: Int[Array, "B T"],
        layer: int,
        attend: Attend,
        state: Any,
        rows: Int[Array, "B Q"] | None = None,
        kv_input: Float[Array, "B R I"] | None = None,
        norm: RMSNorm | None = None,
        repeated: Callable[[Array], Array] | None = None,
    ) -> tuple[Float[Array, "B Q D"], Any]:
        """The layer's output, for all tokens or for `rows`, and the state that `attend` returns.

        Keys and values are made of `kv_input` where it is given, and of `x` where not. Without
        `kv_input` there may be a norm of `x`, which a kernel may compute beside the products.
        `x` may hold tokens that are alike once, R of T; `repeated` then makes all T of their
        projections, and only their positions differ. It takes neither `rows` nor `kv_input`.
        """
        assert norm is None or kv_input is None
        assert repeated is None or (rows is None and kv_input is None)
        projected = None
        if rows is None and kv_input is None:
            projected = joint_tiled_products(x, (self.q, self.k, self.v), norm)
        if projected is None and norm is not None:
            x = norm(x)
        x_q, positions_q = x, positions
        if rows is not None:
            x_q, positions_q = take_rows(x, rows), jnp.take_along_axis(positions, rows, axis=1)
        if projected is None and rows is None and kv_input is None:
            projected = joint_fp8_products(x, (self.q, self.k, self.v))
        if projected is None:
            x_kv = x if kv_input is None else kv_input
            keys_and_values = joint_tiled_products(x_kv, (self.k, self.v))
            projected = self.q(x_q), *(keys_and_values or (self.k(x_kv), self.v(x_kv)))
        if repeated is not None:
            projected = map(repeated, projected)
        q, k, v = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in projected)
        sinks = None if self.sinks is None else self.sinks[...]
        rule = AttentionRule(self.window, self.head_dim**-0.5, sinks, self.operands, rows)
        if isinstance(attend, CachedAttention) and head_rotation.can_rotate(q):
            q = self._rotate_by_kernel(q, self.q_norm, positions_q)
            k = self._rotate_by_kernel(k, self.k_norm, positions)
        else:
            q, k = self._norm_and_rotate(q, k, positions_q, positions)
        y, state = attend(layer, q, k, v, state, rule)
        return self.o(y.reshape(*y.shape[:2], -1)), state

    def _rotate_by_kernel(
        self, x: Float[Array, "B T N H"], norm: RMSNorm | None, positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        """Heads with their norm, where they have one, and rotated, by a kernel for a CPU."""
        gain, eps = None, 0.0
        if norm is not None:
            if (of_kernel := norm_of_kernel(norm, x)) is None:
                x = norm(x)
            else:
                gain, eps = of_kernel
        positions = jnp.broadcast_to(positions, x.shape[:2]).reshape(-1)
        cos, sin = self.rope.tables(positions)
        y = head_rotation.rotate(x.reshape(-1, *x.shape[2:]), gain, cos, sin, eps)
        return y.reshape(x.shape)

    def _norm_and_rotate(
        self,
        q: Float[Array, "B Q N H"],
        k: Float[Array, "B T G H"],
        positions_q: Int[Array, "B Q"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B Q N H"], Float[Array, "B T G H"]]:
        """Queries and keys with their norms, where heads have them, and rotated."""
        if self.q_norm is not None and self.k_norm is not None:
            if type(self.q_norm) is RMSNorm and positions_q is positions:
                rotated = norm_rotate.rotate(
                    q.reshape(-1, *q.shape[2:]),
                    k.reshape(-1, *k.shape[2:]),
                    self.q_norm.scale[...],
                    self.k_norm.scale[...],
                    jnp.broadcast_to(positions, q.shape[:2]).reshape(-1),
                    jnp.asarray(self.rope.frequencies, jnp.float32),
                    eps=self.q_norm.eps,
                    scale=self.rope.scale,
                )
                if rotated is not None:
                    return rotated[0].reshape(q.shape), rotated[1].reshape(k.shape)
            q, k = self.q_norm(q), self.k_norm(k)
        return self.rope(q, positions_q), self.rope(k, positions)


def joint_fp8_products(
    x: Float[Array, "B T I"], layers: Sequence[nnx.Module]
) -> tuple[Float[Array, "B T O"], ...] | None:
    """What FP8 layers make of `x`, in one launch; None where a kernel does not take them."""
    matrices = []
    for layer in layers:
        values, scale = getattr(layer, "values", None), getattr(layer, "scale", None)
        if values is None or scale is None or getattr(layer, "bias", None) is not None:
            return None
        matrices.append(Fp8Matrix(values[...], scale[...]))
    return fp8_matmul.joint_matmul(x, matrices)


def take_rows(x: Float[Array, "B T D"], rows: Int[Array, "B Q"]) -> Float[Array, "B Q D"]:
    """Of every sequence the tokens `rows`."""
    return jnp.take_along_axis(x, rows[..., None], axis=1)
