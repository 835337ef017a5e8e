"""Seconds to read a prompt and write its first token, against its length, beside transformers.

    .venv/bin/python scripts/measure/prompt_time.py [--dtypes bfloat16 float32]
        [--contexts 512 2048 4096 16384] [--record results/prompt_time.jsonl]

The packaged target reads one prompt of random tokens: our engine plainly and with the P-EAGLE head,
which reads the prompt, too; and transformers with PyTorch's scaled dot-product attention, in one
forward that computes the logits of the last token alone. All take turns; a number is the median
over rounds. The floor is the target's arithmetic: of matrices twice their elements for a token, of
causal attention half of all scores, at the speed of XLA's product of two large matrices in that
dtype.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from peagle_jax import Engine, Model, Request, load_pair
from peagle_jax.decode.generate import make_drafter
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

K = 7
SIDE = 2048  # of the large product


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    rows = []
    with ProgressReport("prompts", len(args.dtypes) * len(args.contexts), unit="cases") as report:
        for dtype in args.dtypes:
            models = load_pair(ASSETS / "target", ASSETS / "peagle", dtype=dtype)
            target = models[0]
            config = dataclasses.replace(target.config, context=10**6)
            models = dataclasses.replace(target, config=config), models[1]
            readers = {
                "plain": lambda prompt, models=models: read(models, prompt, drafts=False),
                "peagle": lambda prompt, models=models: read(models, prompt, drafts=True),
                "transformers": torch_reader(dtype),
            }
            speed = product_speed(dtype, args.rounds)
            for context in args.contexts:
                new = measure(readers, dtype, context, target, speed, args.rounds)
                rows += new
                if args.record:
                    append_rows(args.record, new, "scripts/measure/prompt_time.py")
                report.update(report.completed + 1, note=f"{dtype}, {context} tokens")
    columns = ("reader", "dtype", "context", "seconds", "floor_seconds", "over_transformers")
    table = Table(*columns)
    for row in rows:
        cells = (row[name] for name in columns)
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in cells))
    Console(width=100).print(table)


def read(models: tuple[Model, Model], prompt: list[int], *, drafts: bool) -> float:
    """Seconds of our engine. Caches are new in each call, as for a new request."""
    target, head = models
    engine = Engine(target, make_drafter(head, K) if drafts else None, head.params, max_batch=1)
    engine.add(Request(prompt=prompt, max_new_tokens=1, stop_ids=()))
    while engine.has_work:
        engine.step()
    return engine.stats.prefill_seconds


def torch_reader(dtype: str) -> Callable[[list[int]], float]:
    """Seconds of transformers."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=getattr(torch, dtype))
    model.eval()

    def read(prompt: list[int]) -> float:
        tokens = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            model(tokens, use_cache=True, logits_to_keep=1).logits.argmax()
        return time.perf_counter() - start

    return read


def measure(
    readers: dict[str, Callable[[list[int]], float]],
    dtype: str,
    context: int,
    target: Model,
    speed: float,
    rounds: int,
) -> list[dict]:
    """A row for every reader. The first round compiles, and does not count."""
    prompt = np.random.default_rng(0).integers(4, target.config.vocab, context).tolist()
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(1 + rounds):
        for name, reader in readers.items():
            taken = reader(prompt)
            if number:
                seconds[name].append(taken)
    config = target.config
    matrices = sum(x.size for x in jax.tree.leaves(target.params)) - 2 * config.vocab * config.dim
    flops = 2 * matrices * context
    flops += 2 * context**2 * config.layers * config.heads * config.head_dim
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {
            "name": "prompt_time",
            "reader": name,
            "dtype": dtype,
            "context": context,
            "seconds": medians[name],
            "seconds_of_rounds": seconds[name],
            "floor_seconds": flops / speed,
            "over_transformers": medians["transformers"] / medians[name],
        }
        for name in readers
    ]


def product_speed(dtype: str, rounds: int) -> float:
    """Operations per second of a product of two large matrices, accumulated in float32."""
    matrix = jnp.ones((SIDE, SIDE), jnp.dtype(dtype))

    @jax.jit
    def multiply(x):
        return jnp.matmul(x, x, preferred_element_type=jnp.float32)

    seconds = []
    for _ in range(2 + rounds):
        start = time.perf_counter()
        multiply(matrix).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * SIDE**3 / statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
