"""In which layout engines that each have one core of a CPU read their models' matrices.

Blocks of columns are faster on some processors (`layers/column_blocks.py`); by how much depends on
the rows of a step. So both layouts are measured before such engines are made, with matrices of the
model's sizes and on all cores at once, as the engines will multiply. That takes about a second,
most of it for compiling. Processors with matrix units keep plain matrices, with which two engines
of the packaged models decode 1.0 to 1.3 times as fast (LOG.md, 2026-11-29, evening). What was
measured is kept, so that later processes of a machine take the same layout, and sums have the same
order in each:

    ~/.cache/peagle_jax/matrix_layouts/9c1d...json      one file for each kind of step

A file that cannot be read is measured anew; one may be deleted at any time.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.atomic_write import write_atomically
from peagle_jax.decode.drafters import METHODS, Drafter
from peagle_jax.kernels.processor import has_bfloat16_matrix_units
from peagle_jax.layers.column_blocks import in_blocks, matrices, to_blocks
from peagle_jax.layers.products import block_product, product
from peagle_jax.provenance import device_name, versions
from peagle_jax.types import Model
from peagle_jax.user_cache import user_cache

# Weights that fit into the cache of one core are as fast in any layout.
LEAST_BYTES = 4 << 20
# What is measured: matrices of so many bytes, at most so many rows, in rounds of so many passes.
# The passes are one program, as decoding steps are, because every call takes its memory anew. And
# each product reads what the one before wrote: blocks' has to be put into the order of columns.
SAMPLE_BYTES, MOST_ROWS, ROUNDS, PASSES = 12 << 20, 64, 4, 16
# Of the time of plain matrices. The copy takes memory, and prompts are read more slowly with it.
WORTH_IT = 0.85

Matrices = list[jax.Array]


def in_fastest_layout(
    target: Model,
    drafter: Drafter | None,
    draft_params: Any,
    *,
    rows: int,
    num_places: int,
    num_threads: int,
) -> tuple[Model, Any]:
    """The models of engines that decode at the same time, each on a core of its own.

    Args:
      target, drafter, draft_params: as of `Engine`. Somebody else's drafter keeps its parameters.
      rows: requests that one engine decodes together.
      num_places: tokens of each that a step of the target reads.
      num_threads: the engines.

    Returns:
      The target and the parameters of its head; with large matrices in blocks of columns, which
      are a copy, where those were found to be faster.
    """
    if has_bfloat16_matrix_units():
        return target, draft_params
    sample: Matrices = []
    for w in matrices(target.params):
        if sum(x.nbytes for x in sample) < SAMPLE_BYTES:
            sample.append(w)
    if sum(x.nbytes for x in sample) < LEAST_BYTES:
        return target, draft_params
    shapes, dtype = tuple(w.shape for w in sample), sample[0].dtype.name
    if not _are_blocks_faster(shapes, dtype, min(rows * num_places, MOST_ROWS), num_threads):
        return target, draft_params
    if isinstance(drafter, tuple(METHODS.values())):
        draft_params = in_blocks(draft_params)
    return dataclasses.replace(target, params=in_blocks(target.params)), draft_params


@functools.cache
def _are_blocks_faster(
    shapes: tuple[tuple[int, int], ...], dtype: str, num_rows: int, num_threads: int
) -> bool:
    """As kept of an earlier process, or measured; what the numbers are makes no difference."""
    about = {
        "device": device_name(),
        "versions": versions(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "matrices": " ".join(f"{inputs}x{outputs}" for inputs, outputs in shapes),
        "dtype": dtype,
        "rows": str(num_rows),
        "threads": str(num_threads),
        "passes": str(PASSES),
    }
    line = json.dumps(about, sort_keys=True)
    try:
        folder = user_cache("matrix_layouts")
    except RuntimeError:
        folder = Path(os.devnull)  # a user without a home: nothing can be kept
    file = folder / f"{hashlib.sha256(line.encode()).hexdigest()[:20]}.json"
    seconds = _kept_seconds(file)
    if seconds is None:
        plain = [jnp.ones(shape, dtype) for shape in shapes]
        blocks = [to_blocks(w) for w in plain]
        seconds = _fastest_seconds(
            {"plain": (product, plain), "blocks": (block_product, blocks)}, num_rows, num_threads
        )
        _keep_seconds(file, about, seconds)
    return seconds["blocks"] < WORTH_IT * seconds["plain"]


def _kept_seconds(file: Path) -> dict[str, float] | None:
    """The seconds of both layouts; None where there are none, or after damage."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))["seconds"]
        seconds = {form: float(content[form]) for form in ("plain", "blocks")}
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return None
    return seconds if all(0 < x < math.inf for x in seconds.values()) else None


def _keep_seconds(file: Path, about: dict[str, str], seconds: dict[str, float]) -> None:
    """For later processes; where the folder cannot be written, each measures for itself."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"about": about, "seconds": seconds}, indent=1) + "\n")
    except OSError:
        pass


def _fastest_seconds(
    forms: dict[str, tuple[Callable, Matrices]], num_rows: int, num_threads: int
) -> dict[str, float]:
    """Seconds that all threads take for PASSES passes over the matrices; forms take turns."""

    def passes(multiply: Callable, num_inputs: list[int]) -> Callable[[Matrices], jax.Array]:
        def one(x: jax.Array, ws: Matrices) -> jax.Array:
            first = x.shape[1]
            for w, inputs in zip(ws, num_inputs, strict=True):
                x = multiply(jnp.tile(x, -(-inputs // x.shape[1]))[:, :inputs] / inputs, w)
            return x[:, :first]

        def run(ws: Matrices) -> jax.Array:
            x = jnp.arange(1.0, num_rows + 1)[:, None]
            return jax.lax.fori_loop(0, PASSES, lambda _, x: one(x, ws), x)

        return jax.jit(run)

    calls = {}
    for name, (multiply, ws) in forms.items():
        num_inputs = [w.shape[-2] for w in ws]
        calls[name] = passes(multiply, num_inputs).lower(ws).compile()
    fastest = dict.fromkeys(forms, float("inf"))
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        for _ in range(ROUNDS):
            for name, call in calls.items():
                ws = forms[name][1]

                def repeat(_: int, call: Callable = call, ws: Matrices = ws) -> None:
                    jax.block_until_ready(call(ws))

                start = time.perf_counter()
                list(pool.map(repeat, range(num_threads)))
                fastest[name] = min(fastest[name], time.perf_counter() - start)
    return fastest
