"""Compiles whole steps with their kernels for an H200 that is not here.

    scripts/gpu/install_cuda.sh .venv-cuda
    .venv-cuda/bin/python scripts/gpu/compile_ahead.py --out results/compiled_ahead.jsonl \\
        --doc docs/kernels.md

A row says what a program launches, how much of that CUDA graphs hold, and what memory it takes. A
loop in a graph counts with what is in it. Rows of other programs that a file has stay in it. It
needs an environment of install_cuda.sh, and no GPU; about eleven minutes on 2 cores. The name of a
recipe stands for its whole training step, and its row also has the bytes that `peagle train
--dry-run` foretells. `--without` compiles programs without kernels, too (a prompt through
Qwen3-Coder's experts took XLA over a quarter of an hour). Without a device XLA does not tune its
products, so nothing here says how fast anything is.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # otherwise the plugin looks for a driver

import argparse  # noqa: E402
import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import importlib.metadata  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

ROOT = Path(__file__).parents[2]
# this checkout's package, wherever the environment was made
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "generate")]

import size_table  # noqa: E402
import thunks  # noqa: E402
from page import markdown_table, with_table  # noqa: E402

from peagle_jax.atomic_write import write_atomically  # noqa: E402
from peagle_jax.decode.drafters import ParallelDrafter  # noqa: E402
from peagle_jax.kernels.launch import (  # noqa: E402
    H200,
    disable_kernels,
    target_gpu,
    unavailable_reason,
)
from peagle_jax.pipelines import tracing, training_plan  # noqa: E402
from peagle_jax.pipelines.training_tracing import abstract_step  # noqa: E402
from peagle_jax.progress import ProgressReport  # noqa: E402
from peagle_jax.provenance import provenance  # noqa: E402
from peagle_jax.train.cod import cod_sample  # noqa: E402
from peagle_jax.train.config import HeadRun  # noqa: E402
from peagle_jax.train.hidden_states import TrainingRows, shifted  # noqa: E402
from peagle_jax.train.peagle_loss import peagle_loss  # noqa: E402
from peagle_jax.types import Batch, DraftState, Model  # noqa: E402

ROOT = Path(__file__).parents[2]
# target -> (recipe of its head, scales of its FP8 matrices)
TARGETS = {
    "qwen3-coder-30b-a3b-instruct": ("qwen3_coder_30b", "blocks"),
    "gpt-oss-20b": ("gpt_oss_20b", "rows"),
}
RECIPES = ("gemma4_31b", "gpt_oss_120b", "gpt_oss_20b", "qwen3_coder_30b")
TARGET_CONFIGS = ROOT / "configs" / "targets"
K, EAGLE3_K, PROMPT, CACHE_SIZE, TOKENS = 7, 3, 1024, 4096, 20_000
RANK = 256  # of the Markov head, as in DSpark's heads
# jax-triton 0.3 called it triton_kernel_call
TRITON = re.compile(r'custom_call_target="triton_kernel_call(_ffi)?"')
LAUNCH = re.compile(r" = \S.*? (fusion|custom-call|while|conditional|copy|sort)\(")


def decoding(name: str, device) -> dict:
    """{program: lowered} of a prompt of PROMPT tokens, and of steps of each method.

    Weights and cache are FP8, but GPT-OSS's experts are MXFP4. An EAGLE-3 head has one layer.
    """
    recipe, fp8 = TARGETS[name]
    run, _, head = tracing.recipe(ROOT / f"configs/train/{recipe}.yaml", ROOT / "configs/targets")
    target = tracing.abstract_target(
        ROOT / f"configs/targets/{name}.json",
        aux_hidden_state_layers=run.head.aux_hidden_state_layers,
        packed=name.startswith("gpt"),
        fp8=fp8,
    )
    config = dataclasses.replace(target.config, cache_dtype=jnp.dtype(jnp.float8_e4m3fn))
    target = dataclasses.replace(target, config=config)
    config = dataclasses.replace(head.config, dtype=jnp.bfloat16)
    head = tracing.abstract_head(config, fp8=True)
    eagle3 = dict(layers=1, mask_token=None, num_depths=None, windows=(None,))
    eagle3_head = tracing.abstract_head(dataclasses.replace(config, **eagle3), fp8=True)

    def lower(method: str, head: Model | None, k: int):
        sizes = dict(prompt=PROMPT, cache_size=CACHE_SIZE)
        return tracing.lower(target, head, k, method=method, device=device, **sizes)

    prefill, step = lower("peagle", head, K)
    return {
        f"{name}: prompt of {PROMPT} tokens": prefill,
        f"{name}: a plain step": lower("peagle", None, 0)[1],
        f"{name}: a step, K = {K}": step,
        f"{name}: an EAGLE-3 step, K = {EAGLE3_K}": lower("eagle3", eagle3_head, EAGLE3_K)[1],
    }


def training(recipe: str, device) -> dict:
    """{program: lowered} of a head's loss and gradients on one row of TOKENS tokens.

    Aux hidden states are given.
    """
    run, target, head = tracing.recipe(
        ROOT / f"configs/train/{recipe}.yaml", ROOT / "configs/targets"
    )
    head = tracing.abstract_head(dataclasses.replace(head.config, dtype=jnp.bfloat16))
    n, c = TOKENS, head.config
    tokens, segment_ids = np.ones((1, n + 1), np.int32), np.zeros((1, n + 1), np.int32)
    segment_ids, loss_mask = shifted(Batch(tokens, segment_ids, np.ones((1, n + 1), bool)))
    cod = cod_sample(loss_mask, segment_ids, run.cod, [0, 0])

    def spec(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    ids = spec(1, n, dtype=jnp.int32)
    aux_hidden_states = spec(1, n, len(c.aux_hidden_state_layers) * c.target_dim)
    hidden = spec(1, n, c.target_dim)
    rows = TrainingRows(ids, aux_hidden_states, hidden, ids, spec(1, n, dtype=jnp.bool_))
    lm_head = spec(c.target_dim, c.vocab)

    def on_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

    args = jax.tree.map(on_device, (head.params, rows, cod, lm_head))

    def loss(params, rows, cod, lm_head):
        return peagle_loss(head.bind(params), rows, cod, run.num_depths, lm_head)[0]

    with jax.default_device(device):
        lowered = jax.jit(jax.value_and_grad(loss)).trace(*args).lower(lowering_platforms=("cuda",))
    return {f"{recipe}: training step, {n + cod.anchor.shape[1]} packed rows": lowered}


def drafting(recipe: str, device) -> dict:
    """{program: lowered} of drafting K tokens alone, without a Markov head and with one."""
    _, _, head = tracing.recipe(ROOT / f"configs/train/{recipe}.yaml", ROOT / "configs/targets")

    def on_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

    def program(rank: int | None):
        config = dataclasses.replace(head.config, dtype=jnp.bfloat16, markov_rank=rank)
        drafts = tracing.abstract_head(config)
        drafter = ParallelDrafter(drafts.graph, config, K)
        with jax.default_device(device):
            state = jax.eval_shape(lambda: DraftState(drafter.init(1, CACHE_SIZE), None))
        ids = jax.ShapeDtypeStruct((1, K + 1), jnp.int32)
        aux = jax.ShapeDtypeStruct((1, K + 1, config.sizes.aux_dim), jnp.bfloat16)
        count = jax.ShapeDtypeStruct((1,), jnp.int32)
        args = jax.tree.map(on_device, (drafts.params, state, ids, aux, count))
        with jax.default_device(device):
            return jax.jit(drafter.step).trace(*args).lower(lowering_platforms=("cuda",))

    name = f"{recipe}: drafting, K = {K}"
    return {name: program(None), f"{name}, Markov head of rank {RANK}": program(RANK)}


def recipe_step(name: str, device) -> dict:
    """{program: lowered} of the whole training step of a published recipe on one device."""
    run, config = on_one_device(name)
    return {f"{name}: whole training step": abstract_step(run, config, device).lower()}


def on_one_device(name: str) -> tuple[HeadRun, Path]:
    """A recipe, changed to train on one device, and its target's config.json."""
    run, _, _ = tracing.recipe(ROOT / f"configs/train/{name}.yaml", TARGET_CONFIGS)
    return training_plan.on_devices(run, 1), training_plan.find_config(run.target, TARGET_CONFIGS)


