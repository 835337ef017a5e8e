"""Where the time of a training step goes, beside its floor.

    .venv/bin/python scripts/measure/training.py [--dtype bfloat16] \\
        [--record results/training_step.jsonl]

A step of a recipe (configs/train/demo_peagle.yaml) with the packaged target, on random tokens, in
its parts: each is a program of its own, and the median of its runs counts. The floor of a part is
the time that its products with matrices and its attention would take at the speed of one large
product on this machine. Differences between programs stand where a part has none of its own.

How fast that is beside speculators: scripts/peers/compare_training.py.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import load_target, text
from peagle_jax.atomic_write import append_line
from peagle_jax.bench.timing import median_seconds
from peagle_jax.draft.head import DraftHead, random_head
from peagle_jax.draft.repeated_rows import are_alike_by_depth
from peagle_jax.layers import Decoder, product
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.provenance import provenance
from peagle_jax.train import peagle_loss as peagle
from peagle_jax.train.cod import cod_sample
from peagle_jax.train.compute_dtype import in_compute_dtype, rows_in_compute_dtype
from peagle_jax.train.config import PeagleRun, load_run
from peagle_jax.train.head_batches import HeadBatch
from peagle_jax.train.head_config import head_config
from peagle_jax.train.hidden_states import TrainingRows, shifted, training_rows
from peagle_jax.train.teacher import Teacher, teacher_columns
from peagle_jax.train.train_head import head_denominators, head_loss, head_metrics, split_params
from peagle_jax.train.update import Objective, make_optimizer, make_update
from peagle_jax.types import Batch, Model

RECIPE = Path(__file__).parents[2] / "configs/train/demo_peagle.yaml"
LARGE = 2048  # rows, columns and depth of the product whose speed is the floor's


def make_batch(run: PeagleRun, vocab: int, step: int) -> HeadBatch:
    """What the host makes for a step, of random tokens in one document a row."""
    shape = run.data.batch_size, run.data.seq_len
    tokens = np.random.default_rng(step).integers(0, vocab, shape)
    batch = Batch(tokens.astype(np.int32), np.zeros(shape, np.int32), np.ones(shape, bool))
    segment_ids, loss_mask = shifted(batch)
    cod = cod_sample(loss_mask, segment_ids, run.cod, [run.seed, step])
    noise_ids = np.array([(step, row) for row in range(shape[0])], np.int32)
    return HeadBatch(batch, None, segment_ids, loss_mask, cod, noise_ids, run.num_depths)


def large_product_speed(dtype: str) -> float:
    """FLOP/s of a large product, operands in `dtype` and sums in float32."""
    x = jnp.ones((LARGE, LARGE), jnp.float32)
    w = jnp.ones((LARGE, LARGE), dtype)
    return 2 * LARGE**3 / median_seconds(functools.partial(jax.jit(product), x, w), 7)


@dataclasses.dataclass(frozen=True)
class Step:
    """A recipe's step: its models, and one batch."""

    run: PeagleRun
    target: Model
    head: Model
    batch: HeadBatch

    @functools.cached_property
    def rows(self) -> TrainingRows:
        """The target's hidden states of the batch."""
        return jax.jit(self.run_target)(self.target.params, self.batch)

    def run_target(self, params: Any, batch: HeadBatch) -> TrainingRows:
        """The target's forward."""
        target = cast(Decoder, self.target.bind(params))
        segment_ids, loss_mask = jnp.asarray(batch.segment_ids), jnp.asarray(batch.loss_mask)
        return training_rows(target, batch.batch, segment_ids, loss_mask)

    def run_head(self, params: Any, rows: TrainingRows, batch: HeadBatch) -> tuple:
        """The head's forward over all elements, and their positions and depths."""
        head = in_compute_dtype(cast(DraftHead, self.head.bind(params)), self.run.compute)
        rows = rows_in_compute_dtype(rows, self.run.compute)
        cod, (B, n) = batch.cod, rows.tokens.shape
        assert cod is not None
        embeddings, fused = head.embed(rows.tokens), head.fuse(rows.aux_hidden_states)
        hidden, positions = peagle.packed_hidden(
            head, embeddings, fused, rows.segment_ids, cod, batch.num_depths
        )
        depth = jnp.concatenate([jnp.zeros((B, n), jnp.int32), jnp.asarray(cod.depth)], axis=1)
        return hidden, positions, depth

    def loss_of(self, hidden: Any, params: Any, rows: TrainingRows, rest: tuple) -> Any:
        """The loss of the head's hidden states alone."""
        head = in_compute_dtype(cast(DraftHead, self.head.bind(params)), self.run.compute)
        decoder = cast(Decoder, self.target.bind(self.target.params))
        teacher = Teacher(
            teacher_columns(head, decoder.lm_head_weight()),
            rows.teacher_hidden,
            rows.tokens,
            self.batch.num_depths,
            decoder.logit_cap,
            self.run.loss,
        )
        positions, depth = rest
        weight = peagle.element_weights(
            rows.loss_mask, self.batch.cod, self.batch.num_depths, self.run.depth_weights
        )
        summed = teacher.distill(head, hidden, positions, weight, depth)[0]
        return summed / peagle.sum_of_weights(weight)


