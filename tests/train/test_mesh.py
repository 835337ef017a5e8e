"""Training on several simulated devices, in parts of a batch, and resumed on other devices."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import test_runs
import yaml

from peagle_jax import weights
from peagle_jax.cli import main
from peagle_jax.train.config import load_run
from peagle_jax.types import InputError

PROGRAM = Path(__file__).with_name("mesh_runs.py")
STEPS, ROWS = 6, 8
corpus, target = test_runs.corpus, test_runs.target  # fixtures


def recipe(task: str, name: str, corpus, target, folder: Path, **changes) -> Path:
    raw = test_runs.config(task, corpus, folder / name, target, log_every=1, **changes)
    raw["optimizer"] |= {"steps": STEPS, "peak_lr": 2e-3}
    raw["data"] |= {"batch_size": ROWS}
    raw.setdefault("eval", {}).update({"every": 4, "num_prompts": 2, "max_new_tokens": 6})
    if task == "lm":
        del raw["eval"]
    if task == "peagle":
        raw["depth_weights"] = [1.0 + 0.3 * (-1) ** d for d in range(raw["cod"]["num_depths"])]
    return test_runs.write(folder / f"{name}.yaml", raw)


def start(recipes: list[Path], num_devices: int, *options: str) -> subprocess.Popen:
    """Begins to run recipes in a process with so many devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={num_devices}"
    root = Path(__file__).parents[2]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    words = ["--", *options] if options else []
    return subprocess.Popen(
        [sys.executable, PROGRAM, *recipes, *words],
        env=environment | {"XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, error = process.communicate(timeout=500)
    assert process.returncode == 0, error[-3000:]
    return out, error


def start_two(path: Path) -> list[subprocess.Popen]:
    """Two processes of four devices each that train together."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    return [start([path], 4, "--coordinator", address, "--process", f"{i}/2") for i in (1, 2)]


def curves(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The metrics of a run: of each key all its values."""
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return {key: np.array([row[key] for row in rows]) for key in rows[0] if key != "seconds"}


def evaluations(folder: Path, name: str) -> dict[str, np.ndarray]:
    """What a run measured on held-out documents: of each key all its values, none for a target."""
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    keys = ("held_out_loss", "held_out_accuracy", "expected_acceptance_length")
    rows = [row for row in rows if keys[0] in row]
    # a head of one step has no acceptance length to expect
    return {key: np.array([row[key] for row in rows]) for key in keys if rows and key in rows[0]}


def assert_same(folder: Path, name: str, other: str, tolerance: float = 1e-5) -> None:
    got, want = (curves(folder, one) | evaluations(folder, one) for one in (name, other))
    assert got.keys() == want.keys()
    for key, values in want.items():
        # an argmax may tie; and what is measured on held-out documents is rounded
        is_of_argmax = "accuracy" in key or key == "expected_acceptance_length"
        limit = 0.02 if is_of_argmax else tolerance
        np.testing.assert_allclose(
            got[key], values, rtol=limit, atol=limit, err_msg=f"{name} {key}"
        )


MESHES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 4},
    "model": {"model": 2},
    "all": {"data": 2, "fsdp": 2, "model": 2},
}

