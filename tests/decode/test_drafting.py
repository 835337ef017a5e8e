"""Draft heads with caches, padding and ragged batches draft what the slowest reference drafts.

The reference has no cache, drafts for one row at a time and computes every forward anew.
"""

import functools
import inspect
from pathlib import Path

import designs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from block_attention import MaskedAttention, mask_of

from peagle_jax.decode.engine import Engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.requests import Request
from peagle_jax.train.attention import PackedCausal
from peagle_jax.types import DraftState, InputError

WIDTH, B = 48, 3
UNCHECKED = inspect.unwrap(generate)  # as users call it, without the type checks of tests
PROMPT_LENGTHS = (4, 11, 1)  # of each row
# tokens that each row commits before each drafting, up to K + 1
COMMITTED = ((1, 1, 1), (3, 1, 6), (2, 4, 3), (5, 2, 1), (6, 2, 4))
OPTIONS = {
    "llama": {},
    "qwen3": {"qk_norm": True, "layers": 3, "windows": (None,) * 3},
    "residual": {"norm_before_residual": True},
    "before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "layers": 1, "windows": (None,)},
    "norm_output": {"norm_output": True},
    "bias": {"attention_bias": True},
    "reduced": {"draft_vocab": 17},
    "window": {"windows": (3, None)},
    "window_last": {"windows": (None, 3)},
    "markov": {"markov_rank": 3},
    "markov_rnn": {"markov_rank": 5, "markov_kind": "rnn"},
    "markov_gated": {"markov_rank": 6, "markov_kind": "gated", "draft_vocab": 17},
    "bidirectional": {"placeholder_attention": "bidirectional"},
    "committed": {"placeholder_attention": "committed", "windows": (None, 3)},
    "injected": {"placeholder_context": "injected", "layers": 3, "windows": (None,) * 3},
    "injected_bidirectional": {
        "placeholder_attention": "bidirectional",
        "placeholder_context": "injected",
        "markov_rank": 3,
    },
}
EAGLE_OPTIONS = {
    "eagle": {},
    "eagle_qwen3": {"qk_norm": True, "layers": 1, "windows": (None,)},
    "eagle_bias_window": {"attention_bias": True, "windows": (None, 3)},
}
OPTIONS |= {name: tiny.EAGLE | options for name, options in EAGLE_OPTIONS.items()}


