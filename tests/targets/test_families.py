"""Every family against transformers: logits, taps, cached decoding, exports; and a mutation for every special thing."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import families  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from families import CASES, T, V, make, ours, run, truth  # noqa: E402
from flax import nnx  # noqa: E402

from peagle_jax import weights  # noqa: E402
from peagle_jax.checkpoints.target_io import load_target, save_target  # noqa: E402
from peagle_jax.layers import Decoder  # noqa: E402
from peagle_jax.targets import TARGETS, gemma4, gpt_oss, qwen3_moe, read_config  # noqa: E402
from peagle_jax.types import InputError, Model  # noqa: E402

TOLERANCE = 2e-5  # float32, on logits and taps of size 1 to 10 (house.md)


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def test_logits_taps_and_cache(case):
    target, (tokens, logits, states) = ours(case), truth(case)
    assert target.config.stop_ids == (11,)
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    got, aux_hidden_states, _ = run(
        target, jnp.asarray(tokens), positions, target.config.empty_cache(2, T)
    )
    np.testing.assert_allclose(got, logits, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(
        aux_hidden_states,
        np.concatenate([states[t] for t in target.config.aux_hidden_state_layers], -1),
        atol=TOLERANCE,
        rtol=0,
    )

    # block by block, in a cache with room to spare
    cache, seen = target.config.empty_cache(2, 40), []
    for start in range(0, T, 7):
        got, _, cache = run(
            target,
            jnp.asarray(tokens[:, start : start + 7]),
            positions[:, start : start + 7],
            cache,
        )
        cache = dataclasses.replace(cache, length=cache.length + 7)
        seen.append(got)
    np.testing.assert_allclose(np.concatenate(seen, 1), logits, atol=TOLERANCE, rtol=0)
    # and in rings, where a family has windows
    cache, seen = target.config.empty_cache(2, 40, block=7), []
    assert any(group.ring for group in cache.groups) == any(target.config.windows)
    for start in range(0, T, 7):
        got, _, cache = run(
            target,
            jnp.asarray(tokens[:, start : start + 7]),
            positions[:, start : start + 7],
            cache,
        )
        cache = dataclasses.replace(cache, length=cache.length + 7)
        seen.append(got)
    np.testing.assert_allclose(np.concatenate(seen, 1), logits, atol=TOLERANCE, rtol=0)


def test_exported_folder_is_what_transformers_wrote(case, tmp_path):
    theirs, folder = make(case)
    save_target(load_target(folder), tmp_path / "out")
    got, want = weights.open_folder(tmp_path / "out"), weights.open_folder(folder)
    assert got.keys() == want.keys() and all(np.array_equal(got[n], want[n]) for n in want)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.from_numpy(truth(case)[0])
    with torch.no_grad():
        assert torch.equal(again(tokens).compute_logits, torch.from_numpy(truth(case)[1]))


# ---------------------------------------------------------------- what parity would notice


def changed(target: Model, **config) -> Model:
    """The same weights under another config."""
    config = dataclasses.replace(target.config, **config)
    family = next(f for f in TARGETS.values() if isinstance(config, f.config))
    graph, _ = nnx.split(nnx.eval_shape(lambda: family.module(config, rngs=nnx.Rngs(0))))
    return Model(config, graph, target.params)


def filled(target: Model, end: str, value) -> Model:
    """Every parameter whose path ends so, of one value or rewritten."""
    flat = dict(weights.flatten_params(target.params))
    assert any(path.endswith(end) for path in flat)

    def new(x):
        return value(x) if callable(value) else jnp.full_like(x, value)

    return dataclasses.replace(
        target,
        params=weights.unflatten_params(
            {p: new(x) if p.endswith(end) else x for p, x in flat.items()}
        ),
    )


def plain(rope):
    return dataclasses.replace(
        rope,
        frequencies=tuple(777.0 ** (-np.arange(len(rope.frequencies)) / len(rope.frequencies))),
        scale=1.0,
    )


def turned(groups):  # KV heads in another order: what a wrong grouping of query heads reads
    return lambda kernel: jnp.roll(kernel, kernel.shape[1] // groups, axis=1)


MUTATIONS = {
    "llama3 rope": ("llama", lambda t, _: changed(t, rope=plain(t.config.rope))),
    "GQA groups": (
        "llama",
        lambda t, _: filled(filled(t, "attn.k.kernel", turned(2)), "attn.v.kernel", turned(2)),
    ),
    "attention bias": ("llama", lambda t, _: filled(t, "attn.o.bias", 0.0)),
    "MLP bias": ("llama", lambda t, _: filled(t, "mlp.down.bias", 0.0)),
    "norm eps": ("llama", lambda t, _: changed(t, norm_eps=1e-6)),
    "tied head": (
        "llama_tied",
        lambda t, patch: (
            patch.setattr(Decoder, "output_weight", lambda self: self.embed.table[...][::-1].T) or t
        ),
    ),
    "which layers slide": ("qwen3", lambda t, _: changed(t, windows=(5,) * 5)),
    "norms of q and k": (
        "qwen3",
        lambda t, _: filled(filled(t, "q_norm.scale", 1.0), "k_norm.scale", 1.0),
    ),
    "bias of q": ("qwen3", lambda t, _: filled(t, "attn.q.bias", 0.0)),
    "qk norm": ("qwen3_moe", lambda t, _: filled(t, "q_norm.scale", 1.0)),
    "norm eps of Qwen3-MoE": ("qwen3_moe", lambda t, _: changed(t, norm_eps=1e-6)),
    "norm eps of GPT-OSS": ("gpt_oss", lambda t, _: changed(t, norm_eps=1e-6)),
    "norm eps of Gemma 4": ("gemma4", lambda t, _: changed(t, norm_eps=1e-6)),
    "normalised router": ("qwen3_moe", lambda t, _: changed(t, normalize_chosen=False)),
    "raw router": ("qwen3_moe_raw", lambda t, _: changed(t, normalize_chosen=True)),
    "experts a token": ("qwen3_moe", lambda t, _: changed(t, chosen=2)),
    "softmax before top-k": (
        "qwen3_moe_raw",
        lambda t, patch: patch.setattr(qwen3_moe.SparseMLP, "__call__", softmax_last) or t,
    ),
    "window of all layers": ("qwen3_moe_raw", lambda t, _: changed(t, windows=(None,) * 5)),
    "yarn's attention factor": (
        "qwen3_moe_raw",
        lambda t, _: changed(t, rope=dataclasses.replace(t.config.rope, scale=1.0)),
    ),
    "yarn not truncated": (
        "gpt_oss",
        lambda t, _: changed(
            t,
            rope=type(t.config.rope).from_hf(
                {"rope_parameters": families.YARN | {"truncate": True}}, 16, ""
            ),
        ),
    ),
    "sinks": ("gpt_oss", lambda t, _: filled(t, "sinks", -1e30)),
    "window one longer": (
        "gpt_oss",
        lambda t, _: changed(t, windows=tuple(w and w + 1 for w in t.config.windows)),
    ),
    "layer pattern": ("gpt_oss", lambda t, _: changed(t, windows=t.config.windows[1:] + (None,))),
    "clamp": ("gpt_oss", lambda t, _: changed(t, limit=7.0)),
    "alpha": ("gpt_oss", lambda t, _: changed(t, alpha=1.702)),
    "gate and up in turns": (
        "gpt_oss",
        lambda t, patch: patch.setattr(gpt_oss.ClampedSwiGLU, "__call__", by_halves) or t,
    ),
    "softmax after top-k": (
        "gpt_oss",
        lambda t, patch: patch.setattr(gpt_oss.SparseMLP, "__call__", softmax_first) or t,
    ),
    "router bias": ("gpt_oss", lambda t, _: filled(t, "router.bias", 0.0)),
    "expert bias": ("gpt_oss", lambda t, _: filled(t, "experts.down.bias", 0.0)),
    "embedding scale": ("gemma4", lambda t, _: filled(t, "embed.table", lambda x: x / 32**0.5)),
    "scores not scaled": (
        "gemma4",
        lambda t, _: filled(t, "q_norm.scale", lambda x: x * x.shape[0] ** -0.5),
    ),
    "v norm": (
        "gemma4_moe",
        lambda t, patch: patch.setattr(gemma4.SelfAttention, "__call__", v_as_it_is) or t,
    ),
    "K = V before norm and rotation": (
        "gemma4",
        lambda t, patch: patch.setattr(gemma4.SelfAttention, "__call__", v_is_rotated_k) or t,
    ),
    "proportional rope": ("gemma4", lambda t, _: changed(t, full_rope=plain(t.config.full_rope))),
    "rope of the other kind": ("gemma4", lambda t, _: changed(t, rope=plain(t.config.rope))),
    "soft cap": ("gemma4", lambda t, _: changed(t, logit_cap=None)),
    "norm after attention": ("gemma4", lambda t, _: filled(t, "attn_post_norm.scale", 1.0)),
    "norm after the MLP": ("gemma4", lambda t, _: filled(t, "mlp_post_norm.scale", 1.0)),
    "norm before attention": ("gemma4", lambda t, _: filled(t, "attn_norm.scale", 1.0)),
    "norm before the MLP": ("gemma4", lambda t, _: filled(t, "mlp_norm.scale", 1.0)),
    "k norm": ("gemma4", lambda t, _: filled(t, "k_norm.scale", 1.0)),
    "layer scalar": ("gemma4", lambda t, _: filled(t, "2.scale", 1.0)),
    "window": (
        "gemma4",
        lambda t, _: changed(t, windows=tuple(w and w - 1 for w in t.config.windows)),
    ),
    "router scale": ("gemma4_moe", lambda t, _: filled(t, "moe.scale", 1.0)),
    "normalised weights of Gemma's experts": (
        "gemma4_moe",
        lambda t, patch: patch.setattr(gemma4.SparseMLP, "__call__", not_normalized) or t,
    ),
    "scale of each expert": ("gemma4_moe", lambda t, _: filled(t, "expert_scale", 1.0)),
    "dense MLP beside the experts": (
        "gemma4_moe",
        lambda t, _: filled(t, "dense_post_norm.scale", 0.0),
    ),
    "experts' own norms": (
        "gemma4_moe",
        lambda t, _: filled(filled(t, "moe_norm.scale", 1.0), "moe_post_norm.scale", 1.0),
    ),
    "layer embedding": ("gemma4_ple", lambda t, _: filled(t, "ple_embed.table", 0.0)),
    "projection into layers": ("gemma4_ple", lambda t, _: filled(t, "ple_in", 0.0)),
    "gate of the layer embedding": ("gemma4_ple", lambda t, _: filled(t, "ple.gate.kernel", 0.0)),
    "norm of the layer embedding": ("gemma4_ple", lambda t, _: filled(t, "ple.norm.scale", 1.0)),
    "whose KV is shared": (
        "gemma4_ple",
        lambda t, patch: (
            patch.setattr(gemma4.Gemma4Config, "reads_from", first_of_kind) or changed(t)
        ),
    ),
    "double-wide MLP": (
        "gemma4_ple",
        lambda t, _: filled(t, "6.mlp.down.kernel", lambda x: x.at[48:].set(0)),
    ),
}


def softmax_last(self, x):
    weight, chosen = jax.lax.top_k(self.router(x.reshape(-1, x.shape[-1])), self.chosen)
    return self.experts(x, chosen, jax.nn.softmax(weight, axis=-1))


def softmax_first(self, x):
    weight, chosen = jax.lax.top_k(
        jax.nn.softmax(self.router(x.reshape(-1, x.shape[-1])), axis=-1), self.chosen
    )
    return self.experts(x, chosen, weight)


def not_normalized(self, x, normed):
    rows = (
        gemma4.normalize(x.reshape(-1, x.shape[-1]), self.eps)
        * self.scale[...][None]
        * x.shape[-1] ** -0.5
    )
    weight, chosen = jax.lax.top_k(jax.nn.softmax(self.router(rows), axis=-1), self.chosen)
    return self.experts(normed, chosen, weight * self.expert_scale[...][chosen])


def by_halves(self, x):
    gate, up = jnp.split(x, 2, axis=-1)
    return (
        (jnp.clip(up, -self.limit, self.limit) + 1)
        * jnp.minimum(gate, self.limit)
        * jax.nn.sigmoid(self.alpha * jnp.minimum(gate, self.limit))
    )


def attention_with(value):
    def call(self, x, positions, attend, state):
        def heads(y):
            return y.reshape(*x.shape[:2], -1, self.head_dim)

        raw = heads(self.k(x))
        k = self.rope(self.k_norm(raw), positions)
        v = value(self, raw, k, None if self.v is None else heads(self.v(x)))
        y, state = attend(
            self.source,
            self.rope(self.q_norm(heads(self.q(x))), positions),
            k,
            v,
            state,
            gemma4.AttentionRule(self.window, 1.0),
        )
        return self.o(y.reshape(*x.shape[:2], -1)), state

    return call


v_as_it_is = attention_with(lambda self, raw, k, v: raw if v is None else v)
v_is_rotated_k = attention_with(
    lambda self, raw, k, v: k if v is None else gemma4.normalize(v, self.eps)
)


def first_of_kind(self, layer):
    own = self.layers - self.shared
    return (
        layer
        if layer < own
        else min(i for i in range(own) if self.is_full(i) == self.is_full(layer))
    )


def logits_of(target, tokens):
    positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    families._step.cache_clear()  # a patched method is another program
    return run(target, jnp.asarray(tokens), positions, target.config.empty_cache(len(tokens), T))[0]


@pytest.mark.parametrize("name", MUTATIONS)
def test_parity_notices(name, monkeypatch):
    case, mutate = MUTATIONS[name]
    tokens, want, _ = truth(case)
    got = np.asarray(logits_of(mutate(ours(case), monkeypatch), tokens))
    assert got.shape == want.shape == (2, T, V) and np.isfinite(got).all()
    assert np.abs(got - want).max() > 50 * TOLERANCE


@pytest.mark.parametrize("change", [{"decoder_sparse_step": 1}, {"mlp_only_layers": [1, 3]}])
def test_which_layers_are_sparse(change):
    """Another choice asks for other tensors."""
    _, config = read_config(json.loads((make("qwen3_moe")[1] / "config.json").read_text()) | change)
    assert config.sparse != ours("qwen3_moe").config.sparse == (False, True, False, False, False)
    with pytest.raises(InputError, match="the tensors must fit config.json"):
        weights.check_tensors(
            lambda: qwen3_moe.Qwen3Moe(config, rngs=nnx.Rngs(0)),
            weights.open_folder(make("qwen3_moe")[1]),
            qwen3_moe.table(config),
            "x",
        )


@pytest.mark.parametrize("name", ["v_as_it_is", "v_is_rotated_k"])
def test_the_patches_change_one_thing_only(name, monkeypatch):
    """With the right value, the rewritten attention is the model's: so the two mutations above are mutations."""
    monkeypatch.setattr(
        gemma4.SelfAttention,
        "__call__",
        attention_with(lambda self, raw, k, v: gemma4.normalize(raw if v is None else v, self.eps)),
    )
    case = {"v_as_it_is": "gemma4_moe", "v_is_rotated_k": "gemma4"}[name]
    tokens, want, _ = truth(case)
    np.testing.assert_allclose(logits_of(ours(case), tokens), want, atol=TOLERANCE, rtol=0)
