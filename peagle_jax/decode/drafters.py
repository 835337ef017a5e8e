"""The two ways of drafting K tokens with a head: one forward (P-EAGLE), or K forwards (EAGLE).

Both are `Drafter`s, the interface between the decoding loop and whatever proposes tokens.
"""

import dataclasses
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.decode.draft_tokens import draft_tokens, last_committed
from peagle_jax.decode.tree import (
    Tree,
    conditioned_tree,
    likeliest_tree,
    tree_divisor,
    tree_width,
)
from peagle_jax.draft import placeholders
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.draft.placeholder_attention import attended
from peagle_jax.draft.placeholders import PlaceholderRow
from peagle_jax.kernels.launch import platform
from peagle_jax.layers import CachedAttention, take_rows
from peagle_jax.types import DraftState, KVCache, Params, SamplingParams

# What `Drafter.step` returns: drafts, the logits that they were sampled from, state.
Proposal = tuple[Int[Array, "B K"], Float[Array, "B K V"] | None, DraftState]


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes K tokens per step: the interface of `generate`'s `drafter`.

    A drafter is hashable and has no arrays, so that it can be a static argument of a jitted
    function. Its parameters and its state are passed in, and the new state is returned. The axis
    letters are those of `peagle_jax.types`.
    """

    @property
    def k(self) -> int:
        """Tokens drafted per step."""
        ...

    def init(self, batch: int, cache_size: int) -> KVCache | None:
        """An empty cache with room for `cache_size` tokens per row; None for a drafter without.

        Args:
          batch: B, rows.
          cache_size: tokens per row: those of the target's cache, and K more.
        """
        ...

    def prefill(
        self,
        params: Any,
        state: DraftState,
        tokens: Int[Array, "B T"],
        aux_hidden_states: Float[Array, "B T A"],
        count: Int[Array, " B"],
    ) -> DraftState:
        """Reads the prompt.

        Args:
          params: the drafter's parameters: `draft_params` of `generate`.
          state: with the cache of `init`.
          tokens: the prompt from its second token on.
          aux_hidden_states: of the token before each of `tokens`, which predict it.
          count: how many of `tokens` are real, per row.

        Returns:
          The state after reading the prompt.
        """
        ...

    def step(
        self,
        params: Any,
        state: DraftState,
        tokens: Int[Array, "B R"],
        aux_hidden_states: Float[Array, "B R A"],
        count: Int[Array, " B"],
    ) -> Proposal:
        """Reads the tokens that the last step committed, and drafts K more.

        Args:
          params: the drafter's parameters.
          state: what the last call returned, with the sampling of this step.
          tokens: see `DecodeState.tokens`; likewise `aux_hidden_states` and `count`.

        Returns:
          The drafts; the logits over the target's vocabulary that they were sampled from, or None
          where they are argmaxes; and the state after reading the committed tokens.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _HeadDrafter:
    """What both ways of running a draft head share."""

    graph: nnx.GraphDef
    config: HeadConfig
    k: int
    # Only to measure speed: drafts are accepted at these rates, whatever they are. See
    # `verify.draw_accepted`.
    synthetic_rates: tuple[float, ...] | None = None

    def init(self, batch: int, cache_size: int) -> KVCache:
        return self.config.empty_cache(batch, cache_size)

    def prefill(
        self,
        params: Params,
        state: DraftState,
        tokens: Int[Array, "B T"],
        aux_hidden_states: Float[Array, "B T A"],
        count: Int[Array, " B"],
    ) -> DraftState:
        head = self._head(params)
        _, cache = _forward(head, head.embed(tokens), head.fuse(aux_hidden_states), _cache(state))
        return _advance(state, cache, count)

    def _head(self, params: Params) -> DraftHead:
        return cast(DraftHead, nnx.merge(self.graph, params))


