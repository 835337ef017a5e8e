"""Speculation does not change the text: any drafter, at any K, gives the plain greedy output.

This holds up to the last slot of the cache.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.decode import batch
from peagle_jax.decode.generate import generate
from peagle_jax.types import DraftState, InputError, KVCache

NEW = 24
PROMPTS = [[3, 14, 15], [9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 23], [8], [4, 6, 2, 6, 4, 33, 8]]
ADVERSARIES = ("right", "wrong", "constant", "random", "right_then_wrong")


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Drafts what a table [B, position] says.

    The table is a parameter, so that one compiled program serves every adversary.
    """

    k: int

    def init(self, batch, cache_size):
        return KVCache((), jnp.zeros(batch, jnp.int32))

    def prefill(self, params, state, tokens, aux_hidden_states, count):
        return self._advance(state, count)

    def step(self, params, state, tokens, aux_hidden_states, count):
        last = state.cache.length + count  # position of the newest committed token
        drafted = last[:, None] + 1 + jnp.arange(self.k)[None]
        return jnp.take_along_axis(params, drafted, axis=1), None, self._advance(state, count)

    @staticmethod
    def _advance(state, count):
        return DraftState(KVCache((), state.cache.length + count), state.sampling)


@pytest.fixture(autouse=True)
def rows_stay(monkeypatch):
    """The table of `Scripted` has a line for each row of the batch."""
    monkeypatch.setattr(batch, "MIN_TOKENS_LEFT", 1000)


@functools.cache
def truth():
    return [tiny.greedy(tuple(p), NEW + 17) for p in PROMPTS]


def script(name: str) -> np.ndarray:
    table = np.zeros((len(PROMPTS), 80), np.int32)
    for row, prompt, text in zip(table, PROMPTS, truth(), strict=True):
        row[len(prompt) : len(prompt) + len(text)] = text
    rng = np.random.default_rng(3)
    if name == "wrong":
        return (table + 1) % 41
    if name == "constant":
        return np.full_like(table, 7)
    if name == "random":
        return rng.integers(0, 41, table.shape).astype(np.int32)
    if name == "right_then_wrong":
        return np.where(rng.random(table.shape) < 0.7, table, (table + 5) % 41).astype(np.int32)
    return table


def expected_steps(table: np.ndarray, k: int) -> list[tuple[int, list[int], list[bool]]]:
    """(steps, accepted per position, which tokens were drafted) of each row.

    Found by the slowest loop, which compares drafts with the true text position by position.
    """
    out = []
    for row, prompt, text in zip(table, PROMPTS, truth(), strict=True):
        emitted, steps, accepted, is_draft = 1, 0, [0] * k, [False]
        while emitted < NEW:
            right = 0
            while right < k and row[len(prompt) + emitted + right] == text[emitted + right]:
                accepted[right] += 1
                right += 1
            emitted, steps = emitted + right + 1, steps + 1
            is_draft += [True] * right + [False]
        out.append((steps, accepted, is_draft[:NEW]))
    return out


@pytest.mark.parametrize("k", range(1, 17))
def test_adversaries(k):
    for name in ADVERSARIES:
        table = script(name)
        answers = generate(
            tiny.target(), Scripted(k), PROMPTS, max_new_tokens=NEW, draft_params=jnp.asarray(table)
        )
        for answer, text in zip(answers, truth(), strict=True):
            assert answer.output_token_ids == text[:NEW], name
        assert [
            (a.num_drafts, a.num_accepted_per_pos, a.is_draft) for a in answers
        ] == expected_steps(table, k), name
        assert all(
            a.num_draft_tokens == k * a.num_drafts and len(a.is_draft) == NEW for a in answers
        )


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("name", ["right", "wrong"])
def test_up_to_the_last_slot(k, name):
    """The longest prompt fits with no slot to spare; one slot less is refused."""
    cache_size = max(map(len, PROMPTS)) + NEW + k
    answers = generate(
        tiny.target(),
        Scripted(k),
        PROMPTS,
        max_new_tokens=NEW,
        draft_params=jnp.asarray(script(name)),
        cache_size=cache_size,
    )
    assert [a.output_token_ids for a in answers] == [t[:NEW] for t in truth()]
    with pytest.raises(InputError, match=f"must fit the cache of {cache_size - 1} slots"):
        generate(
            tiny.target(),
            Scripted(k),
            PROMPTS,
            max_new_tokens=NEW,
            draft_params=jnp.asarray(script(name)),
            cache_size=cache_size - 1,
        )