class SlowDrafting:
    """Drafting by whole forwards over the text, for one row.

    Padding to one width saves compilations, and causal attention hides it.
    """

    def __init__(self, head):
        self.head = head
        positions = jnp.arange(WIDTH)[None]

        def rows(params, embeddings, fused, n, num_committed=WIDTH):
            module = head.bind(params)
            attend = PackedCausal(jnp.where(positions < n, 0, -1))
            if head.config.placeholder_attention != "causal" and num_committed < n:
                design, padding = head.config.placeholder_attention, WIDTH - n
                mask = mask_of(design, num_committed, n - num_committed, padding)
                attend = MaskedAttention(mask)
            inputs = embeddings[None], fused[None], positions, attend, None
            x, _ = module(*inputs, is_placeholder=positions >= num_committed)
            return module.compute_logits(x[0]), module.final_norm(x[0]), module.feedback(x[0])

        @jax.jit
        def fuse(params, aux_hidden_states):
            return head.bind(params).fuse(aux_hidden_states)

        is_causal = head.config.placeholder_attention == "causal"
        self.rows, self.fuse = jax.jit(rows) if is_causal else rows, fuse

    def choose(self, logits, normed, previous, state):
        """The likeliest token after `previous`, by the logits and the Markov head's formula.

        Args:
          state: of the kind "rnn", and changed here.
        """
        if "markov" in self.head.params:
            markov = jax.tree.map(np.asarray, self.head.params["markov"])
            code = markov["w1"]["table"][previous]
            if "gate" in markov:
                gate = np.concatenate([normed, code]) @ markov["gate"]["kernel"]
                code = code / (1 + np.exp(-gate - markov["gate"]["bias"]))
            if "joint" in markov:
                joint = np.concatenate([state, code, normed]) @ markov["joint"]["kernel"]
                gate, candidate, code = np.split(joint + markov["joint"]["bias"], 3)
                kept = 1 / (1 + np.exp(-gate))
                state[:] = kept * state + (1 - kept) * np.tanh(candidate)
                code = np.tanh(code)
            logits = logits + code @ markov["w2"]["kernel"]
        draft_id = int(np.argmax(logits))
        return draft_id + int(self.head.params["d2t"][draft_id] if "d2t" in self.head.params else 0)

    def draft(self, text, aux_hidden_states, k, method):
        """`text` is t_0 .. t_p; `aux_hidden_states` are h_0 .. h_{p-1} and may go on."""
        p, head, params = len(text) - 1, self.head, self.head.params
        table = np.asarray(params["embed"]["table"])
        fused = np.array(self.fuse(params, jnp.asarray(aux_hidden_states)))

        def pad(rows):
            return jnp.asarray(np.pad(np.array(rows), [(0, WIDTH - len(rows)), (0, 0)]))

        if method == "peagle":
            fuse = functools.partial(self.fuse, params)
            for depth in range(1, k):
                fused[p - 1 + depth] = designs.fused(head, depth, fused[p - 1], fuse)
            inputs = [*table[text[1:]], *[designs.embedding(head, table[text[-1]])] * (k - 1)]
            found = self.rows(params, pad(inputs), jnp.asarray(fused), p + k - 1, p)
            logits, normed, _ = map(np.asarray, found)
            drafts, state = [text[-1]], np.zeros(self.head.config.markov_rank or 0)
            for row in range(p - 1, p + k - 1):
                drafts.append(self.choose(logits[row], normed[row], drafts[-1], state))
            return drafts[1:]
        drafts, tokens = [], list(text[1:])
        for step in range(k):
            found = self.rows(params, pad(table[tokens]), jnp.asarray(fused), p + step)
            logits, normed, states = (np.asarray(x[p + step - 1]) for x in found)
            # each pass drafts one token, so that a state begins anew
            state = np.zeros(self.head.config.markov_rank or 0)
            drafts.append(self.choose(logits, normed, tokens[-1], state))
            tokens.append(drafts[-1])
            fused[p + step] = states
        return drafts


@pytest.mark.parametrize(
    "name, method, k",
    [(n, m, 5) for n in OPTIONS if n not in EAGLE_OPTIONS for m in ("peagle", "eagle3")]
    + [(n, "eagle", 5) for n in EAGLE_OPTIONS]
    + [("llama", m, 1) for m in ("peagle", "eagle3")]
    + [(n, "peagle", 5) for n in list(designs.ALL)[1:]],
)
def test_every_draft_of_every_step(name, method, k):
    head = (
        tiny.head(**OPTIONS[name])
        if name in OPTIONS
        else tiny.head(**designs.ALL[name], num_depths=4)
    )  # K is 5: the last depth repeats
    rng = np.random.default_rng(8)
    texts, all_aux = (
        rng.integers(0, 41, (B, WIDTH)),
        rng.normal(size=(B, WIDTH, head.config.sizes.aux_dim)).astype(np.float32),
    )
    drafter, slow = make_drafter(head, k, method), SlowDrafting(head)
    step, prefill = jax.jit(drafter.step), jax.jit(drafter.prefill)
    lengths = np.array(PROMPT_LENGTHS)
    width = max(PROMPT_LENGTHS)
    state = DraftState(drafter.init(B, WIDTH), None)

    def with_garbage(x, real):
        """9 in the place of everything that must not be read."""
        return np.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, 9).astype(x.dtype)

    real = np.arange(width - 1)[None] < (lengths - 1)[:, None]
    state = prefill(
        head.params,
        state,
        jnp.asarray(with_garbage(texts[:, 1:width], real)),
        jnp.asarray(with_garbage(all_aux[:, : width - 1], real)),
        jnp.asarray(lengths - 1),
    )
    different = set()
    for counts in np.minimum(COMMITTED, k + 1):
        real = np.arange(k + 1)[None] < counts[:, None]
        tokens = np.stack([texts[b, n : n + k + 1] for b, n in enumerate(lengths)])
        aux_hidden_states = np.stack([all_aux[b, n - 1 : n + k] for b, n in enumerate(lengths)])
        drafts, logits, state = step(
            head.params,
            state,
            jnp.asarray(with_garbage(tokens, real)),
            jnp.asarray(with_garbage(aux_hidden_states, real)),
            jnp.asarray(counts),
        )
        assert logits is None
        lengths = lengths + counts
        for b, n in enumerate(lengths):
            want = slow.draft(texts[b, :n], all_aux[b], k, method)
            assert drafts[b].tolist() == want
            different.update(want)
    assert len(different) > 3  # heads that always draft the same would show nothing
    assert state.cache.length.tolist() == (lengths - 1).tolist()


