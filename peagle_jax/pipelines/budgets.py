"""How much of everything a demo does, and the recipes of the models that it trains."""

import dataclasses
from pathlib import Path
from typing import Any

from peagle_jax import weights
from peagle_jax.corpus import INSTALLED
from peagle_jax.kernels.processor import has_bfloat16_products
from peagle_jax.train.cod import CodConfig
from peagle_jax.train.config import (
    DataConfig,
    DepthStage,
    Eagle3Run,
    EvalConfig,
    HeadShape,
    LmRun,
    LmShape,
    OptimizerConfig,
    PeagleRun,
    PlaceholderConfig,
    TttConfig,
)
from peagle_jax.train.peagle_loss import FeatureNoise

HELD_OUT = 0.05  # share of files, by name, that no model of a demo is trained on
# K of the head that is trained to show training: in minutes deeper placeholders learn nothing.
FRESH_HEAD_DEPTHS = 2


@dataclasses.dataclass(frozen=True)
class TrainingSize:
    """How long a model is trained: `steps` steps of `batch_size` packed rows."""

    steps: int
    batch_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScratchModels:
    """Models that a demo trains itself, in the place of those that come with the package.

    Attributes:
      target_shape: of the target.
      source: corpus; None for the Python standard library.
      max_chars: of the corpus; None for all of it.
      seq_len: tokens of a packed row.
      target: training of the target.
      peagle: training of the P-EAGLE head.
      eagle3: training of the EAGLE-3 head.
      peagle_layers: layers of the P-EAGLE head. The EAGLE-3 head has one.
      peagle_mlp_dim: width of its MLPs; None for the target's.
      num_depths: K in training.
    """

    target_shape: LmShape
    source: str | None
    max_chars: int | None
    seq_len: int
    target: TrainingSize
    peagle: TrainingSize
    eagle3: TrainingSize
    peagle_layers: int
    peagle_mlp_dim: int | None
    num_depths: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What a demo measures and trains.

    Attributes:
      minutes: how long it takes, for --dry-run.
      scratch: the models of --from-scratch.
      needs_scratch: whether the packaged models are not meant for this budget.
      fresh_head: training of the head that only shows training; None where heads are trained
        anyway.
      ks: tokens drafted per step.
      batch_sizes: prompts decoded together.
      sampled_k: K at temperature 1; None to decode greedily only.
      num_prompts: excerpts that are decoded.
      max_new_tokens: of each answer.
      repeats: timed rounds.
      dtype: of the timed decoding; FASTEST for the one that this machine is faster with.
        Losslessness is always checked in float32.
    """

    minutes: str
    scratch: ScratchModels
    needs_scratch: bool
    fresh_head: TrainingSize | None
    ks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    sampled_k: int | None
    num_prompts: int
    max_new_tokens: int
    repeats: int
    dtype: str


def lm_shape(
    vocab: int,
    layers: int,
    dim: int,
    mlp_dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
) -> LmShape:
    """The shape of a small target with a rotary base of 10,000."""
    return LmShape(
        vocab=vocab,
        layers=layers,
        dim=dim,
        mlp_dim=mlp_dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=1e4,
        context=context,
    )


# a dtype that depends on the machine
FASTEST = "fastest"

BUDGETS = {
    "smoke": Budget(
        minutes="2 on 2 CPU cores",
        needs_scratch=False,
        fresh_head=TrainingSize(60, 1),
        ks=(1, 4),
        batch_sizes=(1,),
        sampled_k=4,
        num_prompts=4,
        max_new_tokens=48,
        repeats=3,
        dtype="float32",
        scratch=ScratchModels(
            target_shape=lm_shape(1024, 4, 128, 384, 4, 2, 32, 2048),
            source=None,
            max_chars=4_000_000,
            seq_len=128,
            target=TrainingSize(900, 4),
            peagle=TrainingSize(250, 1),
            eagle3=TrainingSize(150, 1),
            peagle_layers=2,
            peagle_mlp_dim=None,
            num_depths=5,
        ),
    ),
    "small": Budget(
        minutes="10 on 2 CPU cores; --from-scratch was not timed",
        needs_scratch=False,
        fresh_head=TrainingSize(300, 1),
        ks=(1, 3, 5, 7, 11),
        batch_sizes=(1, 8),
        sampled_k=7,
        num_prompts=8,
        max_new_tokens=128,
        repeats=7,
        dtype=FASTEST,
        scratch=ScratchModels(
            target_shape=lm_shape(2048, 6, 192, 576, 6, 2, 32, 4096),
            source=None,
            max_chars=20_000_000,
            seq_len=256,
            target=TrainingSize(1200, 4),
            peagle=TrainingSize(700, 1),
            eagle3=TrainingSize(400, 1),
            peagle_layers=2,
            peagle_mlp_dim=None,
            num_depths=8,
        ),
    ),
    "full": Budget(
        minutes="8 on one H200, an estimate: it was never run",
        needs_scratch=True,
        fresh_head=None,
        ks=(1, 3, 5, 7, 11, 16),
        batch_sizes=(1, 8),
        sampled_k=7,
        num_prompts=16,
        max_new_tokens=256,
        repeats=5,
        dtype="bfloat16",
        scratch=ScratchModels(
            target_shape=lm_shape(8192, 12, 768, 2304, 12, 4, 64, 4096),
            source=INSTALLED,
            max_chars=None,
            seq_len=512,
            target=TrainingSize(1500, 32),
            peagle=TrainingSize(900, 32),
            eagle3=TrainingSize(600, 32),
            peagle_layers=4,
            peagle_mlp_dim=1152,
            num_depths=8,
        ),
    ),
}


# ---------------------------------------------------------------- recipes


def lm_run(models: ScratchModels, out: Path, seed: int) -> LmRun:
    """The training run of the target, in `out`/target."""
    steps = models.target.steps
    optimizer = OptimizerConfig(
        steps=steps,
        peak_lr=4e-3 if models.target_shape.dim < 256 else 2e-3,
        warmup=steps // 20,
        weight_decay=0.1,
        max_grad_norm=1.0,
    )
    return LmRun(
        task="lm",
        out=str(out / "target"),
        seed=seed,
        model=models.target_shape,
        data=_data(models, models.target),
        optimizer=optimizer,
        **_intervals(steps),
    )


def peagle_run(
    models: ScratchModels, target: Path, out: Path, seed: int, size: TrainingSize
) -> PeagleRun:
    """The training run of a P-EAGLE head for the target in the folder `target`."""
    return PeagleRun(
        task="peagle",
        head=_head_shape(models.peagle_layers, models.peagle_mlp_dim, target),
        cod=CodConfig(
            num_depths=models.num_depths,
            down_sample_ratio=0.8,
            down_sample_ratio_min=0.2,
            max_anchors=None,
        ),
        placeholder=PlaceholderConfig(hidden="shared", token="mask"),
        feature_noise=FeatureNoise(noise=0.0, dropout=0.0),
        depth_weights=None,
        train_embedding=True,
        **_head_recipe(models, target, out, seed, size),
    )


def fresh_head_run(
    models: ScratchModels, target: Path, out: Path, seed: int, size: TrainingSize
) -> PeagleRun:
    """The training run of the head that a demo with packaged models trains to show training."""
    shallow = dataclasses.replace(models, num_depths=FRESH_HEAD_DEPTHS)
    return peagle_run(shallow, target, out, seed, size)


def eagle3_run(
    models: ScratchModels, target: Path, out: Path, seed: int, size: TrainingSize
) -> Eagle3Run:
    """The training run of an EAGLE-3 head for the target in the folder `target`."""
    return Eagle3Run(
        task="eagle3",
        head=_head_shape(1, None, target),
        ttt=TttConfig(steps=models.num_depths, decay=1.0),
        train_embedding=False,
        **_head_recipe(models, target, out, seed, size),
    )


def _head_recipe(
    models: ScratchModels, target: Path, out: Path, seed: int, size: TrainingSize
) -> dict[str, Any]:
    """What the runs of both heads have in common. The values are from LOG.md, 2026-11-20."""
    steps = size.steps
    return {
        "target": str(target),
        "target_dtype": "float32",
        "hidden_states_dir": None,
        "loss": "forward_kl",
        "out": str(out),
        "seed": seed,
        "init": "target",
        "init_from": None,
        "depth_schedule": _depth_schedule(steps, models.num_depths),
        "train_lm_head": False,
        "data": _data(models, size),
        "eval": EvalConfig(
            every=max(1, steps // 4), prompts=None, num_prompts=8, max_new_tokens=64
        ),
        "optimizer": OptimizerConfig(
            steps=steps,
            peak_lr=3e-3,
            warmup=max(1, steps // 20),
            weight_decay=0.01,
            max_grad_norm=1.0,
        ),
        **_intervals(steps),
    }


def _data(models: ScratchModels, size: TrainingSize) -> DataConfig:
    return DataConfig(
        source=models.source,
        max_chars=models.max_chars,
        held_out=HELD_OUT,
        seq_len=models.seq_len,
        batch_size=size.batch_size,
    )


def _depth_schedule(steps: int, num_depths: int) -> tuple[DepthStage, ...]:
    """Depth 0 alone for a third of the steps; then 2, 4 and at last all depths in equal parts.

    Runs of fewer than 30 steps train all depths from the first step on.
    """
    if steps < 30:
        return ()
    stages = [depths for depths in (1, 2, 4) if depths < num_depths]
    return tuple(
        DepthStage(until=steps // 3 + i * (2 * steps // 3) // len(stages), num_depths=depths)
        for i, depths in enumerate(stages)
    )


def _intervals(steps: int) -> dict[str, Any]:
    """How often a run of so many steps writes metrics and checkpoints."""
    return {
        "log_every": max(1, steps // 40),
        "save_every": max(1, steps // 2),
        "max_seconds": None,
    }


def _aux_hidden_state_layers(target: Path) -> tuple[int, ...]:
    """Inputs of a low layer, of one at two thirds of the target's depth, and of the last layer.

    The usual third choice, the third layer from the end, comes too early in a shallow target.
    """
    layers = weights.read_json(target / "config.json")["num_hidden_layers"]
    low = 1 if layers < 6 else 2
    return tuple(sorted({low, 2 * layers // 3, layers - 1}))


def _head_shape(layers: int, mlp_dim: int | None, target: Path) -> HeadShape:
    """A head that is as wide as its target, so that it can begin as a copy of the last layer."""
    return HeadShape(
        layers=layers,
        dim=None,
        mlp_dim=mlp_dim,
        heads=None,
        kv_heads=None,
        head_dim=None,
        draft_vocab=None,
        aux_hidden_state_layers=_aux_hidden_state_layers(target),
        qk_norm=True,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        mask_token=None,
        rope=None,
    )


def budget_here(name: str) -> Budget:
    """A budget of BUDGETS, with the dtype that is fastest on this machine."""
    budget = BUDGETS[name]
    if budget.dtype != FASTEST:
        return budget
    is_faster = has_bfloat16_products()
    return dataclasses.replace(budget, dtype="bfloat16" if is_faster else "float32")
