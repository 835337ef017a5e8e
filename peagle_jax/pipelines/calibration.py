"""Calibration of a confidence head: what its logits mean, by what decoding accepts.

Prompts are decoded with the head, and every step tells for each position whose drafts before it
were accepted whether its own draft was. Of these the scale and the shift of the position's logits
are fitted by logistic regression (Platt, 1999), once where decoding is greedy and once at
temperature 1.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle_jax import weights
from peagle_jax.checkpoints import head_writing
from peagle_jax.checkpoints.pair import load_drafter_for
from peagle_jax.checkpoints.runs import open_head
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.loop import propose, step
from peagle_jax.decode.prefill import num_positions, prefill, run_to_end
from peagle_jax.decode.requests import Request, check_prompts
from peagle_jax.decode.rows import Row, row_options
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.draft.confidence import KINDS, Calibration, Scaling
from peagle_jax.draft.head import HeadConfig
from peagle_jax.layers import full_precision
from peagle_jax.types import DecodeState, InputError, Model, Params, RowOptions

TEMPERATURE = {"greedy": 0.0, "sampled": 1.0}
# Weight of the logits as they are against a position's outcomes, where these are few.
RIDGE = 1.0
MOST_ROUNDS = 100  # of Newton's method, which takes about six
LEAST_STEP = 1e-10  # of a round, as a share of Newton's own
NUM_BINS = 15  # of confidences, of equal width


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Steps of decoding, with what a confidence head said of them.

    Attributes:
      logits: of every position, without calibration.
      num_accepted: drafts that the step accepted, 0 to K.
      prompt: the number of the prompt that the step belongs to.
    """

    logits: Float[np.ndarray, "steps K"]
    num_accepted: Int[np.ndarray, " steps"]
    prompt: Int[np.ndarray, " steps"]

    def of_position(self, i: int) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
        """Of the steps whose drafts before position i were accepted: logits, and whether it was."""
        reached = self.num_accepted >= i
        return self.logits[reached, i], self.num_accepted[reached] > i


def collect(
    target: Model,
    head: Model,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    kind: str,
    max_new_tokens: int,
    batch_size: int = 32,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> Outcomes:
    """Decodes prompts with a head, step by step.

    Args:
      target: the head's target.
      head: with a confidence head.
      prompts: token ids.
      k: drafts of a step.
      kind: "greedy", or "sampled" at temperature 1.
      max_new_tokens: limit of every answer, which ends with the target's stop tokens, too.
      batch_size: prompts that are decoded together.
      seed: of the first prompt's samples; the next has the next one.
      names: where each prompt comes from, for errors.

    Raises:
      InputError: the head has no confidence head, or a prompt does not fit the target.
    """
    check_has_confidence(head.config, "the head")
    check_prompts(prompts, target.config, max_new_tokens, k, None, names)
    spec = DecodeSpec(target.graph, target.config, make_drafter(head, k), sample_drafts=True)
    parts = []
    for first in range(0, len(prompts), batch_size):
        numbers = range(first, min(first + batch_size, len(prompts)))
        requests = [
            Request(
                prompt=prompts[i],
                max_new_tokens=max_new_tokens,
                temperature=TEMPERATURE[kind],
                seed=seed + i,
            )
            for i in numbers
        ]
        with full_precision(target):
            part = _collect_batch(spec, target, head, requests)
        parts.append(dataclasses.replace(part, prompt=part.prompt + first))
    arrays = [field.name for field in dataclasses.fields(Outcomes)]
    return Outcomes(*(np.concatenate([getattr(part, name) for part in parts]) for name in arrays))


def _collect_batch(
    spec: DecodeSpec, target: Model, head: Model, requests: Sequence[Request]
) -> Outcomes:
    """The steps of requests that are decoded together."""
    stop_ids = tuple(target.config.stop_ids)  # as users' requests end
    rows = [Row(i, request, dict.fromkeys(stop_ids)) for i, request in enumerate(requests)]
    options = row_options(rows, target.config.vocab)
    lengths = np.array([len(request.prompt) for request in requests], np.int32)
    prompts = np.zeros((len(requests), lengths.max()), np.int32)
    for row, request in zip(prompts, requests, strict=True):
        row[: len(request.prompt)] = request.prompt
    longest = int(lengths.max())
    # a row whose last step went past its limit is still verified beside the others
    needed = longest + requests[0].max_new_tokens + 2 * (spec.k + 1)
    slots = max(needed, num_positions(spec, longest))
    state = run_to_end(prefill(spec, slots, target.params, head.params, prompts, lengths, options))
    steps = []
    while not np.asarray(state.done).all():
        state, *seen = _observed_step(spec, target.params, head.params, options, state)
        steps.append(jax.device_get(seen))
    if not steps:  # every answer ended with its first token
        nothing = np.zeros(0, np.int32)
        return Outcomes(np.zeros((0, spec.k), np.float32), nothing, nothing)
    logits, num_accepted, is_running = map(np.array, zip(*steps, strict=True))
    prompt = np.broadcast_to(np.arange(len(requests)), is_running.shape)
    return Outcomes(logits[is_running], num_accepted[is_running], prompt[is_running])


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="state")
def _observed_step(
    spec: DecodeSpec,
    target_params: Params,
    draft_params: Any,
    options: RowOptions,
    state: DecodeState,
) -> tuple[DecodeState, Float[Array, "B K"], Int[Array, " B"], Bool[Array, " B"]]:
    """A step; the logits of its confidences, what it accepted, and which rows it was taken for."""
    *_, logits = propose(spec, draft_params, options.sampling, state)
    assert logits is not None
    new = step(spec, target_params, draft_params, options, state)
    accepted = new.num_accepted_per_pos - state.num_accepted_per_pos
    return new, logits, accepted.sum(axis=1), ~state.done


