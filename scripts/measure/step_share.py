"""How much of a decoding step is not its products with matrices, in two ways.

    .venv/bin/python scripts/measure/step_share.py [--temperature 0]
        [--record results/step_share.jsonl]

The packaged models decode with every method. Their step is timed three times, in turns: as it is;
with every product by an outer product of summed activations and a row of weights, which costs next
to nothing; and its products alone, one after the other, on weights of the same shapes. What is
left of the step where products cost nothing is one estimate of what lies outside of them, and the
step less its products is another. They differ by what runs side by side, and by what of the rest is
a part of XLA's products. Scores and sums of attention are not counted as products with matrices.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import Model, Request, load_pair
from peagle_jax.decode import loop
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.matrix_layout import in_fastest_layout
from peagle_jax.decode.prefill import prefill, run_to_end
from peagle_jax.decode.rows import Row, row_options
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.layers import basic, products
from peagle_jax.layers.matrix_layouts import LAYOUTS, PLAIN, layout_of, layout_of_matrix
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows
from peagle_jax.types import DecodeState, RowOptions

STEPS = 16  # of one call
CONTEXT = 64  # tokens of a prompt
METHODS = ("plain", "eagle3", "peagle")


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of a step: rows of activations, the matrix as it is stored, and dtypes."""

    rows: int
    inputs: int
    outputs: int
    layout: str
    x_dtype: str
    w_dtype: str


@contextmanager
def products_by(multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> Iterator[None]:
    """A context in which models that are traced multiply by `multiply`."""
    changed = {(products, name): multiply for name in ("_matmul", "_narrowed", "_by_transposed")}
    for module in (products, basic):
        of_tiles = module, "products_of_tiles"
        changed[of_tiles] = lambda x, matrices: [multiply(x, w) for w in matrices]
    kept = {(module, name): getattr(module, name) for module, name in changed}
    try:
        for (module, name), function in changed.items():
            setattr(module, name, function)
        yield
    finally:
        for (module, name), function in kept.items():
            setattr(module, name, function)


@contextmanager
def unrolled_scans() -> Iterator[None]:
    """A context in which `jax.lax.scan` is a loop of Python."""
    kept = jax.lax.scan

    def scan(f, init, xs=None, length=None, **_):
        length = jax.tree.leaves(xs)[0].shape[0] if length is None else length
        if not length:
            return kept(f, init, xs, length=0)
        outputs = []
        for i in range(length):
            init, output = f(init, jax.tree.map(lambda x, i=i: x[i], xs))
            outputs.append(output)
        return init, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)

    jax.lax.scan = scan
    try:
        yield
    finally:
        jax.lax.scan = kept


