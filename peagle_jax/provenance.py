"""Where a number comes from: machine, versions, commit, command."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

CODE = (
    "peagle_jax",
    "experiments",
    "scripts",
    "configs",
    "pyproject.toml",
)  # changes elsewhere, as new results, change no number


def provenance(command: str | None = None) -> dict:
    """Where a number comes from: machine, versions, commit, command."""
    device = jax.devices()[0]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "--short", "HEAD") or None,
        "dirty": bool(_git("status", "--porcelain", "--", *CODE)),
        "command": command or " ".join(["peagle", *sys.argv[1:]]),
        "device": device.device_kind if device.platform != "cpu" else f"{_cpu()}, {_cores()}",
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version(name) for name in ("peagle-jax", "jax", "flax")},
    }


def versions() -> str:
    """One line for the metadata of a file."""
    return ", ".join(
        f"{name.replace('-', '_')} {_version(name)}" for name in ("peagle-jax", "jax", "flax")
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # this package, run from a checkout that is not installed
        return "not installed"


def _git(*args: str) -> str:
    """Empty where there is no git, or where this package is not run from its own checkout."""
    root = Path(__file__).parents[1]
    try:
        return (
            subprocess.run(["git", *args], cwd=root, capture_output=True, text=True).stdout.strip()
            if (root / ".git").exists()
            else ""
        )
    except OSError:
        return ""


def _cores() -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count} core{'s' if count != 1 else ''}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
