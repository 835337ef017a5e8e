"""Measures decoders: every method at every K and batch size, as result rows.

Decoders of one batch size are timed in rounds, each of which runs every decoder once and begins
with another one. A speedup compares a decoder with plain decoding of the same round, so that a slow
moment of the machine concerns both.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from peagle_jax.bench.answer_statistics import (
    lengths_by_category,
    mean_acceptance_length,
    repeated_share,
)
from peagle_jax.bench.exact import compare
from peagle_jax.bench.timing import drafting_seconds, verifying_seconds
from peagle_jax.checkpoints.pair import with_aux_layers
from peagle_jax.decode.base_engine import BaseEngine
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.decode.requests import Generation, Request, acceptance_length, check_answered
from peagle_jax.provenance import provenance
from peagle_jax.types import Model

T = TypeVar("T")
METHODS = ("eagle", "eagle3", "peagle")
# The sample text is decoded with the largest K that is not above this.
MAX_SAMPLE_K = 7
# A text that repeats more of its 4-grams than this is shown only if there is no other.
MAX_SAMPLE_REPEATED = 0.2
# Untimed passes of a decoder that chooses K, which may compile something in each.
MAX_UNTIMED_PASSES = 5
# The key of rows that says how many programs timed passes compiled after all.
COMPILED = "programs_compiled_while_timed"


@dataclasses.dataclass(frozen=True)
class Case:
    """One decoder.

    Attributes:
      method: "none" for plain decoding, "eagle", "eagle3" or "peagle".
      k: tokens drafted per step; 0 for plain decoding.
      batch_size: prompts decoded together, while there are as many.
      temperature: 0 is greedy.
      ignore_eos: decode on through end-of-sequence tokens.
      adaptive_k: the engine chooses K while it decodes, from 0 to `k`.
      num_tree_nodes: drafts of a tree that is verified in the place of a chain of K; or None.
    """

    method: str
    k: int
    batch_size: int
    temperature: float
    ignore_eos: bool = False
    adaptive_k: bool = False
    num_tree_nodes: int | None = None

    @property
    def is_chain(self) -> bool:
        """Whether every step drafts a chain of K tokens."""
        return not self.adaptive_k and self.num_tree_nodes is None


@dataclasses.dataclass(frozen=True)
class Sample:
    """An answer of the P-EAGLE head to show in the report.

    Attributes:
      repeated_4grams: see `repeated_share`.
      num_candidates: answers that it was chosen from.
    """

    answer: Generation
    k: int
    temperature: float
    repeated_4grams: float
    num_candidates: int


@dataclasses.dataclass(frozen=True)
class Suite:
    """What `run_suite` measured.

    Attributes:
      records: result rows, in the order in which they were measured.
      lossless: whether every greedy answer of float32 weights and caches equals plain decoding's.
      sample: see `choose_sample`; None without a P-EAGLE head.
      decodings: what was measured, with their requests.
    """

    records: list[dict]
    lossless: bool
    sample: Sample | None
    decodings: Sequence["Decoding"] = ()


class Decoding:
    """Decodes all prompts as one case says, and keeps the answers and the seconds of each round.

    A batch larger than the prompts repeats them.

    Args:
      categories: of the prompts, or none.
      synthetic: rates by method at which drafts are accepted, whatever they are; None: the target
        decides. Answers mean nothing then.
    """

    def __init__(
        self,
        case: Case,
        target: Model,
        head: Model | None,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        categories: Sequence[str] = (),
        synthetic: Mapping[str, tuple[float, ...]] | None = None,
    ) -> None:
        layers = head.config.aux_hidden_state_layers if head else None
        # an EAGLE-1 head reads other hidden states than the heads that it is measured beside
        if layers is not None and layers != target.config.aux_hidden_state_layers:
            target = with_aux_layers(target, layers)
        self.case, self.target, self.head = case, target, head
        num_prompts = max(len(prompts), case.batch_size)
        self.max_new_tokens = max_new_tokens
        self.categories = [categories[i % len(prompts)] for i in range(num_prompts) if categories]
        self.requests = [
            Request(
                prompt=prompts[i % len(prompts)],
                max_new_tokens=max_new_tokens,
                temperature=case.temperature,
                seed=i,
                stop_ids=() if case.ignore_eos else None,
            )
            for i in range(num_prompts)
        ]
        self.synthetic = (synthetic or {}).get(case.method)
        self.drafter = make_drafter(head, case.k, case.method) if head else None
        if self.synthetic is not None:
            drafter = cast(Any, self.drafter)
            self.drafter = dataclasses.replace(drafter, synthetic_rates=self.synthetic)
        self.seconds: list[float] = []
        self.num_tokens: list[int] = []  # of the answers of each timed round
        self.prompt_seconds: list[float] = []
        self.answers: list[Generation] = []
        self.num_threads, self.num_steps = 1, 0
        self.steps_by_k: dict[int, int] = {}
        self.num_compiled = 0  # programs, in timed rounds
        self._programs: set[tuple] = set()
        self.models = target, head.params if head else None  # as the last engine read them

    def engine(self) -> BaseEngine:
        """A new one, with nothing to do yet."""
        return make_engine(
            self.target,
            self.drafter,
            self.head.params if self.head else None,
            max_batch=self.case.batch_size,
            adaptive_k=self.case.adaptive_k,
            num_tree_nodes=self.case.num_tree_nodes,
        )

    @property
    def rows_at_once(self) -> int:
        """Rows of a program. Engines side by side share those of the batch."""
        return -(-self.case.batch_size // self.num_threads)

    def run(self, *, timed: bool) -> int:
        """One round. The answers of an earlier round are replaced; greedy ones are the same.

        Returns:
          Programs that no round before had.
        """
        engine = self.engine()
        start = time.perf_counter()
        answers = dict(engine.run(self.requests))
        seconds = time.perf_counter() - start
        self.answers = [answers[i] for i in range(len(self.requests))]
        check_answered(self.answers, "bench")
        self.models, self.num_threads = engine.models, engine.stats.num_threads
        self.num_steps = engine.stats.num_steps
        self.steps_by_k = dict(sorted(engine.stats.steps_by_k.items()))
        if timed:
            self.seconds.append(seconds)
            self.num_tokens.append(sum(len(answer.output_token_ids) for answer in self.answers))
            self.prompt_seconds.append(engine.stats.prefill_seconds)
        known = len(self._programs)
        self._programs |= engine.stats.programs
        num_new = len(self._programs) - known
        self.num_compiled += num_new if timed else 0
        return num_new

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each timed round. In few bits answers may end sooner in one than in another."""
        return [n / s for n, s in zip(self.num_tokens, self.seconds, strict=True)]

    def record(self) -> dict:
        """The result row, without provenance and comparisons.

        `seconds` are of whole calls with their prompts, one number per round; `step_seconds`, in
        which all rows of the batch take a step, are without the prompts. Where K is chosen while
        decoding, lengths are of the steps that drafted, and there are no shares by position, of
        which later ones were drafted less often; `steps_by_k` says how many steps had each K.
        """
        answers = self.answers
        num_drafts = sum(answer.num_drafts for answer in answers)
        num_tokens = sum(len(answer.output_token_ids) for answer in answers)
        seconds = statistics.median(self.seconds)
        prompt_seconds = statistics.median(self.prompt_seconds)
        accepted_per_position = []
        if num_drafts and not self.case.adaptive_k:
            accepted = np.sum([answer.num_accepted_per_pos for answer in answers], axis=0)
            accepted_per_position = (accepted / num_drafts).tolist()
        return dataclasses.asdict(self.case) | {
            "num_prompts": len(answers),
            "max_new_tokens": self.max_new_tokens,
            "num_tokens": num_tokens,
            "num_steps": self.num_steps,
            "steps_by_k": self.steps_by_k if self.case.adaptive_k else None,
            COMPILED: self.num_compiled,
            "num_threads": self.num_threads,
            "seconds": self.seconds,
            "tokens_per_second": statistics.median(self.tokens_per_second),
            "prompt_seconds": prompt_seconds,
            "step_seconds": (seconds - prompt_seconds) / max(1, self.num_steps),
            "acceptance_length": acceptance_length(answers),
            "synthetic_acceptance": list(self.synthetic) if self.synthetic else None,
            "mean_acceptance_length": mean_acceptance_length(answers),
            "acceptance_length_by_category": lengths_by_category(answers, self.categories),
            "num_drafts": num_drafts,
            "accepted_per_position": accepted_per_position,
            "repeated_4grams": repeated_share([answer.output_token_ids for answer in answers]),
        }