def planned_bytes(name: str) -> int:
    """What `peagle train --dry-run` says of a recipe on one device."""
    run, _ = on_one_device(name)
    return training_plan.training_plan(run, targets=TARGET_CONFIGS).total_bytes


def compile_program(lowered) -> dict:
    """What the compiled program launches, what of it CUDA graphs hold, and its temporary memory."""
    compiled, listed = thunks.compile_program(lowered)
    graphs = {thunk.graph for thunk in listed} - {None}
    memory = compiled.memory_analysis()
    return counts(compiled.as_text()) | {
        "thunks": len(listed),
        "thunks_in_graphs": sum(thunk.graph is not None for thunk in listed),
        "thunks_in_loops": sum(thunk.in_loop for thunk in listed),
        "graphs": len(graphs),
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


def counts(text: str) -> dict[str, int]:
    """Triton calls of a compiled program; launches and loops of its main computation."""
    entry = text[text.index("\nENTRY ") :]
    return {
        "triton": len(TRITON.findall(text)),
        "launches": len(LAUNCH.findall(entry)),
        "loops": entry.count(" while("),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--doc", type=Path, help="a Markdown file whose table is written anew")
    names = [*TARGETS, "drafting", "training", *RECIPES]
    parser.add_argument("--without", nargs="+", choices=names, default=[])
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    device, rows = size_table.cuda_device(), []
    with target_gpu(H200), jax.default_device(device):
        if reason := unavailable_reason("triton"):
            print(f"compile_ahead: Triton kernels cannot be compiled: {reason}", file=sys.stderr)
            return 2
    programs = [(name, True) for name in args.only] + [(name, False) for name in args.without]
    with ProgressReport("compile ahead", len(programs), unit="programs") as progress:
        for i, (name, kernels) in enumerate(programs):
            progress.update(i, note=name)
            with target_gpu(H200), contextlib.nullcontext() if kernels else disable_kernels():
                if name == "training":
                    lowered_programs = training("qwen3_coder_30b", device)
                elif name == "drafting":
                    lowered_programs = drafting("qwen3_coder_30b", device)
                elif name in RECIPES:
                    lowered_programs = recipe_step(name, device)
                else:
                    lowered_programs = decoding(name, device)
            for program, lowered in lowered_programs.items():
                row = {"program": program, "kernels": kernels}
                if name in RECIPES:
                    row["planned_bytes"] = planned_bytes(name)
                rows.append(row | compile_program(lowered))
    table = Table("kernels", *COLUMNS)
    for row in rows:
        table.add_row("yes" if row["kernels"] else "no", *cells(row))
    Console().print(table)
    facts = provenance(" ".join(["python scripts/gpu/compile_ahead.py", *sys.argv[1:]]))
    for name in ("jax-triton", "triton"):
        facts[f"{name} version"] = importlib.metadata.version(name)
    rows = merged(args.out, [facts | row for row in rows])
    write_atomically(args.out, "".join(json.dumps(row) + "\n" for row in rows))
    if args.doc:
        fill(args.doc, rows)
    return 0


def merged(path: Path, rows: list[dict]) -> list[dict]:
    """The rows of a file with `rows` in the places of their programs', or after them."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    by_program = {
        (row["program"], row["kernels"]): row
        for row in [*map(json.loads, text.splitlines()), *rows]
    }
    return list(by_program.values())


COLUMNS = (
    "program",
    "Triton calls",
    "launches",
    "loops",
    "thunks in CUDA graphs",
    "temporary, MB",
)


def cells(row: dict) -> list[str]:
    """Texts of COLUMNS."""
    in_graphs = "not counted"  # in rows of an earlier state of this script
    if "thunks" in row:
        in_graphs = f"{row['thunks_in_graphs']} of {row['thunks']}, in {row['graphs']}"
    numbers = (str(row[key]) for key in ("triton", "launches", "loops"))
    return [row["program"], *numbers, in_graphs, f"{row['temporary_bytes'] / 1e6:,.0f}"]


def fill(doc: Path, rows: list[dict]) -> None:
    """Writes the table between the markers `<!-- ahead -->` and `<!-- end -->`."""
    lines = []
    for row in rows:
        name, *numbers = cells(row)
        lines.append((name + ("" if row["kernels"] else ", without kernels"), *numbers))
    text = doc.read_text(encoding="utf-8")
    write_atomically(doc, with_table(text, "ahead", markdown_table(COLUMNS, lines)))


if __name__ == "__main__":
    sys.exit(main())
