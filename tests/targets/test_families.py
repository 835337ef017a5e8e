"""Every family against transformers: logits, aux hidden states, cached decoding, exports.

A mutation of every architectural option confirms that these comparisons would notice it.
"""

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
from peagle_jax.targets.gemma4_config import Gemma4Config  # noqa: E402
from peagle_jax.types import InputError, Model  # noqa: E402

TOLERANCE = 2e-5  # float32, on logits and hidden states of size 1 to 10


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def assert_equal(got, want):
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def logits_by_blocks(target, tokens, positions, cache, block=7):
    """Logits of a forward for every `block` tokens."""
    logits = []
    for start in range(0, T, block):
        stop = start + block
        got, _, cache = run(target, tokens[:, start:stop], positions[:, start:stop], cache)
        cache = dataclasses.replace(cache, length=cache.length + block)
        logits.append(got)
    return np.concatenate(logits, 1)


def test_logits_hidden_states_and_cache(case):
    target, (tokens, logits, states) = ours(case), truth(case)
    assert target.config.stop_ids == (11,)
    tokens, positions = jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(T), (2, T))
    cache = target.config.empty_cache(2, T)
    got, aux_hidden_states, _ = run(target, tokens, positions, cache)
    assert_equal(got, logits)
    aux_states = [states[i] for i in target.config.aux_hidden_state_layers]
    assert_equal(aux_hidden_states, np.concatenate(aux_states, -1))

    # block by block, in a cache with room to spare
    cache = target.config.empty_cache(2, 40)
    assert_equal(logits_by_blocks(target, tokens, positions, cache), logits)
    # and in rings, where a family has windows
    cache = target.config.empty_cache(2, 40, block=7)
    assert any(group.ring for group in cache.groups) == any(target.config.windows)
    assert_equal(logits_by_blocks(target, tokens, positions, cache), logits)


@pytest.mark.parametrize("block", [None, 7], ids=["whole", "rings"])
def test_bfloat16_caches(case, block):
    """Logits are those of float32 caches but for the rounding of keys and values."""
    target, (tokens, logits, _) = ours(case), truth(case)
    config = dataclasses.replace(target.config, cache_dtype=jnp.dtype(jnp.bfloat16))
    cache = config.empty_cache(2, 40, block=block)
    tokens, positions = jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(T), (2, T))
    error = np.abs(logits_by_blocks(target, tokens, positions, cache) - logits).max()
    assert 1e-5 < error < 0.03 * np.abs(logits).max()


def test_exported_folder_is_what_transformers_wrote(case, tmp_path):
    _, folder = make(case)
    save_target(load_target(folder), tmp_path / "out")
    got, want = weights.open_folder(tmp_path / "out"), weights.open_folder(folder)
    assert got.keys() == want.keys() and all(np.array_equal(got[n], want[n]) for n in want)
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens, logits, _ = truth(case)
    with torch.no_grad():
        assert torch.equal(exported(torch.from_numpy(tokens)).logits, torch.from_numpy(logits))


# ---------------------------------------------------------------- what parity would notice


def with_config(target: Model, **changes) -> Model:
    """The same weights under another config."""
    config = dataclasses.replace(target.config, **changes)
    family = next(f for f in TARGETS.values() if isinstance(config, f.config))
    graph, _ = nnx.split(nnx.eval_shape(lambda: family.module(config, rngs=nnx.Rngs(0))))
    return Model(config, graph, target.params)


def with_params(target: Model, end: str, value) -> Model:
    """The target with other values in every parameter whose path ends with `end`.

    Args:
      value: one number for all of it, or a function of the parameter.
    """
    params = dict(weights.flatten_params(target.params))
    paths = [path for path in params if path.endswith(end)]
    assert paths
    for path in paths:
        old = params[path]
        params[path] = value(old) if callable(value) else jnp.full_like(old, value)
    return dataclasses.replace(target, params=weights.unflatten_params(params))


def patched(target: Model, patch, owner, method: str, replacement) -> Model:
    """The target, after a method of one of its classes is replaced."""
    patch.setattr(owner, method, replacement)
    return target


def plain(rope):
    """The default rope of the same width, with the base that all cases use."""
    count = len(rope.frequencies)
    frequencies = tuple(777.0 ** (-np.arange(count) / count))
    return dataclasses.replace(rope, frequencies=frequencies, scale=1.0)