class ParallelDrafter(_HeadDrafter):
    """P-EAGLE: the committed tokens and K - 1 placeholders in one forward of the head."""

    def step(
        self,
        params: Params,
        state: DraftState,
        tokens: Int[Array, "B R"],
        aux_hidden_states: Float[Array, "B R A"],
        count: Int[Array, " B"],
    ) -> Proposal:
        head, hidden, new_state = self.read(params, state, tokens, aux_hidden_states, count)
        last = last_committed(tokens, count)
        drafts, draft_logits = draft_tokens(head, hidden, last, state.sampling)
        return drafts, draft_logits, new_state

    def tree(
        self,
        params: Params,
        state: DraftState,
        tokens: Int[Array, "B R"],
        aux_hidden_states: Float[Array, "B R A"],
        count: Int[Array, " B"],
        num_nodes: int,
        temperature: Float[Array, " B"] | None = None,
    ) -> tuple[Tree, DraftState]:
        """As `step`, but gives the tree of the `num_nodes` likeliest paths, and the new state.

        With a Markov head the probability of a token is that behind its path, otherwise that of
        its position.

        Args:
          temperature: that the target's tokens are sampled at; None where all are argmaxes.
        """
        inputs = state, tokens, aux_hidden_states, count
        divisor = tree_divisor(temperature)
        if self.config.markov_rank is None:
            width = tree_width(num_nodes, self.config.draft_vocab)
            token_ids, logprobs, new_state = self.likeliest(params, *inputs, width, divisor)
            return likeliest_tree(token_ids, logprobs, num_nodes), new_state
        head, hidden, new_state = self.read(params, *inputs)
        assert head.markov is not None
        markov, normed, target_ids = head.markov, head.final_norm(hidden), head.target_ids()
        logits = head.lm_head(normed)
        width = tree_width(num_nodes, self.config.draft_vocab)

        def continuations(depth: int, parents: Array, states: Array) -> tuple[Array, Array, Array]:
            """The likeliest tokens behind each of M parents [B M], their log-probabilities, and
            the Markov head's states after the parents."""
            shape = (*parents.shape, normed.shape[-1])
            of_position = jnp.broadcast_to(normed[:, depth - 1][:, None], shape)
            bias, states = markov(parents, of_position, states)
            scores = logits[:, depth - 1][:, None] + bias
            logprobs = jax.nn.log_softmax(scores.astype(jnp.float32) / divisor, axis=-1)
            logprobs, ids = jax.lax.top_k(logprobs, width)
            return target_ids[ids].astype(jnp.int32), logprobs, states

        root, first = last_committed(tokens, count), markov.first_state(normed[:, :1])
        return conditioned_tree(root, first, continuations, self.k, num_nodes), new_state

    def likeliest(
        self,
        params: Params,
        state: DraftState,
        tokens: Int[Array, "B R"],
        aux_hidden_states: Float[Array, "B R A"],
        count: Int[Array, " B"],
        width: int,
        divisor: Float[Array, "#B 1 1"],
    ) -> tuple[Int[Array, "B K width"], Float[Array, "B K width"], DraftState]:
        """As `step`, but gives the `width` likeliest tokens of every position.

        Of a head without a Markov head, whose positions do not depend on each other.

        Args:
          divisor: what logits are divided by, from `tree_divisor`.

        Returns:
          Their ids in the target's vocabulary, their log-probabilities, and the new state.
        """
        head, hidden, new_state = self.read(params, state, tokens, aux_hidden_states, count)
        logits = head.compute_logits(hidden).astype(jnp.float32)
        logprobs, ids = jax.lax.top_k(jax.nn.log_softmax(logits / divisor, axis=-1), width)
        return head.target_ids()[ids].astype(jnp.int32), logprobs, new_state

    def read(
        self,
        params: Params,
        state: DraftState,
        tokens: Int[Array, "B R"],
        aux_hidden_states: Float[Array, "B R A"],
        count: Int[Array, " B"],
    ) -> tuple[DraftHead, Float[Array, "B K D"], DraftState]:
        """The head, its hidden states that the K drafts are read from, and the new state."""
        head = self._head(params)
        embeddings, fused = self._with_placeholders(
            head, head.embed(tokens), head.fuse(aux_hidden_states), count
        )
        after_committed = jnp.arange(embeddings.shape[1])[None] - count[:, None]
        # draft 0 is read from the last committed row, draft i from the i-th placeholder after it
        draft_rows = count[:, None] - 1 + jnp.arange(self.k)[None]
        inputs = head, embeddings, fused, _cache(state)
        design, is_placeholder = self.config.placeholder_attention, after_committed >= 0
        if design == "causal":
            hidden, cache = _forward(*inputs, draft_rows, is_placeholder)
        else:
            # a mask over all rows, so that all of them have queries in the last layer, too
            seen = attended(design, after_committed, self.k - 1)
            hidden, cache = _forward(*inputs, None, is_placeholder, seen)
            hidden = take_rows(hidden, draft_rows)
        return head, hidden, _advance(state, cache, count)

    def _with_placeholders(
        self,
        head: DraftHead,
        embeddings: Float[Array, "B C D"],
        fused: Float[Array, "B C D"],
        count: Int[Array, " B"],
    ) -> tuple[Float[Array, "B rows D"], Float[Array, "B rows D"]]:
        """Puts the placeholders right after each row's committed tokens, wherever these end.

        For K = 4 and C = 5 places, of which `count` = 2 are committed:

            row              0   1   2   3   4   5   6   7      C + K - 1 rows
            row - count     -2  -1   0   1   2   3   4   5
            contents         t0  t1  m1  m2  m3  m3  m3  m3
            draft                0   1   2   3

        t are committed tokens and m1, m2, m3 the placeholders of depths 1 to K - 1. What follows
        them is padding. It is at later positions than every row that is read, so that causal
        attention hides it without a mask; the next step overwrites its cache slots. Other designs
        of attention have a mask (`attended`).
        """
        if self.k == 1:
            return embeddings, fused
        num_placeholders = self.k - 1
        batch, num_places = embeddings.shape[:2]

        def of_last_token(x: Float[Array, "B C D"]) -> Float[Array, "B placeholders D"]:
            last = jnp.take_along_axis(x, (count - 1)[:, None, None], axis=1)
            return jnp.repeat(last, num_placeholders, axis=1)

        depth = jnp.broadcast_to(jnp.arange(1, self.k), (batch, num_placeholders))
        unfilled = PlaceholderRow(depth, of_last_token(embeddings), of_last_token(fused))
        masks = placeholders.rows(head, unfilled)

        after_committed = jnp.arange(num_places + num_placeholders)[None] - count[:, None]
        is_committed = (after_committed < 0)[..., None]
        which_mask = jnp.clip(after_committed, 0, num_placeholders - 1)[..., None]

        def merge(committed: Array, mask: Array) -> Array:
            padded = jnp.pad(committed, [(0, 0), (0, num_placeholders), (0, 0)])
            return jnp.where(is_committed, padded, jnp.take_along_axis(mask, which_mask, axis=1))

        return merge(embeddings, masks[0]), merge(fused, masks[1])


