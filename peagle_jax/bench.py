"""Timing, acceptance and exactness of decoding, as one record a measurement."""

import dataclasses
import functools
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.decode.drafters import Drafter
from peagle_jax.decode.generate import Generation, acceptance_length, generate, make_drafter
from peagle_jax.layers import CachedAttention
from peagle_jax.types import DraftState, Model

NEAR_TIE = 1e-4  # top-two logit gap under which float32 may pick either token (house rule)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Answers of two decoders to the same prompts."""

    same: int
    near_ties: int  # differ first where the target's top two logits lie within NEAR_TIE
    different: int

    @property
    def lossless(self) -> bool:
        return self.different == 0


def compare(target: Model, prompts, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Comparison:
    """Token for token; a first difference counts as a near tie only if the target itself was within NEAR_TIE there."""
    same = ties = different = 0
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        if list(a) == list(b):
            same += 1
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is not None and _gap(target, [*prompt, *a[:at]]) < NEAR_TIE:
            ties += 1
        else:
            different += 1
    return Comparison(same, ties, different)


def _gap(target: Model, context: list[int]) -> float:
    """Difference of the target's two largest logits after `context`."""
    positions = jnp.arange(len(context))[None]
    module = target.bind(target.params)
    out, _ = module(jnp.asarray([context]), positions, CachedAttention(positions), target.config.empty_cache(1, len(context)))
    second, first = np.sort(np.asarray(module.unembed(out.hidden[0, -1:])[0]))[-2:]
    return float(first - second)


def provenance(command: str | None = None) -> dict:
    """Where a number comes from: machine, versions, commit, command."""
    here = Path(__file__).parent
    git = lambda *args: subprocess.run(["git", *args], cwd=here, capture_output=True, text=True).stdout.strip()  # noqa: E731
    device = jax.devices()[0]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": git("rev-parse", "--short", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain")), "command": command or " ".join(["peagle", *sys.argv[1:]]),
        "device": device.device_kind if device.platform != "cpu" else f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(), **{name: version(name) for name in ("jax", "flax")},
    }  # fmt: skip


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median wall seconds of `call`, whose result is waited for; the first call compiles and is not counted."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# ---------------------------------------------------------------- end to end


def measure(
    target: Model, head: Model | None, prompts, *, k: int, method: str | None, new_tokens: int, repeats: int = 3
) -> tuple[dict, list[Generation]]:
    """Tokens per second of greedy decoding of one batch, whole call, and what was accepted.

    Returns:
      A record without provenance, and the answers.
    """
    call = lambda: generate(target, head, prompts, k=k, method=method, max_new_tokens=new_tokens, stop_ids=())  # noqa: E731
    answers = call()  # compiles
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        answers = call()
        seconds.append(time.perf_counter() - start)
    drafts = sum(a.num_drafts for a in answers)
    record = {
        "method": method or "none", "k": k if head else 0, "batch": len(prompts), "new_tokens": new_tokens,
        "seconds": seconds, "tokens_per_second": sum(len(a.output_token_ids) for a in answers) / statistics.median(seconds),
        "acceptance_length": acceptance_length(answers), "num_drafts": drafts,
        "accepted_per_position": (np.sum([a.accepted_per_position for a in answers], axis=0) / max(drafts, 1)).tolist() if head else [],
        "repeated_4grams": repeated_share([a.output_token_ids for a in answers]),
    }  # fmt: skip
    return record, answers


