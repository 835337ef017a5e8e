"""Ctrl-C in the midst of commands that write, as programs: the end is prompt, and what was finished
stays. That the same command goes on from it: tests of each command, and scripts/measure/faults.py,
which kills them."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from cli.test_faults import MOST_SECONDS, PROGRAM, RECIPE, fastest_of_three, interrupt, start

# written by a command before it is half done: what is there, and how much of it
COMMANDS = {
    "extract": (
        "extract --target {folders}/target --data {tmp}/code --held-out 0 --out {tmp}/out "
        "--seq-len 32 --rows-per-shard 1 --batch-size 1",
        lambda tmp: len(list((tmp / "out").glob("shard-*.safetensors"))) >= 2,
    ),
    "regenerate": (
        "regenerate --target {folders}/target --data {tmp}/code --held-out 0 --num-samples 4000 "
        "--max-new-tokens 20 --prompt-tokens 8 --batch-size 2 --out {tmp}/out.jsonl",
        lambda tmp: len(lines(tmp / "out.jsonl")) >= 4,
    ),
    "bench": (
        "bench --target {folders}/target --drafter {folders}/peagle --out {tmp}/out "
        "-k 1,2,3,4,5,6,7,8 --prompts {folders}/prompts.jsonl --max-new-tokens 200 --repeats 9",
        lambda tmp: len(lines(tmp / "out" / "results.jsonl")) >= 1,
    ),
    "train": (
        "train {tmp}/recipe.yaml --optimizer.steps 5000 --save-every 20",
        lambda tmp: len(lines(tmp / "run" / "metrics.jsonl")) >= 8,
    ),
}
AGAIN = "; the same command goes on from what is saved"


def lines(path: Path) -> list[str]:
    """Whole lines of a file; none where it does not exist yet."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def wait_until(is_true, process: subprocess.Popen) -> None:
    until = time.monotonic() + 240
    while not is_true():
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_has_written_something(name, folders, tmp_path):
    command, has_begun = COMMANDS[name]
    places = []

    def attempt() -> float:
        place = tmp_path / str(len(places))
        (place / "code").mkdir(parents=True)
        for i in range(200):
            source = f"def f{i}(x):\n    return x + {i}\n" * 40
            (place / "code" / f"f{i}.py").write_text(source)
        recipe = RECIPE.format(folders=folders, tmp=place) + "log_every: 1\n"
        (place / "recipe.yaml").write_text(recipe)
        places.append(place)
        words = command.format(folders=folders, tmp=place).split()
        process = start("-c", PROGRAM, *words)
        try:
            wait_until(lambda: has_begun(place), process)
            seconds, _, error = interrupt(process)
        finally:
            process.kill()
            process.communicate()
        assert "Traceback" not in error, error[-2000:]
        assert process.returncode == 1, error[-2000:]
        goes_on = "" if name == "bench" else AGAIN
        assert error.splitlines()[-1] == f"peagle: interrupted{goes_on}", error[-2000:]
        return seconds

    assert fastest_of_three(attempt) < MOST_SECONDS
    place = places[-1]
    assert has_begun(place)
    assert not [p for p in place.rglob("*") if p.name.endswith(".tmp")]
    for path in place.rglob("*.jsonl"):
        for line in lines(path):
            json.loads(line)
        assert path.read_bytes()[-1:] in (b"\n", b"")


COMPILE = """
import sys, threading, time
from peagle_jax import cli
def compile_for_long(arguments):
    import jax, jax.numpy as jnp
    def many(x):
        for i in range(3000):
            x = jnp.sort(x * i + 1)
        return x
    lowered = jax.jit(many).lower(jnp.ones(8))
    def tell():
        # the compiler alone uses the processor for this long
        before = time.process_time()
        while time.process_time() < before + 1:
            time.sleep(0.01)
        print("begun", flush=True)
    threading.Thread(target=tell, daemon=True).start()
    lowered.compile()
    print("compiled", flush=True)
cli.run_command = compile_for_long
sys.argv[1:] = ["inspect", "x"]
sys.exit(cli.main())
"""


@pytest.mark.slow
def test_while_xla_compiles():
    """A program that XLA compiles for a minute, in which no instruction of Python's is run."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"

    def attempt() -> float:
        process = start("-c", COMPILE, env=environment)
        try:
            assert process.stdout.readline() == "begun\n"
            seconds, out, error = interrupt(process)
        finally:
            process.kill()
            process.communicate()
        assert (process.returncode, out, error) == (1, "", "peagle: interrupted\n")
        return seconds

    assert fastest_of_three(attempt) < MOST_SECONDS
