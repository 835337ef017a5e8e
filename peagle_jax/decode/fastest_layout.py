"""In which layout engines on a CPU read their models' matrices.

Tiles, or torch's layout, are up to four times as fast as ours (`layers/matrix_layouts.py`), by how
much depends on the processor, the sizes and the rows of a step. So all are measured before engines
are made, with matrices of the model's sizes and on all cores at once, as the engines will multiply.
That takes a second or two, most of it for compiling. Matrix units are fed fastest by torch's layout
of those that XLA takes, with 1 to 512 rows of all sizes that were tried (LOG.md, 2026-11-29,
night); tiles were not tried on them, and bfloat16 is not measured there. What was measured is kept,
so that later processes of a machine take the same layout, and sums have the same order in each:

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.atomic_write import write_atomically
from peagle_jax.decode.drafters import METHODS, Drafter
from peagle_jax.free_memory import free_bytes
from peagle_jax.kernels import native_code
from peagle_jax.kernels.processor import has_bfloat16_matrix_units
from peagle_jax.layers.matrix_layouts import (
    PLAIN,
    in_layout,
    is_copied,
    layout_of,
    matrices,
    tied_table,
)
from peagle_jax.layers.products import product_of_layout
from peagle_jax.provenance import device_name, versions
from peagle_jax.types import InputError, Model
from peagle_jax.user_cache import user_cache

# Weights that fit into the cache of one core are as fast in any layout.
LEAST_BYTES = 4 << 20
# What is measured: matrices of so many bytes and at most so many numbers along an axis, and at most
# so many rows, in rounds of passes over the matrices, until some bytes were read. The passes are
# one program, as decoding steps are, because every call takes its memory anew. And each product
# reads what the one before wrote, as in a model.
SAMPLE_BYTES, MOST_NUMBERS, MOST_ROWS, ROUNDS, READ_BYTES = 12 << 20, 4096, 64, 4, 192 << 20
# Of the time of plain matrices, for the copy takes memory.
WORTH_IT = 0.9
# A copy may have as many bytes, or this part of the memory that is free.
SMALL_COPY_BYTES, COPY_PART = 96 << 20, 0.25

Matrices = list[jax.Array]


def in_fastest_layout(
    target: Model,
    drafter: Drafter | None,
    draft_params: Any,
    *,
    rows: int,
    num_places: int,
    num_threads: int,
    donate: bool = False,
) -> tuple[Model, Any]:
    """The models of engines that decode at the same time.

    Args:
      target, drafter, draft_params: as of `Engine`. Somebody else's drafter keeps its parameters.
      rows: requests that one engine decodes together.
      num_places: tokens of each that a step of the target reads.
      num_threads: the engines. One has all cores, several have one each.
      donate: free each matrix that is copied.

    Returns:
      The target and the parameters of its head; with large matrices in another layout, which are a
      copy, where that was found to be faster, and the memory is there.

    Raises:
      InputError: the matrices were donated, and their copies are in another layout.
    """
    if layout_of(target.params) != PLAIN:
        return target, draft_params
    is_known = drafter is None or isinstance(drafter, tuple(METHODS.values()))
    models = target.params, draft_params if drafter is not None and is_known else None
    found = matrices(models, "transposed")
    layout = PLAIN
    if found and sum(w.nbytes for w in found) >= LEAST_BYTES:
        dtype, shapes = _sample(found)
        num_rows = min(rows * num_places, MOST_ROWS)
        layout = _layout_for(shapes, dtype, num_rows, num_threads)
    tied = tied_table(target.params)
    new = [w for w in matrices(models, layout, tied) if not is_copied(w, layout)]
    if any(w.is_deleted() for w in (new if layout != PLAIN else found)):
        rule, next_step = "an engine was given them for itself", "load the models again"
        raise InputError("target", rule, "matrices that were freed", next_step)
    donate &= is_known  # of somebody else's drafter nobody knows which arrays of the target it has
    sizes = [w.nbytes for w in new]
    if layout == PLAIN or not _may_copy(max(sizes, default=0) if donate else sum(sizes)):
        return target, draft_params
    params, head = (in_layout(model, layout, donate=donate, tied=tied) for model in models)
    draft_params = draft_params if head is None else head
    return dataclasses.replace(target, params=params), draft_params


def _layout_for(
    shapes: tuple[tuple[int, int], ...], dtype: str, num_rows: int, num_threads: int
) -> str:
    """The layout for such steps: on matrix units, in bfloat16, the one that always was fastest."""
    if dtype == "bfloat16" and has_bfloat16_matrix_units():
        return "transposed"
    return _fastest_layout(shapes, dtype, num_rows, num_threads)


def _sample(matrices: Matrices) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The dtype, and the shapes of what is measured: each that there is, of large ones a part; and
    until there are SAMPLE_BYTES, as many of each as come.
    """
    shapes: list[tuple[int, int]] = []
    num_bytes = 0
    for w in matrices:
        inputs, outputs = (min(size, MOST_NUMBERS) for size in w.shape)
        if num_bytes < SAMPLE_BYTES or (inputs, outputs) not in shapes:
            shapes.append((inputs, outputs))
            num_bytes += inputs * outputs * w.dtype.itemsize
    return matrices[0].dtype.name, tuple(shapes)


