"""Acceptance on a given text of the target, computed instead of drawn.

A draft x of the head's distribution q is accepted with the chance min(1, p(x) / q(x)), where p is
the target's, and what is written in its place has the distribution max(p - q, 0), normalized. So
the chance that x is drafted and accepted is min(p(x), q(x)), and that it is written is p(x). Given
that the target's text has x there, its draft was accepted with the chance

    min(1, q(x) / p(x)).

For argmax drafts, q is 1 at the argmax: the chance is 1 where the text has the argmax, and 0
elsewhere. Greedy decoding is the same with a greedy text.

Drafts behind an accepted one read what the text has. So one forward of the head over the text, with
all depths at all positions as in training, gives every chance, and a recursion over the positions
the expected numbers of steps and of accepted drafts. Decoding the same text gives draws of these
numbers. What remains random is the text, and all heads share that.
"""

import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle_jax.draft.head import DraftHead
from peagle_jax.layers import Decoder
from peagle_jax.train.eagle3_loss import unrolled_hidden
from peagle_jax.train.hidden_states import TrainingRows, training_rows
from peagle_jax.train.peagle_loss import packed_hidden
from peagle_jax.types import Batch, CodSample, Model

BATCH_SIZE = 8  # texts of one forward


def chances_of_text(
    target: Model,
    head: Model,
    texts: Int[np.ndarray, "N T"],
    k: int,
    temperature: float,
    sample_drafts: bool,
    drafts_known: bool = False,
) -> Float[np.ndarray, "N T-2 K"]:
    """How likely each draft of a step at each position is accepted, if those before it are.

    Args:
      target: loaded with the aux hidden states that the head reads.
      head: of any method.
      texts: prompts with what the target wrote behind them; all of one length.
      k: K.
      temperature: of the target, in 0..; 0: the texts are greedy.
      sample_drafts: whether drafts are sampled at the temperature, too; else they are argmaxes.
      drafts_known: whether the placeholders of a parallel head read the drafts before them.

    Returns:
      Of text n, at [n, i, d], draft d of the step that has written x[i + 1] last. That draft stands
      for x[i + 2 + d]; behind the text's end the chance is 0.
    """
    form = k, temperature, sample_drafts, drafts_known
    chances = []
    for start in range(0, len(texts), BATCH_SIZE):
        part = texts[start : start + BATCH_SIZE]
        padded = np.pad(part, [(0, BATCH_SIZE - len(part)), (0, 0)])  # one program for all parts
        of_part = _chances(target.graph, head.graph, form, target.params, head.params, padded)
        chances.append(np.asarray(of_part)[: len(part)])
    return np.concatenate(chances)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _chances(target_graph, head_graph, form, target_params, head_params, texts):
    k, temperature, sample_drafts, drafts_known = form
    target = cast(Decoder, Model(None, target_graph, target_params).bind(target_params))
    head = cast(DraftHead, Model(None, head_graph, head_params).bind(head_params))
    one_document = jnp.zeros(texts.shape, jnp.int32)
    everything = jnp.ones(texts.shape, bool)
    batch = Batch(texts, one_document, everything)
    rows = training_rows(target, batch, one_document[:, 1:], everything[:, 1:])
    B, n = rows.tokens.shape
    anchor, depth = (jnp.asarray(x) for x in elements(n - 1, k))
    hidden = _hidden(head, rows, anchor, depth, k, drafts_known)
    here = jnp.broadcast_to(anchor + depth, (B, len(anchor)))  # what an element learns from
    written = jnp.take_along_axis(rows.tokens, here + 1, axis=1)

    normed = head.final_norm(hidden)
    logits = head.lm_head(normed)
    if head.markov is not None:
        previous = jnp.take_along_axis(rows.tokens, here, axis=1)
        anchors, depths = (jnp.broadcast_to(x, here.shape) for x in (anchor, depth))
        sizes = {"num_anchors": n - 1, "num_depths": k}
        codes, _ = head.markov.codes(previous, normed, anchors, depths, **sizes)
        logits += head.markov.w2(codes)
    is_written = head.target_ids()[None, None] == written[..., None]
    if temperature and sample_drafts:
        q = jnp.sum(jax.nn.softmax(logits / temperature) * is_written, axis=-1)
        of_target = jax.nn.softmax(target.compute_logits(rows.teacher_hidden) / temperature)
        p = jnp.take_along_axis(of_target[:, :-1], rows.tokens[:, 1:, None], axis=-1)[..., 0]
        p = jnp.take_along_axis(p, here, axis=1)
        chance = jnp.where(q >= p, 1.0, q / jnp.maximum(p, jnp.finfo(p.dtype).tiny))
    else:
        is_argmax = jnp.take_along_axis(is_written, logits.argmax(-1)[..., None], axis=-1)[..., 0]
        chance = is_argmax.astype(jnp.float32)
    return jnp.zeros((B, n - 1, k)).at[:, anchor, depth].set(chance)


