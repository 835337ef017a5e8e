"""Tiny random models and heads, unlike every default, shared by the tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.draft.confidence import NO_CONFIDENCE
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.draft.markov import NO_MARKOV
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.layers import FINAL_HIDDEN_STATE, Rope
from peagle_jax.targets.qwen3 import Qwen3, Qwen3Config
from peagle_jax.types import Model

AUX_LAYERS = (1, 2, 3)  # whose inputs the head reads
# what makes an EAGLE-1 head of `head`, and a target for it of `target`
FINAL = {"aux_hidden_state_layers": (FINAL_HIDDEN_STATE,)}
EAGLE = {**FINAL, "mask_token": None, "dim": 24}


def shake(params, seed: int, scale: float = 0.4):
    """Random weights in the place of the initial ones; norm scales in 0.5..1.5."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)

    def draw(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        value = rng.uniform(0.5, 1.5, x.shape) if x.ndim == 1 else rng.normal(0, scale, x.shape)
        return jnp.asarray(value, x.dtype)

    return jax.tree.unflatten(tree, [draw(x) for x in leaves])


def target_config(**changes) -> Qwen3Config:
    config = Qwen3Config(
        vocab=41,
        layers=4,
        dim=24,
        mlp_dim=40,
        heads=4,
        kv_heads=2,
        head_dim=12,
        rope=Rope.from_hf({"rope_theta": 777.0}, 12, ""),
        norm_eps=3e-3,
        attention_bias=False,
        tied_embeddings=False,
        windows=(None,) * 4,
        context=96,
        aux_hidden_state_layers=AUX_LAYERS,
        dtype=jnp.float32,
        stop_ids=(),
        source=None,
    )
    if "head_dim" in changes:
        changes = {"rope": Rope.from_hf({"rope_theta": 777.0}, changes["head_dim"], ""), **changes}
    return dataclasses.replace(config, **changes)


@functools.cache
def target(seed: int = 0, **changes) -> Model:
    config = target_config(**changes)
    model = Model.from_module(Qwen3(config, rngs=nnx.Rngs(0)), config)
    return dataclasses.replace(model, params=shake(model.params, seed))


def head_config(**changes) -> HeadConfig:
    config = HeadConfig(
        vocab=41,
        draft_vocab=41,
        dim=20,
        layers=2,
        mlp_dim=36,
        heads=4,
        kv_heads=2,
        head_dim=10,
        rope=Rope.from_hf({"rope_theta": 555.0}, 10, ""),
        norm_eps=2e-3,
        context=96,
        target_dim=24,
        aux_hidden_state_layers=AUX_LAYERS,
        mask_token=5,
        num_depths=6,
        qk_norm=False,
        attention_bias=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        **PAPER_DESIGN,
        **NO_MARKOV,
        **NO_CONFIDENCE,
        windows=(None, None),
        dtype=jnp.float32,
    )
    return dataclasses.replace(config, **changes)


@functools.cache
def head(seed: int = 1, **changes) -> Model:
    config = head_config(**changes)
    model = Model.from_module(DraftHead(config, rngs=nnx.Rngs(0)), config)
    params = shake(model.params, seed)
    if config.draft_vocab != config.vocab:
        ids = np.sort(np.random.default_rng(seed).permutation(config.vocab)[: config.draft_vocab])
        params["d2t"] = jnp.asarray(ids - np.arange(config.draft_vocab), jnp.int32)
    return dataclasses.replace(model, params=params)


def pair(method: str | None, seed: int = 1, **changes) -> tuple[Model, Model]:
    """A target, and a head that can draft by the method; `changes` are those of both."""
    if method == "eagle":
        return target(**changes, **FINAL), head(seed, **{**EAGLE, **changes})
    return target(**changes), head(seed, **changes)


def with_embedding(model: Model, token: int, value: float) -> Model:
    """The target, of which one token's embedding is `value` everywhere, such as NaN."""
    table = model.params["embed"]["table"].at[token].set(value)
    params = {**model.params, "embed": {**model.params["embed"], "table": table}}
    return dataclasses.replace(model, params=params)


def attend_in_blocks(monkeypatch) -> list[int]:
    """Makes all cached attention of two tokens and more that is traced from now on one in blocks.

    Returns:
      The tokens of each call, as they come.
    """
    from peagle_jax.kernels import attention, attention_blocks

    calls, in_blocks = [], attention_blocks.attend_in_blocks

    def note(*args, **rule):
        calls.append(args[0].shape[1])
        return in_blocks(*args, **rule)

    monkeypatch.setattr(attention, "MAX_SCORES", 0)
    monkeypatch.setattr(attention, "MAX_MASK", 0)
    monkeypatch.setattr(attention, "LEAST_QUERIES", 2)
    monkeypatch.setattr(attention_blocks, "attend_in_blocks", note)
    return calls


@functools.cache
def greedy(prompt: tuple[int, ...], new: int, seed: int = 0) -> list[int]:
    """Plain greedy decoding without a cache, a loop or a while_loop: the oracle of losslessness."""
    model = target(seed)
    from peagle_jax.train.attention import PackedCausal

    @jax.jit
    def last(params, tokens, length):
        module = model.bind(params)
        positions = jnp.arange(tokens.shape[1])[None]
        out, _ = module(tokens, positions, PackedCausal(jnp.zeros(tokens.shape, jnp.int32)), None)
        return jnp.argmax(module.compute_logits(out.hidden[0, length - 1]))

    tokens = np.zeros((1, len(prompt) + new), np.int32)
    tokens[0, : len(prompt)] = prompt
    for i in range(len(prompt), len(prompt) + new):
        tokens[0, i] = last(model.params, tokens, i)
    return tokens[0, len(prompt) :].tolist()


def hidden_state_index() -> dict:
    """The fields of an index of `peagle extract`: seven rows in three shards."""
    return dict(
        format_version=2,
        target="t",
        target_hash="",
        aux_hidden_state_layers=(2,),
        aux_width=8,
        hidden_width=8,
        dtype="bfloat16",
        compute_dtype="float32",
        seq_len=4,
        batch_size=2,
        rows_per_shard=3,
        data="d",
        max_chars=None,
        held_out=0.0,
        seed=0,
        rows=7,
        shards=3,
        tokens=20,
        num_loss_tokens=20,
        rows_hash="",
        versions="",
        command="",
    )