PARTITIONED = {"partitions_2": {"data": 2}, "partitions_8": MESHES["all"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    ["peagle", *(pytest.param(task, marks=pytest.mark.long) for task in ("eagle3", "eagle", "lm"))],
)
def test_every_mesh_gives_the_same_curve(task, corpus, target, tmp_path):
    """Beside one device, with and without parts, and partitions; and the same head comes out.

    That of P-EAGLE has a Markov head with states.
    """
    parts = {"gradient_accumulation": 4}
    if task == "peagle":
        parts["feature_noise"] = {"noise": 0.05, "dropout": 0.1}
        parts["markov"] = {"rank": 6, "kind": "rnn"}
    one = recipe(task, "one", corpus, target, tmp_path, **(parts | {"gradient_accumulation": 1}))
    assert main(["train", str(one)]) == 0
    recipes = [recipe(task, "parts", corpus, target, tmp_path, **parts)]
    meshes = MESHES if task == "peagle" else {"all": MESHES["all"]}
    for name, mesh in meshes.items():
        if name == "all":
            changes = parts | {"gradient_accumulation": 2}
        else:
            changes = parts | {"gradient_accumulation": 1}
        recipes.append(recipe(task, name, corpus, target, tmp_path, mesh=mesh, **changes))
    partitioned = PARTITIONED if task == "peagle" else {}
    for name, mesh in partitioned.items():
        # the elements of a row in three parts, and layers computed twice
        changes = parts | {"gradient_accumulation": 1, "compute": {"recompute": "layers"}}
        path = recipe(task, name, corpus, target, tmp_path, mesh=mesh, **changes)
        raw = yaml.safe_load(path.read_text())
        raw["cod"]["partitions"] = 3
        recipes.append(test_runs.write(path, raw))
    finish(start(recipes, 8))
    folder = "model" if task == "lm" else "head"
    want = weights.open_folder(tmp_path / "one" / folder)
    for name in ("parts", *meshes, *partitioned):
        assert_same(tmp_path, name, "one")
        got = weights.open_folder(tmp_path / name / folder)
        assert got.keys() == want.keys()
        for key in want:
            np.testing.assert_allclose(got[key], want[key], atol=2e-4, err_msg=f"{name} {key}")
    if task != "lm":
        assert evaluations(tmp_path, "one")["held_out_loss"].size
        results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("one", "all")]
        assert results[0]["acceptance_length"] == pytest.approx(results[1]["acceptance_length"])


@pytest.mark.slow
@pytest.mark.parametrize("begun_on, ended_on", [(8, 1), (1, 8)])
def test_a_run_goes_on_with_other_devices(begun_on, ended_on, corpus, target, tmp_path):
    """Three steps on some devices, the rest on others; with Muon, whose state has other parts."""
    muon = {"optimizer": {"name": "muon", "warmup": 2}}
    one = recipe("peagle", "one", corpus, target, tmp_path, **muon)
    assert main(["train", str(one)]) == 0
    on = {8: {"mesh": MESHES["all"]}, 1: {"gradient_accumulation": 2}}

    def train(num_devices: int, times: int, **changes) -> None:
        path = recipe("peagle", "moved", corpus, target, tmp_path, **muon, **changes)
        if num_devices == 8:
            finish(start([path] * times, 8))
        else:
            assert [main(["train", str(path)]) for _ in range(times)] == [0] * times

    train(begun_on, 3, max_seconds=0.0, **on[begun_on])
    train(ended_on, 1, **on[ended_on])
    assert_same(tmp_path, "moved", "one")


@pytest.mark.parametrize("sizes, chunks", [((8, 1, 1), []), ((2, 4, 1), []), ((2, 1, 4), [4])])
def test_each_device_computes_the_logits_of_its_own_sequences(sizes, chunks):
    """Eight chunks, one for each sequence, on one device; on eight one each. Numbers are the same.

    Where the vocabulary is divided between four devices, two groups have four sequences each.
    """
    program = Path(__file__).with_name("mesh_loss.py")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(program.parents[2])}
    words = [sys.executable, str(program), *map(str, sizes)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [[8], chunks]


@pytest.mark.slow
def test_two_processes_give_the_same_curve(corpus, target, tmp_path):
    """The second is silent, and writes no metrics. Each reads half of the stored hidden states."""
    one = recipe("peagle", "one", corpus, target, tmp_path)
    assert main(["train", str(one)]) == 0
    data, states = yaml.safe_load(one.read_text())["data"], tmp_path / "states"
    words = f"extract --target {target} --data {corpus} --seq-len {data['seq_len']} --out {states}"
    words += (
        f" --dtype float32 --held-out {data['held_out']} --packing {data.get('packing', 'cut')}"
    )
    assert main(words.split()) == 0
    changes = {"mesh": MESHES["all"], "save_every": 2, "hidden_states_dir": str(states)}
    both = recipe("peagle", "both", corpus, target, tmp_path, **changes)
    (out, _), (silent, _) = map(finish, start_two(both))
    assert "acceptance length" in out and "acceptance length" not in silent
    assert not list((tmp_path / "both").glob("corpus?*"))  # it is encoded once
    assert_same(tmp_path, "both", "one")
    got, want = (weights.open_folder(tmp_path / name / "head") for name in ("both", "one"))
    for key in want:
        np.testing.assert_allclose(got[key], want[key], atol=2e-4, err_msg=key)
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("one", "both")]
    assert results[0]["acceptance_length"] == pytest.approx(results[1]["acceptance_length"])


