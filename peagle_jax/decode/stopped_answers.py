"""Counters of answers that a stop string ends before the last step that was taken for them.

Stop strings are looked for every few steps (`engine.STEPS_PER_STOP_CHECK`), or after each where a
neighbour streams. The steps behind the answer's end are no part of it, and depend on that.
"""

import dataclasses
from collections.abc import Sequence

from peagle_jax.decode.requests import Generation
from peagle_jax.decode.spec import DecodeSpec


def without_steps_behind(
    answer: Generation, is_draft: Sequence[bool], spec: DecodeSpec
) -> Generation:
    """An answer without what steps behind its end did to its counters.

    Args:
      is_draft: of all tokens that were written for it.
      spec: how it was decoded, each step with as many drafts.
    """
    found = counters_up_to(is_draft, answer.num_tokens, spec.k)
    if found is None or spec.k == 0:
        return answer
    num_drafts, accepted = found
    return dataclasses.replace(
        answer,
        num_drafts=num_drafts,
        num_draft_tokens=num_drafts * spec.num_drafts,
        num_accepted_per_pos=accepted,
    )


def counters_up_to(is_draft: Sequence[bool], end: int, k: int) -> tuple[int, list[int]] | None:
    """What the steps up to an answer's end did, the last of them counted whole.

    Args:
      is_draft: of all tokens that were written, which are accepted drafts. The first is the
        prompt's; each step has its accepted drafts, and then a token of the target's own.
      end: tokens of the answer.
      k: positions of a draft.

    Returns:
      num_drafts, and num_accepted_per_pos; None where no step begins behind the end.
    """
    num_drafts, accepted, place = 0, [0] * k, 1
    while place < len(is_draft):
        if place >= end:
            return num_drafts, accepted
        num_drafts += 1
        depth = 0
        while place < len(is_draft) and is_draft[place]:
            accepted[depth] += 1
            depth, place = depth + 1, place + 1
        place += 1
    return None
