"""What decoding will reach on a device, with and without a draft head: `peagle plan`.

A step is the sum of its forwards. Each takes the time to read its bytes or to multiply, whichever
is longer (on a CPU both, one after the other), and what its layers cost besides. A step of
speculation costs `Device.pass_seconds` for every forward of the head, and once for the acceptance.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from peagle_jax.pipelines.devices import Device
from peagle_jax.pipelines.model_costs import ModelCosts, Work, forward_work

PLAIN, EAGLE3, PEAGLE = "none", "eagle3", "peagle"
MAX_CONCURRENCY = 1024  # up to which it is looked for where speculation pays
STEP_OF_INPUTS = 1.2  # the factor by which inputs are changed to see what they do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """What decodes: a target, and heads by the method that they draft with.

    Attributes:
      target: its costs.
      heads: costs by method, "eagle3" and "peagle".
      rates: by method, which share of all steps accepts the draft at each position.
      routing: of experts, see `model_costs.expected_experts`.
    """

    target: ModelCosts
    heads: Mapping[str, ModelCosts]
    rates: Mapping[str, Sequence[float]]
    routing: str = "even"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to decode.

    Attributes:
      method: "none", "eagle3" or "peagle".
      k: tokens drafted per step.
      acceptance_length: tokens of a sequence per step.
      step_seconds: of a step of all sequences.
      tokens_per_second: of all sequences.
      bound_by: what takes most of the step: "bytes", "arithmetic" or "launches".
    """

    method: str
    k: int
    acceptance_length: int | float
    step_seconds: int | float
    tokens_per_second: int | float
    bound_by: str


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """The plan at one concurrency and context.

    Attributes:
      concurrency: sequences that are decoded together.
      context: tokens of each, on average.
      plain: without a head.
      best: by method, with the K that is fastest.
      choices: by method, for every K.
      memory: bytes of weights and caches.
      fits: whether the device has as many; None: unknown.
      sensitivity: by input, how the best speedup changes where the input is a fifth larger (or
        where routing is alike); the largest change first.
    """

    concurrency: int
    context: int
    plain: Choice
    best: dict[str, Choice]
    choices: dict[str, list[Choice]]
    memory: int | float
    fits: bool | None
    sensitivity: dict[str, float]


def acceptance_length(rates: Sequence[float], k: int) -> float:
    """Tokens per step: the target's own one, and of each draft the share that is accepted."""
    return 1 + sum(rates[:k])


def seconds_of(work: Work, device: Device) -> tuple[float, float, float]:
    """(reading, multiplying, everything else) of a forward, each alone."""
    reading = work.bytes / device.bandwidth
    reading += work.cache_bytes / (device.cache_bandwidth or device.bandwidth)
    multiplying = work.flops / device.rates[work.number_bytes]
    return reading, multiplying, work.layers * (device.layer_seconds or 0.0)


def drafting_work(
    head: ModelCosts, method: str, k: int, length: int | float, concurrency: int, context: int
) -> list[Work]:
    """The forwards of the head in a step.

    P-EAGLE reads the tokens that were committed and K - 1 placeholders at once. EAGLE-3 reads the
    committed ones, and then K - 1 times one token, without fusion.

    Args:
      length: tokens that were committed for each sequence, on average.
    """
    forward = functools.partial(forward_work, head, sequences=concurrency, context=context)
    if method == PEAGLE:
        rows = concurrency * (length + k - 1)
        return [forward(rows=rows, outputs=concurrency * k, fused=rows)]
    rows = concurrency * length
    first = forward(rows=rows, outputs=concurrency, fused=rows)
    later = forward(rows=concurrency, outputs=concurrency)
    return [first] + [later] * (k - 1)


def plan_step(
    target: ModelCosts,
    head: ModelCosts | None,
    device: Device,
    *,
    method: str,
    k: int,
    length: int | float,
    concurrency: int,
    context: int,
    routing: str = "even",
) -> Choice:
    """A step of all sequences.

    Args:
      target: its costs.
      head: likewise; None: plain decoding, with K = 0.
      length: tokens that a step commits for each sequence, on average.
      concurrency: sequences.
      context: tokens in the caches of each.
      routing: see `model_costs.expected_experts`.
    """
    rows = concurrency * (k + 1)
    verification = forward_work(
        target,
        rows=rows,
        outputs=rows,
        sequences=concurrency,
        context=context,
        routing=routing,
    )
    drafting = []
    if head is not None:
        drafting = drafting_work(head, method, k, length, concurrency, context)
    passes = len(drafting) + 1 if drafting else 0
    parts = [seconds_of(work, device) for work in [verification, *drafting]]
    merge = max if device.overlaps else sum
    rest = sum(other for _, _, other in parts) + passes * device.pass_seconds
    seconds = sum(merge((reading, multiplying)) for reading, multiplying, _ in parts) + rest
    shares = {
        "bytes": sum(reading for reading, _, _ in parts),
        "arithmetic": sum(multiplying for _, multiplying, _ in parts),
        "launches": rest,
    }
    bound_by = max(shares, key=lambda name: shares[name])
    return Choice(method, k, length, seconds, concurrency * length / seconds, bound_by)


