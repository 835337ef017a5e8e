"""How much of everything a demo does, and the training runs that follow from it."""

import dataclasses
from pathlib import Path

from peagle_jax import weights
from peagle_jax.corpus import INSTALLED
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

FRESH_DEPTHS = (
    2  # of the head trained to show training: in minutes, deeper placeholders show nothing
)
HELD_OUT = 0.05  # share of files, by name, that no model of a demo is trained on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scratch:
    """Models trained by the demo itself, instead of those that come with the package."""

    model: LmShape
    source: str | None
    max_chars: int | None
    length: int
    lm: tuple[int, int]  # steps, rows a step
    peagle: tuple[int, int]
    eagle3: tuple[int, int]
    peagle_layers: int
    peagle_mlp: int | None  # width of its MLPs; None: the target's
    num_depths: int  # K in training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    minutes: str  # what to expect, for --dry-run
    scratch: Scratch
    needs_scratch: bool  # whether the models that come with the package are not meant for it
    fresh: (
        tuple[int, int] | None
    )  # steps, rows a step of the head trained to show training; None where heads are trained anyway
    ks: tuple[int, ...]
    batches: tuple[int, ...]
    sampled_k: int | None
    prompts: int
    new_tokens: int
    repeats: int
    dtype: str  # of decoding; exactness is always checked in float32


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
    """Of a small target; its rotary base is 10,000."""
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


BUDGETS = {
    "smoke": Budget(
        minutes="2 on 2 CPU cores",
        needs_scratch=False,
        fresh=(60, 1),
        ks=(1, 4),
        batches=(1,),
        sampled_k=None,
        prompts=4,
        new_tokens=48,
        repeats=3,
        dtype="float32",
        scratch=Scratch(
            model=lm_shape(1024, 4, 128, 384, 4, 2, 32, 2048),
            source=None,
            max_chars=4_000_000,
            length=128,
            lm=(900, 4),
            peagle=(250, 1),
            eagle3=(150, 1),
            peagle_layers=2,
            peagle_mlp=None,
            num_depths=5,
        ),
    ),
    "small": Budget(
        minutes="10 on 2 CPU cores; --from-scratch was not timed",
        needs_scratch=False,
        fresh=(300, 1),
        ks=(1, 3, 5, 7, 11),
        batches=(1, 8),
        sampled_k=7,
        prompts=8,
        new_tokens=128,
        repeats=3,
        dtype="float32",
        scratch=Scratch(
            model=lm_shape(2048, 6, 192, 576, 6, 2, 32, 4096),
            source=None,
            max_chars=20_000_000,
            length=256,
            lm=(1200, 4),
            peagle=(700, 1),
            eagle3=(400, 1),
            peagle_layers=2,
            peagle_mlp=None,
            num_depths=8,
        ),
    ),
    "full": Budget(
        minutes="8 on one H200? never run",
        needs_scratch=True,
        fresh=None,
        ks=(1, 3, 5, 7, 11, 16),
        batches=(1, 8),
        sampled_k=7,
        prompts=16,
        new_tokens=256,
        repeats=5,
        dtype="bfloat16",
        scratch=Scratch(
            model=lm_shape(8192, 12, 768, 2304, 12, 4, 64, 4096),
            source=INSTALLED,
            max_chars=None,
            length=512,
            lm=(1500, 32),
            peagle=(900, 32),
            eagle3=(600, 32),
            peagle_layers=4,
            peagle_mlp=1152,
            num_depths=8,
        ),
    ),
}


# ---------------------------------------------------------------- the runs


def lm_run(s: Scratch, out: Path, seed: int) -> LmRun:
    steps, rows = s.lm
    rate = 4e-3 if s.model.dim < 256 else 2e-3
    how = OptimizerConfig(
        steps=steps, peak_lr=rate, warmup=steps // 20, weight_decay=0.1, max_grad_norm=1.0
    )
    return LmRun(
        task="lm",
        out=str(out / "target"),
        seed=seed,
        model=s.model,
        data=_data(s, rows),
        optimizer=how,
        **_often(steps),
    )


def peagle_run(s: Scratch, target: Path, out: Path, seed: int, steps: int, rows: int) -> PeagleRun:
    return PeagleRun(
        task="peagle",
        head=_head(s.peagle_layers, s.peagle_mlp, target),
        cod=CodConfig(
            num_depths=s.num_depths,
            down_sample_ratio=0.8,
            down_sample_ratio_min=0.2,
            max_anchors=None,
        ),
        placeholder=PlaceholderConfig(hidden="shared", token="mask"),
        feature_noise=FeatureNoise(noise=0.0, dropout=0.0),
        train_embedding=True,
        **_head_run(s, target, out, seed, steps, rows),
    )


def fresh_run(b: Budget, target: Path, out: Path, seed: int) -> PeagleRun:
    """The head that a demo with packaged models trains to show training."""
    return peagle_run(
        dataclasses.replace(b.scratch, num_depths=FRESH_DEPTHS), target, out, seed, *b.fresh
    )


def eagle3_run(s: Scratch, target: Path, out: Path, seed: int, steps: int, rows: int) -> Eagle3Run:
    return Eagle3Run(
        task="eagle3",
        head=_head(1, None, target),
        ttt=TttConfig(steps=s.num_depths, decay=1.0),
        train_embedding=False,
        **_head_run(s, target, out, seed, steps, rows),
    )


def _head_run(s: Scratch, target: Path, out: Path, seed: int, steps: int, rows: int) -> dict:
    """What both heads' runs share: the recipe of LOG.md, 2026-11-20."""
    return {
        "target": str(target),
        "target_dtype": "float32",
        "hidden_states_dir": None,
        "loss": "forward_kl",
        "out": str(out),
        "seed": seed,
        "init": "target",
        "init_from": None,
        "depth_schedule": _depth_schedule(steps, s.num_depths),
        "train_lm_head": False,
        "data": _data(s, rows),
        **_often(steps),
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
    }


def _data(s: Scratch, rows: int) -> DataConfig:
    return DataConfig(
        source=s.source, max_chars=s.max_chars, held_out=HELD_OUT, seq_len=s.length, batch_size=rows
    )


def _depth_schedule(steps: int, num_depths: int) -> tuple[DepthStage, ...]:
    """A third of the steps for depth 0 alone, then twice as many depths at a time."""
    some = [d for d in (1, 2, 4) if d < num_depths]
    return (
        tuple(
            DepthStage(until=steps // 3 + i * (2 * steps // 3) // len(some), num_depths=d)
            for i, d in enumerate(some)
        )
        if steps >= 30
        else ()
    )


def _often(steps: int) -> dict:
    return {"log_every": max(1, steps // 40), "save_every": max(1, steps // 2), "max_seconds": None}


def _aux_layers(target: Path) -> tuple[int, ...]:
    """A low layer, one at two thirds, and the last layer's input: in a shallow target the usual L-3 comes too early."""
    layers = weights.read_json(target / "config.json")["num_hidden_layers"]
    return tuple(sorted({1 if layers < 6 else 2, 2 * layers // 3, layers - 1}))


def _head(layers: int, mlp_dim: int | None, target: Path) -> HeadShape:
    return HeadShape(
        layers=layers,
        dim=None,
        mlp_dim=mlp_dim,
        heads=None,
        kv_heads=None,
        head_dim=None,
        draft_vocab=None,
        aux_hidden_state_layers=_aux_layers(target),
        qk_norm=True,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        mask_token=None,
        rope=None,
    )
