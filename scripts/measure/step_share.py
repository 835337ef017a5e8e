"""How much of a decoding step is not its products with matrices.

    .venv/bin/python scripts/measure/step_share.py [--temperature 0]
        [--record results/step_share.jsonl]

The packaged models decode with every method. Where their matrices are in tiles (as decoding
measures which layout is fastest), a profile of XLA says how long each operation takes: products are
calls of C++ kernels, which also normalize the rows that they read, and compute an MLP's
activation(gate) * up. A profile slows down short operations most, so that the share of what is no
product is at most the one reported.

In other layouts a step is timed three times, in turns: as it is; with every product by an outer
product of summed activations and a row of weights, which costs next to nothing; and its products
alone, one after the other, on weights of the same shapes. What is left of the step where products
cost nothing is one estimate of what lies outside of them, and the step less its products is
another. They differ by what runs side by side, and by what of the rest is a part of XLA's products.

Scores and sums of attention are not counted as products with matrices.
"""

import argparse
import collections
import dataclasses
import functools
import gzip
import json
import re
import statistics
import tempfile
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
from peagle_jax.decode.fastest_layout import in_fastest_layout
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.prefill import prefill, run_to_end
from peagle_jax.decode.rows import Row, row_options
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.layers import products
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
    names = "_matmul", "_narrowed", "_by_transposed"
    kept = {name: getattr(products, name) for name in names}
    try:
        for name in names:
            setattr(products, name, multiply)
        yield
    finally:
        for name, function in kept.items():
            setattr(products, name, function)


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
    first = w[0] if layout_of_matrix(w) == PLAIN else w[:, 0, 0]
    return x.sum(axis=-1, keepdims=True) * first.reshape(1, -1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A call that takes STEPS steps from a state, which it uses up as decoding does."""

    compiled: Any
    args: tuple

    def __call__(self, state: DecodeState) -> None:
        jax.block_until_ready(self.compiled(*self.args, state))


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

    def steps(self) -> Steps:
        """A call that takes STEPS steps, compiled with the products that are in force now."""

        def run(params, options, state):
            batch = len(state.tokens)
            return loop.decode.__wrapped__(self.spec, *params, options, batch + 1, STEPS, state)

        args = self.params(), self.options
        compiled = jax.jit(run, donate_argnums=2).lower(*args, self.state).compile()
        count, _ = jax.block_until_ready(compiled(*args, self.fresh_state()))
        assert int(count) == STEPS, f"{int(count)} steps of {STEPS} fit"

        return Steps(compiled, args)

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


# events of a profile that contain operations and are none themselves
NO_OPERATIONS = ("end:", "Thunk", "Threadpool", "while", "call", "conditional", "Common", "Execute")
PRODUCTS = ("peagle_tiled_products", "peagle_gated_products", "peagle_tiled_product_of")


def measure_in_tiles(decoding: Decoding, rounds: int) -> dict:
    """Milliseconds of a step, and from profiles the share of what is not products in tiles."""
    call = decoding.steps()
    targets = dict(re.findall(r'%(\S+) = .*?custom_call_target="(\w+)"', call.compiled.as_text()))
    assert set(targets.values()) & set(PRODUCTS), "the program has no products in tiles"
    seconds, shares, all_profiles = [], [], collections.Counter()
    for number in range(rounds + 1):
        state = decoding.fresh_state()
        began = time.perf_counter()
        call(state)
        if number:  # the first one warms up
            seconds.append((time.perf_counter() - began) / STEPS)
            profile = collections.Counter()
            for name, duration in profile_of(call, decoding.fresh_state()):
                profile[targets.get(name, "XLA's own")] += duration
            shares.append(1 - sum(profile[name] for name in PRODUCTS) / profile.total())
            all_profiles += profile
    return {
        "step_ms": 1e3 * statistics.median(seconds),
        "outside_share": statistics.median(shares),
        "shares": {name: x / all_profiles.total() for name, x in all_profiles.most_common()},
        "matrix_layout": decoding.spec.matrix_layout,
    }


def profile_of(call: Steps, state: DecodeState) -> list[tuple[str, float]]:
    """The name of each operation of XLA in a call, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call(state)
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    is_name = [x for x in events if x.get("name") == "thread_name"]
    of_xla = {(x["pid"], x["tid"]) for x in is_name if "XLA" in x["args"]["name"]}
    complete = [x for x in events if x.get("ph") == "X" and (x["pid"], x["tid"]) in of_xla]
    return [(x["name"], x["dur"]) for x in complete if not x["name"].startswith(NO_OPERATIONS)]


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
        "outside_share": ms["rest"] / ms["step"],
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
            in_tiles = decoding.spec.matrix_layout == "tiles"
            rows.append(case | (measure_in_tiles if in_tiles else measure)(decoding, args.rounds))
            progress.update(len(rows), note=f"{method}, {dtype}, batch {batch}")
    table = Table("method", "dtype", "batch", "layout", "ms", "outside of products", "of these")
    for row in rows:
        shares = row.get("shares", {}).items()
        parts = (f"{name.removeprefix('peagle_')} {share:.0%}" for name, share in shares)
        cells = row["matrix_layout"], f"{row['step_ms']:.2f}", f"{row['outside_share']:.0%}"
        table.add_row(row["method"], row["dtype"], str(row["batch_size"]), *cells, ", ".join(parts))
    Console(width=110).print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/step_share.py")


if __name__ == "__main__":
    main()
