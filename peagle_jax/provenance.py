"""Where a number comes from: machine, versions, commit, command."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from peagle_jax.atomic_write import append_line

# Paths that decide what a number is. Uncommitted changes elsewhere, as new results, change none.
CODE = ("peagle_jax", "experiments", "scripts", "configs", "pyproject.toml")
PACKAGES = ("peagle-jax", "jax", "flax")


def provenance(command: str | None = None) -> dict:
    """What has to be known of a measurement to repeat it.

    Args:
      command: what was run; None takes the command line of this process.

    Returns:
      Keys `time` (UTC), `commit` (None outside of a git checkout), `dirty` (whether code has
      uncommitted changes), `command` (an absolute path in it is cut to its last name, because rows
      are published and folders of one machine help nobody), `device`, `python`, and the versions of
      this package, jax and flax.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "--short", "HEAD") or None,
        "dirty": bool(_git("status", "--porcelain", "--", *CODE)),
        "command": without_folders(command or " ".join(["peagle", *sys.argv[1:]])),
        "device": device_name(),
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version(name) for name in PACKAGES},
    }


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]], script: str) -> None:
    """Writes result rows to the end of a JSONL, each with where it comes from.

    Args:
      path: a file; it and its folder are made where they are missing.
      script: what made the rows, as `scripts/measure/trees.py`; the arguments of this process
        follow it in the rows' command.
    """
    origin = provenance(" ".join(["python", script, *sys.argv[1:]]))
    lines = [json.dumps({**origin, **row}) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    if lines:
        append_line(path, "\n".join(lines))


def without_folders(text: str) -> str:
    """A text in which every absolute path is cut to its last name; URLs stay."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/,:;'\"]+/)*(?=[^\s/,])", "", text)


def device_name() -> str:
    """The kind of accelerator, or the processor and how many cores of it may be used."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    return f"{_cpu_name()}, {_cpu_cores()}" if on_cpu else device.device_kind


def versions() -> str:
    """The versions of this package, jax and flax in one line, for the metadata of a file."""
    return ", ".join(f"{name.replace('-', '_')} {_version(name)}" for name in PACKAGES)


def _version(name: str) -> str:
    """The version of an installed package; this one may run from a checkout without being so."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _git(*words: str) -> str:
    """What git prints; nothing where there is no git, or where this package is no checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def _cpu_cores() -> str:
    """The cores that this process may use; macOS and Windows tell only those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count()
    return "1 core" if count == 1 else f"{count} cores"


def _cpu_name() -> str:
    """The processor's name as Linux tells it, or what the platform says elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()
