"""report.html: statements, tables, plots, facts and a marked text, on one self-contained page."""

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle_jax.atomic_write import write_atomically
from peagle_jax.report import peers
from peagle_jax.report.records import COLUMNS, cells
from peagle_jax.report.statements import (
    falls_short,
    headline,
    sample_caption,
    slowdown_reasons,
)

STYLE = """
body { font: 15px/1.55 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem;
  color: #1d2430 }
h1 { font-size: 1.7rem; margin-bottom: .2rem }
h2 { margin-top: 2.4rem; border-bottom: 1px solid #d9dee6; padding-bottom: .2rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums;
  font-size: 13.5px }
th, td { padding: .3rem .55rem; border-bottom: 1px solid #e3e7ec; text-align: right;
  vertical-align: top }
th { font-weight: 600 }
td:first-child, th:first-child { text-align: left; white-space: nowrap }
tr.none td { background: #f1f3f6 }
table.facts td { text-align: left }
figure { margin: 1.4rem 0 } img { max-width: 100%; height: auto }
figcaption, .note { color: #4f5866; font-size: 13.5px }
pre { background: #f4f6f9; padding: 1rem; white-space: pre-wrap; border-radius: 6px;
  font-size: 13.5px; line-height: 1.6 }
mark { background: #a9dfe5; color: inherit; border-radius: 2px } pre .prompt { color: #5a6473 }
dl, details { font-size: 13.5px } dt { font-weight: 600 } dd { margin: 0 0 .3rem 1.2rem }
.scroll { overflow-x: auto } .big { font-size: 1.15rem; margin: .8rem 0 }
"""
HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8>"
    "<meta name=viewport content='width=device-width'><title>P-EAGLE in JAX</title>"
)
# Keys of a result row that say where it comes from.
ORIGIN_KEYS = (
    "time",
    "device",
    "python",
    "peagle_jax",
    "jax",
    "flax",
    "commit",
    "dirty",
    "command",
    "name",
    "target",
    "drafters",
    "dtype",
    "seed",
)


@dataclasses.dataclass(frozen=True)
class SampleText:
    """An answer as text, with its drafted parts marked.

    Attributes:
      prompt: the text before it.
      pieces: (text, whether it was drafted and accepted), in order.
      k: tokens drafted per step.
      temperature: 0 for greedy decoding.
      repeated_4grams: share of its 4-grams that it had written before.
      num_candidates: answers that it was chosen from, as the one that repeats itself least.
    """

    prompt: str
    pieces: Sequence[tuple[str, bool]]
    k: int
    temperature: float
    repeated_4grams: float
    num_candidates: int


def write_report(
    out: Path,
    records: Sequence[dict],
    *,
    pictures: Sequence[tuple[str, str]],
    sample: SampleText | None,
    runs: Sequence[tuple[str, Mapping[str, Any]]],
    peer_rows: Sequence[dict] = (),
) -> Path:
    """Writes `out`/report.html, whole or not at all.

    Args:
      records: result rows.
      pictures: (PNG in `out`, caption). method.png comes first, if there is one.
      sample: an answer to show.
      runs: (title, facts) of each model or training run.
      peer_rows: of `peers.newest`, recorded earlier; their table comes first.
    """
    method = [picture for picture in pictures if picture[0] == "method.png"]
    plots = [picture for picture in pictures if picture[0] != "method.png"]
    parts = [
        HEAD,
        f"<style>{STYLE}</style><h1>P-EAGLE in JAX</h1>",
        *(f"<p class=big>{html.escape(line)}</p>" for line in first_lines(records, peer_rows)),
        *(_figure(out, name, caption) for name, caption in method),
        *_peers(out, peer_rows),
        *_tables(records),
        *(_figure(out, name, caption) for name, caption in plots),
        *([] if sample is None else [_sample(sample)]),
        *(_facts(title, facts) for title, facts in runs),
        *([] if not records else [_origin(records[0])]),
    ]
    page = out / "report.html"
    write_atomically(page, "\n".join(parts) + "\n")
    return page