class AutoregressiveDrafter(_HeadDrafter):
    """EAGLE-3 and EAGLE-1: a forward over the committed tokens, then K - 1 forwards of one row.

    Each of these reads the token that was drafted last, and the head's own hidden state in the
    place of the fused aux hidden states (EAGLE-3) or of the target's final hidden state (EAGLE-1),
    which the target has not computed yet.
    """

    def step(
        self,
        params: Params,
        state: DraftState,
        tokens: Int[Array, "B R"],
        aux_hidden_states: Float[Array, "B R A"],
        count: Int[Array, " B"],
    ) -> Proposal:
        head = self._head(params)
        start = _cache(state)
        inputs = head.embed(tokens), head.fuse(aux_hidden_states), start
        last_row = (count - 1)[:, None]
        if platform() == "cpu":
            hidden, cache = _forward(head, *inputs, wanted=last_row)
        else:  # a GPU's fused kernels take all rows of a layer, or have no part in it
            hidden, cache = _forward(head, *inputs)
            hidden = take_rows(hidden, last_row)
        last = last_committed(tokens, count)
        ids, logits = draft_tokens(head, hidden, last, _with_depth_keys(state.sampling, 0))
        cache = dataclasses.replace(cache, length=cache.length + count)

        def draft_next(carry, depth):
            last, hidden, cache = carry
            hidden, cache = _forward(head, head.embed(last), head.feedback(hidden), cache)
            sampling = _with_depth_keys(state.sampling, depth)
            ids, logits = draft_tokens(head, hidden, last[:, 0], sampling)
            cache = dataclasses.replace(cache, length=cache.length + 1)
            return (ids, hidden, cache), (ids, logits)

        (_, _, cache), (later_ids, later_logits) = jax.lax.scan(
            draft_next, (ids, hidden, cache), jnp.arange(1, self.k)
        )
        drafts = jnp.concatenate([ids, later_ids[:, :, 0].T], axis=1)
        if logits is not None and later_logits is not None:
            later_logits = jnp.moveaxis(later_logits[:, :, 0], 0, 1)
            logits = jnp.concatenate([logits, later_logits], axis=1)
        # The drafts' slots are given up: the next step writes the committed tokens there, with the
        # target's aux hidden states.
        committed = dataclasses.replace(cache, length=start.length + count)
        return drafts, logits, dataclasses.replace(state, cache=committed)


