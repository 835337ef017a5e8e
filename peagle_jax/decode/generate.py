"""`generate`: prompts in, answers and counters out. Batches, pads, calls the one program, reads the result once."""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from peagle_jax.decode.drafters import METHODS, Drafter
from peagle_jax.decode.loop import DecodeSpec, run
from peagle_jax.decode.memory import check_cache
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.targets.sharding import mesh_of
from peagle_jax.types import InputError, Model

MOST_DEPTHS = (
    7  # K where nobody names one, and the head was trained for more (AWS: best K of P-EAGLE)
)
BUCKET = 64  # tokens; prompts and caches are padded to multiples, so that similar requests share a compiled program

SLIDING_CHUNK = 512  # prompt tokens read at once where sliding layers keep a ring of window + chunk


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's answer. Counters follow vLLM: the last step counts whole, also what lies past the limit."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    is_draft: list[bool]  # which output tokens were accepted drafts
    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: list[int]

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float | None:
        return acceptance_length([self])


def acceptance_length(answers: Sequence[Generation]) -> float | None:
    """Tokens emitted a target forward: 1 + accepted / drafts, pooled as vLLM does; None without drafts."""
    drafts = sum(a.num_drafts for a in answers)
    return 1 + sum(a.num_accepted_tokens for a in answers) / drafts if drafts else None


def make_drafter(head: Model, k: int, method: str | None = None) -> Drafter:
    """`method` peagle or eagle3; None picks peagle for a head that has placeholders.

    Raises:
      InputError: the head cannot draft that way, or K is below 1.
    """
    if k < 1:
        raise InputError(
            "K",
            "at least one token must be drafted a step",
            k,
            "use -k 1 or more, or --method none",
        )
    method = method or ("peagle" if head.config.parallel else "eagle3")
    if method not in METHODS:
        raise InputError(
            "method", f"must be one of {', '.join(METHODS)} or none", method, "choose one of them"
        )
    if method == "peagle" and not head.config.parallel:
        raise InputError(
            "drafter",
            "parallel drafting needs a mask token and mask_hidden",
            "a head without them",
            "use --method eagle3",
        )
    return METHODS[method](head.graph, head.config, k)


def check_fit(target: Model, head: Model, where="drafter") -> None:
    """Raises InputError where a head was made for another target."""
    t, h = target.config, head.config
    if h.target_dim != t.dim:
        raise InputError(
            where,
            f"the head must read taps of the target's width {t.dim}",
            h.target_dim,
            "use the target it was trained on",
        )
    if h.vocab != t.vocab:
        raise InputError(
            where,
            f"the head's vocabulary must be the target's, {t.vocab} tokens",
            h.vocab,
            "use the target it was trained on",
        )
    if tuple(h.aux_hidden_state_layers) != tuple(t.aux_hidden_state_layers):
        raise InputError(
            where,
            f"the target must be loaded with the head's taps {list(h.aux_hidden_state_layers)}",
            list(t.aux_hidden_state_layers),
            "pass them to load_target",
        )