def choose(
    models: Models, device: Device, method: str, k: int, concurrency: int, context: int
) -> Choice:
    """What a method does with a K."""
    return plan_step(
        models.target,
        models.heads.get(method),
        device,
        method=method,
        k=k,
        length=1.0 if method == PLAIN else acceptance_length(models.rates[method], k),
        concurrency=concurrency,
        context=context,
        routing=models.routing,
    )


def best_choices(
    models: Models, device: Device, concurrency: int, context: int
) -> tuple[Choice, dict[str, Choice], dict[str, list[Choice]]]:
    """(plain decoding, the fastest K of each method, every K of each method)."""
    plain = choose(models, device, PLAIN, 0, concurrency, context)
    choices = {
        method: [
            choose(models, device, method, k, concurrency, context)
            for k in range(1, len(models.rates[method]) + 1)
        ]
        for method in models.heads
    }
    best = {
        method: max(of_method, key=lambda choice: choice.tokens_per_second)
        for method, of_method in choices.items()
    }
    return plain, best, choices


def best_speedup(models: Models, device: Device, concurrency: int, context: int) -> float:
    """Of the fastest method over plain decoding."""
    plain, best, _ = best_choices(models, device, concurrency, context)
    fastest = max(choice.tokens_per_second for choice in best.values())
    return fastest / plain.tokens_per_second


def sensitivity(models: Models, device: Device, concurrency: int, context: int) -> dict[str, float]:
    """How the best speedup changes with each input, as a share; the largest change first.

    Inputs are made a fifth larger, one at a time; accepted shares are kept at 1 or below. Routing
    becomes "alike".
    """
    factor = STEP_OF_INPUTS
    rates = {size: rate * factor for size, rate in device.rates.items()}
    raised = {
        method: [min(1.0, rate * factor) for rate in of_method]
        for method, of_method in models.rates.items()
    }
    replace = dataclasses.replace
    changed = {
        "acceptance": (replace(models, rates=raised), device, context),
        "bandwidth": (models, replace(device, bandwidth=device.bandwidth * factor), context),
        "products": (models, replace(device, rates=rates), context),
        "context": (models, device, round(context * factor)),
    }
    if not device.is_floor:
        layer, forward = (device.layer_seconds or 0.0) * factor, device.pass_seconds * factor
        changed["cost of layers"] = models, replace(device, layer_seconds=layer), context
        changed["cost of passes"] = models, replace(device, pass_seconds=forward), context
    if models.target.experts is not None and models.routing == "even":
        changed["routing alike"] = replace(models, routing="alike"), device, context
    now = best_speedup(models, device, concurrency, context)
    effects = {
        name: best_speedup(other_models, other_device, concurrency, other_context) / now - 1
        for name, (other_models, other_device, other_context) in changed.items()
    }
    return dict(sorted(effects.items(), key=lambda item: -abs(item[1])))


def concurrencies_that_pay(
    models: Models, device: Device, method: str, context: int
) -> list[tuple[int, int]]:
    """Ranges of concurrency, in powers of two, at which the best K is faster than plain decoding.

    Returns:
      (first, last) of each range. A mixture of experts may have two: a few rows read more experts
      with every draft, many rows read all experts anyway.
    """
    ranges: list[tuple[int, int]] = []
    concurrency, is_open = 1, False
    while concurrency <= MAX_CONCURRENCY:
        plain, best, _ = best_choices(models, device, concurrency, context)
        pays = best[method].tokens_per_second > plain.tokens_per_second
        if pays and is_open:
            ranges[-1] = ranges[-1][0], concurrency
        elif pays:
            ranges.append((concurrency, concurrency))
        is_open = pays
        concurrency *= 2
    return ranges


def plan_row(
    models: Models,
    device: Device,
    concurrency: int,
    context: int,
    cache_bytes: int | float,
) -> PlanRow:
    """The plan at one concurrency and context.

    Args:
      cache_bytes: of the keys and values of all sequences, of the target and its largest head.
    """
    plain, best, choices = best_choices(models, device, concurrency, context)
    heads = max((head.weight_bytes for head in models.heads.values()), default=0.0)
    memory = models.target.weight_bytes + heads + cache_bytes
    return PlanRow(
        concurrency=concurrency,
        context=context,
        plain=plain,
        best=best,
        choices=choices,
        memory=memory,
        fits=None if device.memory is None else memory <= device.memory,
        sensitivity=sensitivity(models, device, concurrency, context),
    )
