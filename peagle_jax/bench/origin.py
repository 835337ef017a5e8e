"""Where a number comes from: machine, versions, commit, command."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jax


def provenance(command: str | None = None) -> dict:
    """Where a number comes from: machine, versions, commit, command."""
    here = Path(__file__).parent
    git = lambda *args: subprocess.run(["git", *args], cwd=here, capture_output=True, text=True).stdout.strip()  # noqa: E731
    device = jax.devices()[0]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": git("rev-parse", "--short", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain")), "command": command or " ".join(["peagle", *sys.argv[1:]]),
        "device": device.device_kind if device.platform != "cpu" else f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(), **{name: version(name) for name in ("jax", "flax")},
    }  # fmt: skip


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
