"""Measurement records -> JSONL, the cells of a table, one line of text, and what they say in words."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from peagle_jax.types import InputError

NAMES = {"none": "plain decoding", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
COLUMNS = (  # title, what it means
    ("method", ""),
    ("K", "tokens drafted a step"),
    ("batch", "prompts decoded together"),
    ("tokens/s", "whole calls, prompt included; median of the rounds"),
    ("speedup", "over plain decoding of the same round; median of the rounds"),
    ("acceptance length", "tokens emitted a target forward, pooled: 1 + accepted/drafts"),
    (
        "break-even",
        "acceptance length from which such a step pays: the one reached over the speedup reached",
    ),
    ("accepted per position", "share of drafts accepted at each position, %"),
    ("draft ms", "one drafting of K tokens, by itself"),
    ("verify ms", "one target forward over K+1 tokens, by itself"),
    ("step ms", "a whole call without its prompt, over its steps"),
    ("repeated", "4-grams that the text had written before, %: looping text flatters a drafter"),
    ("lossless", "greedy output equals plain decoding's, token for token"),
)


class Records:
    """results.jsonl: one line a measurement, appended, never edited."""

    def __init__(self, out: Path):
        self.path = out / "results.jsonl"
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise InputError(
                out, "the output folder must be writable", error.strerror, "choose another place"
            ) from None

    def add(self, record: dict) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def one_line(r: dict) -> str:
    length = f", acceptance length {r['acceptance_length']:.2f}" if r["acceptance_length"] else ""
    how = f", temperature {r['temperature']:g}" if r["temperature"] else ""
    speed = f"{r['tokens_per_second']:8.1f} tokens/s  {r['speedup']:.2f}x"
    return f"{NAMES[r['method']]:>14}  K={r['k']:<2} batch {r['batch']:<2} {speed}{length}{how}"


def cells(r: dict) -> list[str]:
    def milli(key):
        return f"{1e3 * r[key]:.2f}" if r.get(key) else ""

    lossless = ""
    if "lossless" in r:
        lossless = "yes" if r["lossless"] else f"NO: {r['different']} differ"
        lossless += f" ({r['near_ties']} near ties)" if r["near_ties"] else ""
    return [
        NAMES[r["method"]],
        str(r["k"] or ""),
        str(r["batch"]),
        f"{r['tokens_per_second']:.0f}",
        f"{r['speedup']:.2f}",
        f"{r['acceptance_length']:.2f}" if r["acceptance_length"] else "",
        f"{r['break_even']:.2f}" if "break_even" in r and r["k"] else "",
        " ".join(f"{100 * a:.0f}" for a in r["accepted_per_position"]),
        milli("draft_seconds"),
        milli("verify_seconds"),
        milli("step_seconds"),
        f"{100 * r['repeated_4grams']:.0f}",
        lossless,
    ]


def best(records: Sequence[dict], method: str, batch: int) -> dict | None:
    """The fastest greedy record of a method."""
    here = [
        r
        for r in records
        if r["method"] == method and r["batch"] == batch and r["temperature"] == 0
    ]
    return max(here, key=lambda r: r["speedup"], default=None)


def headline(records: Sequence[dict]) -> list[str]:
    """What the table says, in words: one line a batch size, one on the two heads at the same K, and one on exactness."""
    lines = []
    for batch in sorted({r["batch"] for r in records if r["temperature"] == 0}):
        found = {m: r for m in ("peagle", "eagle3") if (r := best(records, m, batch))}
        said = [
            f"{NAMES[m]} at its best K ({r['k']}) runs at {r['speedup']:.2f} times plain decoding"
            for m, r in found.items()
        ]
        lines.append(f"Batch {batch}: " + "; ".join(said) + ".")
        if found and max(r["speedup"] for r in found.values()) < 1:
            r = max(found.values(), key=lambda r: r["speedup"])
            costs, emits = f"{r['break_even']:.2f}", f"{r['acceptance_length']:.2f}"
            lines[-1] += (
                f" Nothing pays here: a step at K = {r['k']} costs {costs} plain tokens and emits {emits}."
            )
    if pairs := _pairs(records):
        lines.append(
            "P-EAGLE over EAGLE-3 at the same K, batch 1: "
            + ", ".join(f"K = {k}: {ratio:.2f}" for k, ratio in pairs)
            + "."
        )
    checked = [r for r in records if "lossless" in r]
    if checked:
        wrong = sum(r["different"] for r in checked)
        ties = sum(r["near_ties"] for r in checked)
        texts = sum(r["prompts"] for r in checked)
        exact = (
            "every one equals plain greedy decoding token for token"
            if not wrong + ties
            else f"{wrong} differ, {ties} at near ties"
        )
        lines.append(f"Lossless: {texts} speculative texts were compared; {exact}.")
    return lines


def _pairs(records: Sequence[dict]) -> list[tuple[int, float]]:
    """(K, P-EAGLE's tokens a second over EAGLE-3's), greedy, at batch 1."""
    speed = {
        (r["method"], r["k"]): r["tokens_per_second"]
        for r in records
        if r["batch"] == 1 and r["temperature"] == 0
    }
    return [
        (k, rate / speed["eagle3", k])
        for (method, k), rate in sorted(speed.items())
        if method == "peagle" and ("eagle3", k) in speed
    ]


def table(records: Sequence[dict]) -> Table:
    out = Table(*(title for title, _ in COLUMNS))
    for record in records:
        out.add_row(*cells(record))
    return out
