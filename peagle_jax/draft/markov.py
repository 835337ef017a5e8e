"""The Markov head: what the drafts before a draft say about it (DSpark, arXiv:2607.05147).

P-EAGLE predicts its K positions in one forward, each without knowing the drafts before it. A Markov
head adds a bias of low rank to the logits of every position, which depends on the previous token:

    logits[d] = lm_head(norm(hidden[d])) + w2(code[d])
    code[d] = w1[token[d - 1]]                                                        "vanilla"
    code[d] = w1[token[d - 1]] * sigmoid(gate([norm(hidden[d]); w1[token[d - 1]]]))   "gated"

The kind "rnn" has a state as well, which begins as zero at the first draft, and so knows all drafts
of the step:

    g, c, o = joint([state[d - 1]; w1[token[d - 1]]; norm(hidden[d])])
    state[d] = sigmoid(g) * state[d - 1] + (1 - sigmoid(g)) * tanh(c)
    code[d] = tanh(o)                                                                 "rnn"

The previous token of the first draft is the last committed token. Drafts are then drawn one after
another, by products as small as the rank; the layers still run once. In training the previous
tokens are those of the text (teacher forcing), and all positions are computed at once, states
depth by depth, of all chains together.

Names and forms are those of DSpark's head as vLLM and DeepSpec have it: `markov_w1`, `markov_w2`,
`gate_proj`, `joint_proj`, and the kinds.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle_jax.layers import Embedding, Linear, product
from peagle_jax.layers.basic import along_last
from peagle_jax.types import InputError

KINDS = ("vanilla", "gated", "rnn")  # as DSpark's configs call them
# The fields of a `HeadConfig` without such a head, as the papers of P-EAGLE and EAGLE have none.
NO_MARKOV: dict[str, Any] = {"markov_rank": None, "markov_kind": "vanilla"}


class MarkovHead(nnx.Module):
    """A bias on the logits of a draft, from the tokens before it.

    It begins without any effect: `w2` is zero.

    Args:
      vocab: V, of the target; the previous token may be any of it.
      draft_vocab: W, whose logits get the bias.
      dim: D, the width of the hidden states that a gate reads.
      rank: r, of the bias, and the width of a state.
      kind: one of `KINDS`.
      dtype: of the parameters.
      rngs: for the initial values.

    Attributes:
      state_size: width of the state, 0 of the kinds without one.
    """

    def __init__(
        self,
        vocab: int,
        draft_vocab: int,
        dim: int,
        rank: int,
        *,
        kind: str,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.w1 = Embedding(vocab, rank, dtype=dtype, rngs=rngs)
        self.w2 = Linear(rank, draft_vocab, dtype=dtype, rngs=rngs)
        self.w2.kernel[...] = jnp.zeros_like(self.w2.kernel[...])
        assert kind in KINDS, kind
        sizes = {"gated": (dim + rank, rank), "rnn": (2 * rank + dim, 3 * rank)}
        mixer = None
        if kind in sizes:
            mixer = Linear(*sizes[kind], bias=True, dtype=dtype, rngs=rngs)
        self.gate = mixer if kind == "gated" else None
        self.joint = mixer if kind == "rnn" else None
        self.state_size = rank if kind == "rnn" else 0

    def __call__(
        self,
        previous: Int[Array, "*rows"],
        normed: Float[Array, "*rows D"],
        state: Float[Array, "*rows S"],
    ) -> tuple[Float[Array, "*rows W"], Float[Array, "*rows S"]]:
        """The bias of a draft's logits, and the state for the draft after it.

        Args:
          previous: the token before the draft, of the target's vocabulary.
          normed: hidden states after the final norm, which `lm_head` reads as well.
          state: what the draft before returned; `first_state` for the first one.
        """
        embedded = self.w1(previous)
        if self.joint is None:
            return self.w2(self._code(embedded, normed)), state
        code, state = _read(self.joint(jnp.concatenate([state, embedded, normed], -1)), state)
        return self.w2(code), state

    def first_state(self, normed: Float[Array, "*rows D"]) -> Float[Array, "*rows S"]:
        """The state at the first draft: zeros, for rows as those of `normed`."""
        return jnp.zeros((*normed.shape[:-1], self.state_size), normed.dtype)

    def codes(
        self,
        previous: Int[Array, "B P"],
        normed: Float[Array, "B P D"],
        anchor: Int[Array, "B P"],
        depth: Int[Array, "B P"],
        *,
        num_anchors: int,
        num_depths: int,
        after_first: Float[Array, "B n S"] | None = None,
    ) -> tuple[Float[Array, "B P r"], Float[Array, "B P S"]]:
        """What `w2` multiplies, of elements that are trained together, and states after the first.

        Args:
          previous: the token before each element, of the target's vocabulary.
          normed: as in drafting.
          anchor: of each element. The element of depth 0 of an anchor has this place.
          depth: of each element. Behind those of depth 0 every chain follows, of depths 1, 2, ...
            without a gap; a padding element has depth 0.
          num_anchors: all anchors are below it.
          num_depths: all depths are below it.
          after_first: the states after the elements of depth 0, where these are not among the
            elements.

        Returns:
          The codes, and of elements of depth 0 the states after them.
        """
        embedded = self.w1(previous)
        state = self.first_state(normed)
        if self.joint is None:
            return self._code(embedded, normed), state
        # of the two inputs; what a state adds is computed depth by depth
        assert self.joint.bias is not None
        of_state, of_inputs = jnp.split(self.joint.kernel[...], [self.state_size])
        joint = _product(jnp.concatenate([embedded, normed], axis=-1), of_inputs)
        joint = joint + along_last(self.joint.bias[...], joint)
        code, after = _read(joint, state)  # of depth 0, whose state is zero
        if num_depths == 1:
            return code, after
        P = depth.shape[1]
        num_chains = min(num_anchors, P)
        starts = jax.vmap(lambda d: jnp.nonzero(d == 1, size=num_chains, fill_value=P - 1)[0])(
            depth
        )
        first = after if after_first is None else after_first
        before = _take(first, jnp.take_along_axis(anchor, starts, axis=1))

        @jax.checkpoint  # a round keeps no more than the state for the backward pass
        def read(state: Array, later: Array) -> tuple[Array, Array]:
            # an element of each chain; of a chain that has ended another one, whose code is dropped
            of_depth = _take(joint, jnp.minimum(starts + later, P - 1))
            of_depth += _product(state, of_state).astype(joint.dtype)
            code, after = _read(of_depth, state)
            return after.astype(state.dtype), code

        _, codes = jax.lax.scan(read, before, jnp.arange(num_depths - 1))  # [K-1 B C r]
        chain = jnp.cumsum(depth == 1, axis=1) - 1
        codes = jnp.moveaxis(codes, 0, 1).reshape(len(depth), -1, codes.shape[-1])
        deeper = _take(codes, jnp.maximum((depth - 1) * num_chains + chain, 0))
        return jnp.where((depth > 0)[..., None], deeper.astype(code.dtype), code), after

    def _code(
        self, embedded: Float[Array, "*rows r"], normed: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows r"]:
        """Of the kinds without a state."""
        if self.gate is None:
            return embedded
        return jax.nn.sigmoid(self.gate(jnp.concatenate([normed, embedded], -1))) * embedded


def _product(x: Float[Array, "*rows x"], w: Float[Array, "x J"]) -> Float[Array, "*rows J"]:
    """`x @ w` with all rows in one axis, as `Linear` has them."""
    return product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)


def _take(rows: Float[Array, "B P x"], places: Int[Array, "B C"]) -> Float[Array, "B C x"]:
    """Some of the rows of each sequence."""
    return jnp.take_along_axis(rows, places[..., None], axis=1)


def _read(
    joint: Float[Array, "*rows J"], state: Float[Array, "*rows r"]
) -> tuple[Float[Array, "*rows r"], Float[Array, "*rows r"]]:
    """A draft's code, and the state after it, from what the state before was projected to."""
    gate, candidate, code = jnp.split(joint, 3, axis=-1)
    gate = jax.nn.sigmoid(gate)
    return jnp.tanh(code), gate * state + (1 - gate) * jnp.tanh(candidate)


def check_rank(
    rank: int | None, draft_vocab: int, parallel: bool, where: str, next_step: str
) -> None:
    """Raises InputError unless a head can have a Markov head of that rank; None is always right.

    Args:
      draft_vocab: a bias of a higher rank than this is not of low rank.
      parallel: whether the head drafts in parallel; the others have the previous token anyway.
      where: the key or the file, for the error.
      next_step: what to do, for the error.
    """
    if rank is None:
        return
    if not parallel:
        rule = "a Markov head is for heads that draft in parallel"
        raise InputError(where, rule, "a head without a mask token", next_step)
    if not 1 <= rank <= draft_vocab:
        rule = f"the Markov head's rank must lie in 1..{draft_vocab}, the draft vocabulary"
        raise InputError(where, rule, rank, next_step)


def check_kind(kind: object, where: str, next_step: str) -> None:
    """Raises InputError unless it is a kind of Markov head."""
    if kind not in KINDS:
        raise InputError(where, f"must be one of {', '.join(KINDS)}", kind, next_step)
