"""The training loop that every task shares: resume, step, log, save. What a step does comes in as a function."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints.orbax_io import Checkpoints
from peagle_jax.provenance import provenance
from peagle_jax.train.config import OptimizerConfig, dump
from peagle_jax.types import InputError, Params

Loss = Callable[
    [Params, Any], tuple[jax.Array, dict]
]  # (trained parameters, batch) -> loss, metrics
EvalFn = Callable[
    [int, Params], dict | None
]  # (step, trained parameters) -> what to log of it, if anything


@dataclasses.dataclass(frozen=True)
class FitResult:
    params: Params
    step: int
    seconds: float  # of this session's training steps, without compilation
    tokens: int  # of this session's training steps, likewise
    minutes: float  # of all sessions, compilation included


def make_optimizer(cfg: OptimizerConfig) -> optax.GradientTransformation:
    warmup = min(cfg.warmup, max(cfg.steps - 1, 0))
    schedule = optax.warmup_cosine_decay_schedule(
        0, cfg.peak_lr, warmup, max(cfg.steps, warmup + 1), cfg.peak_lr / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(cfg.max_grad_norm),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=cfg.weight_decay, mask=_decayed),
    )


def _decayed(params: Params) -> Params:
    """Not norms and vectors; nor tables of placeholders, which stand in the place of a vector."""
    return jax.tree.map_with_path(
        lambda path, p: p.ndim > 1 and jax.tree_util.keystr(path[:1]) != "['placeholder']", params
    )


def fit(
    run,
    params: Params,
    loss: Loss,
    batch_at: Callable[[int], Any],
    frozen_params: Any,
    eval_fn: EvalFn | None = None,
) -> FitResult:
    """Trains `params` for `run.optimizer.steps` steps, resuming from what `run.out` holds.

    Args:
      run: a configuration of `train.config`; its `out` gets metrics.jsonl, config.yaml and checkpoints.
      loss: (params, batch, fixed) -> scalar, metrics. Pure.
      batch_at: step -> batch, on the host; the same step gives the same batch.
      fixed: arrays that `loss` reads and nobody trains (a target's weights).
      probe: asked after every step; its seconds are not counted. What it returns becomes a row of metrics.jsonl.
    """
    out = Path(run.out)
    init_run_dir(run)
    checkpoints = Checkpoints(out / "checkpoints")
    optimizer = make_optimizer(run.optimizer)

    def update(state, batch, frozen_params):
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(
            state["params"], batch, frozen_params
        )
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
            "step": state["step"] + 1,
        }, metrics

    params = jax.tree.map(jnp.copy, params)  # the update donates its state
    state = {"params": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
    if (latest := checkpoints.latest()) is not None:
        state = checkpoints.restore(latest, state)
    step = int(state["step"])
    first, kind = step, jax.tree.structure(None)
    spent = _truncate(out / "metrics.jsonl", first)  # seconds of the sessions before this one
    update = jax.jit(update, donate_argnums=0)
    start = warm = time.perf_counter()
    tokens = 0

    def seconds():
        return round(spent + time.perf_counter() - start, 3)

    with _progress() as bar, (out / "metrics.jsonl").open("a", encoding="utf-8") as log:
        task = bar.add_task(run.task, total=run.optimizer.steps, completed=step, loss="")
        while step < run.optimizer.steps:
            batch = batch_at(step)  # while the device still works on the step before
            before, last, kind = time.perf_counter(), kind, jax.tree.structure(batch)
            state, metrics = update(state, batch, frozen_params)
            step += 1
            if (
                kind != last
            ):  # compiles: the first step, and the first one of more depths: not counted
                jax.block_until_ready(state)
                warm += time.perf_counter() - before
            else:
                tokens += run.data.batch_size * run.data.seq_len
            over = run.max_seconds is not None and time.perf_counter() - start > run.max_seconds
            if step % run.log_every == 0 or step == run.optimizer.steps or over:
                jax.block_until_ready(state)
                row = {"step": step, "seconds": seconds(), **_plain(jax.device_get(metrics))}
                _log(log, row)
                bar.update(task, completed=step, loss=f"loss {row['loss']:.4f}")
            if eval_fn is not None:
                before = time.perf_counter()
                if (found := eval_fn(step, state["params"])) is not None:
                    aside = time.perf_counter() - before
                    start, warm = start + aside, warm + aside
                    _log(log, {"step": step, "seconds": seconds(), **found})
            if step % run.save_every == 0 and step < run.optimizer.steps:
                checkpoints.save(step, state)
            if over:
                break
    jax.block_until_ready(state)
    trained = time.perf_counter() - warm
    if step > first:
        checkpoints.save(step, state)
    checkpoints.close()
    return FitResult(state["params"], step, trained, tokens, round(seconds() / 60, 2))


def init_run_dir(run) -> None:
    """Makes `run.out` this run's folder. To be called before anything else is read or written: it is the cheapest refusal.

    Raises:
      InputError: the folder cannot be written, or holds checkpoints of another configuration.
    """
    out = Path(run.out)
    path, text = out / "config.yaml", dump(run)
    try:
        saved = has_checkpoints(run)
        if saved and path.exists() and path.read_text(encoding="utf-8") != text:
            rule = "a run is resumed only with the configuration it began with"
            raise InputError(out, rule, "another one", "choose another out folder")
        out.mkdir(parents=True, exist_ok=True)
        if (
            not saved or not path.exists()
        ):  # the machine, versions and commit that began the run: what its card will say
            write_atomically(out / "origin.json", json.dumps(provenance(), indent=2) + "\n")
            write_atomically(path, text)
    except OSError as error:
        raise InputError(
            out, "the output folder must be writable", error.strerror, "choose another place"
        ) from None


def has_checkpoints(run) -> bool:
    return any((Path(run.out) / "checkpoints").glob("[0-9]*"))


def write_result(run, result: dict) -> None:
    """result.json in `run.out`: what the run came to, for cards and reports."""
    path = Path(run.out) / "result.json"
    result = {k: str(v) if isinstance(v, Path) else v for k, v in result.items()}
    if result["tokens_per_second"] is None and path.exists():  # nothing was trained in this session
        result["tokens_per_second"] = json.loads(path.read_text(encoding="utf-8"))[
            "tokens_per_second"
        ]
    write_atomically(path, json.dumps(result, indent=2) + "\n")


def _truncate(path: Path, step: int) -> float:
    """Drops metric rows past the step that is resumed from: they will be written again. Returns the seconds spent until then."""
    if not path.exists():
        return 0.0
    rows = [
        json.loads(line)
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.endswith("}")
    ]
    kept = [row for row in rows if row["step"] <= step]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
    return max((row["seconds"] for row in kept), default=0.0)


def _log(file, row: dict) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()


def _plain(metrics: dict) -> dict:
    return {k: np.round(v, 6).tolist() for k, v in metrics.items()}


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
