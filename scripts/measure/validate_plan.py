"""Holds `peagle plan` against steps that were measured, here and by others.

    .venv/bin/python scripts/measure/validate_plan.py [--record results/plan_validation.jsonl] \\
        [--doc docs/plan.md]

Steps of a group share a device and an engine. Each is planned with constants that were fitted to
the others of its group, at most two (plan_fit.py); those of groups without constants are planned
with what `peagle plan` has built in. Nothing is run but arithmetic.
"""

import argparse
import dataclasses
import functools
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from plan_fit import GOOD, Step, errors_left_out, fit

from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints.runs import open_head
from peagle_jax.layers import FINAL_HIDDEN_STATE
from peagle_jax.pipelines.devices import DEVICES, Device
from peagle_jax.pipelines.model_costs import ModelCosts, model_costs
from peagle_jax.pipelines.plan_models import default_head, head_costs, planned_target
from peagle_jax.pipelines.tracing import abstract_head, abstract_target
from peagle_jax.provenance import append_rows
from peagle_jax.report.published_tables import PublishedTable, read_tables

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "peagle_jax/assets"
BEGIN, END = "<!-- plan: written by scripts/measure/validate_plan.py -->", "<!-- end -->"
# Bytes/s and FLOP/s with which fits of our own rows begin. Both are fitted.
CPU = Device(
    name="a CPU with 2 cores",
    memory=None,
    bandwidth=25e9,
    rates={4: 100e9, 2: 100e9, 1: 100e9},
    overlaps=False,
    layer_seconds=0.0,
    source="fitted",
)
DEMO_SLOTS = 256  # of a demo's caches: prompts of 48 tokens, and up to 128 new ones
# Where contexts grow, reading keys and values decides; where rows do, products.
BY_CONTEXT, BY_ROWS = ("bandwidth", "cache_bandwidth"), ("bandwidth", "rate")
COMMITTED = 2.0  # tokens that a step of step_time.py commits: its prompts are random


@dataclasses.dataclass(frozen=True)
class Group:
    """Steps of one engine on one device.

    Attributes:
      name: of the group.
      device: on which they ran.
      constants: that are fitted; none: the device's own are taken.
      steps: all of them.
    """

    name: str
    device: Device
    constants: tuple[str, ...]
    steps: list[Step]

    def errors(self) -> list[float]:
        """Of every step, its plan over its measurement, less 1."""
        if not self.constants:
            return [step.planned(self.device) / step.seconds - 1 for step in self.steps]
        return errors_left_out(self.device, self.steps, self.constants)

    def fitted(self) -> dict[str, float]:
        """The constants, fitted to all steps."""
        return fit(self.device, self.steps, self.constants) if self.constants else {}


# ---------------------------------------------------------------- steps measured here


@functools.cache
def packaged(dtype: str) -> dict[str, ModelCosts]:
    """Costs of the packaged target ("none") and heads, by method; caches are float32."""
    target = abstract_target(
        ASSETS / "target/config.json", dtype=jnp.dtype(dtype), aux_hidden_state_layers=()
    )
    costs = {"none": model_costs(target, target, jnp.float32)}
    for method in ("peagle", "eagle3"):
        config = open_head(ASSETS / method, target.config.layers).config
        head = abstract_head(dataclasses.replace(config, dtype=jnp.dtype(dtype)))
        costs[method] = model_costs(head, head, jnp.float32)
    return costs


def own_step(row: dict, seconds: float, slots: int, length: float) -> Step:
    """A row of ours as a step. Attention here reads every slot of the cache."""
    method = "none" if row["method"] == "plain" else row["method"]
    costs = packaged(row["dtype"])
    return Step(
        label=f"{method}, K = {row['k']}, batch {row['batch_size']}, {slots} slots",
        target=costs["none"],
        head=None if method == "none" else costs[method],
        method=method,
        k=row["k"],
        length=length,
        concurrency=row["batch_size"],
        context=slots,
        seconds=seconds,
    )


