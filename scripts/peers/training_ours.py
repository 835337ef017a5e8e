"""peagle_jax as one of the trainers of compare_training.py.

It takes the steps of `peagle train` on stored hidden states: COD sampling on the host while the
device computes, and one jitted program for loss, gradients and optimizer.
"""

import dataclasses
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from line_worker import serve

from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.pair import load_pair
from peagle_jax.cli.libraries import configure_libraries
from peagle_jax.train.cod import cod_sample
from peagle_jax.train.config import PeagleRun
from peagle_jax.train.head_batches import HeadBatch
from peagle_jax.train.hidden_state_store import HiddenStates
from peagle_jax.train.hidden_states import shifted
from peagle_jax.train.settings import build
from peagle_jax.train.train_head import (
    Objective,
    head_denominators,
    head_loss,
    head_metrics,
    split_params,
)
from peagle_jax.train.update import make_optimizer, make_update
from peagle_jax.types import Batch


def start(job: dict):
    """Maps the rows of a job; a request trains its head for some steps from the beginning."""
    configure_libraries()
    rows = dict(np.load(Path(job["folder"]) / "rows.npz"))
    for name in ("aux_hidden_states", "hidden"):
        rows[name] = np.load(Path(job["folder"]) / f"{name}.npy", mmap_mode="r")

    run = build(PeagleRun, job["recipe"], "the job")

    @functools.cache
    def update_of(schedule_steps: int, warmup: int):
        """The jitted step, of heads that differ in nothing but their numbers."""
        target, head = load_pair(run.target, job["heads"][0])
        objective = Objective(
            functools.partial(head_loss, run, target, head),
            functools.partial(head_denominators, run),
            head_metrics,
        )
        schedule = dataclasses.replace(run.optimizer, steps=schedule_steps, warmup=warmup)
        optimizer = make_optimizer(schedule)
        return jax.jit(make_update(objective, optimizer), donate_argnums=0), optimizer

    def train(request: dict) -> dict:
        target, head = load_pair(run.target, request["head"])
        trained, frozen = split_params(run, head)
        update, optimizer = update_of(request["schedule_steps"], request["warmup"])
        trained = jax.tree.map(jnp.copy, trained)
        opt = optimizer.init(trained)
        state = {"params": trained, "opt": opt, "step": jnp.zeros((), jnp.int32)}
        batch_at = functools.partial(_batch, run, rows, request["order"])
        frozen_params = target.params, frozen
        # compiles, and changes a copy
        jax.block_until_ready(update(jax.tree.map(jnp.copy, state), batch_at(0), frozen_params))
        losses = []
        began, cpu_began = time.perf_counter(), time.process_time()
        for step in range(request["steps"]):
            state, metrics = update(state, batch_at(step), frozen_params)
            losses.append(metrics["loss"])
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
        cpu_seconds = time.process_time() - cpu_began
        if request["out"] is not None:
            trained_head = dataclasses.replace(head, params={**state["params"], **frozen})
            save_drafter(trained_head, request["out"], target=run.target)
        return {
            "training_seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "losses": np.asarray(losses, np.float64).tolist(),
            "trained_parameters": sum(x.size for x in jax.tree.leaves(state["params"])),
        }

    return train


def _batch(run: PeagleRun, rows: dict[str, np.ndarray], order: list[int], step: int) -> HeadBatch:
    """The input of a step, as `HeadBatches` makes it."""
    row = order[step % len(order)]
    tokens, segment_ids, loss_mask = (
        rows[name][row : row + 1] for name in ("tokens", "segment_ids", "loss_mask")
    )
    batch = Batch(tokens, segment_ids, loss_mask)
    stored = HiddenStates(
        batch,
        np.array(rows["aux_hidden_states"][row : row + 1]),
        np.array(rows["hidden"][row : row + 1]),
    )
    segment_ids, loss_mask = shifted(batch)
    cod = cod_sample(loss_mask, segment_ids, run.cod, [run.seed, step])
    noise_ids = np.array([(step, 0)], np.int32)
    return HeadBatch(batch, stored, segment_ids, loss_mask, cod, noise_ids, run.num_depths)


if __name__ == "__main__":
    serve(start, "peagle_jax")