def _may_copy(num_bytes: int) -> bool:
    """Whether copies may take so much memory."""
    free = free_bytes()
    return num_bytes <= SMALL_COPY_BYTES or free is None or num_bytes <= COPY_PART * free


@functools.cache
def _fastest_layout(
    shapes: tuple[tuple[int, int], ...], dtype: str, num_rows: int, num_threads: int
) -> str:
    """As kept of an earlier process, or measured; what the numbers are makes no difference."""
    layouts = [PLAIN, "transposed", *(["tiles"] if native_code.is_available() else [])]
    about = {
        "device": device_name(),
        "versions": versions(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "matrices": " ".join(f"{inputs}x{outputs}" for inputs, outputs in shapes),
        "dtype": dtype,
        "rows": str(num_rows),
        "threads": str(num_threads),
        "layouts": " ".join(layouts),
        "read": str(READ_BYTES),
    }
    line = json.dumps(about, sort_keys=True)
    try:
        folder = user_cache("matrix_layouts")
    except RuntimeError:
        folder = Path(os.devnull)  # a user without a home: nothing can be kept
    file = folder / f"{hashlib.sha256(line.encode()).hexdigest()[:20]}.json"
    seconds = _kept_seconds(file, layouts)
    if seconds is None:
        seconds = _fastest_seconds(layouts, shapes, dtype, num_rows, num_threads)
        _keep_seconds(file, about, seconds)
    fastest = min(layouts, key=lambda layout: seconds[layout])
    return fastest if seconds[fastest] < WORTH_IT * seconds[PLAIN] else PLAIN


def _kept_seconds(file: Path, layouts: Sequence[str]) -> dict[str, float] | None:
    """The seconds of each layout; None where there are none, or after damage."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))["seconds"]
        seconds = {layout: float(content[layout]) for layout in layouts}
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
    layouts: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    dtype: str,
    num_rows: int,
    num_threads: int,
) -> dict[str, float]:
    """Seconds that all threads take for some passes over the matrices; layouts take turns."""
    num_bytes = sum(math.prod(shape) for shape in shapes) * jnp.dtype(dtype).itemsize
    num_passes = max(2, READ_BYTES // num_bytes)

    @jax.jit
    def passes(ws: Matrices) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            first = x.shape[1]
            for w, (inputs, _) in zip(ws, shapes, strict=True):
                x = jnp.tile(x, -(-inputs // x.shape[1]))[:, :inputs] / inputs
                x = product_of_layout(x, w)
            return x[:, :first]

        x = jnp.arange(1.0, num_rows + 1)[:, None]
        return jax.lax.fori_loop(0, num_passes, lambda _, x: one(x), x)

    plain = [jnp.ones(shape, dtype) for shape in shapes]
    matrices = {layout: [_in_layout(w, layout) for w in plain] for layout in layouts}
    fastest = dict.fromkeys(layouts, float("inf"))
    calls = {layout: passes.lower(ws).compile() for layout, ws in matrices.items()}
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        for _ in range(ROUNDS):
            for layout, call in calls.items():
                ws = matrices[layout]

                def repeat(_: int, call: Callable = call, ws: Matrices = ws) -> None:
                    jax.block_until_ready(call(ws))

                start = time.perf_counter()
                list(pool.map(repeat, range(num_threads)))
                fastest[layout] = min(fastest[layout], time.perf_counter() - start)
    return fastest


def _in_layout(w: jax.Array, layout: str) -> jax.Array:
    return in_layout({"lm_head": {"kernel": w}}, layout)["lm_head"]["kernel"]