def own_groups() -> list[Group]:
    """Rows of the two latest demos and of step_time.py, by machine, dtype and run."""
    groups: dict[str, list[Step]] = {}
    rows = read_rows(ROOT / "results/demo.jsonl")
    timed = [row for row in rows if "step_seconds" in row and row.get("temperature") == 0]
    # a plan knows one engine, and not several that share the rows
    timed = [row for row in timed if row.get("num_threads", 1) == 1]
    latest = {row["device"]: row["commit"] for row in timed if row["peagle_jax"]}
    for row in timed:
        if row["commit"] == latest[row["device"]] and "batch_size" in row:
            name = f"{row['name']}, {row['device'].split()[0]}, {row['dtype']}"
            length = row["acceptance_length"] or 1.0
            step = own_step(row, row["step_seconds"], DEMO_SLOTS, length)
            groups.setdefault(name, []).append(step)
    runs: dict[tuple[str, str], int] = {}
    for row in read_rows(ROOT / "results/step_time.jsonl"):
        grows = re.search(r"--contexts \d+ \d+", row["command"]) is not None
        what = "by context" if grows else "by batch"
        # a machine's speed changes from run to run: others use it, too
        day = row["time"][:10]
        run = runs.setdefault((day, row["command"]), len(runs) + 1)
        machine = f"{row['device'].split('(')[0]}, {row['dtype']}"
        name = f"step_time {what}, {machine}, {day}, run {run}"
        length = COMMITTED if row["k"] else 1.0
        step = own_step(row, row["ms"] / 1e3, row["slots"], length)
        groups.setdefault(name, []).append(step)
    return [
        Group(name, CPU, BY_CONTEXT if "by context" in name else BY_ROWS, steps)
        for name, steps in sorted(groups.items())
    ]


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL; those of former versions lack some keys."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{"peagle_jax": None} | row for row in rows]


# ---------------------------------------------------------------- steps that others measured


@functools.cache
def published_target(name: str, dtype: str):
    """A target of configs/targets."""
    return planned_target(ROOT / f"configs/targets/{name}.json", dtype, "auto")


def published_head(table: PublishedTable, method: str, target_config) -> ModelCosts:
    """A head of the shapes that the table says."""
    shape = table.facts["heads"][method]
    config = default_head(target_config, method, shape["layers"])
    if method == "eagle":
        config = dataclasses.replace(config, aux_hidden_state_layers=(FINAL_HIDDEN_STATE,))
    draft_vocab = shape["draft_vocab"] or config.vocab
    return head_costs(dataclasses.replace(config, draft_vocab=draft_vocab))


def published_steps(table: PublishedTable, methods: Sequence[str]) -> list[Step]:
    """The rows of some methods whose step can be told."""
    steps = []
    for row in table.rows:
        seconds = table.step_seconds(row)
        if row["method"] not in methods or seconds is None:
            continue
        name = row.get("target", table.facts["target"])
        target = published_target(name, table.facts["dtype"])
        is_plain = row["method"] == "none"
        length = table.acceptance_length(row)
        assert length is not None
        steps.append(
            Step(
                label=f"{row['method']}, K = {row['k']}, concurrency {row['concurrency']}, {name}",
                target=target.costs,
                head=None if is_plain else published_head(table, row["method"], target.config),
                method=row["method"],
                k=row["k"],
                length=length,
                concurrency=row["concurrency"],
                context=table.facts["context"],
                seconds=seconds,
            )
        )
    return steps


# the tables of P-EAGLE's paper, which have an acceptance length at K = 5, and their targets
PAPER = {
    "paper_gpt_oss_20b": "GPT-OSS-20B",
    "paper_gpt_oss_120b": "GPT-OSS-120B",
    "paper_qwen3_coder": "Qwen3-Coder-30B-A3B",
}
NO_OVERHEAD = {"layer_seconds": 0.0, "pass_seconds": 0.0}


