"""How many tokens to draft: chosen while decoding, from what was accepted and what a step costs.

Tokens per second with K drafts are (1 + s_1 + ... + s_K) / seconds(K), where s_j is the chance that
a step accepts its first j drafts. The seconds are measured (`step_times`), the chances estimated
from earlier steps: from what these accepted or, with a calibrated confidence head
(draft/confidence.py), from how likely it found their drafts. The choice is made before a step
drafts, so that it cannot depend on what the step draws: sampled output keeps the target's
distribution. A rule that looks at the drafts of the step itself must be made with more care
(DSpark, arXiv:2607.05147, appendix A).

Estimates can be wrong, and plain decoding tells nothing about drafts. What drafting may lose is
therefore a budget: all steps that drafted, together, may have taken longer than plain decoding of
the same tokens by a share of the whole time, and by a few steps at the beginning.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

# Steps between two choices: at first, and at most. Each choice of the same K doubles them. Plain
# steps tell nothing new: they go on until drafting is looked at again, for a return to the host
# takes as long as one to three of them.
FIRST_STEPS, LAST_STEPS = 4, 128
# Steps of a look at drafting where plain decoding is taken to be faster.
PROBE_STEPS = 4
# Plain steps between two such looks: at first, and at most. Every look in vain doubles them.
FIRST_WAIT, LAST_WAIT = 128, 4096
# The most that an engine begins with, where the one before it had waited longer in the end.
RECALLED_WAIT = 512
# Another K must promise so much more than the present one.
MIN_GAIN = 1.02
# After so many drafts, of all rows, what was observed of the positions that they tried counts half.
# Fewer tell little of a text, more are of other texts: with 128 the estimates err least
# (scripts/measure/survival.py).
HALF_LIFE = 128
# The same of positions that are not tried: after so many drafts, or after so many steps of the
# batch, whichever is more; plain steps have no drafts. They are forgotten more slowly, as nothing
# takes their place.
UNSEEN_HALF_LIFE, UNSEEN_STEPS = 1360, 128
# Steps are weighed by their tokens to this power (`Survival`).
TOKENS_EXPONENT = 0.5
# What is guessed of the first position before it was tried. Others continue as the one before.
FIRST_GUESS = 0.7
# Weight of a guess.
GUESS_WEIGHT = 4.0
# Weight of what earlier engines have seen, where they have seen more.
RECALLED_WEIGHT = 512
# What drafting may lose against plain decoding: a share of all time, and beside it plain steps, and
# once what it takes to begin and to end. With fewer, a head that is known to pay is given up after
# its first steps, which follow the prompt and are worse than others.
MAX_LOSS, LOSS_ALLOWANCE = 0.015, 24.0
# What it takes to begin drafting and to end it, beside the steps: calls of programs, and reading by
# the head of tokens that plain steps have left. So many plain steps, but at least so many seconds:
# 4.6 ms on an AMD EPYC with plain steps of 0.6 (LOG.md, 2026-11-30, morning).
CHANGE_STEPS, CHANGE_SECONDS = 1.0, 0.004
# Plain steps that drafting may have gained before, and lose again.
MAX_CREDIT = 64.0
# Numbers of drafts to choose from, beside 0 and the largest.
CANDIDATES = (1, 3, 5, 7, 11, 15, 23, 31)


def candidates(k_max: int) -> list[int]:
    """The numbers of drafts to choose from, 0 for plain decoding first."""
    return [0, *(k for k in CANDIDATES if k < k_max), k_max]


class Survival:
    """Estimates how many drafts are accepted, with any K, from steps with whatever K there was.

    Steps are weighed by the root of their tokens. A text has easy parts and hard ones, and a step
    goes further in an easy part: with more drafts fewer of the steps lie there. Where parts are
    longer than steps, shares of tokens stay the same with any K; where every token is easy or hard
    by itself, shares of steps do. Texts lie between. Estimates from steps with one K of the lengths
    with others err by up to 5 % so, by 11 % with shares of tokens and by 8 % with those of steps
    (packaged head, K = 1 to 7, three texts; LOG.md, 2026-11-30, afternoon). Shares of tokens err in
    favour of a smaller K, which then stays.

    For every position it keeps which share of the steps with all drafts before it accepted has it
    accepted, too. Older drafts count less.

    Args:
      k_max: the most drafts of a step.
    """

    def __init__(self, k_max: int) -> None:
        # in lists, for arrays of so few numbers take ten times as long
        self.k_max = k_max
        self._weights = [(j + 1) ** TOKENS_EXPONENT for j in range(k_max + 1)]  # by accepted drafts
        self._tried = [0.0] * k_max
        self._accepted = [0.0] * k_max

    def observe(
        self,
        k: int,
        num_steps: int,
        num_drafts: int,
        accepted: Int[np.ndarray, " K"] | Float[np.ndarray, " K"],
    ) -> None:
        """Takes in steps that drafted `k` tokens; of later positions, as of all with 0, they say
        nothing.

        Args:
          num_steps: such steps of the batch.
          num_drafts: of all its rows.
          accepted: in how many of these each position was accepted, or was expected to be.
        """
        of_unseen = num_steps / UNSEEN_STEPS
        if k:
            of_unseen = min(of_unseen, num_drafts / UNSEEN_HALF_LIFE)
        for j in range(self.k_max):
            kept = 0.5 ** (num_drafts / HALF_LIFE if j < k else of_unseen)
            self._tried[j] *= kept
            self._accepted[j] *= kept
        reached = [float(num_drafts), *map(float, accepted[:k]), 0.0]
        # of steps that accepted all k
        weight_reached = self._weights[k] * (reached[k] - reached[k + 1])
        for j in reversed(range(k)):
            self._accepted[j] += weight_reached
            weight_reached += self._weights[j] * (reached[j] - reached[j + 1])
            self._tried[j] += weight_reached

    def counts(self) -> tuple[list[float], list[float]]:
        """The weight of the steps that tried each position, and of those that accepted it."""
        return list(self._tried), list(self._accepted)

    def recall(self, tried: Sequence[float], accepted: Sequence[float]) -> None:
        """Begins with what another run has observed, as a guess.

        Args:
          tried, accepted: its `counts`.
        """
        share = min(1.0, RECALLED_WEIGHT / max(*tried, 1.0))
        self._tried = [share * x for x in tried]
        self._accepted = [share * x for x in accepted]

    def length(self, k: int) -> float:
        """The expected tokens of a step with `k` drafts."""
        steps = self._steps(k)
        return sum((j + 1) * share for j, share in enumerate(steps)) / sum(steps)

    def chances(self, k: int) -> Float[np.ndarray, " k"]:
        """The chance that a step with `k` drafts accepts its first 1, 2, ..., k drafts."""
        steps = np.array(self._steps(k))
        return steps[::-1].cumsum()[::-1][1:] / steps.sum()

    def _steps(self, k: int) -> list[float]:
        """How many steps with `k` drafts accept exactly 0, 1, ..., k of them, as parts of a sum."""
        guess, share, steps = FIRST_GUESS, 1.0, []
        for j in range(k):
            guess = (self._accepted[j] + GUESS_WEIGHT * guess) / (self._tried[j] + GUESS_WEIGHT)
            steps.append((share - share * guess) / self._weights[j])
            share *= guess
        return [*steps, share / self._weights[k]]


@dataclasses.dataclass
class KChooser:
    """Chooses K again and again.

    Attributes:
      k_max: the most drafts of a step.
      k: drafts of the next step.
      steps_left: steps until the next choice.
      survival: what is known of the drafts.
    """

    k_max: int
    k: int = 0
    steps_left: int = 0

    def __post_init__(self) -> None:
        self.survival = Survival(self.k_max)
        self._steps, self._wait, self._plain_steps = FIRST_STEPS, FIRST_WAIT, 0
        self._seconds: Mapping[int, float] = {}
        # of all steps; and by how much those that drafted took longer than plain decoding
        self._total, self._lost = 0.0, 0.0

    @property
    def wait(self) -> int:
        """Plain steps until drafting is looked at."""
        return self._wait

    def recall(self, tried: Sequence[float], accepted: Sequence[float], wait: float = 0) -> None:
        """Begins with what another run has observed.

        Args:
          tried, accepted: the `counts` of its `survival`.
          wait: its last one. This run's texts may be others, so that the first is shorter.
        """
        self.survival.recall(tried, accepted)
        self._wait = int(min(max(FIRST_WAIT, wait), RECALLED_WAIT))

    def choose(self, seconds: Mapping[int, float]) -> int:
        """The number of drafts of the next step.

        Args:
          seconds: of a step with each number of drafts; 0 for plain decoding. With another mapping
            than in the last call, as for another number of rows, there may be a new choice.
        """
        is_due, differs = self.steps_left <= 0, False
        if seconds is not self._seconds and self._seconds:
            # for other rows or slots, not for what was forgotten meanwhile
            differs = best_k(seconds, self.survival) != best_k(self._seconds, self.survival)
        self._seconds = seconds
        if is_due or differs:
            self._choose(differs)
        return self.k

    def observe(
        self,
        num_steps: int,
        num_drafts: int,
        num_accepted_per_pos: Int[np.ndarray, " K"],
        num_expected_per_pos: Float[np.ndarray, " K"] | None = None,
    ) -> None:
        """Takes in steps with the chosen K.

        Args:
          num_steps: of the batch.
          num_drafts: steps that drafted, of all rows.
          num_accepted_per_pos: in how many of these each position was accepted.
          num_expected_per_pos: in how many a calibrated confidence head expected it; None without
            one. The chances of drafts are then estimated by it. What drafting has lost is counted
            by what was accepted in any case.
        """
        self.steps_left -= num_steps
        self._plain_steps += 0 if self.k else num_steps
        k = self.k if num_drafts else 0
        seen = num_accepted_per_pos if num_expected_per_pos is None else num_expected_per_pos
        self.survival.observe(k, num_steps, num_drafts, seen)
        seconds = self._seconds
        self._total += num_steps * seconds[self.k]
        if self.k and num_drafts:
            num_tokens = num_steps * (1 + float(num_accepted_per_pos[:k].sum()) / num_drafts)
            self._lost += num_steps * seconds[self.k] - num_tokens * seconds[0]
            self._lost = max(self._lost, -MAX_CREDIT * seconds[0])

    def _choose(self, is_other_batch: bool) -> None:
        """Chooses K and the steps that it is taken for.

        Args:
          is_other_batch: another K than before is the best for the batch as it is now.
        """
        rates = rates_of(self._seconds, self.survival)
        best = max(rates, key=lambda k: rates[k])
        best_draft = max((k for k in rates if k), key=lambda k: rates[k])
        # of an engine's first steps, too, where the engine before waited for long
        is_waiting = self.k == 0 and (self._total > 0 or self._wait > FIRST_WAIT)
        if is_waiting:
            # Not sooner, unless another batch is best drafted for: plain steps let everything be
            # forgotten, and what is guessed then would end them soon.
            is_over = self._plain_steps >= self._wait or (best and is_other_batch)
            if is_over and self._is_affordable(best_draft):
                self._take(best_draft, PROBE_STEPS)
            else:
                self._take(0)
        else:
            self._go_on(rates, best, best_draft)
        if self.k:
            self._plain_steps = 0

    def _go_on(self, rates: Mapping[int, float], best: int, best_draft: int) -> None:
        """Chooses after steps that drafted, or at the very first.

        Args:
          rates: tokens per second with each number of drafts.
          best, best_draft: the number with the most, and that with the most of those that draft.
        """
        if best:
            self._wait = FIRST_WAIT
        # to end drafting, and to begin it again, may take longer than plain steps would save
        stays = self.k and self._gain_until_look(rates) < self._seconds_of_change()
        if not (best or stays) or not self._is_affordable(best_draft):
            if self.k and not best:
                self._wait = min(2 * self._wait, LAST_WAIT)
            self._take(0)
            return
        wanted = best or best_draft
        is_worth_it = not self.k or rates[wanted] > MIN_GAIN * rates[self.k]
        self._take(wanted if is_worth_it else self.k)

    def _take(self, k: int, num_steps: int | None = None) -> None:
        """Takes `k` for the next steps; more of them, the longer it is taken without a break."""
        if k and not self.k:
            self._lost += self._seconds_of_change()
        self._steps = min(2 * self._steps, LAST_STEPS) if k == self.k else FIRST_STEPS
        self.k = k
        if not k:
            until_look = self._wait - self._plain_steps
            num_steps = until_look if until_look > 0 else FIRST_WAIT  # a look was not affordable
        self.steps_left = num_steps or min(self._steps, max(self._affordable_steps(k), FIRST_STEPS))

    def _is_affordable(self, k: int) -> bool:
        """Whether a look with `k` drafts is within the budget."""
        return self._affordable_steps(k) >= PROBE_STEPS

    def _affordable_steps(self, k: int) -> int:
        """How many steps with `k` drafts, none of them accepted, would be within the budget."""
        plain = self._seconds[0]
        of_a_step = self._seconds[k] - plain
        if of_a_step <= 0:
            return LAST_STEPS  # no slower than plain decoding
        budget = MAX_LOSS * self._total + LOSS_ALLOWANCE * plain - self._lost
        if self.k:
            budget += self._seconds_of_change()  # of the first time, which is free
        return min(LAST_STEPS, int(budget / of_a_step))

    def _gain_until_look(self, rates: Mapping[int, float]) -> float:
        """Seconds that plain decoding would save until drafting is looked at again."""
        wait = min(2 * self._wait, LAST_WAIT)  # which ending it doubles
        return (rates[0] / rates[self.k] - 1) * wait * self._seconds[0]

    def _seconds_of_change(self) -> float:
        """Of beginning to draft, and of ending it."""
        return max(CHANGE_STEPS * self._seconds[0], CHANGE_SECONDS)


def rates_of(seconds: Mapping[int, float], survival: Survival) -> dict[int, float]:
    """Tokens per second of a row with each number of drafts."""
    return {k: survival.length(k) / taken for k, taken in seconds.items()}


def best_k(seconds: Mapping[int, float], survival: Survival) -> int:
    """The number of drafts with the most tokens per second."""
    rates = rates_of(seconds, survival)
    return max(rates, key=lambda k: rates[k])