def outer_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Of a product's shape and dtype, for next to nothing, and of all that the product reads of x.

    A single column of activations would let XLA leave out what computes the others.
    """
    row = {"plain": lambda: w[0], "transposed": lambda: w[:, 0, 0], "tiles": lambda: w[:, 0, :, 0]}
    first = row[layout_of_matrix(w)]().reshape(1, -1)
    return x.sum(axis=-1, keepdims=True) * first.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Steps of a method, from a state after the prompts."""

    spec: DecodeSpec
    target: Model
    draft_params: Any
    options: RowOptions
    state: DecodeState

    def params(self) -> tuple:
        return self.target.params, self.draft_params

    def steps(self) -> Callable[[DecodeState], None]:
        """A call that takes STEPS steps from a state, which it uses up as decoding does.

        It is compiled with the products that are in force now.
        """

        def run(params, options, state):
            batch = len(state.tokens)
            return loop.decode.__wrapped__(self.spec, *params, options, batch + 1, STEPS, state)

        args = self.params(), self.options
        compiled = jax.jit(run, donate_argnums=2).lower(*args, self.state).compile()
        count, _ = jax.block_until_ready(compiled(*args, self.fresh_state()))
        assert int(count) == STEPS, f"{int(count)} steps of {STEPS} fit"
        return lambda state: jax.block_until_ready(compiled(*args, state)) and None

    def fresh_state(self) -> DecodeState:
        """A copy of the state."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, self.state))

    def products(self) -> list[Product]:
        """The products of a step, in the order in which they are traced."""
        found = []

        def note(x, w):
            rows, inputs = x.size // x.shape[-1], x.shape[-1]
            dtypes = x.dtype.name, w.dtype.name
            found.append(Product(rows, inputs, w.size // inputs, layout_of_matrix(w), *dtypes))
            return outer_product(x, w)

        with products_by(note), unrolled_scans():  # the body of a scan is traced once
            run = functools.partial(loop.step, self.spec)
            jax.eval_shape(run, *self.params(), self.options, self.state)
        return found


def start(method: str, dtype: str, batch: int, k: int, temperature: float) -> Decoding:
    """Random prompts of the packaged models, read by the target and the head."""
    folder = ASSETS / ("eagle3" if method == "eagle3" else "peagle")
    target, head = load_pair(ASSETS / "target", folder, dtype=jnp.dtype(dtype))
    drafter = None if method == "plain" else make_drafter(head, k)
    new_tokens = STEPS * (k + 1)
    slots = CONTEXT + new_tokens + 2 * (k + 1)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, target.config.vocab, (batch, CONTEXT)).astype(np.int32)
    wanted = {"max_new_tokens": slots, "temperature": temperature, "stop_ids": ()}
    requests = [Request(prompt=row.tolist(), **wanted) for row in prompts]
    rows = [Row(i, request, {}) for i, request in enumerate(requests)]
    options = row_options(rows, target.config.vocab)
    # as an engine for so many requests reads them
    about = {"rows": batch, "num_places": k + 1, "num_threads": 1}
    draft_params = head.params if drafter else None
    target, draft_params = in_fastest_layout(target, drafter, draft_params, **about)
    layout = layout_of(target.params)
    spec = DecodeSpec(
        target.graph, target.config, drafter, sample_drafts=True, matrix_layout=layout
    )
    lengths = np.full(batch, CONTEXT, np.int32)
    steps = prefill(spec, slots, target.params, draft_params, prompts, lengths, options)
    return Decoding(spec, target, draft_params, options, run_to_end(steps))


def products_alone(found: list[Product]) -> Callable[[DecodeState], None]:
    """A call of STEPS times these products, each of which waits for the one before.

    It takes a state, for which it has no use, as `Decoding.steps` does.
    """
    keys = iter(jax.random.split(jax.random.key(0), len(found)))
    weights = []
    for p in found:
        w = (0.02 * jax.random.normal(next(keys), (p.inputs, p.outputs))).astype(p.w_dtype)
        weights.append(w if p.layout == PLAIN else LAYOUTS[p.layout](w))

    @jax.jit
    def run(weights):
        def step(_, number):
            for p, w in zip(found, weights, strict=True):
                x = jnp.full((p.rows, p.inputs), number).astype(p.x_dtype)
                number = 0.5 + 0.001 * products.product_of_layout(x, w)[0, 0].astype(jnp.float32)
            return number

        return jax.lax.fori_loop(0, STEPS, step, jnp.float32(0.5))

    return lambda state: jax.block_until_ready(run(weights)) and None


def measure(decoding: Decoding, rounds: int) -> dict:
    """Milliseconds of a step, of one whose products cost nothing, and of products alone."""
    found = decoding.products()
    calls = {"step": decoding.steps(), "products": products_alone(found)}
    with products_by(outer_product):
        calls["rest"] = decoding.steps()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            state = decoding.fresh_state()
            began = time.perf_counter()
            call(state)
            if number:  # the first one warms up
                seconds[name].append((time.perf_counter() - began) / STEPS)
    ms = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    return {
        "step_ms": ms["step"],
        "rest_ms": ms["rest"],
        "products_ms": ms["products"],
        "rest_share": ms["rest"] / ms["step"],
        "share_less_products": 1 - ms["products"] / ms["step"],
        "products": len(found),
        "matrix_layout": decoding.spec.matrix_layout,
        "flops_with_padding": sum(2 * p.rows * p.inputs * p.outputs for p in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("-k", type=int, default=7, help="tokens drafted in a step")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 also of drafts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    cases = [(d, b, m) for d in args.dtypes for b in args.batch_sizes for m in args.methods]
    rows = []
    with ProgressReport("step share", len(cases), unit="cases") as progress:
        for dtype, batch, method in cases:
            k = 0 if method == "plain" else args.k
            case = {"name": "step_share", "method": method, "k": k, "dtype": dtype}
            case |= {"batch_size": batch, "temperature": args.temperature}
            decoding = start(method, dtype, batch, k, args.temperature)
            rows.append(case | measure(decoding, args.rounds))
            progress.update(len(rows), note=f"{method}, {dtype}, batch {batch}")
    columns = ("step_ms", "rest_ms", "products_ms", "rest_share", "share_less_products")
    table = Table("method", "dtype", "batch", *(name.replace("_", " ") for name in columns))
    for row in rows:
        cells = (f"{row[name]:.2f}" for name in columns)
        table.add_row(row["method"], row["dtype"], str(row["batch_size"]), *cells)
    Console(width=110).print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/step_share.py")


if __name__ == "__main__":
    main()
