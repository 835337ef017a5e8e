"""Numbers about answers: acceptance lengths, and how much a text repeats itself."""

import statistics
from collections.abc import Sequence

from peagle_jax.decode.requests import Generation, acceptance_length


def mean_acceptance_length(answers: Sequence[Generation]) -> float | None:
    """The mean of the answers' own acceptance lengths, as SPEED-Bench counts over request-turns.

    vLLM's, `acceptance_length`, pools the steps of all answers: long ones weigh more there.
    """
    lengths = [answer.acceptance_length for answer in answers if answer.num_drafts]
    return statistics.fmean(length for length in lengths if length) if lengths else None


def lengths_by_category(
    answers: Sequence[Generation], categories: Sequence[str]
) -> dict[str, float]:
    """The pooled acceptance length of every category in which something was drafted.

    Args:
      categories: of the answers, in their order; none: there are no categories.
    """
    of_category: dict[str, list[Generation]] = {}
    for answer, category in zip(answers, categories, strict=False):
        of_category.setdefault(category, []).append(answer)
    lengths = {name: acceptance_length(group) for name, group in of_category.items()}
    return {name: length for name, length in sorted(lengths.items()) if length is not None}


def repeated_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text.

    Text that repeats itself is easy to draft, and inflates acceptance.
    """
    num_grams = num_repeated = 0
    for token_ids in texts:
        seen: set[tuple[int, ...]] = set()
        for gram in zip(*(token_ids[i:] for i in range(n)), strict=False):
            num_grams += 1
            num_repeated += gram in seen
            seen.add(gram)
    return num_repeated / num_grams if num_grams else 0.0
