"""A step with a tree of drafts, of which the path that the target goes is kept."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.decode.commit import commit
from peagle_jax.decode.drafters import ParallelDrafter
from peagle_jax.decode.drawn_tree import draw_tree, most_children, walk_drawn
from peagle_jax.decode.penalties import count_tokens, penalize
from peagle_jax.decode.sampling import KeyUse, logprobs_of, probabilities, sample, with_step_keys
from peagle_jax.decode.spec import DecodeSpec, needs_logits
from peagle_jax.decode.switching import last_token
from peagle_jax.decode.tree import tree_width, walk
from peagle_jax.kernels import vocab
from peagle_jax.layers import CachedAttention, Decoder, keep_path
from peagle_jax.types import DecodeState, RowOptions, TargetOutput


def tree_step(
    spec: DecodeSpec, target: Decoder, draft_params: Any, options: RowOptions, state: DecodeState
) -> DecodeState:
    """A step with a tree of drafts, of which the path that the target goes is kept."""
    assert isinstance(spec.drafter, ParallelDrafter) and spec.num_nodes is not None
    before = state.draft, state.tokens, state.aux_hidden_states, state.count
    sampling, k, num_nodes = options.sampling, spec.k, spec.num_nodes
    root, draft_probabilities = last_token(state), None
    if sampling is not None and spec.sample_drafts:
        head, hidden, draft = spec.drafter.read(draft_params, *before)
        fresh = with_step_keys(sampling, state.num_steps, KeyUse.DRAFT)
        tree, draft_probabilities = draw_tree(head, hidden, root[:, 0], num_nodes, fresh)
    else:
        temperature = None if sampling is None else jnp.asarray(sampling.temperature)
        tree, draft = spec.drafter.tree(draft_params, *before, num_nodes, temperature)
    block = jnp.concatenate([root, tree.tokens], axis=1)
    positions = state.cache.length[:, None] + tree.depth
    attend = CachedAttention(positions, ancestors=tree.ancestors)
    out, cache = target(block, positions, attend, state.cache)

    rows = jnp.arange(len(block))
    if sampling is not None:
        logits = target.compute_logits(out.hidden)
        fresh = with_step_keys(sampling, state.num_steps, KeyUse.VERIFY)

        def next_probabilities(depth: int, node: Array, drafts: Array) -> Array:
            return probabilities(
                _penalized(options, state, logits[rows, node], drafts[:, :depth]), fresh
            )

        def next_token(depth: int, node: Array, drafts: Array) -> Array:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, depth))(fresh.key)
            return sample(keys, next_probabilities(depth, node, drafts))

    elif needs_logits(options):
        logits = target.compute_logits(out.hidden)

        def next_token(depth: int, node: Array, drafts: Array) -> Array:
            return vocab.argmax(_penalized(options, state, logits[rows, node], drafts[:, :depth]))

    else:
        argmax = target.argmax_logits(out.hidden)

        def next_token(depth: int, node: Array, drafts: Array) -> Array:
            return argmax[rows, node]

    if draft_probabilities is None:
        path, tokens, accepted = walk(tree, k, next_token)
    else:
        width = tree_width(num_nodes, spec.drafter.config.draft_vocab)
        path, tokens, accepted = walk_drawn(
            tree,
            most_children(k, num_nodes, width),
            next_probabilities,
            draft_probabilities,
            root[:, 0],
            jnp.asarray(fresh.temperature) <= 0,
            fresh.key,
        )
    logprobs = None
    if options.logprobs:
        logprobs = logprobs_of(logits[rows[:, None], path], tokens)
    of_path = TargetOutput(
        hidden=jnp.take_along_axis(out.hidden, path[..., None], axis=1),
        aux_hidden_states=jnp.take_along_axis(out.aux_hidden_states, path[..., None], axis=1),
    )
    cache = keep_path(cache, path)
    return commit(spec, state, draft, cache, of_path, tokens, accepted, options, logprobs)


def _penalized(
    options: RowOptions,
    state: DecodeState,
    logits: Float[Array, "B V"],
    drafts: Int[Array, "B depth"],
) -> Float[Array, "B V"]:
    """The target's logits after drafts that were accepted in this step, with penalties."""
    if options.penalties is None:
        return logits
    counts = count_tokens(state, drafts, logits.shape[-1])[:, -1:]
    return penalize(logits[:, None], counts, options.penalties, options.stop_ids)[:, 0]