def check_has_confidence(config: HeadConfig, where: object) -> None:
    """Raises InputError unless a head has a confidence head.

    Args:
      where: the head's folder, for the error.
    """
    if not config.confidence:
        rule, got = "a calibration needs a head with a confidence head", "one without"
        next_step = "train one: confidence: {train_alone: true} and init_from in a recipe"
        raise InputError(where, rule, got, next_step)


# ---------------------------------------------------------------- fitting


def fit(outcomes: Outcomes) -> Scaling:
    """The scale and the shift of every position."""
    return tuple(fit_position(*outcomes.of_position(i)) for i in range(outcomes.logits.shape[1]))


def fit_position(
    logits: Float[np.ndarray, " n"], accepted: Bool[np.ndarray, " n"]
) -> tuple[float, float]:
    """The scale and the shift with the least cross-entropy, by Newton's method.

    RIDGE / 2 times their squared distance from 1 and 0 is added: a position that was never reached
    keeps its logits. Of logits that are far too sure Newton's own steps lead away from the least
    loss, so that a step is halved until it lowers the loss (Armijo's rule).
    """
    x = np.stack([logits.astype(np.float64), np.ones(len(logits))], axis=1)
    start = found = np.array([1.0, 0.0])

    def loss(pair: np.ndarray) -> float:
        scaled = x @ pair
        entropy = (np.logaddexp(0, scaled) - accepted * scaled).sum()
        return float(entropy + RIDGE / 2 * ((pair - start) ** 2).sum())

    for _ in range(MOST_ROUNDS):
        confidence = sigmoid(x @ found)
        gradient = x.T @ (confidence - accepted) + RIDGE * (found - start)
        curvature = (x.T * (confidence * (1 - confidence))) @ x + RIDGE * np.eye(2)
        change = np.linalg.solve(curvature, gradient)
        size, before, slope = 1.0, loss(found), float(gradient @ change)
        while size > LEAST_STEP and loss(found - size * change) > before - 1e-4 * size * slope:
            size /= 2
        found = found - size * change
        if np.abs(size * change).max() < 1e-9:
            break
    return float(found[0]), float(found[1])


