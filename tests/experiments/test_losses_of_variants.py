"""That the head and the loss of every variant can be formed, as shapes; and what vLLM refuses."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.base_run import base_run
from experiments.budgets import BUDGETS
from experiments.jobs import Job
from experiments.registry import EXPERIMENTS
from peagle_jax.checkpoints import export_placeholders
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.pipelines import tracing
from peagle_jax.train import train_head
from peagle_jax.train.cod import cod_sample
from peagle_jax.train.config import PeagleRun
from peagle_jax.train.head_batches import HeadBatch
from peagle_jax.train.head_config import head_config
from peagle_jax.train.hidden_state_store import HiddenStates
from peagle_jax.train.hidden_states import shifted
from peagle_jax.types import Batch

VARIANTS = [
    (experiment, name) for experiment in EXPERIMENTS.values() for name in experiment.variants
]


@functools.cache
def target(folder, aux_hidden_state_layers: tuple[int, ...]):
    """The smoke budget's, without weights."""
    m = BUDGETS["smoke"].model
    hf = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": m.vocab,
        "num_hidden_layers": m.layers,
        "hidden_size": m.dim,
        "intermediate_size": m.mlp_dim,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": m.rope_theta,
        "max_position_embeddings": m.context,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(hf))
    return tracing.abstract_target(
        folder / "config.json", dtype=jnp.float32, aux_hidden_state_layers=aux_hidden_state_layers
    )


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """From a run to the head's config, and shape and dtype of its loss over all depths.

    Heads that differ in nothing that a trace sees are traced once.
    """
    folder = tmp_path_factory.mktemp("target")

    @functools.cache
    def trace(run):
        teacher = target(folder, run.aux_hidden_state_layers)
        config = head_config(run, teacher, 3)
        head = tracing.abstract_head(config)
        n = run.data.seq_len
        batch = Batch(np.ones((1, n), np.int32), np.zeros((1, n), np.int32), np.ones((1, n), bool))
        segment_ids, loss_mask = shifted(batch)
        cod = (
            cod_sample(loss_mask, segment_ids, run.cod, [0, 0])
            if isinstance(run, PeagleRun)
            else None
        )
        width = len(run.aux_hidden_state_layers) * 64
        aux_hidden_states, hidden = (np.zeros((1, n, w), np.float32) for w in (width, 64))
        stored = HiddenStates(batch, aux_hidden_states, hidden)
        num_depths = run.num_depths_at(run.optimizer.steps - 1)
        noise_ids = np.zeros((1, 2), np.int32)
        inputs = HeadBatch(batch, stored, segment_ids, loss_mask, cod, noise_ids, num_depths)
        trained, frozen = train_head.split_params(run, head)

        def loss(params, fixed, inputs):
            return train_head.head_loss(run, teacher, head, params, inputs, fixed)

        return config, *jax.eval_shape(loss, trained, (teacher.params, frozen), inputs)

    def trace_untrained(run):
        usual = base_run(BUDGETS["smoke"], 0)
        return trace(
            dataclasses.replace(run, depth_schedule=(), optimizer=usual.optimizer, init="random")
        )

    return trace_untrained


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_loss_can_be_formed(traced, name):
    for variant in EXPERIMENTS[name].variants:
        job = Job(EXPERIMENTS[name], variant, 0, "smoke")
        run = job.plain_run()
        config, loss, metrics = traced(run)
        assert (
            loss.shape == ()
            and loss.dtype == jnp.float32
            and metrics["correct"].shape == (run.num_depths_at(run.optimizer.steps - 1),)
        ), variant
        assert config.aux_hidden_state_layers == run.aux_hidden_state_layers
        vocab = run.head.draft_vocab or BUDGETS["smoke"].model.vocab  # an EAGLE-1 head names none
        assert config.draft_vocab == vocab
        for field in ("layers", "norm_before_fc", "fc_norm", "norm_before_residual"):
            assert getattr(config, field) == getattr(run.head, field), (variant, field)
        assert (
            config.parallel == (job.variant.method == "peagle")
            and config.num_depths == run.num_depths
        )
        if config.parallel:
            for field in PAPER_DESIGN:
                side = field.removeprefix("placeholder_")
                assert getattr(config, field) == getattr(run.placeholder, side), (variant, field)


def test_what_vllm_refuses(traced):
    status = {
        (e.name, v): export_placeholders.export_status(traced(Job(e, v, 0, "smoke").plain_run())[0])
        for e, v in VARIANTS
    }
    refused = {variant for variant, words in status.items() if words.startswith("refused")}
    assert refused == {
        ("hidden_designs", v)
        for v in ("per_depth", "shared_depth", "low_rank", "last_feature", "gated")
    } | {
        ("token_designs", "last_token"),
        ("block_attention", "bidirectional"),
        ("block_attention", "committed"),
        ("context_injection", "injected"),
        ("context_injection", "both"),
    }
