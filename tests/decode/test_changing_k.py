"""A K that changes while decoding, which the text does not notice."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sampling
import tiny

from peagle_jax.decode import growth, loop, switching
from peagle_jax.decode.adaptive_k import KChooser, candidates
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.prefill import prefill, run_to_end
from peagle_jax.decode.requests import Request
from peagle_jax.decode.sampling import sampling_params
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.decode.step_times import StepTimes
from peagle_jax.decode.verify import verify_sampled
from peagle_jax.types import InputError, RowOptions

PROMPTS = [[3, 14, 15], [9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 23], [8], [4, 6, 2, 6, 4, 33, 8]]


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
    spec = DecodeSpec(
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
        drafts, *_ = loop.propose(spec.with_k(1), head.params, None, ready)
        for row in range(2):
            text = [
                *prompts[row, : lengths[row]],
                *state.output[row, : state.emitted[row]].tolist(),
            ]
            fresh = read(np.array([text[:-1]] * 2, np.int32), np.full(2, len(text) - 1))
            assert fresh.tokens[0, 0] == text[-1]
            want, *_ = loop.propose(spec.with_k(1), head.params, None, fresh)
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
    spec = DecodeSpec(
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
