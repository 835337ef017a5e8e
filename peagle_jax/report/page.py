"""report.html: the records' table, the pictures, the training runs and a marked text on one page that needs no other file."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from peagle_jax.atomic_write import write_atomically
from peagle_jax.report.records import COLUMNS, cells, headline

STYLE = """
body { font: 15px/1.55 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430 }
h1 { font-size: 1.7rem; margin-bottom: .2rem } h2 { margin-top: 2.4rem; border-bottom: 1px solid #d9dee6; padding-bottom: .2rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: 13.5px }
th, td { padding: .3rem .55rem; border-bottom: 1px solid #e3e7ec; text-align: right; vertical-align: top } th { font-weight: 600 }
td:first-child, th:first-child { text-align: left; white-space: nowrap } tr.none td { background: #f1f3f6 }
table.facts td { text-align: left }
figure { margin: 1.4rem 0 } img { max-width: 100%; height: auto } figcaption, .note { color: #5a6473; font-size: 13.5px }
pre { background: #f4f6f9; padding: 1rem; white-space: pre-wrap; border-radius: 6px; font-size: 13.5px; line-height: 1.6 }
mark { background: #a9dfe5; border-radius: 2px } pre .prompt { color: #7a8594 } dl { font-size: 13.5px } dt { font-weight: 600 }
dd { margin: 0 0 .3rem 1.2rem } .scroll { overflow-x: auto } .big { font-size: 1.15rem; margin: .8rem 0 }
"""


def write_report(
    out: Path,
    records: Sequence[dict],
    *,
    pictures: Sequence[tuple[str, str]],
    sample: Sequence[tuple[str, bool]] | None,
    runs: Sequence[tuple[str, dict]],
    prompt: str = "",
    sample_k: int | None = None,
) -> Path:
    """Writes `out`/report.html, whole or not at all.

    Args:
      pictures: (PNG in `out`, caption); a picture named method.png comes first.
      sample: (text piece, whether it was an accepted draft), in order; decoded with `sample_k` drafts a step after `prompt`.
      runs: (title, facts) of each model or training run.
    """
    first = [p for p in pictures if p[0] == "method.png"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>P-EAGLE in JAX</title>",
        f"<style>{STYLE}</style><h1>P-EAGLE in JAX</h1>",
        *(f"<p class=big>{html.escape(line)}</p>" for line in headline(records)),
        *(_figure(out, *p) for p in first),
        *_table(records),
        *(_figure(out, *p) for p in pictures if p not in first),
        *_text(sample, prompt, sample_k),
        *_facts(runs),
        _origin(records),
    ]
    page = out / "report.html"
    write_atomically(page, "\n".join(parts) + "\n")
    return page


def _figure(out: Path, name: str, caption: str) -> str:
    data = base64.b64encode((out / name).read_bytes()).decode()
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def _table(records: Sequence[dict]) -> list[str]:
    e, parts = html.escape, []
    head = "".join(f'<th title="{e(meaning)}">{e(title)}</th>' for title, meaning in COLUMNS)
    for temperature in sorted({r["temperature"] for r in records}):
        here = [r for r in records if r["temperature"] == temperature]
        rows = "".join(
            f'<tr class="{r["method"]}">' + "".join(f"<td>{e(c)}</td>" for c in cells(r)) + "</tr>"
            for r in here
        )
        title = (
            "Speed and acceptance, greedy"
            if temperature == 0
            else f"The same at temperature {temperature:g}"
        )
        parts.append(
            f"<h2>{title}</h2><div class=scroll><table><tr>{head}</tr>{rows}</table></div>"
        )
    meanings = "".join(f"<dt>{e(t)}</dt><dd>{e(m)}</dd>" for t, m in COLUMNS if m)
    return (
        [*parts, f"<details><summary>What the columns mean</summary><dl>{meanings}</dl></details>"]
        if parts
        else []
    )


def _text(sample, prompt: str, k: int | None) -> list[str]:
    if not sample:
        return []
    marked = "".join(
        f"<mark>{html.escape(text)}</mark>" if drafted else html.escape(text)
        for text, drafted in sample
    )
    return [
        "<h2>A text, as it was written</h2>"
        f"<p class=note>K = {k}, greedy; of all prompts the one with the longest steps. Grey: the prompt. "
        "Blue: drafted by the P-EAGLE head and accepted. Plain: the target's own tokens, one a step.</p>",
        f"<pre><span class=prompt>{html.escape(prompt)}</span>{marked}</pre>",
    ]


def _facts(runs) -> list[str]:
    parts = []
    for title, facts in runs:
        rows = "".join(
            f"<tr><td>{html.escape(k.replace('_', ' '))}</td><td>{html.escape(str(v))}</td></tr>"
            for k, v in facts.items()
        )
        parts.append(f"<h2>{html.escape(title)}</h2><table class=facts>{rows}</table>")
    return parts


def _origin(records: Sequence[dict]) -> str:
    if not records:
        return ""
    keys = (
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
    facts = {key: records[0][key] for key in keys if records[0].get(key) is not None} | {
        "records": "results.jsonl, beside this page"
    }
    return _facts([("Where the numbers come from", facts)])[0]