def repeated_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text: looping text flatters a drafter."""
    grams = again = 0
    for ids in texts:
        seen: set = set()
        for gram in zip(*(ids[i:] for i in range(n)), strict=False):
            grams, again = grams + 1, again + (gram in seen)
            seen.add(gram)
    return again / grams if grams else 0.0


# ---------------------------------------------------------------- the parts of a step


def drafting_seconds(
    head: Model, drafter: Drafter, *, batch: int, context: int, committed: int = 2, repeats: int = 5, steps: int = 20
) -> float:  # fmt: skip
    """Seconds to draft K tokens once, by `steps` drafts in one jitted loop, with a cache that holds `context` tokens.

    Every step takes in `committed` tokens (two: a common case) and rolls its cache back, so all steps cost the same.
    """
    slots = context + 4 * drafter.k + 8
    width = len(head.config.taps) * head.config.target_dim
    tokens = jnp.ones((batch, drafter.k + 1), jnp.int32)
    features = jnp.ones((batch, drafter.k + 1, width), head.config.dtype)
    count = jnp.full(batch, committed, jnp.int32)

    @jax.jit
    def loop(params, cache):
        def body(_, carry):
            tokens, cache = carry
            ids, _, state = drafter.step(params, DraftState(cache, None), tokens, features, count)
            # the next step reads this one's drafts, so that no step can be dropped or moved out of the loop
            return jnp.concatenate([ids[:, :1], ids], axis=1), dataclasses.replace(state.cache, length=cache.length)

        return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]

    cache = drafter.init(batch, slots)
    cache = dataclasses.replace(cache, length=jnp.full(batch, context, jnp.int32))
    return median_seconds(functools.partial(loop, head.params, cache), repeats) / steps


def verifying_seconds(target: Model, k: int, *, batch: int, context: int, repeats: int = 5, steps: int = 20) -> float:
    """Seconds of one target forward over K+1 tokens, logits and argmax included, likewise."""
    slots = context + k + 8

    @jax.jit
    def loop(params, cache):
        module = target.bind(params)

        def body(_, carry):
            tokens, cache = carry
            positions = cache.length[:, None] + jnp.arange(k + 1)[None]
            out, new = module(tokens, positions, CachedAttention(positions), cache)
            return jnp.argmax(module.unembed(out.hidden), axis=-1).astype(jnp.int32), dataclasses.replace(new, length=cache.length)

        return jax.lax.fori_loop(0, steps, body, (jnp.ones((batch, k + 1), jnp.int32), cache))[0]

    cache = target.config.empty_cache(batch, slots)
    cache = dataclasses.replace(cache, length=jnp.full(batch, context, jnp.int32))
    return median_seconds(functools.partial(loop, target.params, cache), repeats) / steps


# ---------------------------------------------------------------- a whole table


@dataclasses.dataclass(frozen=True)
class Suite:
    records: list[dict]
    lossless: bool
    sample: Generation | None  # a P-EAGLE answer, for the report


def run_suite(
    target: Model, heads: dict[str, Model], prompts, *, ks: Sequence[int], batches: Sequence[int], new_tokens: int, repeats: int,
    on_record: Callable[[dict], None],
) -> Suite:  # fmt: skip
    """Plain decoding, and every head at every K, at every batch size; all in one run, so that ratios hold.

    Args:
      heads: method ("peagle", "eagle3") -> head.
      prompts: at least one; batches larger than their number repeat them.
      on_record: called with each record as it is made.
    """
    records, lossless, sample = [], True, None
    where = provenance()
    context = max(map(len, prompts)) + new_tokens // 2
    for batch in batches:
        chosen = list(itertools.islice(itertools.cycle(prompts), batch))
        plain, truth = measure(target, None, chosen, k=0, method=None, new_tokens=new_tokens, repeats=repeats)
        plain["step_seconds"] = verifying_seconds(target, 0, batch=batch, context=context, repeats=repeats)
        records.append(where | plain | {"speedup": 1.0})
        on_record(records[-1])
        for (method, head), k in itertools.product(heads.items(), ks):
            record, answers = measure(target, head, chosen, k=k, method=method, new_tokens=new_tokens, repeats=repeats)
            check = compare(target, chosen, [a.output_token_ids for a in answers], [a.output_token_ids for a in truth])
            drafter = make_drafter(head, k, method)
            record |= {
                "speedup": record["tokens_per_second"] / plain["tokens_per_second"], "lossless": check.lossless,
                "near_ties": check.near_ties, "different": check.different,
                "draft_seconds": drafting_seconds(head, drafter, batch=batch, context=context, repeats=repeats),
                "verify_seconds": verifying_seconds(target, k, batch=batch, context=context, repeats=repeats),
            }  # fmt: skip
            record["break_even"] = (record["draft_seconds"] + record["verify_seconds"]) / plain["step_seconds"]
            lossless &= check.lossless
            if method == "peagle" and (sample is None or k <= 7):
                sample = max(answers, key=lambda a: a.num_accepted_tokens)
            records.append(where | record)
            on_record(records[-1])
    return Suite(records, lossless, sample)