def generate(
    target: Model,
    drafter: Model | Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    k: int | None = None,
    method: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    sample_drafts: bool = True,
    stop_ids: Sequence[int] | None = None,
    cache_size: int | None = None,
    draft_params=None,
    prefill_chunk: int | None = None,
    sliding_cache: bool = False,
) -> list[Generation]:
    """Continues every prompt in one batch; greedy output is the target's own, token for token, whatever drafts.

    Args:
      target: from `load_target`, with the drafter's taps.
      drafter: a head from `load_drafter`, a custom `Drafter` (with `draft_params`), or None for plain decoding.
      prompts: token ids, at least one each.
      k: tokens drafted a step; None takes what the head was trained for, but at most 7, the best K published heads have.
      method: "peagle", "eagle3" or None (what the head was made for).
      max_new_tokens: a row's limit.
      temperature, top_k, top_p: sampling; temperature 0 is greedy.
      seed: one, from which each row's follows (seed + row), or one a prompt.
      sample_drafts: with a temperature, sample the drafts as well (True) or draft argmaxes (False). Both are exact.
      stop_ids: a row ends with the first of these; None takes the target's end-of-sequence ids, () none.
      slots: size of the cache in tokens; None makes it fit.
      prefill_chunk: prompt tokens read at once; None reads all, or SLIDING_CHUNK with `sliding_cache`.
      sliding_cache: layers with a sliding window keep no more than it and a chunk; the same answers from less memory.

    Raises:
      InputError: a prompt is empty, holds an unknown id, or does not fit the context, the cache or the memory; K < 1; a drafter
        that does not fit.
    """
    if isinstance(drafter, Model):
        check_fit(target, drafter)
        k = min(drafter.config.num_depths or MOST_DEPTHS, MOST_DEPTHS) if k is None else k
        draft_params, drafter = drafter.params, make_drafter(drafter, k, method)
    depth = drafter.k if drafter else 0
    check_prompts(prompts, target.config, max_new_tokens, depth, cache_size)
    lengths = np.array([len(p) for p in prompts], np.int32)
    width = _round_up(int(lengths.max()))
    if cache_size is None:
        cache_size = cache_size_for(prompts, max_new_tokens, depth)
    padded = np.zeros((len(prompts), min(width, cache_size)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    stops = np.asarray(target.config.stop_ids if stop_ids is None else stop_ids, np.int32)
    seeds = [seed + i for i in range(len(prompts))] if isinstance(seed, int) else seed
    sampling = sampling_params(len(prompts), temperature, top_k, top_p, seeds)
    if prefill_chunk is not None and prefill_chunk < 1:
        raise InputError(
            "prefill_chunk", "at least one token must be read at once", prefill_chunk, "raise it"
        )
    chunk = SLIDING_CHUNK if prefill_chunk is None and sliding_cache else prefill_chunk
    spec = DecodeSpec(
        target.graph,
        target.config,
        drafter,
        cache_size,
        sample_drafts and sampling is not None,
        chunk,
        sliding_cache,
    )
    mesh = mesh_of(target.params)
    parts = 1 if mesh is None else mesh.size
    check_cache(
        target.config.cache_shapes(),
        len(prompts),
        cache_size,
        target.config.kept_dtype,
        spec.block(padded.shape[1]),
        parts,
    )
    limits = np.full(len(prompts), max_new_tokens, np.int32)
    if mesh is not None:  # in NumPy, and replicated: several processes may hold parts of the target
        draft_params = jax.device_put(draft_params, NamedSharding(mesh, PartitionSpec()))
    with full_precision(target), contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        ends = stops if len(stops) else np.array([-1], np.int32)
        state = run(spec, target.params, draft_params, padded, lengths, limits, ends, sampling)
    return _collect(prompts, state, depth, set(stops.tolist()))


def full_precision(model: Model):
    """A context in which float32 products are float32: on GPUs they have 10 bits of mantissa unless asked for more.

    Losslessness is a float32 rule; a model in fewer bits is computed as JAX does by default.
    """
    return jax.default_matmul_precision(
        "highest" if jnp.dtype(model.config.dtype) == jnp.float32 else None
    )


def cache_size_for(prompts: Sequence[Sequence[int]], max_new_tokens: int, k: int) -> int:
    """Size of the cache that `generate` makes when none is named: calls of equal size share a compiled program."""
    return _round_up(_round_up(max(map(len, prompts))) + max_new_tokens + k)


def _collect(prompts, state, depth: int, stops: set[int]) -> list[Generation]:
    output, is_draft, length, drafts, accepted = jax.device_get(
        (state.output, state.is_draft, state.length, state.num_drafts, state.num_accepted_per_pos)
    )
    answers = []
    for i, prompt in enumerate(prompts):
        ids = output[i, : length[i]].tolist()
        steps = int(drafts[i]) if depth else 0
        answers.append(
            Generation(
                list(prompt),
                ids,
                "stop" if ids[-1] in stops else "length",
                is_draft[i, : length[i]].tolist(),
                steps,
                steps * depth,
                accepted[i].tolist(),
            )
        )
    return answers


def check_prompts(prompts, config, new: int, depth: int, cache_size: int | None) -> None:
    """Raises InputError where a request cannot be served by a target of this `config`."""
    if not prompts:
        raise InputError("prompts", "at least one prompt is needed", "none", "give a prompt")
    if new < 1:
        raise InputError("max_new_tokens", "at least one token must be wanted", new, "ask for more")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(
                f"prompt {i}",
                "must have at least one token",
                "an empty one",
                "give it text, or a start token",
            )
        if bad := [t for t in prompt if not 0 <= t < config.vocab]:
            raise InputError(
                f"prompt {i}",
                f"token ids must lie in 0..{config.vocab - 1}",
                bad[0],
                "use the target's own tokenizer",
            )
        if len(prompt) + new > config.context:
            raise InputError(
                f"prompt {i}",
                f"prompt + new tokens must fit the target's context of {config.context} tokens",
                f"{len(prompt)} + {new}",
                "shorten it, or ask for fewer tokens",
            )
        if cache_size is not None and len(prompt) + new + depth > cache_size:
            raise InputError(
                f"prompt {i}",
                f"prompt + new tokens + K must fit the cache of {cache_size} slots",
                f"{len(prompt)} + {new} + {depth}",
                "shorten it, ask for fewer tokens, or raise the cache",
            )


def _round_up(n: int) -> int:
    return -(-n // BUCKET) * BUCKET