def part_seconds(step: Step, repeats: int) -> dict[str, float]:
    """Seconds of every part, and of the whole step."""
    run, target, head, batch = step.run, step.target, step.head, step.batch
    trained, frozen = split_params(run, head)
    seconds = {}

    def measure(name: str, call: Callable[[], object]) -> None:
        seconds[name] = median_seconds(call, repeats)

    measure("host", lambda: make_batch(run, target.config.vocab, 1))
    run_target = jax.jit(step.run_target)
    measure("target forward", lambda: run_target(target.params, batch))
    rows = step.rows
    run_head = jax.jit(step.run_head)
    measure("head forward", lambda: run_head(head.params, rows, batch))
    hidden, *rest = run_head(head.params, rows, batch)
    loss = jax.jit(jax.value_and_grad(step.loss_of))
    measure("loss and its gradient", lambda: loss(hidden, head.params, rows, rest))

    def summed(params: Any, weights: jax.Array) -> jax.Array:
        return jnp.sum(step.run_head({**params, **frozen}, rows, batch)[0] * weights)

    both = jax.jit(jax.grad(summed))
    weights = jnp.ones(hidden.shape, hidden.dtype)
    measure("head forward and backward", lambda: both(trained, weights))
    optimizer = make_optimizer(run.optimizer)
    state = {"params": trained, "opt": optimizer.init(trained), "step": jnp.zeros((), jnp.int32)}
    no_loss = Objective(
        lambda params, grads, frozen, denominators: (
            sum(map(jnp.vdot, jax.tree.leaves(params), jax.tree.leaves(grads))),
            {},
        ),
        lambda batch: jnp.ones(()),
        lambda sums: {},
    )
    grads = jax.tree.map(jnp.ones_like, trained)
    seconds["optimizer"] = _updating_seconds(make_update(no_loss, optimizer), state, grads, repeats)
    objective = Objective(
        functools.partial(head_loss, run, target, head),
        functools.partial(head_denominators, run),
        head_metrics,
    )
    update = make_update(objective, optimizer)
    seconds["step"] = _updating_seconds(update, state, batch, repeats, (target.params, frozen))
    return seconds


def _updating_seconds(
    update: Callable, state: dict, batch: Any, repeats: int, frozen: Any = None
) -> float:
    """Median seconds of an update, which takes the arrays of its state."""
    update, state = jax.jit(update, donate_argnums=0), jax.tree.map(jnp.copy, state)
    seconds = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(update(state, batch, frozen))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def part_flops(step: Step) -> dict[str, float]:
    """Multiplications and additions of products with matrices and of attention, by part."""
    run, c, t = step.run, step.head.config, step.target.config
    batch = step.batch
    assert batch.cod is not None
    rows, n = run.data.batch_size, run.data.seq_len - 1
    elements = rows * (n + batch.cod.anchor.shape[1])

    def matrices(params: Any) -> int:
        return sum(x.size for x in jax.tree.leaves(params) if x.ndim == 2)

    fusion = matrices(step.head.params["fusion"])
    layers = matrices(step.head.params["layers"])
    attention = elements * n * 4 * c.heads * c.head_dim * c.layers
    head_forward = 2.0 * (elements * layers + rows * n * fusion) + attention
    # of placeholders that are the same layer 0 has queries, keys and values once
    repeated = elements - rows * (n + batch.num_depths - 1) if are_alike_by_depth(c) else 0
    head_forward -= 4.0 * repeated * c.dim * (c.heads + 2 * c.kv_heads) * c.head_dim
    of_target = 2.0 * rows * n * matrices(step.target.params["blocks"])
    of_target += rows * n * n * 4 * t.heads * t.head_dim * t.layers
    output, teacher = c.dim * c.draft_vocab, t.dim * c.draft_vocab
    of_loss = 2.0 * (elements * output * (2 + run.train_lm_head) + rows * n * teacher)
    return {
        "target forward": of_target,
        "head forward": head_forward,
        "loss and its gradient": of_loss,
        # nothing is differentiated by aux hidden states
        "head backward": 2 * head_forward - 2.0 * rows * n * fusion,
    }


