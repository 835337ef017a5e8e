"""How many tokens to draft: chosen while decoding, from what was accepted and what a step costs.

Tokens per second with K drafts are (1 + s_1 + ... + s_K) / seconds(K), where s_j is the chance that
a step accepts its first j drafts. The seconds are measured (`step_times`), the chances estimated
from earlier steps. The choice is made before a step drafts, so that it cannot depend on what the
step draws: sampled output keeps the target's distribution. A rule that looks at the drafts of the
step itself must be made with more care (DSpark, arXiv:2607.05147, appendix A).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

# Steps between two choices: at first, and at most. Each choice of the same K doubles them.
FIRST_STEPS, LAST_STEPS = 16, 64
# Steps of a look at drafting.
PROBE_STEPS = 4
# Plain steps between two such looks: at first, and at most. Every look in vain doubles them.
FIRST_WAIT, LAST_WAIT = 128, 4096
# Another K must promise so much more than the present one.
MIN_GAIN = 1.02
# After as many steps that draft, or plain steps, what was observed counts half.
HALF_LIFE, PLAIN_HALF_LIFE = 64, 256
# What is guessed of the first position before it was tried. Others continue as the one before.
FIRST_GUESS = 0.8
# Steps that a guess counts as; and in choices, so that a few bad steps do not end drafting.
GUESS_WEIGHT, PATIENCE = 2.0, 8.0
# Steps that the drafts of earlier engines count as, where there were more; and the plain steps
# before the first look where these make plain decoding the best.
RECALLED_STEPS, RECALLED_WAIT = 64, 512
# Numbers of drafts to choose from, beside 0 and the largest.
CANDIDATES = (1, 3, 5, 7, 11, 15, 23, 31)


def candidates(k_max: int) -> list[int]:
    """The numbers of drafts to choose from, 0 for plain decoding first."""
    return [0, *(k for k in CANDIDATES if k < k_max), k_max]


class Survival:
    """Estimates the chance that a step accepts its first j drafts, for j = 1 to K.

    It is the product of the chances that a position is accepted where all before it were. Each is
    the share of steps that did so, of which older ones count less.

    Args:
      k_max: the most drafts of a step.
    """

    def __init__(self, k_max: int) -> None:
        self.k_max = k_max
        self._tried = np.zeros(k_max)
        self._accepted = np.zeros(k_max)

    def observe(self, k: int, num_steps: int, shares: Float[np.ndarray, " K"]) -> None:
        """Takes in steps that drafted `k` tokens.

        Args:
          num_steps: such steps of the batch. How many rows it had makes no difference.
          shares: in which share of the rows' steps each position was accepted.
        """
        self.forget(num_steps / HALF_LIFE)
        accepted = num_steps * shares[:k]
        self._tried[:k] += [num_steps, *accepted[:-1]]
        self._accepted[:k] += accepted

    def forget(self, half_lives: float) -> None:
        """Lets what was observed count less."""
        self._tried *= 0.5**half_lives
        self._accepted *= 0.5**half_lives

    def counts(self) -> tuple[list[float], list[float]]:
        """How often each position was tried, and accepted."""
        return self._tried.tolist(), self._accepted.tolist()

    def recall(self, tried: Sequence[float], accepted: Sequence[float]) -> None:
        """Begins with what another run has observed, as a guess.

        Args:
          tried, accepted: its `counts`.
        """
        share = min(1.0, RECALLED_STEPS / max(*tried, 1.0))
        self._tried, self._accepted = share * np.array(tried), share * np.array(accepted)

    def chances(self, guess_weight: float = GUESS_WEIGHT) -> Float[np.ndarray, " K"]:
        """The chance that a step accepts its first 1, 2, ..., K drafts.

        Args:
          guess_weight: steps that a guess counts as.
        """
        guess, chance, chances = FIRST_GUESS, 1.0, []
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            guess = (accepted + guess_weight * guess) / (tried + guess_weight)
            chance *= guess
            chances.append(chance)
        return np.array(chances)


@dataclasses.dataclass
class KChooser:
    """Chooses K again and again.

    Plain decoding tells nothing about drafts. Now and then a few steps draft, to see whether the
    text has become easier; the more often in vain, the later again.

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
        self._wait, self._steps = FIRST_WAIT, FIRST_STEPS
        self._seconds: Mapping[int, float] = {}

    def recall(self, tried: Sequence[float], accepted: Sequence[float]) -> None:
        """Begins with what another run has observed, the `counts` of its `survival`."""
        self.survival.recall(tried, accepted)
        self._wait = RECALLED_WAIT

    def choose(self, seconds: Mapping[int, float]) -> int:
        """The number of drafts of the next step.

        Args:
          seconds: of a step with each number of drafts; 0 for plain decoding. With other seconds
            than in the last call, as for another number of rows, there is a new choice.
        """
        is_due = self.steps_left <= 0
        if not is_due and seconds is not self._seconds:
            # for other rows or slots, not for what was forgotten meanwhile
            chances = self.survival.chances(PATIENCE)
            is_due = best_k(seconds, chances) != best_k(self._seconds, chances)
        if is_due:
            self._choose(seconds)
        self._seconds = seconds
        return self.k

    def observe(
        self, num_steps: int, num_drafts: int, num_accepted_per_pos: Int[np.ndarray, " K"]
    ) -> None:
        """Takes in steps with the chosen K.

        Args:
          num_steps: of the batch.
          num_drafts: steps that drafted, of all rows.
          num_accepted_per_pos: in how many of these each position was accepted.
        """
        self.steps_left -= num_steps
        if self.k and num_drafts:
            self.survival.observe(self.k, num_steps, num_accepted_per_pos / num_drafts)
        elif not self.k:
            self.survival.forget(num_steps / PLAIN_HALF_LIFE)

    def _choose(self, seconds: Mapping[int, float]) -> None:
        chances = self.survival.chances(PATIENCE)
        rates, best = rates_of(seconds, chances), best_k(seconds, chances)
        is_due = self.steps_left <= 0
        if self.k == 0 and (best or (is_due and self._seconds)):
            # drafting pays by what is known, which may be old, or plain decoding has waited
            self.k = max((k for k in rates if k), key=lambda k: rates[k])
            self.steps_left, self._steps = PROBE_STEPS, FIRST_STEPS // 2
        elif best == 0:
            is_in_vain = self.k > 0 and is_due
            self.k, self.steps_left = 0, self._wait
            if is_in_vain:
                self._wait = min(2 * self._wait, LAST_WAIT)
        else:
            self._steps = min(2 * self._steps, LAST_STEPS)
            if rates[best] > MIN_GAIN * rates[self.k]:
                self.k, self._steps = best, FIRST_STEPS
            self._wait, self.steps_left = FIRST_WAIT, self._steps


def rates_of(seconds: Mapping[int, float], chances: Float[np.ndarray, " K"]) -> dict[int, float]:
    """Tokens per second of a row with each number of drafts."""
    return {k: (1 + float(chances[:k].sum())) / taken for k, taken in seconds.items()}


def best_k(seconds: Mapping[int, float], chances: Float[np.ndarray, " K"]) -> int:
    """The number of drafts with the most tokens per second."""
    rates = rates_of(seconds, chances)
    return max(rates, key=lambda k: rates[k])
