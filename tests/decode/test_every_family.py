"""P-EAGLE decoding on every target family equals plain greedy decoding by transformers.

Ring caches and prefill in chunks change nothing.
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))
torch = pytest.importorskip("torch")
import families  # noqa: E402
import tiny  # noqa: E402
from test_lossless import Scripted  # noqa: E402

from peagle_jax import free_memory  # noqa: E402
from peagle_jax.decode import memory  # noqa: E402
from peagle_jax.decode.generate import generate  # noqa: E402
from peagle_jax.kernels import attention_blocks  # noqa: E402
from peagle_jax.types import CacheShape, InputError  # noqa: E402

NEW, K = 14, 3
# longer than windows and chunks, shorter, one token; and the first two again, which are read once
PROMPTS = [list(range(3, 33)), [7, 90, 2, 55, 13], list(range(3, 33)), [60], [7, 90, 2, 55, 13]]


@functools.cache
def greedy(case: str) -> list[list[int]]:
    model, _ = families.make(case)
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(NEW + K + 1):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def head(target):
    return tiny.head(
        vocab=families.V,
        draft_vocab=families.V,
        target_dim=target.config.dim,
        aux_hidden_state_layers=target.config.aux_hidden_state_layers,
    )


RINGS = {"prefill_chunk": 8, "sliding_cache": True}


def check(case: str, drafter, **options):
    answers = generate(
        families.ours(case), drafter, PROMPTS, max_new_tokens=NEW, stop_ids=(), **options
    )
    assert [a.output_token_ids for a in answers] == [ids[:NEW] for ids in greedy(case)]
    return answers


# a further option of a family: in the long tier
LATER = ("llama_tied", "qwen3", "qwen3_moe_raw", "gemma4_moe")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long if case in LATER else [])
        for case in families.CASES
    ],
)
def test_a_head_with_rings(case):
    check(case, head(families.ours(case)), k=K, **RINGS)


@pytest.mark.long  # seconds of compilation each
@pytest.mark.parametrize("case", families.CASES)
def test_a_head_and_plain_decoding(case):
    check(case, head(families.ours(case)), k=K)
    check(case, None)


ALL = [
    pytest.param(case, marks=[] if case in ("gpt_oss", "gemma4_ple") else pytest.mark.long)
    for case in families.CASES
]


@pytest.mark.parametrize("sliding_cache", [True, False])
@pytest.mark.parametrize("case", ALL)
def test_attention_in_blocks(case, sliding_cache, monkeypatch):
    """As long prompts have it on a CPU, in prefill and steps."""
    calls = tiny.attend_in_blocks(monkeypatch)
    monkeypatch.setattr(attention_blocks, "block_keys", lambda num_queries: 8)
    # a chunk that no other test has: all programs are traced here
    check(case, head(families.ours(case)), k=K, prefill_chunk=9, sliding_cache=sliding_cache)
    assert {9, K + 1} <= set(calls)


@pytest.mark.parametrize("case", ALL)
def test_a_tree_with_rings(case):
    """Windows, sinks, shared keys and experts, for nodes that see their ancestors alone."""
    answers = check(case, head(families.ours(case)), k=K, num_tree_nodes=9, **RINGS)
    assert all(a.num_draft_tokens == 9 * a.num_drafts for a in answers)


@pytest.mark.parametrize("case", ALL)
def test_every_length_of_rollback(case):
    """Drafts that are right, wrong at the second place, wrong at the first, in turns."""
    table = np.zeros((len(PROMPTS), 80), np.int32)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, greedy(case), strict=True)):
        table[row, len(prompt) : len(prompt) + len(answer)] = answer
    table[:, 2::5] = (table[:, 2::5] + 1) % families.V
    table[:, 0::7] = (table[:, 0::7] + 1) % families.V
    answers = check(case, Scripted(K), draft_params=jnp.asarray(table), **RINGS)
    accepted = np.sum([a.num_accepted_per_pos for a in answers], axis=0)
    assert (accepted > 0).all() and accepted.sum() < sum(a.num_draft_tokens for a in answers)


def test_a_ring_holds_a_block_of_drafts():
    """Chunks of a prompt are shorter here than the K + 1 positions that verifying writes."""
    case, prompt, answer, k = "gpt_oss", PROMPTS[0], greedy("gpt_oss")[0], 6
    table = np.zeros((1, 80), np.int32)
    table[0, len(prompt) : len(prompt) + len(answer)] = answer
    table[:, 1::3] = (table[:, 1::3] + 1) % families.V
    options = {"prefill_chunk": 2, "sliding_cache": True, "stop_ids": ()}
    drafter, params = Scripted(k), jnp.asarray(table)
    ours = families.ours(case)
    got = generate(ours, drafter, [prompt], max_new_tokens=NEW, draft_params=params, **options)
    assert got[0].output_token_ids == answer[:NEW]
    assert sum(got[0].num_accepted_per_pos) > 3


def test_rings_are_small():
    target = families.ours("gpt_oss")
    cache = target.config.empty_cache(1, 640, block=8)
    assert [group.k[0].shape[2] for group in cache.groups] == [5 + 8, 640]
    whole = memory.cache_bytes(target.config.cache_shapes(), 2, 640, jnp.float32)
    assert whole == 5 * 2 * 2 * 2 * 640 * 16 * 4
    assert (
        memory.cache_bytes(target.config.cache_shapes(), 2, 640, jnp.float32, 8)
        == whole // 5 * 2 + whole // 5 * 3 * 13 // 640
    )
    parts = [
        memory.cache_bytes(target.config.cache_shapes(), 2, 640, jnp.float32, parts=n)
        for n in (2, 4)
    ]
    assert parts == [whole // 2, whole]  # two KV heads do not divide by four devices


def test_a_smaller_ring_would_lose_what_is_needed(monkeypatch):
    """Blocks of 7 in a ring of window + 7 are right (tests/targets/test_families.py).

    With two slots fewer the logits change.
    """
    target, (tokens, want, _) = families.ours("gpt_oss"), families.truth("gpt_oss")

    def two_fewer(self, cache_size, block):
        return cache_size if self.window is None else self.window + block - 2

    monkeypatch.setattr(CacheShape, "num_slots", two_fewer)
    cache, worst = target.config.empty_cache(2, 40, block=7), 0.0
    for start in range(0, 21, 7):
        positions = jnp.broadcast_to(start + jnp.arange(7), (2, 7))
        got, _, cache = families.run(
            target, jnp.asarray(tokens[:, start : start + 7]), positions, cache
        )
        cache = dataclasses.replace(cache, length=cache.length + 7)
        worst = max(worst, np.abs(got - want[:, start : start + 7]).max())
    assert worst > 1e-2


def test_a_cache_that_is_too_large_is_refused_before_it_is_allocated(monkeypatch):
    target = families.ours("llama")
    config = dataclasses.replace(target.config, context=3 * 10**9)
    target = dataclasses.replace(target, config=config)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**6)
    # 5 layers, keys and values of 2 heads x 16 in float32: 1,280 bytes a token
    with pytest.raises(
        InputError,
        match=r"cache_size: 2 rows x 2048 tokens must fit the memory; got 0.0 GB wanted, "
        r"0.0 GB free; 2 x 256 would fit",
    ):
        generate(target, None, [[1], [2]], max_new_tokens=2047)
    with pytest.raises(InputError, match="lower max_batch, or use a machine"):
        memory.check_cache(lambda slots: 1280 * 10**6 * slots, 10**6, 4, 10**6)
    monkeypatch.undo()
    with pytest.raises(InputError, match="GB free; 1 x [0-9]+ would fit: lower max_new_tokens"):
        generate(target, None, [[1]], max_new_tokens=10**9)
    # what may be needed is not reserved
    (answer,) = generate(target, None, [[1, 7]], max_new_tokens=4, cache_size=2 * 10**9)
    assert len(answer.output_token_ids) == 4


def test_free_bytes_heeds_a_container(tmp_path, monkeypatch):
    assert free_memory.free_bytes() > 10**8
    (tmp_path / "max").write_text("5000000\n")
    (tmp_path / "used").write_text("3000000\n")
    (tmp_path / "stat").write_text("anon 5\ninactive_file 1500000\nactive_file 500000\n")
    monkeypatch.setattr(
        free_memory, "CGROUPS", [tuple(tmp_path / name for name in ("max", "used", "stat"))]
    )
    assert free_memory.free_bytes() == 4_000_000
    (tmp_path / "max").write_text("max\n")
    assert free_memory.free_bytes() > 10**8


def test_bad_chunk():
    with pytest.raises(InputError, match="prefill_chunk: must be 1 or more; got 0"):
        generate(families.ours("llama"), None, [[1]], max_new_tokens=2, prefill_chunk=0)
    least, whole = (
        generate(families.ours("llama"), None, [[1, 7, 3]], max_new_tokens=4, prefill_chunk=chunk)
        for chunk in (1, None)
    )
    assert least == whole
