"""`generate`: token ids of prompts in, answers and acceptance counters out."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from peagle_jax.checkpoints.pair import check_fit
from peagle_jax.decode.drafters import METHODS, Drafter
from peagle_jax.decode.loop import DecodeSpec, run
from peagle_jax.decode.memory import check_cache
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.targets.config import TargetConfig
from peagle_jax.targets.sharding import mesh_of
from peagle_jax.types import DecodeState, InputError, Model

# K where none is given and the head was trained for more: the best K of AWS's published heads.
MAX_DEFAULT_K = 7
# Prompts and caches are padded to multiples of this, so that similar requests share a program.
BUCKET = 64  # tokens
# Prompt tokens per forward where ring caches are used and no chunk is given.
SLIDING_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one prompt. Counters are vLLM's.

    The last step is counted whole, with drafts that were accepted past the answer's end.

    Attributes:
      prompt_token_ids: the prompt, as it was given.
      output_token_ids: the answer, its stop token included; at least one token and at most
        `max_new_tokens`.
      finish_reason: "stop" after a stop token, "length" at the limit.
      is_draft: which output tokens are accepted drafts; as long as `output_token_ids`.
      num_drafts: speculative steps; 0 with plain decoding.
      num_draft_tokens: tokens drafted, K per step.
      num_accepted_per_pos: [K], in how many steps the draft at each position was accepted; [] with
        plain decoding.
    """

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    finish_reason: str
    is_draft: list[bool]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_per_pos: list[int]

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted drafts, over all steps and positions."""
        return sum(self.num_accepted_per_pos)

    @property
    def acceptance_length(self) -> float | None:
        """Of this answer alone; see the function `acceptance_length`."""
        return acceptance_length([self])


def acceptance_length(answers: Sequence[Generation]) -> float | None:
    """Tokens written per target forward: 1 + accepted / drafts, pooled over answers as in vLLM.

    Args:
      answers: from `generate`, of one call or of several.

    Returns:
      1 to K + 1; None where nothing was drafted.
    """
    num_drafts = sum(answer.num_drafts for answer in answers)
    if num_drafts == 0:
        return None
    return 1 + sum(answer.num_accepted_tokens for answer in answers) / num_drafts


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
    draft_params: Any = None,
    prefill_chunk: int | None = None,
    sliding_cache: bool = False,
) -> list[Generation]:
    """Continues every prompt, all in one batch. Drafting does not change the target's output.

    Greedy output equals plain greedy output token for token. Sampled output has the target's
    distribution (arXiv:2211.17192).

    Args:
      target: from `load_target`, with the draft head's aux hidden state layers.
      drafter: a draft head from `load_drafter`; or a `Drafter`, with its `draft_params`; or None
        for plain decoding.
      prompts: token ids, at least one per prompt.
      k: tokens drafted per step. None takes the K that the head was trained for, but at most 7,
        which is the best K of the published heads.
      method: how the head drafts, "peagle" or "eagle3". None takes what the head was made for.
      max_new_tokens: limit of every answer.
      temperature: 0 decodes greedily.
      top_k: sample among the k most probable tokens; 0 for all.
      top_p: sample among the most probable tokens whose probability sums to this; 1 for all.
      seed: one per prompt; or a single one, from which prompt i takes seed + i.
      sample_drafts: at a temperature above 0, sample the drafts (True) or draft argmaxes (False).
        The target's distribution is kept either way.
      stop_ids: an answer ends with the first of these. None takes the target's end-of-sequence
        tokens, () takes none.
      cache_size: positions that the target's KV cache may grow to. None: as many as needed.
      draft_params: parameters of a `Drafter`; unused with a draft head, which has its own.
      prefill_chunk: prompt tokens per forward. None takes whole prompts, or 512 tokens with
        `sliding_cache`.
      sliding_cache: give layers with a sliding window a ring cache of window + chunk positions.
        The answers are the same, from less memory.

    Returns:
      One answer for each prompt, in the order of the prompts.

    Raises:
      InputError: a prompt is empty, has an unknown token, or does not fit the target's context,
        the cache or the memory; a sampling option, `k` or `prefill_chunk` is out of range; the
        head was made for another target or cannot draft by `method`.
    """
    if isinstance(drafter, Model):
        check_fit(target, drafter)
        draft_params = drafter.params
        drafter = make_drafter(drafter, _default_k(drafter) if k is None else k, method)
    k = drafter.k if drafter else 0
    check_prompts(prompts, target.config, max_new_tokens, k, cache_size)
    if cache_size is None:
        cache_size = cache_size_for(prompts, max_new_tokens, k)
    seeds = [seed + i for i in range(len(prompts))] if isinstance(seed, int) else seed
    sampling = sampling_params(len(prompts), temperature, top_k, top_p, seeds)
    spec = DecodeSpec(
        target=target.graph,
        target_config=target.config,
        drafter=drafter,
        cache_size=cache_size,
        sample_drafts=sample_drafts and sampling is not None,
        chunk=_chunk_size(prefill_chunk, sliding_cache),
        sliding_cache=sliding_cache,
    )
    padded, lengths = _pad(prompts, cache_size)
    _check_memory(spec, target, padded)
    stops = target.config.stop_ids if stop_ids is None else stop_ids
    state = _run_on_devices(
        spec,
        target,
        draft_params,
        padded,
        lengths,
        np.full(len(prompts), max_new_tokens, np.int32),
        np.asarray(stops if len(stops) else [-1], np.int32),
        sampling,
    )
    return _collect(prompts, state, k, set(stops))


# ---------------------------------------------------------------- the steps of `generate`


def _default_k(head: Model) -> int:
    """K where none is given."""
    trained_for = head.config.num_depths or MAX_DEFAULT_K
    return min(trained_for, MAX_DEFAULT_K)


def _chunk_size(prefill_chunk: int | None, sliding_cache: bool) -> int | None:
    """Prompt tokens per forward; None for whole prompts."""
    if prefill_chunk is not None and prefill_chunk < 1:
        next_step = f"leave out prefill_chunk, or use {SLIDING_CHUNK}"
        raise InputError("prefill_chunk", "must be 1 or more", prefill_chunk, next_step)
    if prefill_chunk is None and sliding_cache:
        return SLIDING_CHUNK
    return prefill_chunk


def cache_size_for(prompts: Sequence[Sequence[int]], max_new_tokens: int, k: int) -> int:
    """The cache size that `generate` chooses: calls with equal sizes share a compiled program."""
    return _round_up(_round_up(max(map(len, prompts))) + max_new_tokens + k)


def _round_up(tokens: int) -> int:
    """To the next multiple of BUCKET."""
    return -(-tokens // BUCKET) * BUCKET


def _pad(prompts: Sequence[Sequence[int]], cache_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts in one array [B T] with zeros after each, and their lengths [B]."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = min(_round_up(int(lengths.max())), cache_size)
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded, lengths


def _check_memory(spec: DecodeSpec, target: Model, padded: np.ndarray) -> None:
    """Raises InputError where the target's cache would not fit the memory of its devices."""
    batch, width = padded.shape
    mesh = mesh_of(target.params)
    check_cache(
        target.config.cache_shapes(),
        batch,
        spec.cache_size,
        target.config.kv_cache_dtype,
        spec.block(width),
        parts=1 if mesh is None else mesh.size,
    )


