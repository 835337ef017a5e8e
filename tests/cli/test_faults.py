"""Ctrl-C and a full disk, for the program: one line, an exit code, and nothing half-written."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

MOST_SECONDS = 2  # from Ctrl-C to the end of the program, as docs/reliability.md promises
PROGRAM = "import sys; from peagle_jax.cli import main; sys.exit(main())"
# a call that neither holds Python's lock nor returns before it is done, as XLA's compiler
STUCK = """
import hashlib, threading, time
from peagle_jax.prompt_end import ends_promptly
def tell():
    # only the call uses the processor for this long: a signal before the call, as on a busy
    # machine, unwinds the program as any exception does
    before = time.process_time()
    while time.process_time() < before + 0.2:
        time.sleep(0.01)
    print("begun", flush=True)
with ends_promptly("peagle: interrupted"):
    threading.Thread(target=tell, daemon=True).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""
SLOW_TO_END = """
import time
from peagle_jax.prompt_end import ends_promptly, postpone_end
import signal
def remember(number, frame):
    postpone_end()
    signal.signal(signal.SIGINT, former)
with ends_promptly("peagle: interrupted"):
    former = signal.signal(signal.SIGINT, remember)
    print("begun", flush=True)
    time.sleep(4)
print("saved", flush=True)
"""


IGNORES = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
from peagle_jax.prompt_end import ends_promptly
with ends_promptly("peagle: interrupted"):
    print("begun", flush=True)
    time.sleep(2)
print("done", flush=True)
"""

CUT = """
import os, sys
from peagle_jax import cli
def read_what_is_gone(arguments):
    import jax.numpy as jnp, numpy as np
    path = sys.argv[-1]
    with open(path, "wb") as file:
        file.truncate(1 << 22)
    mapped = np.memmap(path, np.float32, "r")
    os.truncate(path, 0)
    {read}
cli.run_command = read_what_is_gone
sys.argv[1:1] = ["inspect"]
sys.exit(cli.main())
"""


def start(*words, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def interrupt(process: subprocess.Popen) -> tuple[float, str, str]:
    """(seconds until it had ended, stdout, stderr)."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return time.monotonic() - began, out, err


def fastest_of_three(attempt: Callable[[], float]) -> float:
    """The seconds of the first attempt within what is promised, or of the fastest of three.

    A machine that is busy with other work may take longer than the program does.
    """
    seconds = attempt()
    for _ in range(2):
        if seconds < MOST_SECONDS:
            break
        seconds = min(seconds, attempt())
    return seconds


def test_a_call_that_cannot_be_interrupted():
    def attempt() -> float:
        process = start("-c", STUCK)
        assert process.stdout.readline() == "begun\n"
        seconds, _, err = interrupt(process)
        assert (process.returncode, err) == (1, "peagle: interrupted\n")
        return seconds

    assert fastest_of_three(attempt) < MOST_SECONDS


def test_who_postpones_the_end_is_waited_for():
    """As training, which saves its step first."""
    process = start("-c", SLOW_TO_END)
    assert process.stdout.readline() == "begun\n"
    seconds, out, err = interrupt(process)
    assert (process.returncode, out, err) == (0, "saved\n", "")
    assert seconds > 2  # longer than an end that is not postponed


def test_a_background_job_goes_on_ignoring_ctrl_c():
    process = start("-c", IGNORES)
    assert process.stdout.readline() == "begun\n"
    _, out, err = interrupt(process)
    assert (process.returncode, out, err) == (0, "done\n", "")


THREADS_THAT_FAULT = """
import os, threading, time
from peagle_jax.cli import bus_error

def write(number, line, write=os.write):
    write(number, line)
    time.sleep(0.5)

bus_error.os.write = write
threads = [threading.Thread(target=bus_error._end, args=(7,)) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_several_threads_that_fault_at_once_say_one_line():
    out, err = (process := start("-c", THREADS_THAT_FAULT)).communicate(timeout=120)
    assert (process.returncode, out, err.count("bus error")) == (2, "", 1)


@pytest.mark.parametrize("read", ["mapped.sum()", "jnp.array(mapped).block_until_ready()"])
def test_a_mapped_file_that_another_program_cuts(read, tmp_path):
    """By NumPy, and by a thread of XLA's."""
    process = start("-c", CUT.format(read=read), tmp_path / "weights")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err == (
        "peagle: files must stay whole while they are read; got a bus error: one became shorter, "
        "or a disk or shared memory cannot be read; run again when they are complete\n"
    )


@pytest.mark.parametrize("delay", [0.4, 1.5, 3.0])
def test_a_program_that_is_interrupted(delay, folders, tmp_path):
    """While it imports, reads models, or decodes; no traceback, and no half output."""
    words = ["generate", "--target", folders / "target", "--drafter", folders / "peagle"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f"}\n' * 40_000)
    words += ["--prompts", prompts, "--max-new-tokens", "200", "--out", tmp_path / "out.jsonl"]

    def attempt() -> float:
        process = start("-c", PROGRAM, *words)
        time.sleep(delay)
        seconds, _, err = interrupt(process)
        assert process.returncode == 1 and err.splitlines()[-1] == "peagle: interrupted"
        assert "Traceback" not in err
        assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
        return seconds

    assert fastest_of_three(attempt) < MOST_SECONDS


RECIPE = """
task: peagle
target: {folders}/target
out: {tmp}/run
data: {{source: {tmp}/code, held_out: 0, seq_len: 32, batch_size: 2}}
head: {{layers: 1}}
cod: {{num_depths: 2}}
optimizer: {{steps: 6, warmup: 1}}
eval: {{every: null}}
save_every: 2
"""
COMMANDS = {
    "train": ("train {tmp}/recipe.yaml", 40_000, "must be written to the end"),
    "convert": ("convert {folders}/peagle {tmp}/out --to orbax", 4_000, "must be written to the"),
    "regenerate": (
        "regenerate --target {folders}/target --data {tmp}/code --held-out 0 --num-samples 40 "
        "--max-new-tokens 5 --prompt-tokens 8 --out {tmp}/out.jsonl",
        2_000,
        "must have room",
    ),
}


@pytest.mark.parametrize("command, most, words", COMMANDS.values(), ids=COMMANDS)
def test_a_disk_that_is_full(command, most, words, folders, tmp_path):
    """No file may have more than so many bytes, and writing more fails as on a full disk."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "f.py").write_text("def f(x):\n    return x\n" * 40)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folders=folders, tmp=tmp_path))

    program = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({most}, {most})); {PROGRAM}"
    line = command.format(folders=folders, tmp=tmp_path).split()
    # The cache of compiled programs would say that it cannot be written. Files of bytecode would be
    # cut at the limit, and break every later import.
    unwritten = {"JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    process = start("-c", program, *line, env=os.environ | unwritten)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and err.count("\n") == 1 and words in err, err
    left = [path.name for path in Path(tmp_path).rglob("*") if "tmp" in path.name]
    assert not left and not (tmp_path / "out").exists()
    if line[0] == "regenerate":  # what was finished stays, and the same command goes on from it
        *finished, _ = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
        assert 0 < len(finished) < 40
        process = start("-c", PROGRAM, *line)
        _, err = process.communicate(timeout=300)
        everything = (tmp_path / "out.jsonl").read_text()
        assert process.returncode == 0 and everything.startswith("".join(finished)), err
        assert everything.count("\n") == 40