def with_rotated_kv_heads(target: Model, groups: int) -> Model:
    """KV heads in another order, as a wrong grouping of query heads would read them."""

    def rotate(kernel):
        return jnp.roll(kernel, kernel.shape[1] // groups, axis=1)

    return with_params(with_params(target, "attn.k.kernel", rotate), "attn.v.kernel", rotate)


def with_params_of_both(target: Model, ends: tuple[str, str], value) -> Model:
    return with_params(with_params(target, ends[0], value), ends[1], value)


def with_windows(target: Model, shift: int) -> Model:
    """Every window longer by `shift` tokens."""
    return with_config(target, windows=tuple(w and w + shift for w in target.config.windows))


def with_truncated_yarn(target: Model) -> Model:
    parameters = {"rope_parameters": families.YARN | {"truncate": True}}
    return with_config(target, rope=type(target.config.rope).from_hf(parameters, 16, ""))


def logits_of_reversed_embedding(self):
    return self.embed.table[...][::-1].T


# name -> (case, function of the target and pytest's monkeypatch)
MUTATIONS = {
    "llama3 rope": ("llama", lambda t, _: with_config(t, rope=plain(t.config.rope))),
    "GQA groups": ("llama", lambda t, _: with_rotated_kv_heads(t, groups=2)),
    "attention bias": ("llama", lambda t, _: with_params(t, "attn.o.bias", 0.0)),
    "MLP bias": ("llama", lambda t, _: with_params(t, "mlp.down.bias", 0.0)),
    "norm eps": ("llama", lambda t, _: with_config(t, norm_eps=1e-6)),
    "tied head": (
        "llama_tied",
        lambda t, patch: patched(t, patch, Decoder, "lm_head_weight", logits_of_reversed_embedding),
    ),
    "which layers slide": ("qwen3", lambda t, _: with_config(t, windows=(5,) * 5)),
    "norms of q and k": (
        "qwen3",
        lambda t, _: with_params_of_both(t, ("q_norm.scale", "k_norm.scale"), 1.0),
    ),
    "bias of q": ("qwen3", lambda t, _: with_params(t, "attn.q.bias", 0.0)),
    "qk norm": ("qwen3_moe", lambda t, _: with_params(t, "q_norm.scale", 1.0)),
    "norm eps of Qwen3-MoE": ("qwen3_moe", lambda t, _: with_config(t, norm_eps=1e-6)),
    "norm eps of GPT-OSS": ("gpt_oss", lambda t, _: with_config(t, norm_eps=1e-6)),
    "norm eps of Gemma 4": ("gemma4", lambda t, _: with_config(t, norm_eps=1e-6)),
    "normalized router": ("qwen3_moe", lambda t, _: with_config(t, norm_topk_prob=False)),
    "raw router": ("qwen3_moe_raw", lambda t, _: with_config(t, norm_topk_prob=True)),
    "experts per token": ("qwen3_moe", lambda t, _: with_config(t, experts_per_token=2)),
    "softmax before top-k": (
        "qwen3_moe_raw",
        lambda t, patch: patched(t, patch, qwen3_moe.SparseMLP, "__call__", softmax_last),
    ),
    "window of all layers": ("qwen3_moe_raw", lambda t, _: with_config(t, windows=(None,) * 5)),
    "yarn's attention factor": (
        "qwen3_moe_raw",
        lambda t, _: with_config(t, rope=dataclasses.replace(t.config.rope, scale=1.0)),
    ),
    "yarn not truncated": ("gpt_oss", lambda t, _: with_truncated_yarn(t)),
    "sinks": ("gpt_oss", lambda t, _: with_params(t, "sinks", -1e30)),
    "window one longer": ("gpt_oss", lambda t, _: with_windows(t, 1)),
    "layer pattern": (
        "gpt_oss",
        lambda t, _: with_config(t, windows=t.config.windows[1:] + (None,)),
    ),
    "clamp": ("gpt_oss", lambda t, _: with_config(t, swiglu_limit=7.0)),
    "alpha": ("gpt_oss", lambda t, _: with_config(t, swiglu_alpha=1.702)),
    "gate and up in turns": (
        "gpt_oss",
        lambda t, patch: patched(t, patch, gpt_oss.ClampedSwiGLU, "__call__", gate_then_up),
    ),
    "softmax after top-k": (
        "gpt_oss",
        lambda t, patch: patched(t, patch, gpt_oss.SparseMLP, "__call__", softmax_first),
    ),
    "router bias": ("gpt_oss", lambda t, _: with_params(t, "router.bias", 0.0)),
    "expert bias": ("gpt_oss", lambda t, _: with_params(t, "experts.down.bias", 0.0)),
    "embedding scale": (
        "gemma4",
        lambda t, _: with_params(t, "embed.table", lambda x: x / 32**0.5),
    ),
    "scores not scaled": (
        "gemma4",
        lambda t, _: with_params(t, "q_norm.scale", lambda x: x * x.shape[0] ** -0.5),
    ),
    "v norm": (
        "gemma4_moe",
        lambda t, patch: patched(t, patch, gemma4.SelfAttention, "__call__", v_without_norm),
    ),
    "K = V before norm and rotation": (
        "gemma4",
        lambda t, patch: patched(t, patch, gemma4.SelfAttention, "__call__", v_is_rotated_k),
    ),
    "proportional rope": (
        "gemma4",
        lambda t, _: with_config(t, full_rope=plain(t.config.full_rope)),
    ),
    "rope of the other kind": ("gemma4", lambda t, _: with_config(t, rope=plain(t.config.rope))),
    "soft cap": ("gemma4", lambda t, _: with_config(t, logit_cap=None)),
    "norm after attention": ("gemma4", lambda t, _: with_params(t, "attn_post_norm.scale", 1.0)),
    "norm after the MLP": ("gemma4", lambda t, _: with_params(t, "mlp_post_norm.scale", 1.0)),
    "norm before attention": ("gemma4", lambda t, _: with_params(t, "attn_norm.scale", 1.0)),
    "norm before the MLP": ("gemma4", lambda t, _: with_params(t, "mlp_norm.scale", 1.0)),
    "k norm": ("gemma4", lambda t, _: with_params(t, "k_norm.scale", 1.0)),
    "layer scalar": ("gemma4", lambda t, _: with_params(t, "2.scale", 1.0)),
    "window": ("gemma4", lambda t, _: with_windows(t, -1)),
    "router scale": ("gemma4_moe", lambda t, _: with_params(t, "moe.scale", 1.0)),
    "normalized weights of Gemma's experts": (
        "gemma4_moe",
        lambda t, patch: patched(t, patch, gemma4.SparseMLP, "__call__", not_normalized),
    ),
    "scale of each expert": ("gemma4_moe", lambda t, _: with_params(t, "expert_scale", 1.0)),
    "dense MLP beside the experts": (
        "gemma4_moe",
        lambda t, _: with_params(t, "dense_post_norm.scale", 0.0),
    ),
    "experts' own norms": (
        "gemma4_moe",
        lambda t, _: with_params_of_both(t, ("moe_norm.scale", "moe_post_norm.scale"), 1.0),
    ),
    "layer embedding": ("gemma4_ple", lambda t, _: with_params(t, "ple_embed.table", 0.0)),
    "projection into layers": ("gemma4_ple", lambda t, _: with_params(t, "ple_in", 0.0)),
    "gate of the layer embedding": (
        "gemma4_ple",
        lambda t, _: with_params(t, "ple.gate.kernel", 0.0),
    ),
    "norm of the layer embedding": (
        "gemma4_ple",
        lambda t, _: with_params(t, "ple.norm.scale", 1.0),
    ),
    "whose KV is shared": (
        "gemma4_ple",
        lambda t, patch: with_config(
            patched(t, patch, Gemma4Config, "kv_source_layer", first_of_kind)
        ),
    ),
    "double-wide MLP": (
        "gemma4_ple",
        lambda t, _: with_params(t, "6.mlp.down.kernel", lambda x: x.at[48:].set(0)),
    ),
}


def softmax_last(self, x):
    logits = self.router(x.reshape(-1, x.shape[-1]))
    topk_logits, topk_ids = jax.lax.top_k(logits, self.experts_per_token)
    return self.experts(x, topk_ids, jax.nn.softmax(topk_logits, axis=-1))


def softmax_first(self, x):
    probs = jax.nn.softmax(self.router(x.reshape(-1, x.shape[-1])), axis=-1)
    routing_weights, topk_ids = jax.lax.top_k(probs, self.experts_per_token)
    return self.experts(x, topk_ids, routing_weights)


def not_normalized(self, x, normed):
    """Gemma's mixture without the division of a token's routing weights by their sum."""
    rows = gemma4.normalize(x.reshape(-1, x.shape[-1]), self.eps)
    logits = self.router(rows * self.scale[...][None] * x.shape[-1] ** -0.5)
    routing_weights, topk_ids = jax.lax.top_k(
        jax.nn.softmax(logits, axis=-1), self.experts_per_token
    )
    return self.experts(normed, topk_ids, routing_weights * self.expert_scale[...][topk_ids])


def gate_then_up(self, x):
    gate, up = jnp.split(x, 2, axis=-1)
    gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
    return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


def attention_with(value):
    """Gemma's attention, its values computed by `value(layer, raw k, rotated k, raw v or None)`."""

    def call(self, x, positions, attend, state):
        def heads(y):
            return y.reshape(*x.shape[:2], -1, self.head_dim)

        raw_k = heads(self.k(x))
        k = self.rope(self.k_norm(raw_k), positions)
        v = value(self, raw_k, k, None if self.v is None else heads(self.v(x)))
        q = self.rope(self.q_norm(heads(self.q(x))), positions)
        rule = gemma4.AttentionRule(self.window, 1.0)
        y, state = attend(self.kv_source_layer, q, k, v, state, rule)
        return self.o(y.reshape(*x.shape[:2], -1)), state

    return call


v_without_norm = attention_with(lambda self, raw_k, k, v: raw_k if v is None else v)
v_is_rotated_k = attention_with(
    lambda self, raw_k, k, v: k if v is None else gemma4.normalize(v, self.eps)
)
v_as_in_the_model = attention_with(
    lambda self, raw_k, k, v: gemma4.normalize(raw_k if v is None else v, self.eps)
)


def first_of_kind(self, layer):
    """Gemma4Config.kv_source_layer, but for the first layer of the same kind, not the last."""
    unshared = self.layers - self.num_kv_shared_layers
    if layer < unshared:
        return layer
    return min(i for i in range(unshared) if self.is_full(i) == self.is_full(layer))


def logits_of(target, tokens):
    positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    families._forward.cache_clear()  # a patched method is another program
    cache = target.config.empty_cache(len(tokens), T)
    return run(target, jnp.asarray(tokens), positions, cache)[0]


@pytest.mark.parametrize("name", MUTATIONS)
def test_parity_notices(name, monkeypatch):
    case, mutate = MUTATIONS[name]
    tokens, want, _ = truth(case)
    got = np.asarray(logits_of(mutate(ours(case), monkeypatch), tokens))
    assert got.shape == want.shape == (2, T, V) and np.isfinite(got).all()
    assert np.abs(got - want).max() > 50 * TOLERANCE


@pytest.mark.parametrize("change", [{"decoder_sparse_step": 1}, {"mlp_only_layers": [1, 3]}])
def test_which_layers_have_experts(change):
    """Another choice asks for other tensors."""
    _, folder = make("qwen3_moe")
    _, config = read_config(json.loads((folder / "config.json").read_text()) | change)
    written = ours("qwen3_moe").config.is_moe_layer
    assert config.is_moe_layer != written == (False, True, False, False, False)
    with pytest.raises(InputError, match="the tensors must fit config.json"):
        weights.check_tensors(
            lambda: qwen3_moe.Qwen3Moe(config, rngs=nnx.Rngs(0)),
            weights.open_folder(folder),
            qwen3_moe.table(config),
            "x",
        )


@pytest.mark.parametrize("case", ["gemma4_moe", "gemma4"])
def test_the_patches_change_one_thing_only(case, monkeypatch):
    """With the right values, the rewritten attention is the model's.

    So "v norm" and "K = V before norm and rotation" differ from it in nothing else.
    """
    monkeypatch.setattr(gemma4.SelfAttention, "__call__", v_as_in_the_model)
    tokens, want, _ = truth(case)
    assert_equal(logits_of(ours(case), tokens), want)
