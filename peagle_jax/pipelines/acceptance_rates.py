"""Which share of all steps accepts the draft at each position: given, measured, or published."""

import json
from collections.abc import Sequence
from pathlib import Path

from peagle_jax.report.records import chains
from peagle_jax.types import InputError

METHODS = ("eagle3", "peagle")
# vLLM pull request 32628: GPT-OSS-120B, HumanEval, K = 8, in percent.
PUBLISHED = {
    "peagle": (63, 38, 23, 14, 9, 5, 3, 2),
    "eagle3": (71, 49, 32, 21, 14, 9, 5, 3),
}
PUBLISHED_SOURCE = "vLLM #32628 (GPT-OSS-120B, HumanEval)"


def read_rates(
    option: str, text: str, methods: Sequence[str] = METHODS
) -> tuple[str, tuple[float, ...]]:
    """Reads METHOD=RATES, with rates in percent, or METHOD=FILE, with rows of `peagle bench`.

    Args:
      option: its spelling, for errors.
      text: for example "peagle=63,38,23" or "eagle3=runs/bench/results.jsonl".
      methods: that may be named.

    Returns:
      The method, and the accepted share at each position, from 0 to 1.

    Raises:
      InputError: the method is unknown, rates are no percentages or do not fall, or the file has no
        row of that method.
    """
    method, equals, value = text.partition("=")
    if method not in methods or not equals:
        rule = f"must be METHOD=RATES, with a method of {', '.join(methods)}"
        raise InputError(option, rule, text, f"give {option} peagle=63,38,23")
    if value.endswith(".jsonl"):
        rates = _measured(Path(value), method)
        return method, check_rates(value, rates)
    try:
        percents = [float(part) for part in value.split(",")]
    except ValueError:
        rule = "rates must be percentages with commas between them, or a .jsonl file"
        raise InputError(option, rule, value, f"give {option} {method}=63,38,23") from None
    return method, check_rates(option, [percent / 100 for percent in percents])


def check_rates(where: str, rates: list[float] | tuple[float, ...]) -> tuple[float, ...]:
    """Refuses shares that cannot be: a draft is accepted only where all before it were.

    Raises:
      InputError: there are none, one is no share, or one is larger than the one before it.
    """
    shown = ", ".join(f"{100 * rate:g}" for rate in rates)
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        rule = "rates must be percentages from 0 to 100, one for each position"
        raise InputError(where, rule, shown or "none", "give the first position's rate first")
    if any(later > earlier for earlier, later in zip(rates, rates[1:], strict=False)):
        rule = "rates must not rise: a draft counts only where all before it were accepted"
        next_step = "give shares of all steps, as vLLM logs them, not of the drafts before"
        raise InputError(where, rule, shown, next_step)
    return tuple(rates)


def _measured(path: Path, method: str) -> list[float]:
    """The rates of a method's greedy chain with the largest K; of several of those, the last's."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        of_method = [row for row in rows if row.get("method") == method and row.get("k")]
        # an adaptive K and a tree have other shares by position, and so has sampled text; of
        # synthetic acceptance the shares are those that were asked for
        of_method = [row for row in chains(of_method) if not row.get("temperature")]
        of_method = [row for row in of_method if not row.get("synthetic_acceptance")]
        chosen = max(of_method, key=lambda row: (row["k"], rows.index(row)))
        return [float(rate) for rate in chosen["accepted_per_position"]]
    except OSError as error:
        rule, next_step = "this file must be readable", "name the results.jsonl of `peagle bench`"
        raise InputError(path, rule, error.strerror, next_step) from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OverflowError):
        rule = f"must have rows of `peagle bench` with greedy chains of method {method}"
        raise InputError(path, rule, "none", "run peagle bench --out DIR first") from None
