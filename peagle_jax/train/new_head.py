"""The head that a training run begins with: its configuration, and its parameters before the first step."""

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoints import head_io
from peagle_jax.checkpoints.runs import open_head
from peagle_jax.draft import draft_vocab
from peagle_jax.draft.head import HeadConfig, random_head
from peagle_jax.draft.init import init_from_head, init_from_target, init_placeholders
from peagle_jax.layers import Rope
from peagle_jax.train.config import HeadRun, Llama3Rope, PeagleRun, PlaceholderConfig
from peagle_jax.train.data import PackedRows
from peagle_jax.train.hidden_states import compute_hidden_states
from peagle_jax.types import InputError, Model

START_TOKENS = 8192  # whose mean taps placeholders may start from


def new_head(run: HeadRun, target: Model, rows: PackedRows, tokenizer) -> Model:
    """The head to train, as it starts."""
    config = head_config(run, target, tokenizer.mask_token_id)
    ids = None
    if config.draft_vocab != config.vocab:
        counts = np.bincount(rows.tokens[rows.loss_mask], minlength=config.vocab)
        ids = draft_vocab.choose(counts, config.draft_vocab)
    module = target.bind(target.params)
    embedding, output = module.embed.table[...], module.lm_head_weight()
    head = random_head(config, seed=run.seed, embedding=embedding, output=output, ids=ids)
    mean_aux_hidden_states = None
    if run.init == "target" or config.parallel and config.placeholder_hidden == "mean_feature":
        batch = rows.take(range(min(-(-START_TOKENS // run.data.seq_len), len(rows))))
        aux_hidden_state_layers, _ = compute_hidden_states(module, jax.tree.map(jnp.asarray, batch))
        mean_aux_hidden_states = jnp.mean(
            aux_hidden_state_layers, axis=(0, 1), where=(batch.segment_ids >= 0)[..., None]
        )
    if run.init == "target":
        head = init_from_target(head, target)
    trained = None if run.init_from is None else _trained(run.init_from, config.dtype, embedding)
    if trained is not None:
        head = init_from_head(head, trained, run.init_from)
    if config.parallel and not (
        trained is not None and trained.config.parallel
    ):  # behind the embedding and fusion that they begin with
        head = init_placeholders(head, mean_aux_hidden_states, seed=run.seed)
    return head


def _trained(name: str, dtype, embedding) -> Model:
    """A head to go on from: a folder of any layout, a hub id, or a training run."""
    return head_io.to_model(open_head(name), dtype=dtype, embedding=embedding)


def head_config(run: HeadRun, target: Model, mask_token: int | None) -> HeadConfig:
    """Nulls in the run's head take the target's value."""
    h, t = run.head, target.config

    def pick(mine, theirs):
        return theirs if mine is None else mine

    head_dim = pick(h.head_dim, t.head_dim)
    if h.rope is None and 2 * len(t.rope.frequencies) != head_dim:
        rule = f"the target's rotary embedding turns heads of {2 * len(t.rope.frequencies)}"
        raise InputError("head.head_dim", rule, head_dim, "leave it null, or set head.rope")
    parallel = isinstance(run, PeagleRun)
    mask_token = pick(h.mask_token, mask_token)
    if parallel and mask_token is None:
        raise InputError(
            run.target,
            "P-EAGLE needs a mask token",
            "a tokenizer without one",
            "set head.mask_token to an unused id",
        )
    if parallel and not 0 <= mask_token < t.vocab:
        raise InputError(
            "head.mask_token", f"must lie in 0..{t.vocab - 1}", mask_token, "mend the config"
        )
    if list(t.aux_hidden_state_layers) != sorted(set(t.aux_hidden_state_layers)):
        raise InputError(
            "head.taps",
            "must ascend, as vLLM collects them",
            list(t.aux_hidden_state_layers),
            "mend the config",
        )
    if h.draft_vocab is not None and not 1 <= h.draft_vocab <= t.vocab:
        raise InputError(
            "head.draft_vocab", f"must lie in 1..{t.vocab}", h.draft_vocab, "mend the config"
        )
    design = run.placeholder if parallel else PlaceholderConfig(hidden="shared", token="mask")
    return HeadConfig(
        vocab=t.vocab,
        draft_vocab=pick(h.draft_vocab, t.vocab),
        dim=pick(h.dim, t.dim),
        layers=h.layers,
        mlp_dim=pick(h.mlp_dim, t.mlp_dim),
        heads=pick(h.heads, t.heads),
        kv_heads=pick(h.kv_heads, t.kv_heads),
        head_dim=head_dim,
        rope=t.rope if h.rope is None else _rope(h.rope, head_dim),
        norm_eps=t.norm_eps,
        context=t.context,
        target_dim=t.dim,
        aux_hidden_state_layers=t.aux_hidden_state_layers,
        mask_token=mask_token if parallel else None,
        num_depths=run.num_depths,
        placeholder_hidden=design.hidden,
        placeholder_token=design.token,
        qk_norm=h.qk_norm,
        attention_bias=False,
        norm_before_residual=h.norm_before_residual,
        norm_before_fc=h.norm_before_fc,
        fc_norm=h.fc_norm,
        norm_output=h.norm_output,
        windows=(None,) * h.layers,
        dtype=jnp.float32,
    )


def _rope(rope: Llama3Rope, head_dim: int) -> Rope:
    spec = {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low,
        "high_freq_factor": rope.high,
        "original_max_position_embeddings": rope.original,
    }
    return Rope.from_hf({"rope_parameters": spec}, head_dim, "head.rope")