@pytest.mark.long
def test_the_first_process_encodes_for_both(corpus, target, tmp_path):
    """What it cannot encode is said in both, soon, and both end as after a mistake of the user."""
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    path = recipe("peagle", "run", corpus, target, tmp_path, mesh=MESHES["all"])
    raw = yaml.safe_load(path.read_text())
    raw["data"]["source"] = str(tmp_path / "bad.jsonl")
    processes = start_two(test_runs.write(path, raw))
    began = time.monotonic()
    ends = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], ends
    said = [[x for x in end.splitlines() if x.startswith("peagle: ")] for end in ends]
    words = "bad.jsonl:2: text must be text; got 5"
    assert len(said[0]) == 1 and words in said[0][0]
    assert len(said[1]) == 1 and words in said[1][0]
    assert said[1][0].startswith("peagle: --process: process 1 must encode the corpus, for which ")
    assert time.monotonic() - began < 200


@pytest.mark.long
@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_process_ends_the_others(dead, corpus, target, tmp_path):
    """Within a minute, by name; and the same commands go on from the last checkpoint."""
    path = recipe("peagle", "run", corpus, target, tmp_path, mesh=MESHES["all"], save_every=2)
    raw = yaml.safe_load(path.read_text())
    raw["optimizer"]["steps"] = 100_000
    test_runs.write(path, raw)
    processes = start_two(path)
    try:
        saved = tmp_path / "run" / "checkpoints"
        waited = 0
        while not any(saved.glob("[0-9]*")):
            assert waited < 300 and all(process.poll() is None for process in processes)
            time.sleep(1)
            waited += 1
        processes[dead].kill()
        killed_at = time.monotonic()
        _, error = processes[1 - dead].communicate(timeout=200)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert time.monotonic() - killed_at < 60
    assert processes[1 - dead].returncode not in (0, -9)
    # at the first one all meet, and without it JAX ends the others before they could say more
    named = "peagle: --process 2/2: all processes must live until" if dead else "the leader task"
    assert named in error, error[-3000:]
    assert "Traceback" not in error


@pytest.mark.long
def test_ctrl_c_in_one_process_ends_both(corpus, target, tmp_path):
    """With the same step saved, and nothing exported, as if training were over."""
    path = recipe("peagle", "run", corpus, target, tmp_path, mesh=MESHES["all"], save_every=2)
    raw = yaml.safe_load(path.read_text())
    raw["optimizer"]["steps"] = 100_000
    processes = start_two(test_runs.write(path, raw))
    saved = tmp_path / "run" / "checkpoints"
    try:
        until = time.monotonic() + 300
        while not any(saved.glob("[0-9]*")):
            assert time.monotonic() < until and all(p.poll() is None for p in processes)
            time.sleep(1)
        processes[1].send_signal(signal.SIGINT)
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [1, 1], errors
    assert "stopping: this step is finished and saved first" in errors[1]
    assert not (tmp_path / "run" / "head").exists()
    assert not (tmp_path / "run" / "result.json").exists()


def test_rows_must_be_divisible(corpus, target, tmp_path):
    changes = {"mesh": {"data": 2, "fsdp": 3}, "gradient_accumulation": 2}
    with pytest.raises(InputError, match=r"batch_size: must be a multiple of .*12; got 8; use 12"):
        load_run(recipe("peagle", "x", corpus, target, tmp_path, **changes))


def test_more_devices_than_there_are(corpus, target, tmp_path, capsys):
    path = recipe("peagle", "x", corpus, target, tmp_path, mesh={"data": 2, "model": 3})
    assert main(["train", str(path)]) == 2
    assert "data x fsdp x model must be the number of devices, 1; got 2 x 1 x 3 = 6" in (
        capsys.readouterr().err
    )