def choose_sample(decodings: Sequence[Decoding]) -> Sample | None:
    """The P-EAGLE answer that repeats itself least, so that the report shows ordinary text.

    Greedy answers with the largest K up to 7 are considered first. If all of them repeat more than
    a fifth of their 4-grams, answers at a higher temperature are considered, too.

    Returns:
      None where no chain of a P-EAGLE head was measured.
    """
    ours = [d for d in decodings if d.case.method == "peagle" and d.case.is_chain]
    samples = []
    for temperature in sorted({d.case.temperature for d in ours}):
        here = [d for d in ours if d.case.temperature == temperature]
        ks = [d.case.k for d in here]
        k = max((k for k in ks if k <= MAX_SAMPLE_K), default=min(ks))
        answers = next(d.answers for d in here if d.case.k == k)
        shares = [repeated_share([answer.output_token_ids]) for answer in answers]
        share = min(shares)
        answer = answers[shares.index(share)]
        samples.append(Sample(answer, k, temperature, share, len(answers)))
        if share <= MAX_SAMPLE_REPEATED:
            break
    return min(samples, key=lambda sample: sample.repeated_4grams, default=None)


def run_suite(
    target: Model,
    heads: dict[str, Model],
    prompts: Sequence[Sequence[int]],
    *,
    ks: Sequence[int],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    repeats: int,
    on_record: Callable[[dict], object],
    ignore_eos: bool = False,
    adaptive_k: bool = False,
    num_tree_nodes: Sequence[int] = (),
    sampled_k: int | None = None,
    label: dict | None = None,
    categories: Sequence[str] = (),
    synthetic: Mapping[str, tuple[float, ...]] | None = None,
    progress: Callable[[str], object] = lambda activity: None,
) -> Suite:
    """Measures plain decoding, and every head at every K and batch size.

    Args:
      heads: draft heads by method, "peagle", "eagle3" and "eagle".
      prompts: token ids. Every case decodes all of them.
      ks: tokens drafted per step.
      batch_sizes: prompts decoded together.
      max_new_tokens: limit of every answer.
      repeats: rounds. Speedups are medians of the rounds' own ratios.
      on_record: is given each result row as soon as it is there.
      ignore_eos: decode on through end-of-sequence tokens, so that all answers have that length.
      adaptive_k: measure every head with a K that is chosen while it decodes, too.
      num_tree_nodes: measure the P-EAGLE head with trees of so many drafts at every K, too.
      sampled_k: K of a further group of cases at temperature 1 and the largest batch size; None
        for no such group.
      label: more keys for every result row.
      categories: of the prompts, for acceptance by category; none: there are no categories.
      synthetic: rates by method at which drafts are accepted, see `Decoding`. Rows say so.
      progress: is told in a few words what is being done.
    """
    origin = provenance() | (label or {})
    context = max(map(len, prompts)) + max_new_tokens // 2
    records: list[dict] = []
    decodings: list[Decoding] = []
    drafting = [m for m in METHODS if m in heads]
    others = []
    if adaptive_k:
        most = {m: make_drafter(heads[m], "auto", m).k for m in drafting}
        others += [Case(m, k, 0, 0.0, adaptive_k=True) for m, k in most.items()]
    if "peagle" in heads:
        others += [Case("peagle", k, 0, 0.0, num_tree_nodes=n) for k in ks for n in num_tree_nodes]
    for cases in _case_groups(drafting, ks, batch_sizes, sampled_k, others):
        cases = [dataclasses.replace(case, ignore_eos=ignore_eos) for case in cases]
        group = [
            Decoding(c, target, heads.get(c.method), prompts, max_new_tokens, categories, synthetic)
            for c in cases
        ]
        _run_rounds(group, repeats, progress)
        progress(f"batch size {cases[0].batch_size}: the parts of a step")
        for measured in _group_records(target, group, context, repeats):
            record = origin | measured
            records.append(record)
            on_record(record)
        decodings += group
    lossless = all(record.get("lossless", True) for record in records)
    return Suite(records, lossless, choose_sample(decodings), decodings)


