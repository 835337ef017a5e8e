"""The target stage: a small Qwen3, trained on the text stage."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from experiments.budgets import Budget
from experiments.stages.cache import Log, Stage
from experiments.stages.text import text_stage
from peagle_jax import corpus, text
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.train.config import LmRun
from peagle_jax.train.pretrain import held_out_bits, train_lm
from peagle_jax.train.recipe_sections import DataConfig, OptimizerConfig

STATE_COPIES = (
    7  # times its parameters that a target takes on disk: two training states, and its folder
)


def target_stage(budget: Budget) -> Stage:
    """`model`: a Hugging Face folder with tokenizer; beside it the training run."""

    def make(folder: Path, parents: Sequence[Path], log: Log) -> None:
        result = train_lm(_run(budget, folder, parents[0] / "train.jsonl"), log)
        bits = held_out_bits(
            load_target(result.folder, aux_hidden_state_layers=()),
            text.load_tokenizer(result.folder),
            corpus.read_corpus(parents[0] / "held_out.jsonl"),
            budget.lm_seq_len,
        )
        parameters = f"{result.parameters:,} parameters"
        log(f"target: {parameters}, {bits:.3f} bits per byte on held-out modules")

    config = dataclasses.asdict(_run(budget, Path("."), Path("train.jsonl")))
    num_bytes = 4 * STATE_COPIES * _num_parameters(budget)
    return Stage("target", config, (__name__,), (text_stage(budget),), num_bytes, make)


def _run(budget: Budget, folder: Path, source: Path) -> LmRun:
    optimizer = OptimizerConfig(
        steps=budget.lm_steps,
        peak_lr=budget.lm_peak_lr,
        warmup=budget.lm_steps // 20,
        weight_decay=0.1,
        max_grad_norm=1.0,
    )
    data = DataConfig(
        source=str(source),
        max_chars=None,
        held_out=0.02,
        seq_len=budget.lm_seq_len,
        batch_size=budget.lm_batch_size,
    )
    return LmRun(
        task="lm",
        out=str(folder),
        seed=0,
        model=budget.model,
        data=data,
        optimizer=optimizer,
        log_every=max(1, budget.lm_steps // 40),
        save_every=max(1, budget.lm_steps // 8),
        max_seconds=None,
    )


def _num_parameters(budget: Budget) -> int:
    """About: norms are not counted."""
    model = budget.model
    attention = 2 * model.dim * model.head_dim * (model.heads + model.kv_heads)
    layer = attention + 3 * model.dim * model.mlp_dim
    return 2 * model.vocab * model.dim + model.layers * layer
