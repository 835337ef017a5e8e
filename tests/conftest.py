"""Strict settings, one compilation cache for all runs, and the tiers of docs/testing.md."""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when a kernel is decorated; the tests that compile kernels do so in processes of their own.
os.environ["TRITON_INTERPRET"] = "1"
# Tests ask whether numbers are right, not whether they come quickly: unoptimized machine code
# compiles in a bit more than half the time (docs/testing.md). Workers and subprocesses inherit the
# environment; the flags are part of a cached program's key, so they must not be appended twice.
UNOPTIMIZED = "--xla_backend_optimization_level=0"
if UNOPTIMIZED not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {UNOPTIMIZED}".strip()
# In the environment and not only in jax.config, because the commands that tests run in this
# process set up a cache, too.
CACHE = Path.home() / ".cache" / "peagle_jax" / "xla-tests"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
sys.path.insert(0, str(Path(__file__).parent))  # tests/tiny.py, tests/tiers.py
sys.path.append(str(Path(__file__).parents[1] / "scripts"))  # gpu/interpreter.py

# A shell's background job ignores Ctrl-C, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import pytest  # noqa: E402
from tiers import is_long, is_slow  # noqa: E402

from peagle_jax.decode import step_times  # noqa: E402
from peagle_jax.decode.first_call import let_go  # noqa: E402
from peagle_jax.free_memory import num_mappings  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
step_times.MEASURED_SECONDS = 0.0  # no more rounds than there must be


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test` and `.ci/run` leave to `make test-all`: the list is tests/tiers.py."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Lets go of compiled programs before Linux runs out of memory mappings.

    Every compiled program is a few mappings of memory for as long as `jax.jit` holds it. Linux
    allows a process 65,530, the tests of one worker come to 60,000, and what follows is a crash
    within XLA.
    """
    yield
    if num_mappings() > 15_000:
        let_go()
