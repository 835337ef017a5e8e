"""Requests on their way through an engine, and what the rows of a batch ask for."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from peagle_jax.decode.answer_text import AnswerText
from peagle_jax.decode.penalties import penalties_of
from peagle_jax.decode.requests import Output, Request, failed_answer
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.types import RowOptions

# Rows have places for a multiple of as many stop ids, so that requests share programs.
STOP_IDS_STEP = 4


@dataclasses.dataclass
class WrittenTokens:
    """What was written in a row.

    Attributes:
      token_ids: the answer so far, and behind its end what steps wrote before that was known.
      is_draft: which of them are accepted drafts.
      logprobs: of all of them; zeros where no row of the batch wants them.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    is_draft: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Row:
    """A request on its way.

    Attributes:
      id: its number.
      request: what is asked for.
      stop_ids: the tokens that end its answer, with what `Generation.stop_reason` then is.
      text: the answer's; None where the engine has no tokenizer.
      num_reported: tokens of the answer that outputs had.
      written: what the host has read of the answer.
    """

    id: int
    request: Request
    stop_ids: Mapping[int, int | str | None]
    text: AnswerText | None = None
    num_reported: int = 0
    written: WrittenTokens = dataclasses.field(default_factory=WrittenTokens)


def output_without_answer(row: Row, reason: str, error: str | None = None) -> Output:
    """The output of a request whose prompt was not read to its end, or whose row was lost."""
    answer = failed_answer(row.request, error, reason)
    return Output(row.id, [], answer, time.perf_counter())


def num_reserved(request: Request, spec: DecodeSpec) -> int:
    """The most positions of the caches that a request will ever need.

    A row whose last step went K tokens past its limit is still verified beside the others.
    """
    return len(request.prompt) + request.max_new_tokens + spec.k + spec.num_ahead - 1


def row_options(rows: Sequence[Row | None], vocab: int) -> RowOptions:
    """What the rows of a batch ask for. Rows without a request are done from the start.

    Args:
      vocab: tokens that the target knows.
    """
    free = Request(prompt=(), max_new_tokens=0)
    requests = [free if row is None else row.request for row in rows]
    most = max(1, *(0 if row is None else len(row.stop_ids) for row in rows))
    stop_ids = np.full((len(rows), -(-most // STOP_IDS_STEP) * STOP_IDS_STEP), -1, np.int32)
    for ids, row in zip(stop_ids, rows, strict=True):
        if row is not None:
            ids[: len(row.stop_ids)] = list(row.stop_ids)
    return RowOptions(
        max_new_tokens=np.array([r.max_new_tokens for r in requests], np.int32),
        stop_ids=stop_ids,
        sampling=sampling_params(
            len(rows),
            [r.temperature for r in requests],
            [r.top_k for r in requests],
            [r.top_p for r in requests],
            [r.seed or 0 for r in requests],
            [r.min_p for r in requests],
        ),
        penalties=penalties_of(requests, vocab),
        logprobs=any(r.logprobs for r in requests),
    )


def num_stop_ids(options: RowOptions | None) -> int:
    """Places for stop ids in each row."""
    assert options is not None
    return options.stop_ids.shape[1]


def sampling_kind(options: RowOptions) -> str:
    """What of `options` decides on a program."""
    kind = "greedy"
    if options.sampling is not None:
        kind = "filtered" if options.sampling.filtered else "sampled"
    penalties = " penalized" if options.penalties is not None else ""
    return kind + penalties + (" logprobs" if options.logprobs else "")
