"""The training loop that all tasks share: resume, step, log, evaluate, save.

What a step computes, and what it reads, come in as functions.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints.orbax_io import Checkpoints
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import provenance
from peagle_jax.train.config import Run, dump, load_run
from peagle_jax.train.data import PackedRows
from peagle_jax.train.divergence import check_finite
from peagle_jax.train.interruption import Interruption
from peagle_jax.train.mesh import any_process, is_first_process, put, put_rows, shardings_of
from peagle_jax.train.settings import differences
from peagle_jax.train.update import Layout, Objective, make_optimizer, make_update
from peagle_jax.types import InputError, Params

# Keys that may differ when a run is resumed: they change no step.
MAY_CHANGE = ("mesh", "gradient_accumulation", "max_seconds", "log_every", "save_every")
# Steps after which several processes tell each other whether one of them is to stop.
AGREE_EVERY = 10
RESULT_FILE = "result.json"
DATA_FILE = "data.json"
# (step, trained parameters) -> a row of metrics, or None if this step is not evaluated
EvalFn = Callable[[int, Params], dict | None]


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` came to.

    Attributes:
      params: the trained parameters.
      step: steps trained, over all sessions.
      seconds: of this session's training steps, without compilation and evaluation.
      tokens: of the same steps.
      minutes: of all sessions, with compilation and without evaluation.
    """

    params: Params
    step: int
    seconds: float
    tokens: int
    minutes: float


class TrainingClock:
    """Times a session of training, in three ways that differ in what they leave out.

    1. `session`: since the session began. It ends runs that have a time limit (`max_seconds`).
    2. `run`: this and all earlier sessions. It is the "seconds" of metrics.jsonl.
    3. `stepping`: without compilation. Tokens per second are computed from it.

    Evaluation is left out of all three, so that evaluating more often changes no training curve.

    Args:
      seconds_before: of the sessions before this one.
    """

    def __init__(self, seconds_before: float) -> None:
        self._seconds_before = seconds_before
        self._began = time.perf_counter()
        self._evaluating = 0.0
        self._compiling = 0.0

    def session(self) -> float:
        return time.perf_counter() - self._began - self._evaluating

    def run(self) -> float:
        return round(self._seconds_before + self.session(), 3)

    def stepping(self) -> float:
        return self.session() - self._compiling

    def leave_out_evaluation(self, seconds: float) -> None:
        self._evaluating += seconds

    def leave_out_compilation(self, seconds: float) -> None:
        self._compiling += seconds


class MetricsLog:
    """metrics.jsonl of a run: a row of JSON for each logged step and each evaluation.

    Rows past the step that a run resumes from are dropped, because they will be written again.

    Args:
      path: the file.
      resume_step: the step that the run resumes from; 0 for a new run.

    Attributes:
      seconds: that the sessions before had spent at `resume_step`.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path, self.seconds = path if is_first_process() else Path(os.devnull), 0.0
        self._file: TextIO | None = None
        if self.path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            # a killed session may have left half a line
            rows = [json.loads(line) for line in lines if line.endswith("}")]
            rows = [row for row in rows if row["step"] <= resume_step]
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
            self.seconds = max((row["seconds"] for row in rows), default=0.0)

    def __enter__(self) -> "MetricsLog":
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, row: dict) -> None:
        """Appends a row; it is in the file when this returns."""
        if self._file is None:
            raise ValueError("metrics are written inside a with statement")
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def fit(
    run: Run,
    params: Params,
    objective: Objective,
    batch_at: Callable[[int], Any],
    frozen_params: Any,
    eval_fn: EvalFn | None = None,
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
      eval_fn: is called after every step; the row that it returns, if any, is logged.
      say: is told which step the run goes on from, if it was begun before.
      rows_at: step -> the numbers of its rows, for messages.
      mesh: over which parameters are spread, and the rows of a batch will be; None: one device.

    Raises:
      InputError: `run.out` has checkpoints of another configuration, or cannot be written; or the
        loss or the gradients of a step are not finite. What such a step made is not saved.
      KeyboardInterrupt: after Ctrl-C. The last finished step is saved.
    """
    out, steps = Path(run.out), run.optimizer.steps
    init_run_dir(run)
    checkpoints = Checkpoints(out / "checkpoints")
    optimizer = make_optimizer(run.optimizer)
    state = _first_state(params, optimizer, mesh)
    update = _compiled_update(run, objective, optimizer, state, frozen_params, mesh)
    if (latest := checkpoints.latest()) is not None:
        state = checkpoints.restore(latest, state)
    first_step = step = int(state["step"])
    if first_step > 0:
        say(f"resumed from the checkpoint of step {first_step:,} in {out}")
    log = MetricsLog(out / "metrics.jsonl", first_step)
    clock = TrainingClock(log.seconds)
    tokens = 0
    batch_structure = jax.tree.structure(None)  # of no batch
    progress = ProgressReport(f"train {run.task}", steps, first_step, "steps")
    agree_every = 1 if jax.process_count() == 1 else AGREE_EVERY
    unchecked: tuple[int, dict] | None = None  # the step before, and its metrics

    def check() -> None:
        if unchecked is not None:
            try:
                check_finite(out, *unchecked, checkpoints.latest(), rows_at)
            except InputError:
                checkpoints.close()  # a save that is under way is of a good step
                raise

    with Interruption() as interruption, log, progress:
        while step < steps:
            batch = put_rows(
                batch_at(step), mesh
            )  # while the device is still busy with the step before
            last_structure, batch_structure = batch_structure, jax.tree.structure(batch)
            step_began = time.perf_counter()
            state, metrics = update(state, batch, frozen_params)
            step += 1
            check()  # of the step before, while the device is busy with this one
            unchecked = step, metrics
            if batch_structure != last_structure:
                # This step was compiled: it is the session's first, or the first of more depths.
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
            if eval_fn is not None:
                began = time.perf_counter()
                evaluation = eval_fn(step, state["params"])
                if evaluation is not None:
                    clock.leave_out_evaluation(time.perf_counter() - began)
                    log.write({"step": step, "seconds": clock.run(), **evaluation})
            if step % run.save_every == 0 and step < steps:
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
    checkpoints.close()
    interruption.deliver()
    return FitResult(state["params"], step, seconds, tokens, round(clock.run() / 60, 2))


