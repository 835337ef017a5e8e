"""Groups of devices decode requests of their own, and answer as one device does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from groups import CASES, MAX_BATCH, models, requests

from peagle_jax.decode import parallel_engine
from peagle_jax.decode.device_groups import device_groups
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.parallel_engine import ParallelEngine, make_engine

PROGRAM = Path(__file__).with_name("data_parallel.py")
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def on_four_devices():
    """What the program says of each case."""
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {result.pop("name"): result for result in results}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_one_device(case, on_four_devices):
    target, drafter, head_params = models()
    one = make_engine(
        target, drafter, head_params, max_batch=MAX_BATCH, num_threads=1, **CASES[case][1]
    )
    answers = dict(one.run(requests()))
    want = [answers[i].output_token_ids for i in range(len(answers))]
    assert on_four_devices[case]["answers"] == want


def test_each_group_has_an_engine(on_four_devices):
    four, two = on_four_devices["four"], on_four_devices["two_by_two"]
    assert four["max_batch"] == [2, 2, 1, 1] and two["max_batch"] == [3, 3]
    assert four["devices"] == [[0], [1], [2], [3]] and two["devices"] == [[0, 1], [2, 3]]
    # a target on one device alone is read by the kernels of a GPU
    assert four["is_on_a_mesh"] == [False] * 4 and two["is_on_a_mesh"] == [True] * 2
    for result in (four, two):
        assert all(result["has_worked"])
        assert result["num_copied"] == 0
        # each engine has the memory of its own device, and programs for it
        first = [devices[0] for devices in result["devices"]]
        assert result["asked_for_memory"] == first
        assert result["compiled_for"] == [f"cpu:{i}" for i in first]
        assert result["num_programs"] >= 4 * len(first)


def test_memory_of_parts(monkeypatch):
    """Where devices have their own, each must have room for its part, at worst the longest."""
    target, drafter, head_params = models()
    engines = [Engine(target, drafter, head_params, max_batch=n) for n in (2, 1)]
    asked = []
    monkeypatch.setattr(Engine, "check_memory", lambda self, some: asked.append((self, some)))
    some = requests(5)
    by_length = sorted(some, key=lambda request: len(request.prompt) + request.max_new_tokens)
    ParallelEngine(engines).check_memory(some)
    assert asked == [(engines[0], some)]
    asked.clear()
    monkeypatch.setattr(parallel_engine, "platform", lambda: "gpu")
    ParallelEngine(engines, jax.devices() * 2).check_memory(some)
    assert asked == [(engines[0], by_length[-2:]), (engines[1], by_length[-1:])]


def test_without_a_mesh_there_is_one_group():
    target, _, head_params = models()
    [group] = device_groups(target, head_params)
    assert group.target is target and group.draft_params is head_params and group.device is None
