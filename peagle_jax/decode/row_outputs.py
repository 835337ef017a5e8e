"""What an engine says of a row: its new tokens and text, and its answer once it is done."""

from peagle_jax.decode.answer_text import UndecodableError
from peagle_jax.decode.batch import Batch
from peagle_jax.decode.requests import Output
from peagle_jax.decode.stopped_answers import without_steps_behind


def output_of_row(
    batch: Batch, i: int, now: float, *, is_cancelled: bool, k_changes: bool
) -> Output | None:
    """What is new in a row; None for nothing.

    Args:
      batch: whose steps are done.
      i: the row.
      now: when the host had the tokens.
      is_cancelled: whether the request was cancelled.
      k_changes: whether steps differ in how many tokens they draft.
    """
    row, numbers = batch.rows[i], batch.numbers()
    assert row is not None
    request, is_done = row.request, bool(numbers.done[i])
    if not (is_done or request.stream or request.stop or is_cancelled):
        return None
    written = batch.tokens(i)
    token_ids, num_tokens = written.token_ids, len(written.token_ids)
    reason, stop_reason = None, None
    if numbers.failed[i]:
        reason = "error"
    elif is_done:
        reason = "stop" if token_ids[-1] in row.stop_ids else "length"
    elif is_cancelled:
        reason = "cancelled"
    why = "the target computed NaN or infinity" if reason == "error" else None
    told = token_ids
    if reason == "stop":
        told = token_ids[:-1]  # as vLLM's text
        stop_reason = row.stop_ids[token_ids[-1]]
    if row.text is not None:
        try:
            found = row.text.read(told, is_done=reason is not None)
        except UndecodableError as error:
            found, reason, why = None, "error", str(error)
        if found is not None:
            reason, stop_reason, why = "stop", found.string, None
            num_tokens = found.num_tokens
    is_told = request.stream or reason is not None
    new_ids = token_ids[row.num_reported : num_tokens] if is_told else []
    new_text = row.text.news() if is_told and row.text is not None else ""
    if reason is None:
        return Output(row.id, new_ids, None, now, new_text) if new_ids else None
    text = None if row.text is None else row.text.text
    answer = batch.answer(i, reason, num_tokens, text, why, stop_reason)
    if not k_changes:
        answer = without_steps_behind(answer, written.is_draft, batch.spec)
    return Output(row.id, new_ids, answer, now, new_text)