def test_plain_decoding_is_greedy():
    answers = generate(tiny.target(), None, PROMPTS, max_new_tokens=NEW)
    assert [a.output_token_ids for a in answers] == [t[:NEW] for t in truth()]
    assert all(
        a.num_drafts == 0 and a.acceptance_length is None and not any(a.is_draft) for a in answers
    )


@pytest.mark.parametrize("name", ["right", "random"])
def test_stop_tokens(name):
    """A row ends with its first stop token, even within an accepted block; other rows go on."""
    stop = truth()[1][9]
    answers = generate(
        tiny.target(),
        Scripted(5),
        PROMPTS,
        max_new_tokens=NEW,
        draft_params=jnp.asarray(script(name)),
        stop_ids=[stop, 40],
    )
    for answer, text in zip(answers, truth(), strict=True):
        ends = [i for i, t in enumerate(text[:NEW]) if t in (stop, 40)]
        assert answer.output_token_ids == text[: ends[0] + 1 if ends else NEW]
        assert answer.finish_reason == ("stop" if ends else "length")
    assert any(a.finish_reason == "stop" for a in answers)


@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_a_stop_token_past_the_limit(row):
    """It stands in the accepted block, behind the last token that was asked for."""
    text = truth()[row]
    # where a token comes that has not come before, and is not the first of a block of six
    past = next(i for i in range(8, NEW) if i % 6 != 1 and text[i] not in text[:i])
    answers = generate(
        tiny.target(),
        Scripted(5),
        PROMPTS,
        max_new_tokens=past,
        draft_params=jnp.asarray(script("right")),
        stop_ids=[text[past]],
    )
    assert answers[row].output_token_ids == text[:past]
    assert answers[row].finish_reason == "length"


@pytest.mark.parametrize("new", [1, 2])
def test_shortest_answers(new):
    answers = generate(
        tiny.target(),
        Scripted(4),
        PROMPTS,
        max_new_tokens=new,
        draft_params=jnp.asarray(script("right")),
    )
    assert [a.output_token_ids for a in answers] == [t[:new] for t in truth()]
    assert [a.num_drafts for a in answers] == [new - 1] * len(PROMPTS)


def test_a_row_does_not_depend_on_its_neighbors():
    head = tiny.head()
    together = generate(tiny.target(), head, PROMPTS, k=4, max_new_tokens=NEW)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        alone = generate(tiny.target(), head, [prompt], k=4, max_new_tokens=NEW)[0]
        assert (alone.output_token_ids, alone.num_accepted_per_pos) == (
            answer.output_token_ids,
            answer.num_accepted_per_pos,
        )


@pytest.mark.filterwarnings("ignore:K = .* is far above:UserWarning")
@pytest.mark.parametrize("method, k", [("peagle", 6), ("peagle", 16), ("eagle3", 6), ("eagle", 6)])
def test_real_heads_up_to_the_last_slot(method, k):
    """A head with its own cache, beyond the narrow drafting forward, with no slot to spare."""
    cache_size = max(map(len, PROMPTS)) + NEW + k
    answers = generate(
        *tiny.pair(method),
        PROMPTS,
        k=k,
        method=method,
        max_new_tokens=NEW,
        cache_size=cache_size,
    )
    assert [a.output_token_ids for a in answers] == [t[:NEW] for t in truth()]


@pytest.mark.long
@pytest.mark.parametrize("method", ["peagle", "eagle3", "eagle"])
@pytest.mark.parametrize("k", range(1, 17))
@pytest.mark.filterwarnings("ignore:K = .* is far above:UserWarning")
def test_real_heads_at_every_k(method, k):
    """Several heads, so that some drafts are accepted by luck; every K, both ways of drafting."""
    for seed in range(4):
        answers = generate(
            *tiny.pair(method, seed), PROMPTS, k=k, method=method, max_new_tokens=NEW
        )
        assert [a.output_token_ids for a in answers] == [t[:NEW] for t in truth()]


def test_defaults():
    """K: what the head was trained for, at most 7. Seeds: one a row, counted on from the first."""
    for num_depths, k in ((6, 6), (11, 7), (None, 7)):
        answer = generate(
            tiny.target(), tiny.head(num_depths=num_depths), PROMPTS[:1], max_new_tokens=4
        )[0]
        assert len(answer.num_accepted_per_pos) == k

    def ask(seed):
        return [
            a.output_token_ids
            for a in generate(
                tiny.target(), None, [[3], [3]], max_new_tokens=12, temperature=1.0, seed=seed
            )
        ]

    assert ask(4) == ask([4, 5]) and ask(4)[0] != ask(4)[1]
    assert ask(2**32 - 1) == ask([2**32 - 1, 0])
    assert ask(None) == ask(0)  # the numbers of the prompts