def first_lines(records: Sequence[dict], peer_rows: Sequence[dict]) -> list[str]:
    """The report's first lines. Where P-EAGLE gains little, vLLM's rows say what it gains there."""
    lines = headline(records)
    if falls_short(records) and (line := peers.gains_in_vllm(peer_rows)):
        lines.append(line)
    return lines


def _figure(out: Path, name: str, caption: str) -> str:
    """A picture, as data within the page."""
    data = base64.b64encode((out / name).read_bytes()).decode()
    text = html.escape(caption)
    image = f'<img alt="{text}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def _peers(out: Path, rows: Sequence[dict]) -> list[str]:
    """The table and the picture of the comparison with other engines."""
    if not rows:
        return []
    peers.draw(rows, out / "peers.png")
    header, *lines = [[html.escape(cell) for cell in line] for line in peers.table(rows)]
    titles = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines
    )
    return [
        "<h2>Beside vLLM and transformers</h2>",
        "<p class=note>Recorded earlier, by scripts/peers/compare_speed.py.</p>",
        f"<div class=scroll><table><tr>{titles}</tr>{body}</table></div>",
        _figure(out, "peers.png", peers.caption(rows)),
    ]


def _tables(records: Sequence[dict]) -> list[str]:
    """A table for each temperature, reasons of slow rows, and what the columns mean."""
    if not records:
        return []
    parts = []
    for temperature in sorted({r["temperature"] for r in records}):
        rows = [r for r in records if r["temperature"] == temperature]
        title = f"The same at temperature {temperature:g}"
        if temperature == 0:
            title = "Speed and acceptance, greedy"
        parts.append(f"<h2>{title}</h2>{_table(rows)}")
    if reasons := slowdown_reasons(records):
        items = "".join(f"<li>{html.escape(reason)}</li>" for reason in reasons)
        parts.append(_details("Why some rows are slower than plain decoding", f"<ul>{items}</ul>"))
    meanings = "".join(
        f"<dt>{html.escape(title)}</dt><dd>{html.escape(meaning)}</dd>"
        for title, meaning in COLUMNS
        if meaning
    )
    parts.append(_details("What the columns mean", f"<dl>{meanings}</dl>"))
    return parts


def _details(summary: str, content: str) -> str:
    """Content that is shown when its summary is clicked."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def _table(records: Sequence[dict]) -> str:
    titles = "".join(
        f'<th title="{html.escape(meaning)}">{html.escape(title)}</th>'
        for title, meaning in COLUMNS
    )
    rows = "".join(map(_row, records))
    return f"<div class=scroll><table><tr>{titles}</tr>{rows}</table></div>"


def _row(record: dict) -> str:
    tds = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(record))
    return f'<tr class="{record["method"]}">{tds}</tr>'


def _sample(sample: SampleText) -> str:
    """The text, its accepted drafts marked."""
    pieces = []
    for text, is_draft in sample.pieces:
        escaped = html.escape(text)
        pieces.append(f"<mark>{escaped}</mark>" if is_draft else escaped)
    caption = sample_caption(
        sample.k, sample.temperature, sample.repeated_4grams, sample.num_candidates
    )
    prompt = f"<span class=prompt>{html.escape(sample.prompt)}</span>"
    return (
        "<h2>A text, as it was written</h2>"
        f"<p class=note>{html.escape(caption)}</p><pre>{prompt}{''.join(pieces)}</pre>"
    )


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    """A table of names and values. Numbers are rounded to four digits."""
    rows = "".join(
        f"<tr><td>{html.escape(name.replace('_', ' '))}</td>"
        f"<td>{html.escape(rounded(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<h2>{html.escape(title)}</h2><table class=facts>{rows}</table>"


def rounded(value: Any) -> str:
    """A value as text, with every float in it rounded to four significant digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(rounded, value)) if value else "none"
    return "none" if value is None else str(value)


def _origin(record: dict) -> str:
    """Machine, versions and command of the result rows."""
    facts = {key: record[key] for key in ORIGIN_KEYS if record.get(key) is not None}
    facts["rows"] = "results.jsonl, beside this page"
    return _facts("Where the numbers come from", facts)
