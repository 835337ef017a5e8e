"""The training loop that all tasks share: resume, step, log, evaluate, save.

What a step computes, and what it reads, come in as functions.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.checkpoints.orbax_io import Checkpoints
from peagle_jax.progress import ProgressReport
from peagle_jax.train.config import Run
from peagle_jax.train.divergence import check_finite
from peagle_jax.train.evaluations import Evaluations
from peagle_jax.train.interruption import Interruption
from peagle_jax.train.mesh import any_process, is_first_process, put, put_rows, shardings_of
from peagle_jax.train.metrics_log import MetricsLog, TrainingClock
from peagle_jax.train.run_folder import init_run_dir
from peagle_jax.train.settings import plain
from peagle_jax.train.step_memory import does_not_fit, lacks_memory
from peagle_jax.train.trackers import Trackers
from peagle_jax.train.update import Layout, Objective, make_optimizer, make_update
from peagle_jax.types import InputError, Params

# Steps after which several processes tell each other whether one of them is to stop.
AGREE_EVERY = 10
# (step, trained parameters) -> a row of metrics, or None if this step is not evaluated
EvalFn = Callable[[int, Params], dict | None]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is measured between steps, and what follows from it.

    Attributes:
      measure: what is called after a step that is due; the row that it returns, if any, is logged.
      keeps_best: return the parameters of the evaluation with the longest acceptance length, not
        those of the last step.
      patience: stop after so many evaluations without a longer one; None: never.
      patience_from: the step after which evaluations count for that, when all depths are trained.
      is_due: whether a step is measured; None: every step is.
    """

    measure: EvalFn
    keeps_best: bool = False
    patience: int | None = None
    patience_from: int = 0
    is_due: Callable[[int], bool] | None = None

    def measures(self, step: int) -> bool:
        """Whether what was trained up to a step is measured."""
        return self.is_due is None or self.is_due(step)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` came to.

    Attributes:
      params: the trained parameters.
      step: steps trained, over all sessions.
      kept_step: after which the parameters were such: `step`, or that of the best evaluation.
      stopped_early: whether evaluations no longer became better.
      seconds: of this session's training steps, without compilation and evaluation.
      tokens: of the same steps.
      minutes: of all sessions, with compilation and without evaluation.
    """

    params: Params
    step: int
    kept_step: int
    stopped_early: bool
    seconds: float
    tokens: int
    minutes: float


def fit(
    run: Run,
    params: Params,
    objective: Objective,
    batch_at: Callable[[int], Any],
    frozen_params: Any,
    evaluation: Evaluation | None = None,
    say: Callable[[str], None] = print,
    rows_at: Callable[[int], Sequence[int]] | None = None,
    mesh: Mesh | None = None,
) -> FitResult:
    """Trains `params` for `run.optimizer.steps` steps, resuming from the newest checkpoint.

    Args:
      run: what to train; `run.out` gets metrics.jsonl, config.yaml and checkpoints.
      params: before the first step.
      objective: what is minimized.
      batch_at: step -> batch, on the host; the same step must always give the same batch. Where the
        structure of batches changes, the step is compiled again.
      frozen_params: arrays that `loss` reads and that are not trained, such as the target's
        weights.
      evaluation: what is measured between steps; None: nothing.
      say: is told which step the run goes on from, if it was begun before.
      rows_at: step -> the numbers of its rows, for messages.
      mesh: over which parameters are spread, and the rows of a batch will be; None: one device.

    Raises:
      InputError: `run.out` has checkpoints of another configuration, or cannot be written; or a
        step does not fit the memory, and those before it are saved; or its loss or gradients are
        not finite. What such a step made is not saved.
      KeyboardInterrupt: after Ctrl-C, here or in another process. The last finished step is saved.
    """
    out, steps = Path(run.out), run.optimizer.steps
    init_run_dir(run)
    checkpoints = Checkpoints(out / "checkpoints", run.keep_checkpoints)
    optimizer = make_optimizer(run.optimizer)
    state = _first_state(params, optimizer, mesh)
    update = jitted_update(run, objective, optimizer, state, frozen_params, mesh)
    if (latest := checkpoints.latest()) is not None:
        state = checkpoints.restore(latest, state)
    first_step = step = int(state["step"])
    if first_step > 0:
        say(f"resumed from the checkpoint of step {first_step:,} in {out}")
    is_first = is_first_process()
    trackers = Trackers(run.trackers if is_first else (), out, plain(run), first_step, say)
    log = MetricsLog(out / "metrics.jsonl", first_step, trackers)
    clock = TrainingClock(log.seconds)
    keeps_best = evaluation is not None and evaluation.keeps_best
    patience = (None, 0) if evaluation is None else (evaluation.patience, evaluation.patience_from)
    evaluations = Evaluations(*patience)
    for row in log.rows:
        evaluations.add(row)
    if keeps_best:
        checkpoints.protected = evaluations.best_step
    tokens = 0
    programs: dict[tuple, jax.stages.Compiled] = {}  # by the form of a batch
    progress = ProgressReport(f"train {run.task}", steps, first_step, "steps")
    agree_every = 1 if jax.process_count() == 1 else AGREE_EVERY
    unchecked: tuple[int, dict] | None = None  # the step before, and its metrics

    def check() -> None:
        if unchecked is not None:
            check_finite(out, *unchecked, checkpoints.latest(), rows_at)

    # a save that is under way when an error ends the loop is of a good step
    interruption = Interruption()
    with contextlib.ExitStack() as stack, log, progress:
        stack.callback(checkpoints.wait)
        while step < steps and not evaluations.is_over:
            # while the device is still busy with the step before
            batch = put_rows(batch_at(step), mesh)
            leaves, structure = jax.tree.flatten(batch)
            form = structure, tuple((x.shape, x.dtype) for x in leaves)
            step_began, is_new = time.perf_counter(), form not in programs
            if is_new:
                program = update.lower(state, leaves, frozen_params, structure).compile()
                programs[form] = program
                jax.block_until_ready(state)  # what the step before took is free again
                if any_process(lacks_memory(program)):
                    check()
                    if step > first_step and step != checkpoints.latest():
                        checkpoints.save(step, state)
                    raise does_not_fit(program, run)
            state, metrics = programs[form](state, leaves, frozen_params)
            if step == first_step:
                # Until here, where minutes may be spent on compiling, there is nothing to save.
                jax.block_until_ready(state)
                stack.enter_context(interruption)
            step += 1
            check()  # of the step before, while the device is busy with this one
            unchecked = step, metrics
            if is_new:
                # This step was compiled: it is the session's first, or the first of such a form.
                # Its time is left out of the speed, and so are its tokens.
                jax.block_until_ready(state)
                clock.leave_out_compilation(time.perf_counter() - step_began)
            else:
                tokens += run.data.batch_size * run.data.seq_len
            is_over_time = run.max_seconds is not None and clock.session() > run.max_seconds
            if step % run.log_every == 0 or step == steps or is_over_time:
                jax.block_until_ready(state)
                check()
                row = {"step": step, "seconds": clock.run(), **_to_json(jax.device_get(metrics))}
                log.write(row)
                progress.update(step, note=f"loss {row['loss']:.4f}")
            is_best = False
            if evaluation is not None and evaluation.measures(step):
                jax.block_until_ready(state)
                check()
                began = time.perf_counter()
                try:
                    measured = evaluation.measure(step, state["params"])
                except InputError:  # the steps since the last save are not lost with it
                    checkpoints.save(step, state)
                    checkpoints.wait()
                    raise
                if measured is not None:
                    clock.leave_out_evaluation(time.perf_counter() - began)
                    row = {"step": step, "seconds": clock.run(), **measured}
                    log.write(row)
                    is_best = evaluations.add(row)
            if keeps_best and is_best:
                checkpoints.protected = step
            if (step % run.save_every == 0 and step < steps) or (keeps_best and is_best):
                check()
                checkpoints.save(step, state)
            is_stopping = is_over_time or interruption.is_requested
            if step % agree_every == 0 and any_process(is_stopping):
                break
        jax.block_until_ready(state)
        check()
        seconds = clock.stepping()
    if step > first_step and step != checkpoints.latest():
        checkpoints.save(step, state)
    checkpoints.wait()
    is_interrupted = any_process(interruption.is_requested)
    interruption.deliver()
    if is_interrupted and not interruption.is_requested:
        # another process was: none goes on as if training were over
        raise KeyboardInterrupt
    kept_step = step
    if keeps_best and evaluations.best_step not in (None, step):
        kept_step = evaluations.best_step
        say(
            f"the head of step {kept_step:,} is kept: its acceptance length, "
            f"{evaluations.best_length:.2f}, is the longest"
        )
        state = checkpoints.restore(kept_step, state)
    checkpoints.close()
    minutes = round(clock.run() / 60, 2)
    stopped_early = evaluations.is_over
    return FitResult(state["params"], step, kept_step, stopped_early, seconds, tokens, minutes)


def _first_state(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> dict:
    """The training state of step 0. What the optimizer keeps of a parameter lies beside it."""
    params = jax.tree.map(jnp.copy, params)  # each update donates the state, and with it its arrays
    state = {"params": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
    if mesh is None:
        return state
    places = state_shardings(state, mesh)
    return state | {name: jax.tree.map(put, state[name], places[name]) for name in ("opt", "step")}


def state_shardings(state: dict, mesh: Mesh) -> dict:
    """Where the arrays of a training state lie whose parameters are spread over a mesh already.

    Args:
      state: "params", "opt" and "step"; arrays, or their shapes.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    # What an optimizer keeps of a parameter has its path at the end of its own.
    places = {
        jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(state["params"])
    }

    def beside(path: tuple, x: jax.Array) -> NamedSharding:
        tails = (jax.tree_util.keystr(path[i:]) for i in range(len(path)))
        param = next((places[tail] for tail in tails if tail in places), None)
        return everywhere if param is None or param.shape != x.shape else param.sharding

    return {
        "params": shardings_of(state["params"]),
        "opt": jax.tree.map_with_path(beside, state["opt"]),
        "step": everywhere,
    }


def jitted_update(
    run: Run,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    state: dict,
    frozen_params: Any,
    mesh: Mesh | None,
) -> Any:
    """`make_update`, jitted, of a batch's leaves and its structure.

    On a mesh every array of the state stays where it is. The state and the frozen parameters may be
    shapes with shardings.
    """
    layout = placed = None
    if mesh is not None:
        layout = Layout(shardings_of(state["params"]), shardings_of(frozen_params))
        everywhere = NamedSharding(mesh, PartitionSpec())
        placed = (shardings_of(state), everywhere)
    update = make_update(objective, optimizer, run.gradient_accumulation, layout)

    # leaves, because what describes a lowered program would fill the batch's class with no arrays
    def update_of_leaves(state: dict, leaves: list, frozen_params: Any, structure: Any) -> tuple:
        return update(state, jax.tree.unflatten(structure, leaves), frozen_params)

    return jax.jit(update_of_leaves, static_argnums=3, donate_argnums=0, out_shardings=placed)


def _to_json(metrics: dict) -> dict:
    """Arrays as lists of numbers with six digits behind the point."""
    shown = {key: value for key, value in metrics.items() if key != "grad_norms"}
    return {key: np.round(value, 6).tolist() for key, value in shown.items()}
