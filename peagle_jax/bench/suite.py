"""A table of decoders: every method at every K and batch size, in rounds, so that a ratio compares neighbours in time."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from peagle_jax.bench.exact import compare
from peagle_jax.bench.timing import drafting_seconds, verifying_seconds
from peagle_jax.decode.generate import (
    Generation,
    acceptance_length,
    cache_size_for,
    generate,
    make_drafter,
)
from peagle_jax.provenance import provenance
from peagle_jax.types import Model

METHODS = ("eagle3", "peagle")


@dataclasses.dataclass(frozen=True)
class Case:
    """One decoder. `method` is none, eagle3 or peagle; K is 0 for plain decoding."""

    method: str
    k: int
    batch: int
    temperature: float


@dataclasses.dataclass(frozen=True)
class Suite:
    records: list[dict]
    lossless: bool  # every greedy float32 text was plain decoding's
    sample: (
        Generation | None
    )  # a P-EAGLE answer, for the report: of the largest K up to 7, the one with the longest steps
    sample_k: int | None = None


class Decoding:
    """Decodes all prompts as one case says, `batch` at a time, and keeps the answers and the seconds of every round."""

    def __init__(
        self,
        case: Case,
        target: Model,
        head: Model | None,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
    ):
        self.case, self.target, self.head, self.new_tokens = case, target, head, new_tokens
        spread = [
            prompts[i % len(prompts)] for i in range(max(len(prompts), case.batch))
        ]  # a batch larger than the prompts repeats them
        self.groups = [
            spread[i : i + case.batch]
            for i in range(0, len(spread) // case.batch * case.batch, case.batch)
        ]
        self.seconds: list[float] = []
        self.prompt_seconds: list[float] = []
        self.answers: list[Generation] = []

    def run(self, *, timed: bool) -> None:
        start = time.perf_counter()
        self.answers = [
            a
            for i, group in enumerate(self.groups)
            for a in self._decode(group, i * self.case.batch, self.new_tokens)
        ]
        middle = time.perf_counter()
        for group in self.groups:  # the same program, for the one token that the prompt alone gives
            self._decode(group, 0, 1)
        if timed:
            self.seconds.append(middle - start)
            self.prompt_seconds.append(time.perf_counter() - middle)

    def _decode(self, group, first: int, new_tokens: int) -> list[Generation]:
        return generate(
            self.target,
            self.head,
            group,
            k=self.case.k or None,
            method=self.case.method if self.head else None,
            max_new_tokens=new_tokens,
            stop_ids=(),
            temperature=self.case.temperature,
            seed=[first + i for i in range(len(group))],
            cache_size=cache_size_for(group, self.new_tokens, self.case.k),
        )

    def record(self) -> dict:
        """What was measured, without provenance. `seconds` are of whole calls, prompts included; `step_seconds` are without them."""
        answers, case = self.answers, self.case
        drafts = sum(a.num_drafts for a in answers)
        steps = sum(
            max(
                a.num_drafts if self.head else self.new_tokens - 1
                for a in answers[i : i + case.batch]
            )
            for i in range(0, len(answers), case.batch)
        )
        median, prompt = statistics.median(self.seconds), statistics.median(self.prompt_seconds)
        return dataclasses.asdict(case) | {
            "prompts": len(answers),
            "new_tokens": self.new_tokens,
            "seconds": self.seconds,
            "tokens_per_second": sum(len(a.output_token_ids) for a in answers) / median,
            "prompt_seconds": prompt,
            "step_seconds": (median - prompt) / steps,
            "acceptance_length": acceptance_length(answers),
            "num_drafts": drafts,
            "accepted_per_position": (
                np.sum([a.accepted_per_position for a in answers], axis=0) / drafts
            ).tolist()
            if drafts
            else [],
            "repeated_4grams": repeated_share([a.output_token_ids for a in answers]),
        }


def repeated_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text: looping text flatters a drafter."""
    grams = again = 0
    for ids in texts:
        seen: set = set()
        for gram in zip(*(ids[i:] for i in range(n)), strict=False):
            grams, again = grams + 1, again + (gram in seen)
            seen.add(gram)
    return again / grams if grams else 0.0


