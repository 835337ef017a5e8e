"""Measurement records -> JSONL, a table for the terminal, and a self-contained report.html."""

import html
import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from peagle_jax.types import InputError

NAMES = {"none": "plain decoding", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
COLUMNS = (  # title, what it means
    ("method", ""), ("K", "tokens drafted a step"), ("batch", "prompts decoded together"),
    ("tokens/s", "whole calls, prompt included; median of the repeats"), ("speedup", "over plain decoding, same run"),
    ("acceptance length", "tokens emitted a target forward, pooled: 1 + accepted/drafts"),
    ("accepted per position", "share of drafts accepted, %"), ("draft ms", "one drafting of K tokens"),
    ("verify ms", "one target forward over K+1 tokens"),
    ("break-even", "acceptance length at which a step costs what plain decoding does"),
    ("lossless", "greedy output equals plain decoding's, token for token"),
)  # fmt: skip
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430 }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #d9dee6; text-align: right } th { font-weight: 600 }
td:first-child, th:first-child { text-align: left } tr.none td { background: #f4f6f9 }
pre { background: #f4f6f9; padding: 1rem; white-space: pre-wrap; border-radius: 6px }
mark { background: #bfe6c8; border-radius: 2px } dt { font-weight: 600 } .note { color: #5a6473 }
"""


class Records:
    """results.jsonl: one line a measurement, appended, never edited."""

    def __init__(self, out: Path):
        self.path = out / "results.jsonl"
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise InputError(out, "the output folder must be writable", error.strerror, "choose another place") from None

    def add(self, record: dict) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def one_line(r: dict) -> str:
    length = f", acceptance length {r['acceptance_length']:.2f}" if r["acceptance_length"] else ""
    return (
        f"{NAMES[r['method']]:>14}  K={r['k']:<2} batch {r['batch']:<2} {r['tokens_per_second']:8.1f} tokens/s  {r['speedup']:.2f}x{length}"
    )


def cells(r: dict) -> list[str]:
    milli = lambda key: f"{1e3 * r[key]:.2f}" if key in r else ""  # noqa: E731
    plain = r["method"] == "none"
    lossless = (
        ""
        if plain
        else ("yes" if r["lossless"] else f"NO: {r['different']} differ") + (f" ({r['near_ties']} near ties)" if r["near_ties"] else "")
    )
    return [
        NAMES[r["method"]], str(r["k"] or ""), str(r["batch"]), f"{r['tokens_per_second']:.1f}", f"{r['speedup']:.2f}",
        f"{r['acceptance_length']:.2f}" if r["acceptance_length"] else "", " ".join(f"{100 * a:.0f}" for a in r["accepted_per_position"]),
        milli("draft_seconds"), milli("step_seconds") if plain else milli("verify_seconds"),
        f"{r['break_even']:.2f}" if "break_even" in r else "", lossless,
    ]  # fmt: skip


def table(records: Sequence[dict]) -> Table:
    out = Table(*(title for title, _ in COLUMNS))
    for record in records:
        out.add_row(*cells(record))
    return out


def write_report(
    out: Path, records: Sequence[dict], *, sample: Sequence[tuple[str, bool]] | None, runs: Sequence[tuple[str, dict]], prompt: str = ""
) -> Path:
    """report.html: the table, what its columns mean, the training runs, a text with accepted drafts marked.

    Args:
      sample: (text piece, whether it was an accepted draft), in order.
      runs: (title, facts) of each training run.
    """
    e = html.escape
    head = "".join(f'<th title="{e(meaning)}">{e(title)}</th>' for title, meaning in COLUMNS)
    body = "".join(f'<tr class="{r["method"]}">' + "".join(f"<td>{e(c)}</td>" for c in cells(r)) + "</tr>" for r in records)
    meanings = "".join(f"<dt>{e(t)}</dt><dd>{e(m)}</dd>" for t, m in COLUMNS if m)
    parts = [
        "<!doctype html><meta charset=utf-8><title>P-EAGLE in JAX</title>", f"<style>{STYLE}</style>", "<h1>P-EAGLE in JAX</h1>",
        "<p>A draft head proposes K tokens, the target reads them all in one forward and keeps those it would have written "
        "itself. EAGLE-3 drafts one forward a token; P-EAGLE drafts all K in one.</p>",
        f"<h2>Speed and acceptance, greedy</h2><table><tr>{head}</tr>{body}</table><dl>{meanings}</dl>",
    ]  # fmt: skip
    if sample:
        marked = "".join(f"<mark>{e(text)}</mark>" if drafted else e(text) for text, drafted in sample)
        parts.append(f'<h2>A text</h2><p class=note>Green: drafted by the P-EAGLE head and accepted. Grey first: the prompt.</p>'
                     f'<pre><span class=note>{e(prompt)}</span>{marked}</pre>')  # fmt: skip
    for title, facts in runs:
        rows = "".join(f"<tr><td>{e(k.replace('_', ' '))}</td><td>{e(str(v))}</td></tr>" for k, v in facts.items())
        parts.append(f"<h2>{e(title)}</h2><table>{rows}</table>")
    if records:
        keys = ("time", "device", "python", "jax", "flax", "commit", "dirty", "command")
        parts.append("<h2>Where the numbers come from</h2><p class=note>" + e("; ".join(f"{k} {records[0].get(k)}" for k in keys)) + "</p>")
    page = out / "report.html"
    work = page.with_name(".report.html.tmp")
    work.write_text("\n".join(parts) + "\n", encoding="utf-8")
    work.replace(page)
    return page