def test_a_seed_fixes_a_row():
    target, head, prompts = (
        tiny.target(),
        tiny.head(),
        [[3, 1, 4], [1, 5, 2, 6, 5, 3, 5, 0, 2], [2]],
    )

    def draw(prompts, seed):
        return generate(target, head, prompts, k=3, max_new_tokens=12, temperature=0.9, seed=seed)

    both = draw(prompts, [5, 6, 7])
    assert draw([prompts[2]], [7])[0].output_token_ids == both[2].output_token_ids
    assert draw([prompts[2]], [8])[0].output_token_ids != both[2].output_token_ids


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"target_dim": 25}, "width 24; got 25"),
        ({"vocab": 43, "draft_vocab": 43}, "41 tokens; got 43"),
        ({"aux_hidden_state_layers": (0, 1, 2)}, r"aux_hidden_state_layers \[0, 1, 2\]"),
        ({"aux_hidden_state_layers": (1, 2)}, r"aux_hidden_state_layers \[1, 2\]"),
        (tiny.EAGLE, r"aux_hidden_state_layers \[-1\]"),
        (tiny.EAGLE | {"dim": 20}, "must have the target's width 24; got 20"),
    ],
)
def test_heads_that_do_not_fit(changes, words):
    with pytest.raises(InputError, match=words):
        generate(tiny.target(), tiny.head(**changes), [[1]], k=2)


def test_methods_that_a_head_cannot_draft_by():
    eagle3 = tiny.head(mask_token=None)
    assert type(make_drafter(eagle3, 3)).__name__ == "AutoregressiveDrafter"
    assert type(make_drafter(tiny.head(), 3)).__name__ == "ParallelDrafter"
    with pytest.raises(InputError, match="parallel drafting needs a mask token"):
        make_drafter(eagle3, 3, "peagle")
    eagle = tiny.head(**tiny.EAGLE)
    assert type(make_drafter(eagle, 3)).__name__ == "AutoregressiveDrafter"
    with pytest.raises(InputError, match="needs a mask token .* got peagle.*; use eagle$"):
        make_drafter(eagle, 3, "peagle")
    for head, method in ((eagle, "eagle3"), (eagle3, "eagle"), (tiny.head(), "eagle")):
        use = "eagle" if head is eagle else "eagle3" if head is eagle3 else "peagle"
        with pytest.raises(InputError, match=f"final hidden state, .* got {method}.*; use {use}$"):
            make_drafter(head, 3, method)
    with pytest.raises(InputError, match="at least one token must be drafted per step; got 0"):
        make_drafter(eagle3, 0)
    with pytest.raises(InputError, match="at most 128 drafts per step, .* got 129; use -k 6"):
        make_drafter(eagle3, 129)


