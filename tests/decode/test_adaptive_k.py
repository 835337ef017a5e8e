"""A K that changes while decoding: what is chosen, and that the text does not notice."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sampling
import tiny

from peagle_jax.decode import adaptive_k, growth, loop, switching
from peagle_jax.decode.adaptive_k import KChooser, Survival, candidates
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.prefill import prefill, run_to_end
from peagle_jax.decode.requests import Request
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.decode.step_times import StepTimes
from peagle_jax.decode.verify import verify_sampled
from peagle_jax.types import InputError, RowOptions

PROMPTS = [[3, 14, 15], [9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 23], [8], [4, 6, 2, 6, 4, 33, 8]]
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
    assert survival.chances(4)[0] < adaptive_k.FIRST_GUESS  # which is a share of tokens
    seen, lengths = [], []
    for _ in range(600):
        survival.observe(4, 16, 16, steps(rng, conditional, 4, 16))
        seen.append(survival.chances(4))
        lengths.append(survival.length(4))
    # the guess counts as a few tokens, of about ninety
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


@pytest.mark.parametrize("k_seen", [5, 7])
def test_a_smaller_k_has_more_of_its_steps_in_easy_parts(k_seen):
    """In a text of hard and easy parts, lengths with K = 1 and 3 follow from steps with more."""
    parts = [0, 0, 1, 2, 7, 7]
    num_steps, accepted = regions_in_steps(parts, k_seen)
    survival = Survival(7)
    survival.observe(k_seen, 1, num_steps, accepted)
    for k in (1, 3, 5):
        fewer, found = regions_in_steps(parts, k)
        assert survival.length(k) == pytest.approx(840 * len(parts) / fewer, rel=0.01)
        assert survival.chances(k) == pytest.approx(found[:k] / fewer, abs=0.01)
        # which shares of all steps would not say
        naive = 1 + accepted[:k].sum() / num_steps
        assert k == k_seen or naive < 0.97 * survival.length(k)


def test_survival_forgets():
    survival = Survival(2)
    survival.observe(2, 100, 100, np.array([100, 100]))
    assert survival.chances(2)[1] > 0.93
    half = adaptive_k.HALF_LIFE
    survival.observe(2, half, half, np.zeros(2, int))
    # of the hundred half are left, in steps of three tokens; the others have one
    tokens = 150 / (150 + half)
    wanted = tokens / 3 / (tokens / 3 + 1 - tokens)
    assert survival.chances(2)[0] == pytest.approx(wanted, abs=0.03)
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
    survival.observe(0, half, 0, np.zeros(2, int))
    assert survival.counts()[0][0] < after[0]


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
    assert max(waits) <= adaptive_k.LAST_WAIT + adaptive_k.PLAIN_STEPS
    assert waits[-2] > 4 * waits[0]
    # text that becomes easy is noticed
    again = decode_simulated(chooser, SECONDS, [0.9] * 7, 12_000, rng)
    assert again[-1] in (5, 7) and again.count(0) < 2 * adaptive_k.LAST_WAIT
    # and the next look comes as soon as at first
    after = decode_simulated(chooser, SECONDS, [0.02] * 7, 2_000, rng)
    waits = [len(list(g)) for k, g in itertools.groupby(after) if not k]
    assert waits[0] <= 2 * adaptive_k.FIRST_WAIT + adaptive_k.PLAIN_STEPS


@pytest.mark.parametrize("is_known", [False, True])
def test_what_drafting_may_lose_is_bounded(is_known):
    """On a text that makes every estimate wrong: easy while plain, hopeless as soon as drafted."""
    chooser = KChooser(7)
    if is_known:
        chooser.recall([1e6] * 7, [1e6] * 7)
    total = lost = 0.0
    begins = 0  # of drafting
    was_plain = True
    for _ in range(4000):
        k = chooser.choose(SECONDS)
        if k == 0:
            # as if whatever was known before had been good
            chooser.survival.recall([1e6] * 7, [1e6] * 7)
        count = chooser.steps_left
        chooser.observe(count, count if k else 0, np.zeros(7, int))
        total += count * SECONDS[k]
        lost += count * (SECONDS[k] - SECONDS[0]) if k else 0
        begins += k > 0 and was_plain
        was_plain = k == 0
    budget = adaptive_k.MAX_LOSS * total + adaptive_k.LOSS_ALLOWANCE
    # each beginning costs, too; and a look is never shorter than its first steps
    lost += adaptive_k.CHANGE_STEPS * begins
    assert 0.5 * adaptive_k.MAX_LOSS * total < lost
    assert begins > 10 and lost < budget + adaptive_k.FIRST_STEPS * (SECONDS[7] - SECONDS[0]) + 1


def test_a_known_head_may_draft_at_once():
    """Also where its best K has slow steps; and no time, however odd, ends a choice."""
    chooser = KChooser(7)
    chooser.recall([1e6] * 7, [1e6] * 7)
    assert chooser.choose({0: 1.0, 7: 4.0}) == 7
    for _ in range(40):
        chooser.observe(chooser.steps_left, chooser.steps_left, np.zeros(7, int))
        assert chooser.choose({0: 1.0, 7: 1.0}) in (0, 7)


def test_first_steps_in_vain_do_not_end_drafting_that_is_known_to_pay():
    """Steps right after a prompt accept less than later ones."""
    batch_of_8 = {0: 1.0, 1: 1.7, 3: 2.15, 5: 2.58, 7: 2.84}
    chooser = KChooser(7)
    chooser.recall([400.0] * 7, [360.0] * 7)
    for _ in range(2):
        assert chooser.choose(batch_of_8) > 0
        count = chooser.steps_left
        # one token in two of each step
        accepted = np.array([4 * count, *[0] * 6])
        chooser.observe(count, 8 * count, accepted)
    # a head that never does better is given up
    for _ in range(8):
        k = chooser.choose(batch_of_8)
        chooser.observe(chooser.steps_left, 8 * chooser.steps_left if k else 0, np.zeros(7, int))
    assert chooser.k == 0


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
        budget = adaptive_k.MAX_LOSS * total + adaptive_k.LOSS_ALLOWANCE
        assert count <= max(adaptive_k.FIRST_STEPS, budget / (seconds[3] - seconds[0]))
        # 1.5 drafts of a step are accepted
        chooser.observe(count, 2 * count, np.array([count, count, count]))
        total += count * seconds[3]
    assert taken[0] == adaptive_k.FIRST_STEPS and adaptive_k.FIRST_STEPS < taken[-1] <= 64


def test_a_time_that_was_measured_at_a_bad_moment_does_not_stay(tmp_path):
    """The best K seems slow at first; now and then it is taken, and its time observed."""
    rng = np.random.default_rng(4)
    chooser, chosen = KChooser(7), []
    times = StepTimes({"machine": "one"}, tmp_path)
    seconds = times.get(
        list(SECONDS), 1, 256, "greedy", lambda k: SECONDS[k] * (1.08 if k == 5 else 1)
    )
    easy = [0.8, 0.8, 0.85, 0.85, 0.8, 0.3, 0.3]
    while len(chosen) < 20_000:
        k = chooser.choose(seconds)
        count = chooser.steps_left
        accepted = np.zeros(7, int)
        accepted[:k] = steps(rng, easy, k, count)
        chooser.observe(count, count if k else 0, accepted)
        times.observe(k, 1, 256, "greedy", SECONDS[k])
        chosen += [k] * count
    assert seconds[5] == SECONDS[5]
    assert np.mean(np.array(chosen[-5000:]) == 5) > 0.8


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
    assert chooser.choose(dear) == 0 and chooser.steps_left == adaptive_k.PLAIN_STEPS
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


@pytest.fixture
def any_k(monkeypatch, tmp_path):
    """An engine whose K changes every few steps."""
    monkeypatch.setattr(growth, "FIRST_SLOTS", 64)
    rounds = itertools.cycle([(4, 2), (0, 3), (2, 2), (4, 1), (1, 3), (0, 11), (3, 2)])

    def choose(self, seconds):
        assert set(seconds) == {0, 1, 3, 4}
        self._seconds = dict.fromkeys(range(5), 1.0)
        if self.steps_left <= 0:
            self.k, self.steps_left = next(rounds)
        return self.k

    monkeypatch.setattr(KChooser, "choose", choose)
    monkeypatch.setattr(StepTimes, "get", lambda self, ks, *_: dict.fromkeys(ks, 1.0))

    def make(method: str, max_batch: int) -> Engine:
        target, head = tiny.pair(method, context=640)
        drafter = make_drafter(head, 4, method)
        return Engine(
            target, drafter, head.params, adaptive_k=True, max_batch=max_batch, step_times=tmp_path
        )

    return make


@pytest.mark.parametrize("method, max_batch", [("peagle", 3), ("eagle3", 1), ("eagle", 2)])
def test_greedy_text_is_plain_decodings(method, max_batch, any_k):
    engine = any_k(method, max_batch)
    num_programs = switching._change_k._cache_size()
    requests = [
        Request(prompt=p, max_new_tokens=70 + i, stop_ids=()) for i, p in enumerate(PROMPTS)
    ]
    answers = dict(engine.run(requests))
    for i, prompt in enumerate(PROMPTS):
        answer = answers[i]
        assert answer.output_token_ids == tiny.greedy(tuple(prompt), 70 + i)
        assert len(answer.num_accepted_per_pos) == 4
        assert sum(answer.is_draft) <= answer.num_accepted_tokens
        assert answer.num_drafts <= answer.num_draft_tokens <= 4 * answer.num_drafts
    assert set(engine.stats.steps_by_k) == {0, 1, 2, 3, 4}
    assert engine.stats.steps_by_k.total() == engine.stats.num_steps
    # plain steps are no drafts
    assert sum(a.num_drafts for a in answers.values()) < engine.stats.num_steps * max_batch
    assert any(a.num_accepted_tokens for a in answers.values())
    # one program for a size of batch and caches serves all changes
    sizes = {program[1:3] for program in engine.stats.programs if program[0] == "decode"}
    assert switching._change_k._cache_size() - num_programs <= len(sizes)
    assert engine.stats.steps_by_k.total() > 10 * len(sizes)


@pytest.mark.parametrize("method", ["peagle", "eagle3", "eagle"])
def test_the_head_has_read_every_token_after_a_change(method):
    """Drafts after any change of K are those of a state that was made from the text so far."""
    target, head = tiny.pair(method)
    lookback = 7
    spec = loop.DecodeSpec(
        target.graph, target.config, make_drafter(head, 4, method), False, lookback=lookback
    )
    params = target.params, head.params
    options = RowOptions(np.full(2, 99), np.full((2, 1), -1), None)
    prompts, lengths = np.array([[3, 14, 15, 9, 2], [8, 1, 0, 0, 0]], np.int32), np.array([5, 2])

    def read(prompts, lengths):
        return run_to_end(prefill(spec, 128, *params, prompts, lengths, options, chunk=8))

    state = read(prompts, lengths)
    for k, num_steps in [(2, 2), (4, 1), (0, 5), (1, 3), (4, 2), (3, 2)]:
        state = switching.change_k(spec.drafter, head.params, k, state)
        _, state = loop.decode(spec.with_k(k), *params, options, 9, num_steps, state)
        # what the next change would draft, beside the same from the text alone
        ready = switching.change_k(spec.drafter, head.params, 1, jax.tree.map(jnp.copy, state))
        num_unread = ready.count
        assert num_unread.max() <= 2
        drafts, _, _ = loop.propose(spec.with_k(1), head.params, None, ready)
        for row in range(2):
            text = [
                *prompts[row, : lengths[row]],
                *state.output[row, : state.emitted[row]].tolist(),
            ]
            fresh = read(np.array([text[:-1]] * 2, np.int32), np.full(2, len(text) - 1))
            assert fresh.tokens[0, 0] == text[-1]
            want, _, _ = loop.propose(spec.with_k(1), head.params, None, fresh)
            assert drafts[row, 0] == want[0, 0], (k, row)
            assert ready.draft.cache.length[row] == len(text) - 1 - num_unread[row]
    # longer than the lookback: the oldest tokens are left out
    before = int(state.cache.length[0])
    _, state = loop.decode(spec.with_k(0), *params, options, 9, 20, state)
    assert int(state.cache.length[0]) == before + 20
    assert state.count.min() > lookback
    ring = np.asarray(state.aux_hidden_states), np.asarray(state.count)
    state = switching.change_k(spec.drafter, head.params, lookback - 1, state)
    assert state.count.tolist() == [lookback] * 2
    for row in range(2):
        text = state.output[row, : state.emitted[row]].tolist()
        assert state.tokens[row].tolist() == text[-lookback:]
        in_order = np.roll(ring[0][row], -(ring[1][row] % lookback), axis=0)
        assert np.array_equal(state.aux_hidden_states[row], in_order)
    state = switching.change_k(spec.drafter, head.params, 4, state)
    assert state.count.tolist() == [1] * 2
    assert int(state.draft.cache.length[0]) < before + lookback


def test_sampled_text_keeps_the_targets_distribution():
    """With a schedule, steps of each kind: also the keys of plain steps must be fresh."""
    shape, head_shape = test_sampling.SHAPE, test_sampling.HEAD
    target, head = tiny.target(**shape), tiny.head(**head_shape)
    spec = loop.DecodeSpec(
        target.graph, target.config, make_drafter(head, 2, "peagle"), True, lookback=3
    )
    params, rows, length = (target.params, head.params), test_sampling.ROWS, test_sampling.LENGTH
    prompts = np.tile(test_sampling.PROMPT, (rows, 1)).astype(np.int32)
    counts = np.zeros(test_sampling.V**length)
    accepted = 0
    for call in range(3):
        seeds = range(7_000_000 + call * rows, 7_000_000 + (call + 1) * rows)
        sampling = sampling_params(rows, test_sampling.TEMPERATURE, 0, 1.0, seeds, 0.0)
        options = RowOptions(np.full(rows, length), np.full((rows, 1), -1), sampling)
        lengths = np.full(rows, prompts.shape[1])
        state = run_to_end(prefill(spec, 16, *params, prompts, lengths, options, chunk=2))
        for k in (0, 1, 0):
            if k:
                state = switching.change_k(spec.drafter, head.params, k, state)
            _, state = loop.decode(spec.with_k(k), *params, options, rows + 1, 1, state)
        assert state.done.all()
        index = np.asarray(state.output[:, :length]) @ test_sampling.V ** np.arange(length)[::-1]
        counts += np.bincount(index, minlength=len(counts))
        accepted += int(state.num_accepted_per_pos.sum())
    assert accepted > rows / 10
    expected = test_sampling.exact(0, 1.0, 0.0, False) * counts.sum()
    assert test_sampling.chi_square(counts, expected) > 0.001


@pytest.mark.parametrize("looks_at_draft", [False, True])
def test_a_choice_that_looks_at_the_draft_would_not(looks_at_draft):
    """Why K is chosen before a step drafts (DSpark, arXiv:2607.05147, appendix A).

    A rule that leaves out drafts that the head finds unlikely changes the distribution.
    """
    rows = 60_000
    rng = np.random.default_rng(6)
    p_logits, q_logits = (jnp.asarray(rng.normal(size=4), jnp.float32) for _ in range(2))
    sampling = sampling_params(rows, 1.0, 0, 1.0, range(rows), 0.0)
    assert sampling is not None
    q = np.asarray(jax.nn.softmax(q_logits))
    drafts = rng.choice(4, rows, p=q / q.sum())
    tokens, _ = verify_sampled(
        jnp.asarray(drafts[:, None]),
        jnp.broadcast_to(q_logits, (rows, 1, 4)),
        jnp.broadcast_to(p_logits, (rows, 2, 4)),
        sampling,
    )
    p = np.asarray(jax.nn.softmax(p_logits), float)
    p /= p.sum()
    plain = rng.choice(4, rows, p=p)
    drafts_are_used = q[drafts] > 0.3 if looks_at_draft else rng.random(rows) < 0.5
    assert 0.1 < drafts_are_used.mean() < 0.9
    committed = np.where(drafts_are_used, np.asarray(tokens)[:, 0], plain)
    counts = np.bincount(committed, minlength=4)
    p_value = test_sampling.chi_square(counts, p * rows)
    assert p_value < 1e-6 if looks_at_draft else p_value > 0.001


# ---------------------------------------------------------------- options


def test_auto_in_generate(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, head = tiny.target(), tiny.head()
    answers = generate(target, head, PROMPTS[:2], k="auto", max_new_tokens=25, stop_ids=())
    assert [a.output_token_ids for a in answers] == [tiny.greedy(tuple(p), 25) for p in PROMPTS[:2]]
    assert len(answers[0].num_accepted_per_pos) == 6  # what the head was trained for
    assert len(list((tmp_path / "peagle_jax" / "step_times").iterdir())) == 1
    assert make_drafter(tiny.head(num_depths=None), "auto").k == 7
    assert make_drafter(tiny.head(num_depths=40), "auto").k == 15
    assert candidates(1) == [0, 1] and candidates(6) == [0, 1, 3, 5, 6]


def test_what_cannot_be_adapted(monkeypatch):
    target, head = tiny.target(), tiny.head()
    with pytest.raises(InputError, match="a draft head; got plain decoding; give a draft head"):
        Engine(target, adaptive_k=True)
    with pytest.raises(InputError, match="chains of drafts; got a tree of 9 nodes; leave out one"):
        Engine(target, make_drafter(head, 3), head.params, adaptive_k=True, num_tree_nodes=9)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="chosen by one process; got 2 processes; give a number"):
        Engine(target, make_drafter(head, 3), head.params, adaptive_k=True)