def _case_groups(
    methods: Sequence[str],
    ks: Sequence[int],
    batch_sizes: Sequence[int],
    sampled_k: int | None,
    others: Sequence[Case],
) -> Iterator[list[Case]]:
    """Cases that are timed in the same rounds. The first of each group is plain decoding.

    `others` are greedy cases that every batch size has, too.
    """
    for batch_size in batch_sizes:
        cases = [Case(method, k, batch_size, 0.0) for method in methods for k in ks]
        cases += [dataclasses.replace(case, batch_size=batch_size) for case in others]
        yield [Case("none", 0, batch_size, 0.0), *cases]
    if sampled_k is not None:
        batch_size = max(batch_sizes)
        cases = [Case(method, sampled_k, batch_size, 1.0) for method in methods]
        yield [Case("none", 0, batch_size, 1.0), *cases]


def _run_rounds(group: Sequence[Decoding], repeats: int, progress: Callable[[str], object]) -> None:
    """Compiles every decoder of a group, then times all of them in each round.

    One that chooses K runs until a pass compiles nothing, at most MAX_UNTIMED_PASSES times.
    """
    batch_size, temperature = group[0].case.batch_size, group[0].case.temperature
    for decoding in group:
        case = decoding.case
        progress(f"compiling {case.method}, K = {case.k}, batch size {batch_size}")
        for _ in range(MAX_UNTIMED_PASSES if case.adaptive_k else 1):
            if not decoding.run(timed=False):
                break
    for number in range(1, repeats + 1):
        where = f"batch size {batch_size}, temperature {temperature:g}"
        progress(f"{where}: round {number} of {repeats}")
        for decoding in in_turns(group, number):
            decoding.run(timed=True)


