"""Experiment trackers: the rows of metrics.jsonl, sent to TensorBoard, trackio, wandb or MLflow.

A recipe names them (`trackers: [tensorboard, wandb]`). Each is a library that is installed beside
this package and has its own settings, such as WANDB_PROJECT or MLFLOW_TRACKING_URI.
"""

import importlib
import json
import os
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from peagle_jax import weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.types import InputError

PROJECT = "peagle"  # where the environment names no other
RUN_IDS_FILE = "trackers.json"  # in a run's folder: what each tracker calls the run


@runtime_checkable
class Tracker(Protocol):
    """Where the metrics of a run go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends numbers by name."""
        ...

    def close(self) -> None:
        """Waits until all of it has arrived."""
        ...


class TensorBoard:
    """Event files in `out`/tensorboard, written by tensorboardX."""

    def __init__(self, library: Any, out: Path, settings: Mapping[str, Any], step: int) -> None:
        # what an earlier session logged past the step that it goes on from is hidden
        purge = step + 1 if step else None
        self._writer = library.SummaryWriter(str(out / "tensorboard"), purge_step=purge)
        if not step:
            self._writer.add_text("recipe", f"```\n{json.dumps(settings, indent=2)}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, or trackio, which has the same functions."""

    def __init__(self, library: Any, out: Path, settings: Mapping[str, Any], step: int) -> None:
        self._library = library
        is_wandb = library.__name__ == "wandb"
        project = os.environ.get("WANDB_PROJECT", PROJECT) if is_wandb else PROJECT
        name = known_run(out, library.__name__) if step else None
        if name is None:  # others may have a folder of the same name
            name = f"{run_name(out)}-{uuid.uuid4().hex[:6]}"
            remember_run(out, library.__name__, name)
        # trackio knows a run by its name, wandb by its id
        identity = {"id": name} if is_wandb else {}
        library.init(project=project, name=name, config=dict(settings), resume="allow", **identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._library.log(dict(metrics), step=step)

    def close(self) -> None:
        self._library.finish()


class Mlflow:
    """MLflow. A run that is resumed goes on under the same id."""

    def __init__(self, library: Any, out: Path, settings: Mapping[str, Any], step: int) -> None:
        self._library = library
        known = known_run(out, "mlflow") if step else None
        if "MLFLOW_EXPERIMENT_NAME" not in os.environ:
            library.set_experiment(PROJECT)
        run = library.start_run(run_id=known, run_name=run_name(out))
        if known is None:
            library.log_params(flatten(settings))
            remember_run(out, "mlflow", run.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._library.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._library.end_run()


# name in recipes -> module, class. The extras in pyproject.toml have the same names.
TRACKERS: dict[str, tuple[str, Any]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "trackio": ("trackio", Wandb),
    "wandb": ("wandb", Wandb),
    "mlflow": ("mlflow", Mlflow),
}


def import_libraries(names: Sequence[str]) -> list[types.ModuleType]:
    """The libraries of trackers. It is called before any work, because it is a cheap refusal.

    Raises:
      InputError: one is not installed.
    """
    libraries = []
    for name in names:
        module, _ = TRACKERS[name]
        try:
            libraries.append(importlib.import_module(module))
        except ImportError as error:
            rule = f"the tracker {name} needs the library {module}"
            next_step = f"pip install 'peagle-jax[{name}]', or remove {name} from trackers"
            raise InputError("trackers", rule, error, next_step) from None
    return libraries


class Trackers:
    """The trackers of a run. One that fails is left out from then on: a run does not end for it.

    Args:
      names: keys of `TRACKERS`.
      out: the run's folder.
      settings: the recipe, shown beside the metrics.
      step: from which the run goes on; 0 for a new one.
      say: is told of failures.

    Raises:
      InputError: a library is not installed, or does not start.
    """

    def __init__(
        self,
        names: Sequence[str],
        out: Path,
        settings: Mapping[str, Any],
        step: int,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._open: dict[str, Tracker] = {}
        for name, library in zip(names, import_libraries(names), strict=True):
            try:
                self._open[name] = TRACKERS[name][1](library, out, settings, step)
            except Exception as error:  # libraries raise what they like
                next_step = f"do what the error says, or remove {name} from trackers"
                rule = f"the tracker {name} must start"
                raise InputError("trackers", rule, _first_line(error), next_step) from error

    def log(self, row: Mapping[str, Any]) -> None:
        """Sends the numbers of a row of metrics.jsonl."""
        self._for_each(lambda tracker: tracker.log(row["step"], numbers_of(row)))

    def close(self) -> None:
        """Waits until all of it has arrived."""
        self._for_each(lambda tracker: tracker.close())
        self._open = {}

    def _for_each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:  # libraries raise what they like
                del self._open[name]
                self._say(f"the run goes on without the tracker {name}: {_first_line(error)}")


def known_run(out: Path, tracker: str) -> str | None:
    """What a tracker called the run in an earlier session; None if there was none."""
    name = _known_runs(out).get(tracker)
    return name if isinstance(name, str) else None


def remember_run(out: Path, tracker: str, name: str) -> None:
    """Writes down what a tracker calls the run."""
    names = _known_runs(out) | {tracker: name}
    write_atomically(out / RUN_IDS_FILE, json.dumps(names) + "\n")


def _known_runs(out: Path) -> dict[str, Any]:
    path = out / RUN_IDS_FILE
    next_step = f"remove {path}: trackers then begin a run anew"
    return weights.read_json(path, next_step) if path.exists() else {}


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl; those of a list by their place, from 1."""
    numbers = {}
    for name, value in row.items():
        if isinstance(value, list):
            numbers |= {f"{name}/{i}": float(x) for i, x in enumerate(value, 1)}
        elif isinstance(value, int | float) and name != "step":
            numbers[name] = float(value)
    return numbers


def run_name(out: Path) -> str:
    """What a run is called: the last two folders of its path."""
    return "-".join(out.absolute().parts[-2:])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def flatten(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Settings by the path of their key, as MLflow takes them: "optimizer.steps"."""
    flat = {}
    for key, value in settings.items():
        inner = f"{path}.{key}" if path else key
        flat |= flatten(value, inner) if isinstance(value, Mapping) else {inner: value}
    return flat
