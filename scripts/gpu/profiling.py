"""Where a decoding step's time goes on a GPU: microseconds of each kernel, by JAX's profiler.

Kernels of one name are told apart by their grids, which the profiler writes beside the name. A
program is profiled as decoding runs it, in a CUDA graph with its loop, and without graphs: the
profiler may see graphs as a whole only.
"""

import collections
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from gpu import steps
from peagle_jax.kernels.graphs import ENABLED, OPTIONS

WAYS = {"graphs with loops": OPTIONS, "no graphs": {ENABLED: ""}}
MOST = 60  # kernels of a row: the others are summed up


def cases(tiny: bool) -> list[steps.Case]:
    """Plain decoding and a verification of eight tokens, of both targets at batch 1."""
    if tiny:
        return [steps.Case(steps.QWEN, "none", 0, 1, 2)]
    methods = [(steps.OSS, "peagle", 7), (steps.QWEN, "none", 0), (steps.QWEN, "peagle", 7)]
    methods += [(steps.OSS, "none", 0)]
    return [steps.Case(target, method, k, 1) for target, method, k in methods]


def measure(case: steps.Case, tiny: bool) -> Iterator[dict]:
    """A row a way to launch: kernels of a step, the longest first."""
    it = steps.program(case, tiny)
    num_steps = it.num_steps
    params, state = it.params_and_state("even")
    args = params, it.draft_params(), state
    lowered = it.run.lower(*args)
    for way, options in WAYS.items():
        run = lowered.compile(options if jax.default_backend() == "gpu" else None)
        jax.block_until_ready(run(*args))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(run(*args))
            kernels, span = read(Path(folder))
        longest = sorted(kernels.items(), key=lambda item: -item[1][1])
        us_per_ns_and_step = 1e-3 / num_steps
        yield {
            "part": "profile",
            "case": case.name,
            "way": way,
            "steps": num_steps,
            "launches_a_step": sum(count for count, _ in kernels.values()) / num_steps,
            "busy_us_a_step": us_per_ns_and_step * sum(ns for _, ns in kernels.values()),
            "span_us_a_step": us_per_ns_and_step * span,
            "kernels": [
                {"name": name, "a_step": count / num_steps, "us": 1e-3 * ns / count}
                for name, (count, ns) in longest[:MOST]
            ],
            "other_us_a_step": us_per_ns_and_step * sum(ns for _, (_, ns) in longest[MOST:]),
        }


def read(folder: Path) -> tuple[dict[str, tuple[int, float]], float]:
    """{kernel and its grid: (launches, nanoseconds)} of a trace, and from its first to its last."""
    kernels: dict[str, list] = collections.defaultdict(lambda: [0, 0.0])
    first, last = float("inf"), 0.0
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue  # other lines repeat the same times by operation
                for event in line.events:
                    entry = kernels[label(event)]
                    entry[0] += 1
                    entry[1] += event.duration_ns
                    first = min(first, event.start_ns)
                    last = max(last, event.start_ns + event.duration_ns)
    return {name: (count, ns) for name, (count, ns) in kernels.items()}, max(0.0, last - first)


def label(event: Any) -> str:
    """A kernel's name, and its grid and block where the profiler says them."""
    stats = {name: value for name, value in event.stats if name}
    details = str(stats.get("kernel_details", ""))
    words = [word for word in details.split() if word.startswith(("grid", "block", "regs"))]
    return " ".join([event.name[:80], *words])
