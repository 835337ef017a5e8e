"""Trackers: what is sent, how runs go on, and that a broken one does not end a training.

tensorboardX is real here, and its files are read back. In place of the other libraries stand
modules with the functions that they have; LOG.md has a trial of the real ones.
"""

import json
import struct
import sys
import types

import pytest
import yaml
from tensorboardX.proto.event_pb2 import Event
from test_best_head import LENGTHS, train

from peagle_jax.cli import main
from peagle_jax.train.trackers import TRACKERS, Trackers, flatten, numbers_of
from peagle_jax.types import InputError


def events(folder):
    """(step, name, value) of a folder of event files: records of length, CRC, bytes, CRC."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            values = [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            found += [x for x in values if not x[1].startswith("recipe")]
            data = data[16 + length :]
    return found


def test_tensorboard_has_every_row_of_the_metrics(tmp_path):
    train(tmp_path, trackers=["tensorboard"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = [(row["step"], name, x) for row in rows for name, x in numbers_of(row).items()]
    found = events(tmp_path / "tensorboard")
    assert [x[:2] for x in found] == [x[:2] for x in expected]
    assert [x[2] for x in found] == pytest.approx([x[2] for x in expected])
    lengths = [(step, x) for step, name, x in found if name == "acceptance_length"]
    assert lengths == [(step, x) for step, x in LENGTHS.items() if x is not None]


def test_numbers_of_a_row():
    row = {"step": 3, "loss": 1, "accuracy": [0.5, 0.25], "acceptance_length": None}
    assert numbers_of(row) == {"loss": 1.0, "accuracy/1": 0.5, "accuracy/2": 0.25}
    assert flatten({"a": {"b": {"c": 1}}, "d": [2]}) == {"a.b.c": 1, "d": [2]}


class Fake(types.ModuleType):
    """A library that writes down how it is called."""

    def __init__(self, name, fails_at=None):
        super().__init__(name)
        self.calls, self._fails_at = [], fails_at

    def _note(self, call, *details):
        self.calls.append((call, *details))
        if call == self._fails_at:
            raise ConnectionError("no route to host\nand more")

    def init(self, project=None, name=None, config=None, resume=None, id=None):
        self._note("init", project, name, config["optimizer"]["steps"], resume, id)

    def log(self, metrics, step=None):
        self._note("log", step, sorted(metrics))

    def finish(self):
        self._note("finish")

    def set_experiment(self, name):
        self._note("set_experiment", name)

    def start_run(self, run_id=None, run_name=None):
        self._note("start_run", run_id, run_name)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "id7"))

    def log_params(self, params):
        self._note("log_params", params["optimizer.steps"])

    def log_metrics(self, metrics, step=None):
        self._note("log_metrics", step, sorted(metrics))

    def end_run(self):
        self._note("end_run")


@pytest.fixture
def library(monkeypatch):
    def install(name, fails_at=None):
        fake = Fake(name, fails_at)
        monkeypatch.setitem(sys.modules, name, fake)
        return fake

    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return install


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_goes_on_under_its_name(name, tmp_path, library, monkeypatch):
    fake = library(name)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "deep" / "run", trackers=[name], stop_after=7)
    (_, project, first, steps, resume, identity), *others = fake.calls
    assert (project, steps, resume) == ("peagle", 12, "allow")
    assert first.startswith("deep-run-") and identity == (first if name == "wandb" else None)
    assert others[-1] == ("finish",)
    logged = [x[1] for x in others[:-1]]
    assert logged == [2, 3, 4, 6, 6]  # of 3 and 6 the loss, of 2, 4 and 6 an evaluation
    fake.calls.clear()
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    train(tmp_path / "deep" / "run", trackers=[name])
    assert fake.calls[0][2] == first
    assert fake.calls[0][1] == ("mine" if name == "wandb" else "peagle")
    fake.calls.clear()
    train(tmp_path / "other" / "run", trackers=[name])
    assert fake.calls[0][2] != first


def test_mlflow(tmp_path, library, monkeypatch):
    fake = library("mlflow")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", trackers=["mlflow"], stop_after=7)
    begun = [("set_experiment", "peagle"), ("start_run", None, f"{tmp_path.name}-run")]
    assert fake.calls[:3] == [*begun, ("log_params", 12)]
    assert fake.calls[-1] == ("end_run",)
    assert ("log_metrics", 4, ["acceptance_length", "seconds"]) in fake.calls
    fake.calls.clear()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    train(tmp_path / "run", trackers=["mlflow"])
    assert fake.calls[0] == ("start_run", "id7", f"{tmp_path.name}-run")
    assert fake.calls[1][:2] == ("log_metrics", 6)


def test_a_tracker_that_fails_is_left_out(tmp_path, library):
    fake, said = library("wandb", fails_at="log"), []
    fitted, _ = train(tmp_path, trackers=["wandb", "tensorboard"], said=said)
    assert fitted.step == 12
    assert [call[0] for call in fake.calls] == ["init", "log"]
    told = "the run goes on without the tracker wandb: ConnectionError: no route to host"
    assert said.count(told) == 1
    assert events(tmp_path / "tensorboard")[-1][0] == 12


def test_a_tracker_that_does_not_start_is_refused(tmp_path, library):
    library("wandb", fails_at="init")
    with pytest.raises(InputError, match="wandb must start; got ConnectionError: no route to host"):
        train(tmp_path, trackers=["wandb"])


def test_a_tracker_that_is_not_installed_or_not_known(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(InputError, match=r"pip install 'peagle-jax\[trackio\]', or remove"):
        Trackers(["trackio"], tmp_path, {}, 0, print)
    recipe = {"task": "peagle", "target": "t", "out": str(tmp_path / "o"), "data": {"source": "d"}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"trackers": ["trackio"]}))
    assert main(["train", str(path)]) == 2
    assert "trackio needs the library trackio" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()  # it is the first thing that is looked at
    assert main(["train", str(path), "--trackers", "tensorbored"]) == 2
    assert "must be of tensorboard, trackio, wandb, mlflow" in capsys.readouterr().err


def test_the_extras_have_the_names_of_the_trackers():
    import tomllib
    from pathlib import Path

    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, (module, _) in TRACKERS.items():
        assert extras[name][0].lower().startswith(module.lower()), name