def _first_state(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> dict:
    """The training state of step 0. What the optimizer keeps of a parameter lies beside it."""
    params = jax.tree.map(jnp.copy, params)  # each update donates the state, and with it its arrays
    state = {"params": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
    if mesh is None:
        return state
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt = optax.tree_utils.tree_map_params(
        optimizer,
        put,
        state["opt"],
        shardings_of(params),
        transform_non_params=lambda x: put(x, everywhere),
    )
    return {"params": params, "opt": opt, "step": put(state["step"], everywhere)}


def _compiled_update(
    run: Run,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    state: dict,
    frozen_params: Any,
    mesh: Mesh | None,
) -> Callable[[dict, Any, Any], tuple[dict, dict]]:
    """`make_update`, to be compiled. On a mesh every array of the state stays where it is."""
    if mesh is None:
        update = make_update(objective, optimizer, run.gradient_accumulation)
        return jax.jit(update, donate_argnums=0)
    layout = Layout(shardings_of(state["params"]), shardings_of(frozen_params))
    update = make_update(objective, optimizer, run.gradient_accumulation, layout)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings_of(state), everywhere))


def init_run_dir(run: Run) -> None:
    """Makes `run.out` the folder of this run.

    It is called before anything else is read or written, because it is the cheapest refusal.

    Raises:
      InputError: the folder cannot be written, or has checkpoints of a run with other settings.
    """
    out = Path(run.out)
    path = out / "config.yaml"
    try:
        resumes = has_checkpoints(run) and path.exists()
        if resumes:
            _check_same_settings(load_run(path), run)
            return
        out.mkdir(parents=True, exist_ok=True)
        # machine, versions and commit that began the run, for the model card
        write_atomically(out / "origin.json", json.dumps(provenance(), indent=2) + "\n")
        write_atomically(path, dump(run))
    except OSError as error:
        rule = "the output folder must be writable"
        next_step = "set out to a folder that you may write to"
        raise InputError(out, rule, error.strerror, next_step) from None


def check_same_data(run: Run, rows: PackedRows) -> None:
    """Checks that a run that goes on trains on the rows that it began with.

    The recipe names a corpus, which may have changed: with it the order of rows would, and the
    tokens of a reduced draft vocabulary.

    Raises:
      InputError: the rows are others.
    """
    path = Path(run.out) / DATA_FILE
    data = {"num_rows": len(rows), "digest": rows.digest()}
    if has_checkpoints(run) and path.exists():
        former = json.loads(path.read_text(encoding="utf-8"))
        if former != data:
            rule = "a run is resumed only with the data that it began with"
            got = f"{len(rows):,} other rows, were {former.get('num_rows', 0):,}"
            next_step = f"restore {run.data.source}, or set out to another folder"
            raise InputError(run.out, rule, got, next_step)
        return
    write_atomically(path, json.dumps(data) + "\n")


def _check_same_settings(old: Run, new: Run) -> None:
    """Raises InputError if a run cannot be resumed, naming the keys that differ."""
    if changed := differences(old, new, may_change=MAY_CHANGE):
        rule = "a run is resumed only with the settings that it began with"
        next_step = "restore them in the recipe, or set out to another folder to begin a new run"
        raise InputError(new.out, rule, "; ".join(changed), next_step)


def has_checkpoints(run: Run) -> bool:
    """Whether the run was begun and has saved a checkpoint."""
    return any((Path(run.out) / "checkpoints").glob("[0-9]*"))


def read_result(run: Run, kind: type, say: Callable[[str], None] = print) -> Any:
    """The result of a run that has nothing left to train, to export and to measure.

    Args:
      run: the run.
      kind: the dataclass of its result; one of its fields is `folder`.
      say: is told if nothing is left to do.

    Returns:
      An instance of `kind`; None if there is something left to do.
    """
    path = Path(run.out) / RESULT_FILE
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # damaged: it is written again
    fields = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(result, dict) or result.keys() != fields:
        return None  # written by another version
    if result["step"] < run.optimizer.steps or not Path(result["folder"]).is_dir():
        return None
    say(f"{run.out} was finished before; without its {RESULT_FILE} it would be measured again")
    return kind(**result | {"folder": Path(result["folder"])})


def write_result(run: Run, result: dict) -> None:
    """Writes result.json into `run.out`: what the run came to, for model cards and reports.

    A session that had nothing left to train keeps the speed that an earlier one measured.
    """
    path = Path(run.out) / RESULT_FILE
    result = {key: str(v) if isinstance(v, Path) else v for key, v in result.items()}
    if result["tokens_per_second"] is None and path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        result["tokens_per_second"] = before["tokens_per_second"]
    write_atomically(path, json.dumps(result, indent=2) + "\n")


def _to_json(metrics: dict) -> dict:
    """Arrays as lists of numbers with six digits behind the point."""
    shown = {key: value for key, value in metrics.items() if key != "grad_norms"}
    return {key: np.round(value, 6).tolist() for key, value in shown.items()}