def _with_depth_keys(
    sampling: SamplingParams | None, depth: int | Int[Array, ""]
) -> SamplingParams | None:
    """Keys for the draft at `depth`; the K drafts of a step must not share one."""
    if sampling is None:
        return None
    keys = jax.vmap(lambda key: jax.random.fold_in(key, depth))(sampling.key)
    return dataclasses.replace(sampling, key=keys)


def _cache(state: DraftState) -> KVCache:
    """The draft head's cache, which `_HeadDrafter.init` made."""
    assert state.cache is not None
    return state.cache


def _forward(
    head: DraftHead,
    embeddings: Float[Array, "B T D"],
    fused: Float[Array, "B T D"],
    cache: KVCache,
    wanted: Int[Array, "B Q"] | None = None,
    is_placeholder: Bool[Array, "B T"] | None = None,
    seen: Bool[Array, "B T T"] | None = None,
) -> tuple[Float[Array, "B Q D"], KVCache]:
    """The head over T further positions of every row; the cache's length stays as it is.

    Args:
      wanted: those whose hidden states are returned; None for all.
      is_placeholder: which positions hold placeholders; None where none does.
      seen: which of these positions each of them attends to; None: those up to itself.
    """
    positions = cache.length[:, None] + jnp.arange(embeddings.shape[1])[None]
    attend = CachedAttention(positions, ancestors=seen)
    return head(embeddings, fused, positions, attend, cache, wanted, is_placeholder)


def _advance(state: DraftState, cache: KVCache, count: Int[Array, " B"]) -> DraftState:
    """The state after `count` more tokens were read; what follows them in the cache is given up."""
    length = _cache(state).length + count
    return dataclasses.replace(state, cache=dataclasses.replace(cache, length=length))


def synthetic_rates(drafter: Drafter | None) -> tuple[float, ...] | None:
    """The rates at which a drafter's K drafts are to be accepted; None: verification decides.

    Raises:
      ValueError: there are fewer rates than drafts.
    """
    rates = drafter.synthetic_rates if isinstance(drafter, _HeadDrafter) else None
    if rates is None or drafter is None:
        return None
    if len(rates) < drafter.k:
        raise ValueError(f"{drafter.k} drafts need as many rates; got {len(rates)}; give more")
    return rates[: drafter.k]


METHODS = {
    "peagle": ParallelDrafter,
    "eagle3": AutoregressiveDrafter,
    "eagle": AutoregressiveDrafter,
}