def _run_on_devices(
    spec: DecodeSpec, target: Model, draft_params: Any, *arguments: Any
) -> DecodeState:
    """`loop.run` in the target's precision, on the mesh that its parameters are spread over.

    Inputs are NumPy arrays, and the head's parameters are replicated, because each of several
    processes may hold another part of the target.
    """
    mesh = mesh_of(target.params)
    on_mesh = contextlib.nullcontext()
    if mesh is not None:
        on_mesh = jax.set_mesh(mesh)
        draft_params = jax.device_put(draft_params, NamedSharding(mesh, PartitionSpec()))
    with full_precision(target), on_mesh:
        return run(spec, target.params, draft_params, *arguments)


def full_precision(model: Model) -> contextlib.AbstractContextManager:
    """A context in which the products of a float32 model are computed in float32.

    GPUs round the factors of float32 products to 10 bits of mantissa unless told otherwise, and
    lossless decoding is promised for float32. A model in fewer bits is computed as JAX does by
    default.
    """
    is_float32 = jnp.dtype(model.config.dtype) == jnp.float32
    return jax.default_matmul_precision("highest" if is_float32 else None)


def _collect(
    prompts: Sequence[Sequence[int]], state: DecodeState, k: int, stop_ids: set[int]
) -> list[Generation]:
    """Reads the results from the device, in one transfer."""
    output, is_draft, lengths, steps, accepted = jax.device_get(
        (state.output, state.is_draft, state.length, state.num_drafts, state.num_accepted_per_pos)
    )
    answers = []
    for row, prompt in enumerate(prompts):
        answer = slice(lengths[row])
        token_ids = output[row, answer].tolist()
        num_drafts = int(steps[row]) if k else 0
        answers.append(
            Generation(
                prompt_token_ids=list(prompt),
                output_token_ids=token_ids,
                finish_reason="stop" if token_ids[-1] in stop_ids else "length",
                is_draft=is_draft[row, answer].tolist(),
                num_drafts=num_drafts,
                num_draft_tokens=num_drafts * k,
                num_accepted_per_pos=accepted[row].tolist(),
            )
        )
    return answers


