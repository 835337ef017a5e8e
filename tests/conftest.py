"""Strict settings, and one compilation cache for all runs."""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRITON_INTERPRET"] = (
    "1"  # read when a kernel is decorated; what compiles them runs in processes of its own
)
sys.path.insert(0, str(Path(__file__).parent))  # tests/tiny.py

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores Ctrl-C, and so would what tests start

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update(
    "jax_compilation_cache_dir", str(Path.home() / ".cache" / "peagle_jax" / "xla-tests")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Every compiled program is a few mappings of memory for as long as `jax.jit` holds it. Linux allows a process 65,530, the tests of
    one worker come to 60,000, and what follows is a crash within XLA."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 15_000:
        jax.clear_caches()
