"""The two ways of running a draft head: all K drafts in one forward (P-EAGLE), or one forward each (EAGLE-3).

Both are `Drafter`s, the one door between a decoding loop and whatever proposes tokens.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from peagle_jax.decode.sampling import draw, probabilities
from peagle_jax.draft import placeholders
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.draft.placeholders import Slot
from peagle_jax.kernels.launch import platform
from peagle_jax.layers import CachedAttention
from peagle_jax.types import DraftState, KVCache, SamplingParams


@runtime_checkable
class Drafter(Protocol):
    """Hashable and without arrays: parameters and state go in and come out."""

    k: int

    def init(self, batch: int, cache_size: int) -> KVCache | None:
        """An empty cache for `slots` committed tokens."""
        ...

    def read(
        self,
        params: Any,
        state: DraftState,
        tokens: Int[Array, "B T"],
        aux_hidden_states: Float[Array, "B T A"],
        count: Int[Array, " B"],
    ) -> DraftState:
        """Takes in the prompt: row i of `tokens` is the token after the one that gave row i of `features`."""
        ...

    def step(
        self,
        params: Any,
        state: DraftState,
        tokens: Int[Array, "B R"],
        aux_hidden_states: Float[Array, "B R A"],
        count: Int[Array, " B"],
    ) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None, DraftState]:
        """Takes in the `count` tokens committed last, and drafts K more.

        Returns:
          drafts; the logits they were sampled from, over the target's vocabulary (None: they are argmaxes); state.
        """
        ...


SHORT = 4  # committed rows of the narrow forward; see LOG.md, 2026-11-20


@dataclasses.dataclass(frozen=True)
class _HeadDrafter:
    graph: nnx.GraphDef
    config: HeadConfig
    k: int

    def init(self, batch: int, cache_size: int) -> KVCache:
        return self.config.empty_cache(batch, cache_size)

    def read(self, params, state: DraftState, tokens, aux_hidden_states, count) -> DraftState:
        head: DraftHead = nnx.merge(self.graph, params)
        _, cache = _run(head, head.embed(tokens), head.fuse(aux_hidden_states), state.cache)
        return _advance(state, cache, count)


class ParallelDrafter(_HeadDrafter):
    """P-EAGLE: committed rows and K-1 placeholder rows in one forward.

    The last step committed up to K+1 tokens, but seldom more than a few: where no row of the batch has more than `SHORT`,
    the forward has SHORT + K - 1 rows instead of 2K (on CPUs).
    """

    def step(self, params, state: DraftState, tokens, aux_hidden_states, count):
        if (
            self.k <= SHORT or platform() == "gpu"
        ):  # where more rows cost nothing, and a branch waits for the host
            return self._forward(params, state, tokens, aux_hidden_states, count)

        def few():
            return self._forward(
                params, state, tokens[:, :SHORT], aux_hidden_states[:, :SHORT], count
            )

        return jax.lax.cond(
            count.max() <= SHORT,
            few,
            lambda: self._forward(params, state, tokens, aux_hidden_states, count),
        )

    def _forward(self, params, state: DraftState, tokens, aux_hidden_states, count):
        head: DraftHead = nnx.merge(self.graph, params)
        embeddings, aux_hidden_states = self._rows(
            head, head.embed(tokens), head.fuse(aux_hidden_states), count
        )
        hidden, cache = _run(head, embeddings, aux_hidden_states, state.cache)
        drafting = (
            count[:, None] - 1 + jnp.arange(self.k)[None]
        )  # the last real row, then the placeholders
        ids, q = _choose(
            head, jnp.take_along_axis(hidden, drafting[..., None], axis=1), state.sampling
        )
        return ids, q, _advance(state, cache, count)

    def _rows(
        self,
        head: DraftHead,
        embeddings: Float[Array, "B R D"],
        aux_hidden_states: Float[Array, "B R D"],
        count: Int[Array, " B"],
    ):
        """Row j is committed while j < count; then follow the K-1 placeholders at once, and padding after them.

        Padding stands at later positions than every real row, so causal attention hides it without a mask.
        """
        if self.k == 1:
            return embeddings, aux_hidden_states
        pair = (embeddings, aux_hidden_states)
        last = [
            jnp.repeat(
                jnp.take_along_axis(x, (count - 1)[:, None, None], axis=1), self.k - 1, axis=1
            )
            for x in pair
        ]
        depth = jnp.broadcast_to(jnp.arange(1, self.k), (len(count), self.k - 1))
        masks = placeholders.rows(head, Slot(depth, *last))
        slot = (
            jnp.arange(embeddings.shape[1] + self.k - 1)[None] - count[:, None]
        )  # below 0: a committed row
        real, slot = (slot < 0)[..., None], jnp.clip(slot, 0, self.k - 2)[..., None]

        def extend(x):
            return jnp.pad(x, [(0, 0), (0, self.k - 1), (0, 0)])

        return tuple(
            jnp.where(real, extend(x), jnp.take_along_axis(mask, slot, axis=1))
            for x, mask in zip(pair, masks, strict=True)
        )


class AutoregressiveDrafter(_HeadDrafter):
    """EAGLE-3: one forward over the committed rows, then K-1 forwards that feed back token and hidden state."""

    def step(self, params, state: DraftState, tokens, aux_hidden_states, count):
        head: DraftHead = nnx.merge(self.graph, params)
        hidden, cache = _run(head, head.embed(tokens), head.fuse(aux_hidden_states), state.cache)
        hidden = jnp.take_along_axis(hidden, (count - 1)[:, None, None], axis=1)
        ids, q = _choose(head, hidden, self._keyed(state.sampling, 0))
        cache = dataclasses.replace(cache, length=cache.length + count)

        def again(carry, depth):
            ids, hidden, cache = carry
            hidden, cache = _run(head, head.embed(ids), head.feedback(hidden), cache)
            ids, q = _choose(head, hidden, self._keyed(state.sampling, depth))
            return (ids, hidden, dataclasses.replace(cache, length=cache.length + 1)), (ids, q)

        (_, _, cache), (more, more_q) = jax.lax.scan(
            again, (ids, hidden, cache), jnp.arange(1, self.k)
        )
        ids = jnp.concatenate([ids, more[:, :, 0].T], axis=1)
        if q is not None:
            q = jnp.concatenate([q, jnp.moveaxis(more_q[:, :, 0], 0, 1)], axis=1)
        # the drafts' own slots are scratch: the next step writes their real tokens and features there
        committed = dataclasses.replace(cache, length=state.cache.length + count)
        return ids, q, dataclasses.replace(state, cache=committed)

    @staticmethod
    def _keyed(how: SamplingParams | None, depth) -> SamplingParams | None:
        return how and dataclasses.replace(
            how, key=jax.vmap(lambda key: jax.random.fold_in(key, depth))(how.key)
        )


def _run(
    head: DraftHead,
    embeddings: Float[Array, "B T D"],
    aux_hidden_states: Float[Array, "B T D"],
    cache: KVCache,
):
    positions = cache.length[:, None] + jnp.arange(embeddings.shape[1])[None]
    return head(embeddings, aux_hidden_states, positions, CachedAttention(positions), cache)


def _advance(state: DraftState, cache: KVCache, count) -> DraftState:
    return dataclasses.replace(
        state, cache=dataclasses.replace(cache, length=state.cache.length + count)
    )


def _choose(head: DraftHead, hidden: Float[Array, "B T D"], how: SamplingParams | None):
    """Drafted target ids [B T], and the logits they were sampled from over the target's vocabulary, or None."""
    ids = head.target_ids()
    if how is None:
        return ids[head.argmax_logits(hidden)].astype(jnp.int32), None
    logits = head.compute_logits(hidden)
    full = (
        jnp.full((*logits.shape[:2], head.cfg.vocab), -jnp.inf, jnp.float32)
        .at[:, :, ids]
        .set(logits.astype(jnp.float32))
    )
    keys = jax.vmap(lambda key: jax.random.split(key, logits.shape[1]))(how.key)
    each = jax.vmap(lambda row, key: draw(key, probabilities(row, how)), (1, 1), 1)
    return each(full, keys).astype(jnp.int32), full


METHODS = {"peagle": ParallelDrafter, "eagle3": AutoregressiveDrafter}
