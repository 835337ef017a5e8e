"""How many tokens to draft: what is chosen, from what was accepted and what steps cost."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from peagle_jax.decode import adaptive_k, step_times
from peagle_jax.decode.adaptive_k import KChooser, Survival, best_k, candidates
from peagle_jax.decode.step_times import StepTimes

# a first draft costs much, further ones little: as P-EAGLE on a CPU
SECONDS = {0: 1.0, 1: 1.9, 3: 2.0, 5: 2.2, 7: 2.9}


def steps(rng, conditional, k: int, count: int) -> np.ndarray:
    """In how many of `count` steps each position was accepted, by chances given the one before."""
    hits = rng.random((count, k)) < np.asarray(conditional)[:k]
    return np.cumprod(hits, axis=1).sum(axis=0)


def decode_simulated(chooser: KChooser, seconds: dict, conditional, num_steps: int, rng) -> list:
    """The K of every step of a text with given chances."""
    chosen = []
    while len(chosen) < num_steps:
        k = chooser.choose(seconds)
        count = chooser.steps_left
        accepted = np.zeros(chooser.k_max, int)
        accepted[:k] = steps(rng, conditional, k, count)
        chooser.observe(count, count if k else 0, accepted)
        chosen += [k] * count
    return chosen


# ---------------------------------------------------------------- what is chosen


def geometric(conditional, k: int) -> np.ndarray:
    """The chances that a step accepts its first 1, 2, ..., k drafts where all steps are alike."""
    return np.cumprod(np.asarray(conditional)[:k])


def test_estimates_are_the_shares_of_steps():
    rng = np.random.default_rng(3)
    conditional = [0.8, 0.7, 0.9, 0.5]
    survival = Survival(4)
    assert survival.length(0) == 1 and len(survival.chances(0)) == 0
    assert survival.chances(4)[0] < adaptive_k.FIRST_GUESS  # which is of weights
    seen, lengths = [], []
    for _ in range(600):
        survival.observe(4, 16, 16, steps(rng, conditional, 4, 16))
        seen.append(survival.chances(4))
        lengths.append(survival.length(4))
    # the guess counts as a few tokens, of some hundreds
    assert np.mean(seen[100:], axis=0) == pytest.approx(geometric(conditional, 4), abs=0.025)
    assert np.mean(lengths[100:]) == pytest.approx(1 + geometric(conditional, 4).sum(), abs=0.08)
    # of a batch of any size
    batch = Survival(4)
    for _ in range(40):
        batch.observe(4, 4, 4000, steps(rng, conditional, 4, 4000))
    assert batch.chances(4) == pytest.approx(geometric(conditional, 4), abs=0.01)
    # positions that were not tried continue as the last one did
    short = Survival(4)
    for _ in range(600):
        short.observe(2, 16, 16, steps(rng, [0.8, 0.7], 2, 16))
    assert short.chances(2) == pytest.approx([0.8, 0.56], abs=0.1)
    assert 0.5 < short.chances(4)[3] / short.chances(4)[2] < 1


def regions_in_steps(lengths, k: int) -> tuple[int, np.ndarray]:
    """How a text of parts, in each of which so many drafts are right, is decoded with k drafts."""
    accepted, num_steps = np.zeros(7, int), 0
    for length in lengths:
        num_right = min(length, k)
        count = 840 // (num_right + 1)  # every part has 840 tokens
        accepted[:num_right] += count
        num_steps += count
    return num_steps, accepted


def independent_steps(k: int) -> tuple[int, np.ndarray]:
    """How a text is decoded in which every draft is right with a chance of 0.75."""
    return 10_000, (10_000 * 0.75 ** np.arange(1, 8)).astype(int) * (np.arange(7) < k)


@pytest.mark.parametrize("k_seen", [1, 3, 5, 7])
@pytest.mark.parametrize("text", ["long parts", "independent tokens"])
def test_lengths_with_another_k_follow_from_steps(text, k_seen, monkeypatch):
    """In a text of long parts shares of tokens stay the same with any K, and in one where no token
    tells of the next one shares of steps do. The estimate lies between, and errs half as much."""
    parts = [0, 0, 1, 2, 7, 7]
    decode = independent_steps if text != "long parts" else lambda k: regions_in_steps(parts, k)

    def errors(exponent: float) -> np.ndarray:
        monkeypatch.setattr(adaptive_k, "TOKENS_EXPONENT", exponent)
        survival = Survival(7)
        survival.observe(k_seen, 1, *decode(k_seen))
        found = {k: decode(k) for k in (1, 3, 5, 7) if k <= k_seen}
        lengths = {k: 1 + accepted[:k].sum() / steps for k, (steps, accepted) in found.items()}
        return np.array([survival.length(k) / length - 1 for k, length in lengths.items()])

    by_steps, between, by_tokens = (errors(x) for x in (0.0, adaptive_k.TOKENS_EXPONENT, 1.0))
    right, wrong = (by_tokens, by_steps) if text == "long parts" else (by_steps, by_tokens)
    assert np.abs(right).max() < 0.01 and abs(between[-1]) < 0.01 and abs(wrong[-1]) < 0.01
    assert k_seen == 1 or np.abs(between).max() < 0.65 * np.abs(wrong).max() < 0.2
    assert np.abs(between).max() < 0.12


def test_survival_forgets():
    survival = Survival(2)
    survival.observe(2, 100, 100, np.array([100, 100]))
    assert survival.chances(2)[1] > 0.93
    half = adaptive_k.HALF_LIFE
    survival.observe(2, half, half, np.zeros(2, int))
    # half of the hundred are left
    assert survival.chances(2)[0] == pytest.approx(50 / (50 + half), abs=0.03)
    survival.observe(2, 8 * half, 8 * half, np.zeros(2, int))
    assert survival.chances(2)[0] < 0.1
    # what steps do not try is forgotten more slowly
    survival = Survival(2)
    survival.observe(2, 1, 100, np.array([100, 100]))
    before = np.array(survival.counts()[0])
    survival.observe(1, half, half, np.array([half, 0]))
    after = np.array(survival.counts()[0])
    assert after[1] == pytest.approx(before[1] * 0.5 ** (half / adaptive_k.UNSEEN_HALF_LIFE))
    assert adaptive_k.UNSEEN_HALF_LIFE > 2 * half
    # plain steps have no drafts, and let everything be forgotten
    survival.observe(0, half, 0, np.zeros(2, int))
    forgotten = 0.5 ** (half / adaptive_k.UNSEEN_STEPS)
    assert survival.counts()[0] == pytest.approx((after * forgotten).tolist())


def test_memory_is_of_drafts_and_not_of_steps():
    """Eight rows tell as much in a step as one row in eight steps, and are forgotten as fast."""
    one, eight = Survival(2), Survival(2)
    for accepted in ([30, 20], [10, 0], [25, 15]):
        one.observe(2, 32, 32, np.array(accepted))
        eight.observe(2, 4, 32, np.array(accepted))
    assert one.counts() == eight.counts()


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_what_is_not_tried_is_forgotten_slowly(num_rows):
    """In a batch of one row by drafts, in a large one by steps."""
    survival = Survival(3)
    survival.observe(3, 1, 100, np.array([100, 100, 100]))
    before = survival.counts()[0][2]
    survival.observe(2, 64, 64 * num_rows, np.array([9, 0, 0]))
    of_steps, of_drafts = adaptive_k.UNSEEN_STEPS, adaptive_k.UNSEEN_HALF_LIFE
    half_lives = min(64 / of_steps, 64 * num_rows / of_drafts)
    assert survival.counts()[0][2] == pytest.approx(before * 0.5**half_lives)


def test_the_best_k_is_found_behind_a_worse_one():
    """One draft loses against none, five win: rates are not compared pairwise from the left."""
    rng = np.random.default_rng(0)
    chooser = KChooser(7)
    chosen = decode_simulated(chooser, SECONDS, [0.8, 0.8, 0.85, 0.85, 0.8, 0.3, 0.3], 3000, rng)
    assert np.mean(np.array(chosen[500:]) == 5) > 0.9
    assert set(chosen) <= set(candidates(7)) == set(SECONDS)


def test_hopeless_text_is_decoded_plainly_and_seldom_tried():
    rng = np.random.default_rng(1)
    chooser = KChooser(7)
    chosen = decode_simulated(chooser, SECONDS, [0.02] * 7, 30_000, rng)
    lost = sum(SECONDS[k] - SECONDS[0] for k in chosen)
    assert lost / len(chosen) < 0.005
    probes = [len(list(g)) for k, g in itertools.groupby(chosen) if k]
    waits = [len(list(g)) for k, g in itertools.groupby(chosen) if not k]
    # one that is accepted by chance may be followed by a second look
    assert probes.count(adaptive_k.PROBE_STEPS) > 0.8 * len(probes) > 5
    assert max(waits) <= adaptive_k.LAST_WAIT + adaptive_k.FIRST_WAIT
    assert waits[-2] > 4 * waits[0]
    # text that becomes easy is noticed
    again = decode_simulated(chooser, SECONDS, [0.9] * 7, 12_000, rng)
    assert again[-1] in (5, 7) and again.count(0) < 2 * adaptive_k.LAST_WAIT
    # and the next look comes as soon as at first
    after = decode_simulated(chooser, SECONDS, [0.02] * 7, 2_000, rng)
    waits = [len(list(g)) for k, g in itertools.groupby(after) if not k]
    assert waits[0] <= 3 * adaptive_k.FIRST_WAIT


def test_plain_steps_are_interrupted_by_looks_alone():
    """Every return to the host takes as long as a step or more, and plain steps teach nothing."""
    chooser, waits = KChooser(3), []
    seconds = {0: 1.0, 1: 3.0, 3: 5.0}
    for _ in range(12):
        k, count = chooser.choose(seconds), chooser.steps_left
        waits.append(0 if k else count)
        chooser.observe(count, count if k else 0, np.zeros(3, int))
    first = adaptive_k.FIRST_WAIT
    assert [n for n in waits if n][:3] == [first, 2 * first, 4 * first]
    assert all(bool(one) != bool(other) for one, other in itertools.pairwise(waits))
    # steps of which others were done sooner are not taken again
    chooser = KChooser(3)
    assert chooser.choose(seconds) == 0
    chooser.observe(first - 28, 0, np.zeros(3, int))
    chooser.steps_left = 0
    assert chooser.choose(seconds) == 0 and chooser.steps_left == 28


def test_a_choice_that_was_not_affordable_is_made_again_soon():
    """However long looks in vain had been waited for before."""
    chooser, seconds = KChooser(3), {0: 1.0, 3: 2.5}
    for _ in range(14):
        k, count = chooser.choose(seconds), chooser.steps_left
        chooser.observe(count, count if k else 0, np.zeros(3, int))
    assert chooser._wait > 2 * adaptive_k.FIRST_WAIT
    chooser.survival.recall([1e6] * 3, [1e6] * 3)  # drafting promises to pay again
    chooser._lost, chooser.steps_left, chooser._plain_steps = 1e9, 0, 0
    assert chooser.choose(seconds) == 0
    assert chooser.steps_left == adaptive_k.FIRST_WAIT


def test_drafting_is_not_left_for_less_than_a_change_takes():
    """To end drafting for 256 plain steps, and to begin again, takes as long as eight of them."""
    seconds = {0: 0.5e-3, 3: 0.5e-3 * 2.05}

    def k_after(length: float) -> int:
        chooser = KChooser(3)
        chooser.recall([1e6] * 3, [1e6] * 3)
        assert chooser.choose(seconds) == 3
        chooser.survival.length = lambda k: length if k else 1.0
        chooser._lost, chooser.steps_left = 0.0, 0
        return chooser.choose(seconds)

    # plain decoding is 1.02 times as fast, and saves 2.6 ms; 1.04 times, and 5.2
    assert (k_after(2.01), k_after(1.97)) == (3, 0)


def test_looks_that_find_little_difference_become_rare_too():
    """Where plain decoding is a little faster, drafting goes on for a while, and not for ever."""
    chooser, seconds = KChooser(3), {0: 1.0, 1: 1.55, 3: 2.05}
    chosen = []
    for _ in range(3000):
        k, count = chooser.choose(seconds), chooser.steps_left
        accepted = np.array([0.5, 0.3, 0.18] if k == 3 else [0.5, 0.0, 0.0]) * (count if k else 0)
        chooser.observe(count, count if k else 0, accepted.round().astype(int))
        chosen.append((k, count))
    lost = sum(count * (seconds[k] - (1 + 0.5 * (k > 0) + 0.48 * (k == 3))) for k, count in chosen)
    assert lost < (adaptive_k.MAX_LOSS + 0.002) * sum(n * seconds[k] for k, n in chosen)
    assert max(count for k, count in chosen if not k) >= 4 * adaptive_k.FIRST_WAIT


def test_a_changing_batch_does_not_shorten_the_waits():
    """Guesses favour drafting for one of two sizes: each change is a short look, and no more."""
    chooser = KChooser(3)
    sizes = {0: 1.0, 1: 1.2, 3: 1.3}, {0: 1.0, 1: 3.0, 3: 5.0}
    chooser.choose(sizes[1])
    chooser.observe(2000, 0, np.zeros(3, int))  # everything is forgotten
    chooser._wait = 1024
    chooser._plain_steps = chooser.steps_left = 10
    assert chooser.choose(sizes[0]) > 0 and chooser.steps_left == adaptive_k.PROBE_STEPS
    assert chooser.wait == 1024
    chooser.observe(4, 4, np.zeros(3, int))
    chooser.survival.recall([1e6] * 3, [0.0] * 3)
    assert chooser.choose(sizes[0]) == 0 and chooser.wait == 2048


def test_an_engine_waits_as_long_as_the_one_before_it_did():
    """Up to a limit, for its texts may be others."""
    known = KChooser(3)
    for wait, found in ((0.0, 128), (64.0, 128), (300.0, 300), (4096.0, adaptive_k.RECALLED_WAIT)):
        known.recall([9.0] * 3, [0.0] * 3, wait)
        assert known.wait == found
    # also where all was forgotten meanwhile, and a guess favours drafting
    known.recall([0.01] * 3, [0.0] * 3, 4096.0)
    assert best_k({0: 1.0, 3: 2.0}, known.survival) == 3
    assert known.choose({0: 1.0, 3: 2.0}) == 0 and known.steps_left == adaptive_k.RECALLED_WAIT


def decode_deceptive_text(chooser, seconds):
    """A text that makes every estimate wrong: easy while plain, hopeless as soon as drafted.

    Returns:
      The seconds of all steps; what drafting lost of them against plain decoding, with what it
      takes to begin and to end it; and how often it began.
    """
    total = lost = begins = 0
    was_plain = True
    for _ in range(4000):
        k = chooser.choose(seconds)
        if k == 0:
            # as if whatever was known before had been good
            chooser.survival.recall([1e6] * 7, [1e6] * 7)
        count = chooser.steps_left
        chooser.observe(count, count if k else 0, np.zeros(7, int))
        total += count * seconds[k]
        lost += count * (seconds[k] - seconds[0]) if k else 0
        begins += k > 0 and was_plain
        was_plain = k == 0
    change = max(adaptive_k.CHANGE_STEPS * seconds[0], adaptive_k.CHANGE_SECONDS)
    return total, lost + change * begins, begins


def seconds_with(plain):
    """Of steps, where a plain one takes so long."""
    return {k: plain * taken for k, taken in SECONDS.items()}


@pytest.mark.parametrize("plain", [1.0, 0.5e-3])
@pytest.mark.parametrize("is_known", [False, True])
def test_what_drafting_may_lose_is_bounded(is_known, plain):
    chooser, seconds = KChooser(7), seconds_with(plain)
    if is_known:
        chooser.recall([1e6] * 7, [1e6] * 7)
    total, lost, begins = decode_deceptive_text(chooser, seconds)
    change = max(plain, adaptive_k.CHANGE_SECONDS)
    budget = adaptive_k.MAX_LOSS * total + adaptive_k.LOSS_ALLOWANCE * plain + change
    assert 0.5 * adaptive_k.MAX_LOSS * total < lost
    # a look is never shorter than its first steps
    longest = adaptive_k.FIRST_STEPS * (seconds[7] - plain)
    assert begins > 10 and lost < budget + longest


def test_there_are_fewer_looks_where_plain_steps_are_short():
    """A change of K takes as long as eight of them."""
    begins = [decode_deceptive_text(KChooser(7), seconds_with(x))[2] for x in (1.0, 0.5e-3)]
    assert 10 < begins[1] < 0.7 * begins[0]


def test_a_known_head_may_draft_at_once():
    """Also where its best K has slow steps; and no time, however odd, ends a choice."""
    chooser = KChooser(7)
    chooser.recall([1e6] * 7, [1e6] * 7)
    assert chooser.choose({0: 1.0, 7: 4.0}) == 7
    for _ in range(40):
        chooser.observe(chooser.steps_left, chooser.steps_left, np.zeros(7, int))
        assert chooser.choose({0: 1.0, 7: 1.0}) in (0, 7)


@pytest.mark.parametrize("plain", [1.0, 0.6e-3])
def test_first_steps_in_vain_do_not_end_drafting_that_is_known_to_pay(plain):
    """Steps right after a prompt accept less than later ones. Where plain steps are short, to begin
    takes as long as eight of them, and is no reason to give up either."""
    batch_of_8 = {0: plain, 1: 1.7 * plain, 3: 2.15 * plain, 5: 2.58 * plain, 7: 2.84 * plain}
    chooser = KChooser(7)
    chooser.recall([400.0] * 7, [360.0] * 7)
    for _ in range(2):
        assert chooser.choose(batch_of_8) > 0
        count = chooser.steps_left
        # one token in two of each step
        accepted = np.array([4 * count, *[0] * 6])
        chooser.observe(count, 8 * count, accepted)
    # a head that never does better is given up
    chosen = []
    for _ in range(16):
        chosen += [k := chooser.choose(batch_of_8)] * chooser.steps_left
        chooser.observe(chooser.steps_left, 8 * chooser.steps_left if k else 0, np.zeros(7, int))
    assert chosen.count(0) > 0.9 * len(chosen)


def test_no_more_steps_are_taken_at_once_than_may_be_lost():
    """Where drafting neither gains nor loses, the next choice comes before the budget is gone."""
    seconds = {0: 1.0, 3: 2.5}
    chooser = KChooser(3)
    chooser.recall([1e6] * 3, [1e6] * 3)
    total, taken = 0.0, []
    for _ in range(60):
        chooser.survival.recall([1e6] * 3, [1e6] * 3)  # it does not learn that nothing is gained
        assert chooser.choose(seconds) == 3
        taken.append(count := chooser.steps_left)
        budget = adaptive_k.MAX_LOSS * total + adaptive_k.LOSS_ALLOWANCE + adaptive_k.CHANGE_STEPS
        assert count <= max(adaptive_k.FIRST_STEPS, budget / (seconds[3] - seconds[0]))
        # 1.5 drafts of a step are accepted
        chooser.observe(count, 2 * count, np.array([count, count, count]))
        total += count * seconds[3]
    assert taken[0] == adaptive_k.FIRST_STEPS and adaptive_k.FIRST_STEPS < taken[-1] <= 128


def test_a_time_that_was_measured_at_a_bad_moment_does_not_stay(tmp_path):
    """The best K seems slow at first; later rounds are of better moments."""
    rng = np.random.default_rng(4)
    chooser, chosen = KChooser(7), []
    times = StepTimes({"machine": "one"}, tmp_path)

    def measure(k):
        return SECONDS[k] * (1.3 if k == 5 and not chosen else 1)

    easy = [0.8, 0.8, 0.85, 0.85, 0.8, 0.3, 0.3]
    while len(chosen) < 20_000:
        seconds = times.get(list(SECONDS), 1, 256, "greedy", measure)
        k = chooser.choose(seconds)
        count = chooser.steps_left
        accepted = np.zeros(7, int)
        accepted[:k] = steps(rng, easy, k, count)
        chooser.observe(count, count if k else 0, accepted)
        times.count(1, 256, "greedy", count, count * step_times.COMPILING_WAITS / 1000)
        chosen += [k] * count
    assert seconds[5] == pytest.approx(SECONDS[5])
    is_best = np.array(chosen) == 5
    assert is_best[:4000].mean() < 0.2 and is_best[-5000:].mean() > 0.8


def test_gains_of_drafting_are_a_bounded_credit():
    rng = np.random.default_rng(2)
    chooser = KChooser(7)
    decode_simulated(chooser, SECONDS, [0.95] * 7, 5_000, rng)
    assert chooser._lost == pytest.approx(-adaptive_k.MAX_CREDIT * SECONDS[0])


def test_other_seconds_are_a_new_choice():
    """As when rows leave: the smaller batch may draft where the larger one did not."""
    chooser = KChooser(3)
    dear = {0: 1.0, 1: 3.0, 3: 5.0}
    cheap = {0: 1.0, 1: 1.1, 3: 1.2}
    assert chooser.choose(dear) == 0 and chooser.steps_left == adaptive_k.FIRST_WAIT
    chooser.observe(chooser.steps_left - 1, 0, np.zeros(3, int))
    assert chooser.choose(dear) == 0 and chooser.steps_left == 1
    assert chooser.choose(cheap) == 3 and chooser.steps_left == adaptive_k.FIRST_STEPS
    # a little better is not worth a change
    chooser.observe(400, 400, np.array([400, 400, 400]))
    twice = 2 * adaptive_k.FIRST_STEPS
    assert chooser.choose({0: 1.0, 1: 0.599, 3: 1.2}) == 3 and chooser.steps_left == twice
    # other seconds of which the same K is best are no reason to choose before it is time
    assert chooser.choose({0: 1.0, 1: 0.5, 3: 1.2}) == 3 and chooser.steps_left == twice
    assert chooser.choose({0: 0.2, 1: 0.5, 3: 1.2}) == 0


@pytest.mark.parametrize(
    "text, of_best, of_plain",
    [
        ("easy, four rows", 0.96, 1.3),
        ("hard, one row", 0.96, 1.05),
        ("hopeless, short steps", 0.96, 0.96),
    ],
)
@pytest.mark.parametrize(
    "machine", [(0.0, 20, 1.0, 1.0), (0.15, 20, 0.8, 1.0), (0.25, 60, 1.0, 1.0)]
)
def test_a_machine_whose_speed_drifts(text, of_best, of_plain, machine, monkeypatch):
    """Times of one moment beside those of another would cost up to a quarter of the speed."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts" / "measure")
    monkeypatch.setattr(step_times, "MEASURED_SECONDS", 2.0)  # of a clock that does not wait
    from drifting_machine import simulate

    over, over_plain = zip(*(simulate(text, machine, seed) for seed in range(4)), strict=True)
    assert np.mean(over) > of_best and np.mean(over_plain) > of_plain and min(over) > 0.93