def measure(run: PeagleRun, repeats: int) -> dict:
    """A result row, without provenance."""
    target = load_target(run.target, aux_hidden_state_layers=run.aux_hidden_state_layers)
    tokenizer = text.load_tokenizer(Path(run.target))
    config = head_config(run, target, None if tokenizer is None else tokenizer.mask_token_id)
    module = cast(Decoder, target.bind(target.params))
    embedding, output = module.embed.table[...], module.lm_head_weight()
    head = random_head(config, seed=run.seed, embedding=embedding, output=output, ids=None)
    step = Step(run, target, head, make_batch(run, target.config.vocab, 0))
    flops, seconds = part_flops(step), part_seconds(step, repeats)
    speeds = {dtype: large_product_speed(dtype) for dtype in ("float32", run.compute.dtype)}
    both = seconds.pop("head forward and backward")
    seconds["head backward"] = both - seconds["head forward"]
    whole = seconds.pop("step")
    order = (
        "target forward",
        "head forward",
        "loss and its gradient",
        "head backward",
        "optimizer",
        "host",
    )
    parts = {}
    for name in order:
        # the target computes in its own dtype
        speed = speeds["float32" if name == "target forward" else run.compute.dtype]
        floor = flops[name] / speed if name in flops else None
        parts[name] = {"seconds": seconds[name], "flops": flops.get(name), "floor_seconds": floor}
    tokens = run.data.batch_size * (run.data.seq_len - 1)
    return {
        "name": "training_step",
        "dtype": run.compute.dtype,
        "target": Path(run.target).name,
        "tokens": tokens,
        "elements": step.head.config.num_depths and int(step.batch.cod.anchor.shape[1]) + tokens,
        "parameters": sum(x.size for x in jax.tree.leaves(head.params)),
        "large_product_flops_per_second": speeds,
        "parts": parts,
        "step_seconds": whole,
        "tokens_per_second": tokens / whole,
    }


def table_of(row: dict) -> Table:
    """Milliseconds of every part, and of its floor."""
    table = Table("part", "ms", "floor, ms", "GFLOP", "share of the step")
    for name, part in row["parts"].items():
        floor, flops = part["floor_seconds"], part["flops"]
        table.add_row(
            name,
            f"{part['seconds'] * 1e3:.1f}",
            "" if floor is None else f"{floor * 1e3:.1f}",
            "" if flops is None else f"{flops / 1e9:.2f}",
            "" if name == "host" else f"{part['seconds'] / row['step_seconds']:.0%}",
        )
    floor = sum(part["floor_seconds"] or 0 for part in row["parts"].values())
    flops = sum(part["flops"] or 0 for part in row["parts"].values())
    ms = f"{row['step_seconds'] * 1e3:.1f}"
    table.add_row("whole step", ms, f"{floor * 1e3:.1f}", f"{flops / 1e9:.2f}", "100%")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=9, help="default: 9")
    parser.add_argument("--record", type=Path, help="append a row to this JSONL")
    args = parser.parse_args()
    run = cast(PeagleRun, load_run(args.recipe))
    compute = dataclasses.replace(run.compute, dtype=args.dtype)
    row = measure(
        dataclasses.replace(run, target=str(ASSETS / "target"), compute=compute), args.repeats
    )
    console = Console(width=100)
    console.print(table_of(row))
    console.print(
        f"{args.dtype}: {row['tokens_per_second']:,.0f} tokens/s with the target's forward"
    )
    if args.record is not None:
        command = f"python scripts/measure/training.py --dtype {args.dtype}"
        append_line(args.record, json.dumps(provenance(command) | row))


if __name__ == "__main__":
    main()
