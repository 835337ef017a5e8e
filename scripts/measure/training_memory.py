"""Memory of a head's training step against the length of a row, and at 20,000 tokens.

    .venv/bin/python scripts/measure/training_memory.py --record results/training_memory.jsonl
    .venv/bin/python scripts/measure/training_memory.py --recipes --record ...

A small P-EAGLE head, K = 8, one row of n tokens; partitions grow with n, so that each has as many
elements. `compiled` is XLA's count of the buffers of loss and gradients, beside arguments and
results; `peak_rss` is what a process of its own held at most while it computed them, less what it
held before. The exponent is the slope of log(bytes) over log(n).

`--recipes` compiles the loss and gradients of the published heads for a CPU on one row of 20,000
tokens with the target's hidden states given, which runs nothing.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.draft.confidence import NO_CONFIDENCE
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.markov import NO_MARKOV
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.layers import Rope
from peagle_jax.pipelines import tracing
from peagle_jax.provenance import append_rows
from peagle_jax.train.cod import CodConfig, cod_sample
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.train.recipe_sections import ComputeConfig
from peagle_jax.types import Model

ROOT = Path(__file__).parents[2]
RECIPES = ("gpt_oss_20b", "gpt_oss_120b", "qwen3_coder_30b", "gemma4_31b")
SIZES = (1024, 2048, 4096, 8192, 16384)
PARTITION_TOKENS = 1024  # of a row to one partition
LONG = 20_000


def small_head() -> Model:
    """Two layers of width 64."""
    config = HeadConfig(
        vocab=512,
        draft_vocab=512,
        dim=64,
        layers=2,
        mlp_dim=256,
        heads=2,
        kv_heads=1,
        head_dim=32,
        rope=Rope.from_hf({"rope_theta": 1e4}, 32, ""),
        norm_eps=1e-6,
        context=32_768,
        target_dim=64,
        aux_hidden_state_layers=(1, 3, 5),
        mask_token=1,
        num_depths=8,
        qk_norm=False,
        attention_bias=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        **PAPER_DESIGN,
        **NO_MARKOV,
        **NO_CONFIDENCE,
        windows=(None, None),
        dtype=jnp.float32,
    )
    return tracing.abstract_head(config)


def program(
    head: Model, n: int, cod: CodConfig, compute: ComputeConfig, dtype: Any
) -> tuple[Callable, list[Any]]:
    """(loss and gradients of a list of arrays, the shapes of these) of one row of n tokens."""
    config = head.config
    segment_ids, loss_mask = np.zeros((1, n), np.int32), np.ones((1, n), bool)
    elements = cod_sample(loss_mask, segment_ids, cod, 0)
    aux = np.zeros((1, n, config.sizes.aux_dim), dtype)
    hidden = np.zeros((1, n, config.target_dim), dtype)
    ids = np.zeros((1, n), np.int32)
    rows = TrainingRows(*map(jnp.asarray, (ids, aux, hidden, segment_ids, loss_mask)))
    output = jax.ShapeDtypeStruct((config.target_dim, config.vocab), dtype)
    leaves, structure = jax.tree.flatten((rows, elements))

    def run(params: Any, output: jax.Array, leaves: list[jax.Array]) -> Any:
        rows, elements = jax.tree.unflatten(structure, leaves)
        return jax.value_and_grad(
            lambda params: peagle_loss(
                head.bind(params),
                rows,
                elements,
                cod.num_depths,
                output,
                compute=compute,
                partitions=cod.partitions,
            )[0]
        )(params)

    return run, [head.params, output, leaves]


def compiled_bytes(run: Callable, arguments: list[Any]) -> dict[str, int]:
    """XLA's count: buffers, and what they, arguments and results are together."""
    analysis = jax.jit(run).lower(*arguments).compile().memory_analysis()
    temporary = analysis.temp_size_in_bytes
    other = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    return {"compiled": temporary, "with_arguments": temporary + other}


def small_program(n: int) -> tuple[Callable, list[Any]]:
    cod = CodConfig(num_depths=8, partitions=max(1, n // PARTITION_TOKENS))
    return program(small_head(), n, cod, ComputeConfig(recompute="layers"), jnp.float32)


def peak_rss(n: int) -> int:
    """Bytes that a process held more while it computed than before; run in one of its own."""
    run, shapes = small_program(n)
    arguments = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), shapes[:2])
    compiled = jax.jit(run).lower(*shapes).compile()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jax.block_until_ready(compiled(*arguments, shapes[2]))
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def exponent(sizes: list[int], values: list[int]) -> float:
    """Slope of log(values) over log(sizes)."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def long_row(name: str) -> dict:
    """The head of a recipe at LONG tokens."""
    run, _, head = tracing.recipe(ROOT / f"configs/train/{name}.yaml", ROOT / "configs/targets")
    parts = program(head, LONG, run.cod, run.compute, jnp.dtype(run.target_dtype))
    return {
        "recipe": name,
        "tokens": LONG,
        "partitions": run.cod.partitions,
        "parameters": tracing.parameter_bytes(head.params),
        **compiled_bytes(*parts),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--measured-up-to", type=int, default=8192, metavar="N")
    parser.add_argument("--recipes", action="store_true")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rss-of", type=int, metavar="N", help="print the measured bytes of N")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    if args.rss_of is not None:
        print(peak_rss(args.rss_of))
        return 0
    rows = []

    def add(row: dict) -> None:
        rows.append({"name": "training_memory", **row})
        print(json.dumps(rows[-1]), flush=True)

    if args.recipes:
        for name in args.only:
            add(long_row(name))
    else:
        for n in args.sizes:
            row = {"tokens": n, "partitions": max(1, n // PARTITION_TOKENS), "peak_rss": None}
            if n <= args.measured_up_to:
                command = [sys.executable, __file__, "--rss-of", str(n)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row["peak_rss"] = int(done.stdout)
            add({**row, **compiled_bytes(*small_program(n))})
        for key in ("compiled", "peak_rss"):
            known = [row for row in rows if row[key]]
            if len(known) < 2:
                continue
            slope = exponent([row["tokens"] for row in known], [row[key] for row in known])
            print(f"{key}: exponent {slope:.3f}")
    if args.record is not None:
        append_rows(args.record, rows, "scripts/measure/training_memory.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
