"""Spread over 8 simulated devices, and over two processes, a target gives what it gives on one."""

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import families  # noqa: E402
import numpy as np  # noqa: E402

from peagle_jax.decode.generate import generate  # noqa: E402

PROMPTS, NEW = [[5, 60, 2, 33, 8, 90, 41], [7]], 8
CASES = ("qwen3_moe_raw", "gpt_oss", "gemma4_ple")
MORE = ("llama", "gemma4_moe")  # in the long tier, with answers of all of them
PROGRAM = Path(__file__).with_name("spread.py")


def spawn(job: dict, **env):
    environment = (
        os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])} | env
    )
    command = [sys.executable, str(PROGRAM), json.dumps(job)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process) -> dict:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def eight(cases, answers):
    """All cases in one process of 8 devices."""
    folders = {case: str(families.make(case, for_eight_devices=True)[1]) for case in cases}
    job = {"folders": folders, "prompts": PROMPTS, "new": NEW, "answers": answers}
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    return finish(spawn(job, XLA_FLAGS=flags))


@functools.cache
def truth(case):
    answers = generate(
        families.ours(case, for_eight_devices=True), None, PROMPTS, max_new_tokens=NEW, stop_ids=()
    )
    _, logits, _ = families.truth(case, for_eight_devices=True)
    return logits[:1], [a.output_token_ids for a in answers]


def assert_close(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=3e-5, rtol=0)


def test_eight_devices():
    got = eight(CASES, ["qwen3_moe_raw"])
    for case in CASES:
        _, logits, _ = families.truth(case, for_eight_devices=True)
        assert_close(got[case]["logits"], logits[:1])
    logits, answers = truth("qwen3_moe_raw")
    assert got["qwen3_moe_raw"]["answers"] == answers
    for gpu_logits in got["qwen3_moe_raw"]["gpu"]:  # what a GPU would run, on CPUs
        assert_close(gpu_logits, logits[:, : np.asarray(gpu_logits).shape[1]])
    # each device holds an eighth of what divides by 8, and all of what does not, as the 4 KV heads
    shards = got["gpt_oss"]["shards"]
    assert shards["embed.table"] == [13, 32]
    assert shards["lm_head.kernel"] == [32, 13]
    assert shards["blocks.0.attn.sinks"] == [1]
    assert shards["blocks.0.attn.q.kernel"] == [32, 16]
    assert shards["blocks.0.attn.q.bias"] == [16]
    assert shards["blocks.0.attn.k.kernel"] == [32, 64]
    assert shards["blocks.0.attn.o.kernel"] == [16, 32]
    assert shards["blocks.0.mlp.experts.gate_up.kernel"] == [1, 32, 128]
    assert shards["blocks.0.mlp.experts.down.bias"] == [1, 32]
    assert got["gemma4_ple"]["shards"]["blocks.0.mlp.gate.kernel"] == [32, 8]


@pytest.mark.parametrize(
    ("mesh", "most_rows"), [("8 1 1", 24), ("1 8 1", 24), ("2 2 2", 28), ("1 1 8", 112)]
)
def test_each_device_runs_the_experts_of_its_own_rows(mesh, most_rows):
    """Eight sequences of 6 rows, two experts each: 96 pairs, and a tile of 16 behind them.

    A device that divides sequences with others has the pairs of its own alone.
    """
    program = PROGRAM.with_name("mesh_experts.py")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(program), *mesh.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [most_rows] * 2  # looped, and grouped


@pytest.mark.long
def test_eight_devices_every_family():
    results = eight((*CASES, *MORE), [*CASES, *MORE])
    for case, got in results.items():
        logits, answers = truth(case)
        assert_close(got["logits"], logits)
        assert got["answers"] == answers


def test_two_processes():
    """gloo: each process reads its own slices; the answers are those of one process."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    case = "qwen3_moe_raw"
    job = {
        "folders": {case: str(families.make(case, for_eight_devices=True)[1])},
        "prompts": PROMPTS,
        "new": NEW,
        "answers": [case],
        "address": address,
    }
    got = [finish(p)[case] for p in [spawn(job | {"process": i}) for i in range(2)]]
    logits, answers = truth(case)
    for result in got:
        assert_close(result["logits"], logits)
        assert result["answers"] == answers
        assert result["shards"]["blocks.0.mlp.experts.gate_up.kernel"] == [4, 32, 48]
    # of 8 experts with 3 matrices in each of 5 layers, four each
    first, second = (result["read"] for result in got)
    assert len(first) == len(second) == 4 * 3 * 5
    assert not set(first) & set(second)