def sigmoid(x: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """1 / (1 + exp(-x)), of any x."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def calibration_error(
    confidence: Float[np.ndarray, " n"], accepted: Bool[np.ndarray, " n"]
) -> float:
    """Expected calibration error (arXiv:1706.04599): over bins of equal width, the mean distance
    between the mean confidence and the share that was accepted, weighed by what lies in a bin."""
    bins = reliability(confidence, accepted)
    return float(sum(n * abs(said - found) for said, found, n in bins) / max(len(accepted), 1))


def reliability(
    confidence: Float[np.ndarray, " n"], accepted: Bool[np.ndarray, " n"]
) -> list[tuple[float, float, int]]:
    """Of every bin that is not empty: mean confidence, share that was accepted, and how many."""
    which = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    groups = [which == b for b in range(NUM_BINS)]
    return [
        (float(confidence[group].mean()), float(accepted[group].mean()), int(group.sum()))
        for group in groups
        if group.any()
    ]


# ---------------------------------------------------------------- the command


def calibrate_head(
    target: Model,
    path: str | Path,
    out: str | Path,
    prompts: Sequence[Sequence[int]],
    *,
    k: int | None,
    max_new_tokens: int,
    names: Sequence[str] | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Writes a head's folder again, with the calibration of its confidence head.

    Args:
      target: the head's target.
      path: the head's folder, or a training run.
      out: the folder to write.
      prompts: token ids of texts that the head was not trained on.
      k: drafts of a step; None for the K that the head was trained for.
      max_new_tokens: limit of every answer.
      names: where each prompt comes from, for errors.
      command: the command line, to be recorded.

    Returns:
      Of each kind of decoding the steps, and the calibration error before and after on these very
      prompts; on others it is larger.

    Raises:
      InputError: the head has no confidence head or cannot be read, `out` cannot be written, or a
        prompt does not fit.
    """
    state = open_head(path, target.config.layers)
    check_has_confidence(state.config, path)
    head_writing.check_expressible(state, path, "peagle_jax")
    weights.check_output(out)
    head = load_drafter_for(target, path)
    k = head.config.num_depths if k is None else k
    if k is None:
        rule = "the folder does not say which K the head was trained for"
        raise InputError(path, rule, "none", "give it with -k, for example -k 7")
    scalings, facts = {}, {}
    for kind in KINDS:
        seen = collect(
            target, head, prompts, k=k, kind=kind, max_new_tokens=max_new_tokens, names=names
        )
        if not len(seen.num_accepted):
            rule = "some answer must be longer than its first token"
            got = f"{max_new_tokens}, and no step with drafts"
            next_step = "give 64 or more, or other prompts"
            raise InputError("--max-new-tokens", rule, got, next_step)
        scalings[kind] = fit(seen)
        before, after = (pooled_error(seen, s) for s in (None, scalings[kind]))
        facts[f"{kind}: steps"] = len(seen.num_accepted)
        facts[f"{kind}: calibration error before"] = round(before, 4)
        facts[f"{kind}: calibration error after"] = round(after, 4)
    config = dataclasses.replace(state.config, confidence_calibration=Calibration(**scalings))
    head_writing.write_head(
        dataclasses.replace(state, config=config),
        out,
        checkpoint_format="peagle_jax",
        metadata={"command": command} if command else {},
    )
    return facts


def confidences(outcomes: Outcomes, scaling: Scaling | None) -> Float[np.ndarray, "steps K"]:
    """Of every step and position; with None those of the logits as they are."""
    logits = outcomes.logits.astype(np.float64)
    if scaling is None:
        return sigmoid(logits)
    scale, shift = np.array(scaling).T
    return sigmoid(scale * logits + shift)


def pooled_error(outcomes: Outcomes, scaling: Scaling | None) -> float:
    """The calibration error over all positions that were reached, together."""
    confidence, reached = confidences(outcomes, scaling), reached_positions(outcomes)
    return calibration_error(confidence[reached], accepted_positions(outcomes)[reached])


def reached_positions(outcomes: Outcomes) -> Bool[np.ndarray, "steps K"]:
    """Which positions of which steps have all drafts before them accepted."""
    return outcomes.num_accepted[:, None] >= np.arange(outcomes.logits.shape[1])


def accepted_positions(outcomes: Outcomes) -> Bool[np.ndarray, "steps K"]:
    """Which drafts were accepted."""
    return outcomes.num_accepted[:, None] > np.arange(outcomes.logits.shape[1])