# ---------------------------------------------------------------- checks of the input


def make_drafter(head: Model, k: int, method: str | None = None) -> Drafter:
    """A drafter that runs a draft head.

    Args:
      k: tokens drafted per step.
      method: "peagle" or "eagle3". None takes "peagle" for a head that can draft in parallel.

    Raises:
      InputError: the head cannot draft by that method, or K is below 1.
    """
    if k < 1:
        next_step = "use -k 1 or more, or --method none for plain decoding"
        raise InputError("K", "at least one token must be drafted per step", k, next_step)
    if method is None:
        method = "peagle" if head.config.parallel else "eagle3"
    if method not in METHODS:
        rule = f"must be one of {', '.join(METHODS)} or none"
        raise InputError("method", rule, method, "use peagle for a head with a mask token")
    if method == "peagle" and not head.config.parallel:
        rule = "parallel drafting needs a mask token and mask_hidden"
        raise InputError("method", rule, "peagle, and a head without them", "use eagle3")
    return METHODS[method](head.graph, head.config, k)


def check_prompts(
    prompts: Sequence[Sequence[int]],
    config: TargetConfig,
    max_new_tokens: int,
    k: int,
    cache_size: int | None,
) -> None:
    """Checks that a target can serve a request.

    Args:
      config: the target's.
      k: draft tokens per step; 0 for plain decoding.
      cache_size: positions of the cache; None where `generate` chooses it.

    Raises:
      InputError: there is no prompt; a prompt is empty, has a token that the target does not know,
        or does not fit the context or the cache together with its answer.
    """
    if not prompts:
        raise InputError("prompts", "at least one prompt is needed", "none", "give a prompt")
    if max_new_tokens < 1:
        raise InputError("max_new_tokens", "must be 1 or more", max_new_tokens, "use 128")
    for i, prompt in enumerate(prompts):
        _check_prompt(f"prompt {i}", prompt, config, max_new_tokens, k, cache_size)


def _check_prompt(
    where: str,
    prompt: Sequence[int],
    config: TargetConfig,
    max_new_tokens: int,
    k: int,
    cache_size: int | None,
) -> None:
    """Raises InputError where one prompt cannot be served."""
    if not len(prompt):
        next_step = "give it text, or a start token"
        raise InputError(where, "must have at least one token", "an empty one", next_step)
    unknown = [token for token in prompt if not 0 <= token < config.vocab]
    if unknown:
        rule = f"token ids must lie in 0..{config.vocab - 1}"
        raise InputError(where, rule, unknown[0], "use the target's own tokenizer")
    if len(prompt) + max_new_tokens > config.context:
        rule = f"prompt + new tokens must fit the target's context of {config.context} tokens"
        got = f"{len(prompt)} + {max_new_tokens}"
        raise InputError(where, rule, got, "shorten the prompt, or ask for fewer new tokens")
    needed = len(prompt) + max_new_tokens + k
    if cache_size is not None and needed > cache_size:
        rule = f"prompt + new tokens + K must fit the cache of {cache_size} slots"
        got = f"{len(prompt)} + {max_new_tokens} + {k}"
        next_step = f"raise cache_size to {needed}, or ask for fewer new tokens"
        raise InputError(where, rule, got, next_step)