def elements(n: int, k: int) -> tuple[Int[np.ndarray, " P"], Int[np.ndarray, " P"]]:
    """Anchor and depth of all elements of n positions: those of depth 0, then chain by chain."""
    anchor, depth = np.meshgrid(np.arange(n), np.arange(1, k), indexing="ij")
    within = anchor + depth < n
    anchors = np.concatenate([np.arange(n), anchor[within]])
    return anchors, np.concatenate([np.zeros(n, int), depth[within]])


def _hidden(
    head: DraftHead, rows: TrainingRows, anchor: Array, depth: Array, k: int, drafts_known: bool
) -> Float[Array, "B P D"]:
    """The head's residual stream of all elements; the last of the rows' positions is left out."""
    B, n = rows.tokens.shape
    if not head.cfg.parallel:
        by_step = jnp.stack(list(unrolled_hidden(head, rows, k)), axis=2)
        return by_step[:, anchor, depth]
    shape = B, len(anchor) - (n - 1)
    anchors, depths = (jnp.broadcast_to(x[n - 1 :], shape) for x in (anchor, depth))
    cod = CodSample(anchors, depths, jnp.ones(shape, bool))
    embeddings, fused = head.embed(rows.tokens), head.fuse(rows.aux_hidden_states)
    reads_text = jnp.ones((B, n), bool) if drafts_known else None
    attended = embeddings, fused, rows.segment_ids
    hidden, _ = packed_hidden(head, *attended, cod, k, reads_text=reads_text)
    return jnp.concatenate([hidden[:, : n - 1], hidden[:, n:]], axis=1)


def expected_counts(
    chances: Float[np.ndarray, "n K"], first: int
) -> tuple[float, Float[np.ndarray, " K"]]:
    """Expected numbers of steps, and of accepted drafts by position, along one text.

    Steps whose last draft lies behind the text's end do not count, because the text does not say
    how many of their drafts would be accepted.

    Args:
      chances: of the text, as `chances_of_text` has them.
      first: where the first step stands: the index of the prompt's last token.
    """
    n, k = chances.shape
    all_before = np.cumprod(chances, axis=1)  # [i, d]: drafts 0 .. d are accepted
    num_steps = n - k + 1
    visits = np.zeros(n + 2)
    visits[first] = 1
    for i in range(first, num_steps):
        at_least = np.concatenate([[1.0], all_before[i], [0.0]])
        visits[i + 1 : i + k + 2] += visits[i] * (at_least[:-1] - at_least[1:])
    visited = visits[first:num_steps]
    return float(visited.sum()), visited @ all_before[first:num_steps]


def mean_chances(chances: Float[np.ndarray, "n K"], first: int) -> Float[np.ndarray, " K"]:
    """The chance of each draft behind accepted ones, as the mean over all steps of a text.

    Decoding takes steps where the drafts before were rejected, and reaches late drafts on easy
    text alone, the worse the head the more so. Here every head is asked at the same places.

    Arguments are those of `expected_counts`.
    """
    n, k = chances.shape
    return chances[first : n - k + 1].mean(axis=0)


def expected_acceptance(
    target: Model,
    head: Model,
    texts: Sequence[Sequence[int]],
    prompt_tokens: int,
    k: int,
    temperature: float,
    sample_drafts: bool,
    drafts_known: bool = False,
) -> list[dict]:
    """Of every text, what a row of results has of a prompt: num_drafts, num_accepted_per_pos.

    And chance_per_pos, which is `mean_chances`.

    Args:
      texts: prompts with what the target wrote behind them, at this temperature.
      prompt_tokens: length of each prompt.

    Other arguments are those of `chances_of_text`.
    """
    form = k, temperature, sample_drafts, drafts_known
    first, found = prompt_tokens - 1, []
    for chances in chances_of_text(target, head, np.array(texts), *form).astype(float):
        num_drafts, accepted = expected_counts(chances, first)
        found.append(
            {
                "num_drafts": num_drafts,
                "num_accepted_per_pos": accepted.tolist(),
                "chance_per_pos": mean_chances(chances, first).tolist(),
            }
        )
    return found
