"""What a training step frees stays with the process: a later step causes no page faults."""

import os
import subprocess
import sys

import pytest

from peagle_jax import allocator, cli

# 64 MB are allocated, written and freed, in a thread other than the first, as by XLA
SCRIPT = """
import ctypes, resource, sys, threading
from peagle_jax.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def step():
    memory = ctypes.c_void_p(libc.malloc(64 << 20))
    libc.memset(memory, 1, 64 << 20)
    libc.free(memory)

def steps():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def page_faults(how: str, **settings: str) -> int:
    """Those of five steps after the first."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(allocator.USERS_OWN)}
    env |= settings
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_later_steps_cause_no_page_faults(monkeypatch):
    for name in [name for name in os.environ if name.startswith(allocator.USERS_OWN)]:
        monkeypatch.delenv(name)
    assert page_faults("keep") < 100
    assert page_faults("as it is", **allocator.environment()) < 100
    assert page_faults("as it is") > 1000  # huge pages may be 2 MB, or 4 kB as usual


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX"])
def test_what_the_environment_says_stands(name, monkeypatch):
    monkeypatch.setenv(name, "")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: pytest.fail("it was asked for"))
    assert not allocator.keep_freed_memory() and not allocator.environment()


def test_another_c_library_is_left_alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith(allocator.USERS_OWN)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_memory()


@pytest.mark.parametrize("command, is_called", [("train", True), ("bench", False)])
def test_it_is_for_training(command, is_called, monkeypatch):
    calls = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: calls.append(command))
    monkeypatch.setattr(cli, "explain_bus_errors", lambda: None)
    monkeypatch.setattr(sys, "argv", ["peagle", command, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert calls == [command] * is_called
