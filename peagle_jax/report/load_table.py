"""Rows of load.jsonl as a table: engines in this process and served models side by side."""

from collections.abc import Sequence

from rich.table import Table

from peagle_jax.report.records import NAMES, k_label

# title, key of a row, how it is written
COLUMNS = (
    ("tokens/s", "output_throughput", ".1f"),
    ("TTFT ms", "median_ttft_ms", ".1f"),
    ("p99", "p99_ttft_ms", ".1f"),
    ("TPOT ms", "median_tpot_ms", ".2f"),
    ("p99", "p99_tpot_ms", ".2f"),
    ("request ms", "median_e2el_ms", ".0f"),
    ("p99", "p99_e2el_ms", ".0f"),
    ("acceptance length", "spec_decode_acceptance_length", ".2f"),
)


def load_table(rows: Sequence[dict]) -> Table:
    """A line for each row. TTFT, TPOT and request: median, and 99th percentile beside it."""
    table = Table(
        "measured", "K", "concurrency", "rate", "done", *(title for title, _, _ in COLUMNS)
    )
    for row in rows:
        sent = f"{row['completed']}/{row['completed'] + row['failed']}"
        cells = [
            format(row[key], form) if row.get(key) is not None else "" for _, key, form in COLUMNS
        ]
        place = [
            "" if row[key] is None else str(row[key]) for key in ("max_concurrency", "request_rate")
        ]
        k = "" if row["k"] is None else k_label(row)
        table.add_row(_name_of(row), k, *place, sent, *cells)
    return table


def _name_of(row: dict) -> str:
    """What a row measured: a method of this package, or a served model."""
    if row.get("server"):
        return f"{row['engine']}: {row['model']}"
    return NAMES[row["method"]]