def published_groups() -> list[Group]:
    """With two constants of the engine, or of the machine where that is unknown, or with none."""
    tables = read_tables(ROOT / "results/published")
    engine = "layer_seconds", "pass_seconds"
    groups = [
        ("vllm_20780", "EAGLE-3", ("none", "eagle3"), engine),
        ("vllm_20780", "EAGLE-1", ("none", "eagle"), engine),
        ("vllm_16937", "both", ("none", "eagle", "eagle3"), engine),
        ("vllm_16035", "EAGLE-1", ("none", "eagle"), engine),
        ("vllm_32628", "EAGLE-3", ("eagle3",), ("bandwidth", "layer_seconds")),
        ("vllm_32887", "plain", ("none",), ()),
        ("aws_qwen3_coder", "plain", ("none",), ()),
        ("sglang_h200", "plain", ("none",), ()),
        ("vllm_62258", "plain", ("none",), ()),
        *((name, f"{of}, K = 5", ("eagle3", "peagle"), engine) for name, of in PAPER.items()),
    ]
    return [
        Group(
            f"{tables[name].facts['source']}: {what}",
            # nothing but the fitted constants is taken from other tables
            dataclasses.replace(DEVICES[tables[name].facts["device"]], **NO_OVERHEAD)
            if constants
            else DEVICES[tables[name].facts["device"]],
            constants,
            published_steps(tables[name], methods),
        )
        for name, what, methods, constants in groups
    ]


# ---------------------------------------------------------------- output


def summary(group: Group, errors: Sequence[float]) -> dict:
    """What is recorded of a group."""
    misses = [
        f"{step.label}: {100 * error:+.0f} %"
        for step, error in zip(group.steps, errors, strict=True)
        if abs(error) > GOOD
    ]
    return {
        "name": "plan_validation",
        "group": group.name,
        "machine": group.device.name,
        "constants": group.fitted(),
        "steps": len(errors),
        "within_15_percent": len(errors) - len(misses),
        "worst": max(errors, key=abs),
        "misses": misses,
    }


def markdown(rows: Sequence[dict]) -> str:
    """The table of docs/plan.md."""
    lines = [
        "| steps of | fitted to the others | within 15 % | worst |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        fitted = ", ".join(row["constants"]) or "nothing"
        good = f"{row['within_15_percent']} of {row['steps']}"
        fitted = fitted.replace("_", " ")
        lines.append(f"| {row['group']} | {fitted} | {good} | {100 * row['worst']:+.0f} % |")
    lines += ["", "Misses, each planned over measured:", ""]
    for row in rows:
        if row["misses"]:
            of_group = f"{row['group']}: {'; '.join(row['misses'])}."
            lines.append(textwrap.fill(f"- {of_group}", 100, subsequent_indent="  "))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    parser.add_argument("--doc", type=Path, help="write the table between its marks in this file")
    args = parser.parse_args()
    groups = own_groups() + published_groups()
    rows = [summary(group, group.errors()) for group in groups]
    table = Table("steps of", "constants", "within 15 %", "worst", title="peagle plan")
    for row in rows:
        constants = ", ".join(f"{name} {value:.3g}" for name, value in row["constants"].items())
        good = f"{row['within_15_percent']} of {row['steps']}"
        table.add_row(row["group"], constants, good, f"{100 * row['worst']:+.0f} %")
    Console(width=140).print(table)
    for row in rows:
        for miss in row["misses"]:
            print(f"{row['group']}: {miss}")
    if args.record:
        append_rows(args.record, rows, "scripts/measure/validate_plan.py")
    if args.doc:
        text = args.doc.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        after = rest.split(END, 1)[1]
        body = f"{before}{BEGIN}\n{markdown(rows)}\n{END}{after}"
        write_atomically(args.doc, body)


if __name__ == "__main__":
    main()