def in_turns(group: Sequence[T], number: int) -> list[T]:
    """The order of a round: each begins a third of the group later than the one before.

    A machine that others use may be slow for some seconds in every round: that shall not always be
    the same decoder's turn.
    """
    first = number * max(1, len(group) // 3) % len(group)
    return [*group[first:], *group[:first]]


def _group_records(
    target: Model, group: Sequence[Decoding], context: int, repeats: int
) -> Iterator[dict]:
    """The result rows of a group, with what compares each decoder to plain decoding."""
    plain = group[0]
    is_greedy = plain.case.temperature == 0
    # in fewer bits the same logits may be summed in another order, and texts may differ
    dtypes = target.config.dtype, target.config.kv_cache_dtype
    is_exact = is_greedy and all(np.dtype(dtype) == np.float32 for dtype in dtypes)
    verify_seconds: dict[tuple[int, int], float] = {}
    for decoding in group:
        record = decoding.record()
        record["speedup"] = _speedup(decoding, plain)
        if not decoding.case.adaptive_k:
            # the acceptance length from which such a step would pay
            record["break_even"] = (record["acceptance_length"] or 1.0) / record["speedup"]
        if is_greedy and decoding.case.is_chain:
            k, rows = decoding.case.k, decoding.rows_at_once
            if (k, rows) not in verify_seconds:
                verify_seconds[k, rows] = verifying_seconds(
                    decoding.models[0],
                    k,
                    batch=rows,
                    context=context,
                    repeats=repeats,
                )
            record["draft_seconds"] = _draft_seconds(decoding, context, repeats)
            record["verify_seconds"] = verify_seconds[k, rows]
        if is_exact and decoding.head and decoding.synthetic is None:
            record |= _exactness(target, decoding, plain)
        yield record


def _speedup(decoding: Decoding, plain: Decoding) -> float:
    """Over plain decoding, of tokens per second: the median of the rounds' own ratios."""
    rates = zip(decoding.tokens_per_second, plain.tokens_per_second, strict=True)
    return statistics.median(rate / plain_rate for rate, plain_rate in rates)


def _draft_seconds(decoding: Decoding, context: int, repeats: int) -> float:
    """Seconds to draft K tokens once, timed alone; 0 in plain decoding."""
    if decoding.head is None:
        return 0.0
    head = dataclasses.replace(decoding.head, params=decoding.models[1])
    drafter = make_drafter(head, decoding.case.k, decoding.case.method)
    return drafting_seconds(
        head, drafter, batch=decoding.rows_at_once, context=context, repeats=repeats
    )


def _exactness(target: Model, decoding: Decoding, plain: Decoding) -> dict:
    """Whether the answers are plain decoding's."""
    prompts = [answer.prompt_token_ids for answer in decoding.answers]
    texts = [answer.output_token_ids for answer in decoding.answers]
    plain_texts = [answer.output_token_ids for answer in plain.answers]
    result = compare(target, prompts, texts, plain_texts)
    return {
        "lossless": result.lossless,
        "near_ties": result.near_ties,
        "different": result.different,
    }
