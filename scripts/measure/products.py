"""Milliseconds of a decoder's matrix products alone, by every form, at 1 to 64 rows.

    .venv/bin/python scripts/measure/products.py [--one-core] [--record results/products.jsonl]
    .venv/bin/python scripts/measure/products.py --config configs/targets/qwen3-8b.json \\
        --num-layers 1 --loops 2 --rows 1 8 32

The products are those of the packaged target's layers, or of another: q, k, v, o, gate, up, down,
each reading what the one before it wrote, with nothing between them but what makes the shapes fit.
A form is timed inside of one compiled loop; forms take turns, and a number is the median over
rounds. The forms of torch are left out where torch is not installed.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax.kernels import native_code
from peagle_jax.kernels.tiled_products import can_be_tiled, to_tiles
from peagle_jax.layers import product
from peagle_jax.layers.matrix_layouts import to_transposed
from peagle_jax.layers.products import product_of_layout
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.provenance import append_rows

PACKAGED = ASSETS / "target" / "config.json"
ROWS = (1, 2, 4, 8, 16, 32, 64)
# a fusion type of its own makes XLA call YNNPACK for products on a CPU; "" is none
WITHOUT_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    parser.add_argument("--one-core", action="store_true", help="let one core compute")
    parser.add_argument("--config", type=Path, default=PACKAGED)
    parser.add_argument("--num-layers", type=int, help="the first layers; default: all")
    parser.add_argument("--loops", type=int, default=20, help="passes over them in a timed call")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    if args.one_core:  # before XLA and torch count them
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    layers = make_layers(json.loads(args.config.read_text()), args.num_layers)
    num_weights = sum(w.size for layer in layers for w in layer)
    rows = []
    table = Table("form", *map(str, args.rows), title=f"ms for {num_weights / 1e6:.1f}M weights")
    by_form: dict[str, list[float]] = {}
    for num_rows in args.rows:
        calls = jax_forms(layers, num_rows, args.loops)
        calls |= torch_forms(layers, num_rows, args.loops)
        for form, ms in medians(calls, args.rounds, args.loops).items():
            by_form.setdefault(form, []).append(ms)
    for form, numbers in by_form.items():
        table.add_row(form, *(f"{ms:.2f}" for ms in numbers))
        rows.append({"name": "products", "form": form, "weights": num_weights})
        rows[-1]["config"] = "packaged" if args.config == PACKAGED else str(args.config)
        rows[-1]["cores"] = len(os.sched_getaffinity(0))
        rows[-1]["ms"] = dict(zip(map(str, args.rows), numbers, strict=True))
    Console(width=110).print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/products.py")


def make_layers(config: dict, num_layers: int | None) -> list[list[np.ndarray]]:
    """Random matrices of every layer: q, k, v, o, gate, up, down."""
    dim, mlp = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or dim // config["num_attention_heads"]
    inner = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    shapes = [(dim, inner), (dim, kv), (dim, kv), (inner, dim), (dim, mlp), (dim, mlp), (mlp, dim)]
    rng = np.random.default_rng(0)
    num_layers = num_layers or config["num_hidden_layers"]
    return [
        [(0.02 * rng.normal(size=shape)).astype(np.float32) for shape in shapes]
        for _ in range(num_layers)
    ]


def merged(layer: list[np.ndarray]) -> list[np.ndarray]:
    """q, k and v as one matrix, gate and up as another."""
    q, k, v, o, gate, up, down = layer
    return [np.concatenate([q, k, v], axis=1), o, np.concatenate([gate, up], axis=1), down]


def chain(multiply: Callable, layers: list, x):
    """All products, one after the other."""
    for layer in layers:
        if len(layer) == 4:
            qkv, o, gate_up, down = layer
            inner, mlp = o.shape[0], down.shape[0]
            h = multiply(x, qkv)
            x = x + multiply(h[:, :inner] + h[:, inner:].sum(), o)
            h = multiply(x, gate_up)
            x = x + multiply(h[:, :mlp] * h[:, mlp:], down)
        else:
            q, k, v, o, gate, up, down = layer
            rest = multiply(x, k).sum() + multiply(x, v).sum()
            x = x + multiply(multiply(x, q) + rest, o)
            x = x + multiply(multiply(x, gate) * multiply(x, up), down)
    return x


def jax_forms(
    layers: list[list[np.ndarray]], num_rows: int, loops: int
) -> dict[str, Callable[[], object]]:
    """A call of `loops` passes for each form of XLA."""

    def bfloat16(x, w):
        return jnp.matmul(x.astype(w.dtype), w, preferred_element_type=jnp.float32)

    narrow = jnp.bfloat16
    joined = [merged(layer) for layer in layers]
    transposed = [[to_transposed(w) for w in layer] for layer in layers]
    forms = {
        "XLA float32": (jnp.matmul, layers, jnp.float32, {}),
        "XLA float32, merged": (jnp.matmul, joined, jnp.float32, {}),
        "XLA float32, no YNNPACK": (jnp.matmul, layers, jnp.float32, WITHOUT_YNNPACK),
        "XLA bfloat16 operands": (bfloat16, layers, narrow, {}),
        "XLA bfloat16 operands, merged": (bfloat16, joined, narrow, {}),
        "XLA bfloat16 operands, no YNNPACK": (bfloat16, layers, narrow, WITHOUT_YNNPACK),
        "peagle_jax.layers.product": (product, layers, narrow, {}),
        "transposed, bfloat16": (product_of_layout, transposed, narrow, {}),
        "transposed, float32": (product_of_layout, transposed, jnp.float32, {}),
    }
    if native_code.is_available():
        forms["our own, in tiles, bfloat16"] = (product_of_layout, layers, narrow, {})
        forms["our own, in tiles, float32"] = (product_of_layout, layers, jnp.float32, {})
    calls = {}
    for name, (multiply, matrices, dtype, options) in forms.items():
        weights = jax.tree.map(lambda w, dtype=dtype: jnp.asarray(w, dtype), matrices)
        if "in tiles" in name:
            weights = jax.tree.map(
                lambda w: to_tiles(w) if can_be_tiled(w.shape, w.dtype) else w, weights
            )

        @functools.partial(jax.jit, compiler_options=options or None)
        def passes(weights, x, multiply=multiply):
            def body(_, x):
                return 0.5 * chain(multiply, weights, x)

            return jax.lax.fori_loop(0, loops, body, x)

        x = jnp.ones((num_rows, layers[0][0].shape[0]), jnp.float32)
        calls[name] = functools.partial(
            lambda run, weights, x: run(weights, x).block_until_ready(), passes, weights, x
        )
    return calls


def torch_forms(
    layers: list[list[np.ndarray]], num_rows: int, loops: int
) -> dict[str, Callable[[], object]]:
    """The same in torch, with weights as `torch.nn.Linear` has them."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: its forms are left out", file=sys.stderr)
        return {}
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    calls = {}
    for dtype in (torch.float32, torch.bfloat16):
        # transposed views of row-major [outputs, inputs], so that `@` is a linear layer
        weights = [[torch.tensor(w.T.copy(), dtype=dtype).T for w in layer] for layer in layers]
        x = torch.ones(num_rows, layers[0][0].shape[0], dtype=dtype)

        def passes(weights=weights, x=x):
            with torch.inference_mode():
                for _ in range(loops):
                    x = 0.5 * chain(torch.matmul, weights, x)
            return x

        calls[f"torch {str(dtype).removeprefix('torch.')}"] = passes
    return calls


def medians(calls: dict[str, Callable[[], object]], rounds: int, loops: int) -> dict[str, float]:
    """Milliseconds of one pass of each form; the forms take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:  # the first one compiles
                seconds[name].append((time.perf_counter() - start) / loops)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