def test_a_k_far_above_training_warns():
    head = tiny.head()  # trained for 6
    assert make_drafter(head, 12).k == 12
    with pytest.warns(UserWarning, match="K = 13 is far above 6, .* compare with -k 6"):
        assert make_drafter(head, 13).k == 13
    assert make_drafter(tiny.head(num_depths=None), 128).k == 128


@pytest.mark.parametrize(
    "prompts, words",
    [
        ([], "at least one prompt"),
        ([[1], []], "prompt 1: must have at least one token"),
        ([[41]], r"0..40; got 41"),
        ("def", r"one for each prompt; got str; give tokenizer\(texts\)"),
        ({"input_ids": [[1]]}, "one for each prompt; got dict"),
        (5, "one for each prompt; got int"),
        (["def"], "prompt 0: a prompt is token ids; got str; encode it"),
        ([1, 2], "prompt 0: a prompt is token ids; got int"),
        ([[1, 2.5]], "a token of the prompt must be a whole number; got 2.5"),
    ],
)
def test_bad_prompts(prompts, words):
    with pytest.raises(InputError, match=words):
        UNCHECKED(tiny.target(), None, prompts, max_new_tokens=4)


def test_prompts_as_arrays_and_from_an_iterator():
    prompts = [[3, 14, 15], [9, 2, 6]]
    want = generate(tiny.target(), None, prompts, max_new_tokens=4)
    for given in (np.array(prompts), jnp.array(prompts), iter(prompts), map(np.array, prompts)):
        answers = UNCHECKED(tiny.target(), None, given, max_new_tokens=4)
        assert [a.output_token_ids for a in answers] == [a.output_token_ids for a in want]
        assert [a.prompt_token_ids for a in answers] == prompts


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_new_tokens": None}, "max_new_tokens: must be 1 or more; got None"),
        ({"max_batch": 1.5}, "max_batch: must be a whole number; got 1.5"),
        ({"seed": 1.5}, "seed: must be a whole number; got 1.5"),
        ({"drafter": None, "k": 3}, "tokens are drafted by a head; got no drafter, k=3"),
        ({"drafter": None, "method": "peagle"}, "no drafter, k=None, method=peagle"),
        ({"drafter": "HEAD"}, "drafter: is a loaded model; got HEAD; load both"),
        ({"target": Path("TARGET")}, "target: is a loaded model; got TARGET; load both"),
    ],
)
def test_mistakes_in_a_call(options, words):
    given = {"target": tiny.target(), "drafter": tiny.head(), "max_new_tokens": 4, **options}
    with pytest.raises(InputError, match=words):
        UNCHECKED(given.pop("target"), given.pop("drafter"), [[1]], **given)


@pytest.mark.parametrize("k", ["5", 2.5])
def test_a_k_that_is_no_number(k):
    with pytest.raises(InputError, match=f'K: must be a whole number, or "auto"; got {k!r}; use 6'):
        inspect.unwrap(make_drafter)(tiny.head(), k)


class SomebodysOwn:
    """A drafter that is not of this package, and no dataclass."""

    def __init__(self, drafter):
        self.k, self.init = drafter.k, drafter.init
        self.prefill, self.step = drafter.prefill, drafter.step


def test_a_drafter_of_somebody_elses():
    target, head = tiny.pair("peagle")
    drafter = SomebodysOwn(make_drafter(head, 3, "peagle"))
    prompts = [[3, 14, 15], [9, 2, 6, 5, 35]]
    engine = Engine(target, drafter, head.params, max_batch=2)
    requests = [Request(prompt=prompt, max_new_tokens=12, stop_ids=()) for prompt in prompts]
    answers = [answer for _, answer in sorted(engine.run(requests), key=lambda pair: pair[0])]
    plain = generate(target, None, prompts, max_new_tokens=12, stop_ids=())
    assert [a.output_token_ids for a in answers] == [a.output_token_ids for a in plain]
    assert all(a.num_drafts for a in answers)