def run_suite(
    target: Model,
    heads: dict[str, Model],
    prompts,
    *,
    ks: Sequence[int],
    batches: Sequence[int],
    new_tokens: int,
    repeats: int,
    on_record: Callable[[dict], None],
    sampled_k: int | None = None,
    label: dict | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Suite:
    """Plain decoding, and every head at every K, at every batch size; then at temperature 1 and one K.

    Args:
      heads: method ("peagle", "eagle3") -> head.
      prompts: at least one; every case decodes all of them, `batch` at a time (a rest that fills no batch is left out).
      repeats: rounds. In each, every case of a batch size runs once, plain decoding first; speedups are medians of the
        rounds' own ratios.
      on_record: called with each record as it is made.
      sampled_k: K of the cases at temperature 1, at the largest batch; None for none.
      label: more to write into every record.
      progress: told what is being done.
    """
    order = [m for m in METHODS if m in heads]
    sets = [(batch, 0.0, [(m, k) for m in order for k in ks]) for batch in batches]
    sets += [(max(batches), 1.0, [(m, sampled_k) for m in order])] if sampled_k else []
    where, records, lossless, sample = provenance() | (label or {}), [], True, None
    sample_k = None
    context = max(map(len, prompts)) + new_tokens // 2
    for batch, temperature, cases in sets:
        runs = [
            Decoding(Case(m, k, batch, temperature), target, heads.get(m), prompts, new_tokens)
            for m, k in [("none", 0), *cases]
        ]
        for run in runs:
            progress(f"compiling {run.case.method} K={run.case.k} batch {batch}")
            run.run(timed=False)
        for number in range(repeats):
            progress(f"batch {batch}, temperature {temperature:g}: round {number + 1} of {repeats}")
            for run in runs:
                run.run(timed=True)
        greedy = temperature == 0
        exact = (
            greedy and np.dtype(target.config.dtype) == np.float32
        )  # in fewer bits nobody promises equal texts
        verifying = {}
        if greedy:
            progress(f"batch {batch}: the parts of a step")
            ks_here = sorted({run.case.k for run in runs})
            verifying = {
                k: verifying_seconds(target, k, batch=batch, context=context, repeats=repeats)
                for k in ks_here
            }
        for run in runs:
            record = where | run.record() | {"speedup": _speedup(run, runs[0])}
            # the acceptance length from which such a step would pay, as whole calls cost here
            record["break_even"] = (record["acceptance_length"] or 1.0) / record["speedup"]
            if greedy:
                record |= _parts(run, verifying, context, repeats)
            if exact and run.head:
                record |= _exactness(target, run, runs[0])
                lossless &= record["lossless"]
            if run.case.method == "peagle" and greedy and (sample is None or run.case.k <= 7):
                sample, sample_k = (
                    max(run.answers, key=lambda a: a.num_accepted_tokens / max(a.num_drafts, 1)),
                    run.case.k,
                )
            records.append(record)
            on_record(record)
    return Suite(records, lossless, sample, sample_k)


def _speedup(run: Decoding, plain: Decoding) -> float:
    return statistics.median(p / s for p, s in zip(plain.seconds, run.seconds, strict=True))


def _exactness(target: Model, run: Decoding, plain: Decoding) -> dict:
    texts = [[a.output_token_ids for a in r.answers] for r in (run, plain)]
    check = compare(target, [a.prompt_token_ids for a in run.answers], *texts)
    return {"lossless": check.lossless, "near_ties": check.near_ties, "different": check.different}


def _parts(run: Decoding, verifying: dict[int, float], context: int, repeats: int) -> dict:
    """Seconds of drafting and of the target's forward, each alone in a loop; a step, which finds neither in cache, takes more."""
    case, drafting = run.case, 0.0
    if run.head is not None:
        drafter = make_drafter(run.head, case.k, case.method)
        drafting = drafting_seconds(
            run.head, drafter, batch=case.batch, context=context, repeats=repeats
        )
    return {"draft_seconds": drafting, "verify_seconds": verifying[case.k]}
