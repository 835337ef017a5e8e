"""`peagle plan`: what decoding will reach, before a device is rented."""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peagle_jax.cli.arguments import check_at_least, parse_numbers
from peagle_jax.cli.output import print_marked, say
from peagle_jax.types import InputError

if TYPE_CHECKING:
    from peagle_jax.pipelines.decoding_plan import PlanRow

NUM_SENSITIVE = 2  # inputs that are named in a row of the table


def plan(arguments: argparse.Namespace) -> int:
    """Plans decoding on a device, prints a table, and draws it with --out."""
    import jax

    from peagle_jax.pipelines.acceptance_rates import PUBLISHED, read_rates
    from peagle_jax.pipelines.decoding_plan import Models, plan_row
    from peagle_jax.pipelines.devices import THIS_MACHINE, find_device
    from peagle_jax.pipelines.plan_models import (
        cache_sizes,
        head_costs,
        planned_heads,
        planned_target,
    )
    from peagle_jax.pipelines.training_plan import TARGET_CONFIGS, find_config

    concurrencies = parse_numbers("--concurrency", arguments.concurrency)
    contexts = parse_tokens("--context", arguments.context)
    check_at_least("--head-layers", arguments.head_layers, 1)
    rates = {method: tuple(x / 100 for x in of_method) for method, of_method in PUBLISHED.items()}
    given = dict(read_rates("--acceptance", text) for text in arguments.acceptance)
    path = find_config(arguments.target, TARGET_CONFIGS)
    on_cpu = arguments.device == THIS_MACHINE and jax.default_backend() == "cpu"
    target = planned_target(path, arguments.dtype, arguments.kv_cache_dtype, on_cpu)
    if max(contexts) > target.config.context:
        rule = f"must be at most {target.config.context}, the target's longest sequence"
        next_step = f"give --context {min(1024, target.config.context)}"
        raise InputError("--context", rule, max(contexts), next_step)
    heads = planned_heads(target, arguments.head_layers, arguments.drafter)
    device = find_device(arguments.device)
    models = Models(
        target=target.costs,
        heads={method: head_costs(c, on_cpu=on_cpu) for method, c in heads.items()},
        rates={**rates, **given},
        routing=arguments.routing,
    )
    size = cache_sizes(target, heads, on_cpu)
    rows = [
        plan_row(models, device, concurrency, context, size(concurrency, context))
        for context in contexts
        for concurrency in concurrencies
    ]
    name = path.parent.name if path.stem == "config" else path.stem
    title = f"{name}, {target.dtype}, on one {device.name}"
    print_marked(plan_table(rows, title))
    for note in notes(models, device, contexts, set(given)):
        say(note)
    if arguments.out is not None:
        write_plan(arguments.out, rows, title)
    return 0


def parse_tokens(option: str, text: str) -> list[int]:
    """Reads numbers of tokens with commas between them; k stands for 1,024.

    Raises:
      InputError: a part is no such number, or 0.
    """
    parts = [re.fullmatch(r"(\d+)(k?)", part, re.IGNORECASE) for part in text.split(",")]
    numbers = [int(part[1]) * (1024 if part[2] else 1) if part else 0 for part in parts]
    if not all(numbers):
        rule = "must be numbers of tokens, separated by commas"
        raise InputError(option, rule, text or "nothing", f"give {option} 1k,8k")
    return numbers


def plan_table(rows: "Sequence[PlanRow]", title: str):
    """The rows for people."""
    from rich.table import Table

    columns = ("context", "concurrency", "plain", "EAGLE-3", "P-EAGLE", "bound by", "memory")
    table = Table(*columns, "speedup most sensitive to", title=title)
    for row in rows:
        cells = [f"{row.plain.tokens_per_second:,.0f}"]
        for method in ("eagle3", "peagle"):
            choice = row.best[method]
            speedup = choice.tokens_per_second / row.plain.tokens_per_second
            cells.append(f"{choice.tokens_per_second:,.0f} (K {choice.k}, {speedup:.2f})")
        fastest = max(row.best.values(), key=lambda choice: choice.tokens_per_second)
        digits = 0 if row.memory >= 1e10 else 2
        memory = f"{row.memory / 1e9:,.{digits}f} GB" + (", too much" if row.fits is False else "")
        effects = list(row.sensitivity.items())[:NUM_SENSITIVE]
        sensitive = ", ".join(f"{name} {100 * effect:+.0f} %" for name, effect in effects)
        table.add_row(
            f"{row.context:,}",
            str(row.concurrency),
            *cells,
            f"{row.plain.bound_by}; {fastest.bound_by}",
            memory,
            sensitive,
        )
    return table


def notes(models, device, contexts: Sequence[int], given: set[str]) -> list[str]:
    """What the numbers rest on, and where speculation pays."""
    from peagle_jax.pipelines.acceptance_rates import PUBLISHED_SOURCE
    from peagle_jax.pipelines.decoding_plan import MAX_CONCURRENCY, concurrencies_that_pay
    from peagle_jax.report.records import NAMES

    lines = [
        "tokens/s of all sequences, decoding alone (no prompts); in brackets the best K and the "
        "speedup; bound by: plain decoding, and the fastest method; sensitive: to an input a fifth "
        "larger",
        f"device: {device.source}; weights are read at {device.bandwidth / 1e12:.3g} TB/s",
    ]
    if device.is_floor:
        lines.append("nobody measured what a layer costs there besides: times are floors")
    else:
        layer, forward = (device.layer_seconds or 0) * 1e6, device.pass_seconds * 1e6
        lines.append(f"besides, {layer:.0f} us a layer and {forward:.0f} us a pass of the head")
    for method, rates in models.rates.items():
        source = "given" if method in given else PUBLISHED_SOURCE
        shown = " ".join(f"{100 * rate:.3g}" for rate in rates)
        lines.append(f"accepted of {NAMES[method]}, by position: {shown} %; {source}")
    for method in models.heads:
        for context in contexts:
            ranges = concurrencies_that_pay(models, device, method, context)
            words = " and ".join(
                f"{first} to {last}" if last > first else str(first) for first, last in ranges
            )
            where = f"of 1 to {MAX_CONCURRENCY}, at {context:,} tokens"
            lines.append(f"{NAMES[method]} pays at a concurrency of {words or 'none'} ({where})")
    return lines


def write_plan(out: Path, rows: "Sequence[PlanRow]", title: str) -> None:
    """Writes plan.jsonl and plan.png into a folder.

    Raises:
      InputError: the folder cannot be written.
    """
    from peagle_jax.atomic_write import write_atomically
    from peagle_jax.report.plan_picture import draw_plan

    panels: dict[str, dict[str, list]] = {}
    for row in rows:
        panel = panels.setdefault(f"{row.context:,} tokens each", {})
        for method, choice in {"none": row.plain, **row.best}.items():
            point = row.concurrency, choice.tokens_per_second, choice.k
            panel.setdefault(method, []).append(point)
    lines = [json.dumps({"name": "plan", "of": title} | dataclasses.asdict(row)) for row in rows]
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "plan.jsonl", "".join(f"{line}\n" for line in lines))
        draw_plan(out / "plan.png", title, panels)
    except OSError as error:
        rule = "the folder must be writable"
        raise InputError(out, rule, error.strerror, "choose another") from None
    say(f"rows and picture: {out}")
