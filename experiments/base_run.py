"""The training run that every variant changes a little, and changes that questions share."""

import dataclasses
from collections.abc import Callable
from typing import Any

from experiments.budgets import Budget
from peagle_jax.train.cod import CodConfig
from peagle_jax.train.config import (
    DataConfig,
    DepthStage,
    Eagle3Run,
    EagleRun,
    EvalConfig,
    HeadRun,
    HeadShape,
    OptimizerConfig,
    PeagleRun,
    PlaceholderConfig,
    TttConfig,
)
from peagle_jax.train.eagle_loss import RegressionConfig
from peagle_jax.train.peagle_loss import FeatureNoise


def base_run(budget: Budget, seed: int) -> PeagleRun:
    """The base: a P-EAGLE head in the paper's design. `Job.run` fills in its folders.

    Every value stands here, also where a recipe has the same default: a new default of recipes must
    not change what experiments measure.
    """
    model = budget.model
    head = HeadShape(
        layers=budget.layers,
        dim=model.dim,
        mlp_dim=model.mlp_dim,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        draft_vocab=model.vocab,
        aux_hidden_state_layers=budget.aux_hidden_state_layers,
        qk_norm=True,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        mask_token=None,
        rope=None,
    )
    cod = CodConfig(
        num_depths=budget.k, down_sample_ratio=0.8, down_sample_ratio_min=0.1, max_anchors=None
    )
    optimizer = OptimizerConfig(
        steps=budget.steps,
        peak_lr=budget.peak_lr,
        warmup=max(1, budget.steps // 24),
        weight_decay=0.01,
        max_grad_norm=1.0,
    )
    data = DataConfig(
        source="",
        max_chars=None,
        held_out=0.0,
        seq_len=budget.seq_len,
        batch_size=budget.batch_size,
        packing="cut",
        bad_rows="refuse",
        chat_template_kwargs=None,
        special_tokens=False,
        split_turns=False,
    )
    return PeagleRun(
        task="peagle",
        target="",
        target_dtype="float32",
        out="",
        seed=seed,
        hidden_states_dir="",
        head=head,
        loss="forward_kl",
        init="target",
        init_from=None,
        depth_schedule=depth_schedule(budget.steps, budget.k),
        train_embedding=True,
        train_lm_head=False,
        cod=cod,
        placeholder=PlaceholderConfig(
            hidden="shared",
            token="mask",
            attention="causal",
            context="layers",
            true_tokens=0.0,
        ),
        feature_noise=FeatureNoise(noise=0.0, dropout=0.0),
        depth_weights=None,
        data=data,
        optimizer=optimizer,
        eval=EvalConfig(every=None, prompts=None, num_prompts=1, max_new_tokens=8),
        log_every=max(1, budget.steps // 48),
        save_every=max(1, budget.steps // 8),
        max_seconds=None,
    )


def depth_schedule(steps: int, num_depths: int) -> tuple[DepthStage, ...]:
    """One depth, two and three, for a fifth of the steps each; all depths for the rest.

    Placeholders learn little before depth 0 has learned its task.
    """
    return tuple(
        DepthStage(until=steps * (stage + 1) // 5, num_depths=stage + 1)
        for stage in range(min(3, num_depths - 1))
    )


def with_depths(run: PeagleRun, num_depths: int) -> PeagleRun:
    """The same run, trained for another number of depths."""
    cod = dataclasses.replace(run.cod, num_depths=num_depths)
    schedule = depth_schedule(run.optimizer.steps, num_depths)
    return dataclasses.replace(run, cod=cod, depth_schedule=schedule)


def with_steps(run: HeadRun, steps: int) -> HeadRun:
    """The same run with another number of steps; its depths follow at the same shares of them."""
    schedule = depth_schedule(steps, run.num_depths) if run.depth_schedule else ()
    optimizer = dataclasses.replace(run.optimizer, steps=steps)
    return dataclasses.replace(run, optimizer=optimizer, depth_schedule=schedule)


def with_placeholder(**design: Any) -> Callable[[PeagleRun], PeagleRun]:
    """A change of runs: other values of their `placeholder`."""

    def change(run: PeagleRun) -> PeagleRun:
        return dataclasses.replace(run, placeholder=dataclasses.replace(run.placeholder, **design))

    return change


def as_eagle3(run: PeagleRun, *, layers: int = 1) -> Eagle3Run:
    """An autoregressive head on the same data, for the same steps.

    Its embedding is trained too, so that both heads learn with equal means.
    """
    shared = {field.name: getattr(run, field.name) for field in dataclasses.fields(HeadRun)}
    shared["task"] = "eagle3"
    shared["head"] = dataclasses.replace(run.head, layers=layers)
    return Eagle3Run(**shared, ttt=TttConfig(steps=run.cod.num_depths, decay=1.0))


def as_eagle3_of_equal_layers(run: PeagleRun) -> Eagle3Run:
    """As `as_eagle3`, with the run's number of layers, and so as many parameters."""
    return as_eagle3(run, layers=run.head.layers)


def as_eagle(run: PeagleRun, *, layers: int = 1) -> EagleRun:
    """An EAGLE-1 head on the same data, for the same steps.

    It learns one step, to predict the target's next final hidden state, and so has no depths. Its
    embedding and output matrix are the target's.
    """
    shared = {field.name: getattr(run, field.name) for field in dataclasses.fields(HeadRun)}
    shared["task"] = "eagle"
    shared["head"] = dataclasses.replace(
        run.head, layers=layers, dim=None, draft_vocab=None, aux_hidden_state_layers=None
    )
    shared |= {"depth_schedule": (), "train_embedding": False}
    return EagleRun(
        **shared,
        regression=RegressionConfig(weight=1.0, token_weight=0.1, noise=0.1),
        num_speculative_tokens=run.cod.num_depths,
    )


def readable(value: Any) -> str:
    """A setting's value in words, for the changes of a row.

    A depth schedule, a tuple of dictionaries, becomes "1 until step 480, 2 until step 960".
    """
    if value == ():
        return "none"
    if isinstance(value, tuple) and all(isinstance(stage, dict) for stage in value):
        depths = ((stage.get("num_depths", stage.get("depths")), stage) for stage in value)
        return ", ".join(f"{count} until step {stage['until']}" for count, stage in depths)
    return str(value)
