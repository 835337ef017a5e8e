"""Result rows of `bench.suite`: their JSONL file, the cells of a table, and one line of text."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from peagle_jax.atomic_write import append_line
from peagle_jax.file_lock import lock_while_alive, try_lock
from peagle_jax.json_files import read_jsonl
from peagle_jax.old_names import RESULT_ROW_KEYS, with_new_names
from peagle_jax.types import InputError

NAMES = {"none": "plain decoding", "eagle": "EAGLE-1", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
# title and meaning of each column
COLUMNS = (
    ("method", ""),
    ("K", "tokens drafted per step; auto: chosen while decoding"),
    ("batch", "prompts decoded together"),
    ("tokens/s", "of whole calls with their prompts; median of the rounds"),
    ("speedup", "over plain decoding in the same round; median of the rounds"),
    (
        "acceptance length",
        "tokens written per target forward: 1 + accepted / drafts, pooled; of an adaptive K, per "
        "forward that had drafts to verify",
    ),
    ("break-even", "acceptance length from which such a step pays: the one reached / speedup"),
    ("accepted per position", "share of the drafts at each position that were accepted, %"),
    ("draft ms", "to draft K tokens, timed alone"),
    ("verify ms", "one target forward over K + 1 tokens, timed alone"),
    ("step ms", "a whole call without its prompt, divided by its steps"),
    ("repeated", "4-grams that the text had written before, %; repetition inflates acceptance"),
    ("lossless", "whether greedy output equals plain decoding's, token for token"),
)


class Records:
    """results.jsonl in a folder: one result row per line. Lines are appended and never edited.

    The file is locked for as long as the object lives, so that rows of two commands do not mix.

    Args:
      out: the folder.
      name: of the file.

    Raises:
      InputError: the folder cannot be made or written to, or another command adds rows.
    """

    def __init__(self, out: Path, name: str = "results.jsonl") -> None:
        self.path = out / name
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            is_mine = lock_while_alive(self, self.path)
        except OSError as error:
            raise _not_writable(out, error) from None
        if not is_mine:
            raise _is_locked(self.path)

    def add(self, record: dict) -> None:
        """Appends a row."""
        append_line(self.path, json.dumps(record))


def check_records(out: Path, name: str = "results.jsonl") -> None:
    """Refuses what `Records` would, before minutes of work; makes and keeps nothing.

    Raises:
      InputError: as for `Records`.
    """
    path = out / name
    try:
        there = next(p for p in (path, *path.parents) if p.exists())
        if there == path:
            with path.open("a", encoding="utf-8") as file:
                if not try_lock(file):
                    raise _is_locked(path)
        elif not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        elif not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _not_writable(out, error) from None


def _not_writable(out: Path, error: OSError) -> InputError:
    rule, next_step = "the output folder must be writable", "choose another with --out"
    return InputError(out, rule, error.strerror, next_step)


def _is_locked(path: Path) -> InputError:
    rule, got = "one command adds rows at a time", "another one at it"
    return InputError(path, rule, got, "wait for it, or choose another --out")


def read_rows(path: Path) -> list[dict]:
    """The result rows of a JSONL file, with the keys that new rows have.

    Rows that were written before a key got its name in docs/glossary.md are read, too.

    Args:
      path: for example results/demo.jsonl.

    Raises:
      InputError: the file cannot be read, or one of its lines is not a JSON object.
    """
    return [
        with_new_names(row, RESULT_ROW_KEYS, f"{path}:{number}") for number, row in read_jsonl(path)
    ]


def best(records: Sequence[dict], method: str, batch_size: int) -> dict | None:
    """The greedy row of a method with the highest speedup; None where there is none."""
    rows = [r for r in greedy(records) if r["method"] == method and r["batch_size"] == batch_size]
    return max(rows, key=lambda r: r["speedup"], default=None)


def greedy(records: Sequence[dict]) -> list[dict]:
    """Rows at temperature 0."""
    return [r for r in records if r["temperature"] == 0]


def is_chain(row: dict) -> bool:
    """Whether every step drafts a chain of the same K tokens, or nothing (plain decoding)."""
    return not row.get("adaptive_k") and not row.get("num_tree_nodes")


def chains(records: Sequence[dict]) -> list[dict]:
    """The rows of chains and of plain decoding."""
    return list(filter(is_chain, records))


def k_label(row: dict) -> str:
    """What stands for K in a table: a number, auto, or a number and the nodes of a tree."""
    if row.get("adaptive_k"):
        return "auto"
    nodes = row.get("num_tree_nodes")
    return f"{row['k']}, tree {nodes}" if nodes else str(row["k"])


def batch_sizes(records: Sequence[dict]) -> list[int]:
    """The batch sizes that occur, in order."""
    return sorted({r["batch_size"] for r in records})


def methods(records: Sequence[dict]) -> list[str]:
    """The speculative methods that occur, in the order of tables and plots."""
    return [m for m in ("eagle", "eagle3", "peagle") if any(r["method"] == m for r in records)]


def plain_row(records: Sequence[dict], row: dict) -> dict | None:
    """Plain decoding at the batch size and temperature of `row`; None where it was not measured."""
    for r in records:
        same_case = all(r[key] == row[key] for key in ("batch_size", "temperature"))
        if r["method"] == "none" and same_case:
            return r
    return None


def one_line(record: dict) -> str:
    """A row in one line, for the terminal."""
    name, k, batch_size = NAMES[record["method"]], k_label(record), record["batch_size"]
    line = f"{name:>14}  K={k:<2} batch {batch_size:<2}"
    line += f" {record['tokens_per_second']:8.1f} tokens/s  {record['speedup']:.2f}x"
    if record["acceptance_length"]:
        line += f", acceptance length {record['acceptance_length']:.2f}"
    if record["temperature"]:
        line += f", temperature {record['temperature']:g}"
    if record.get("synthetic_acceptance"):
        line += ", SYNTHETIC acceptance"
    return line


def cells(record: dict) -> list[str]:
    """A row as cells of a table with COLUMNS; what was not measured is empty."""
    is_speculative = record["k"] > 0
    return [
        NAMES[record["method"]],
        k_label(record) if is_speculative else "",
        str(record["batch_size"]),
        f"{record['tokens_per_second']:.0f}",
        f"{record['speedup']:.2f}",
        f"{record['acceptance_length']:.2f}" if record["acceptance_length"] else "",
        f"{record['break_even']:.2f}" if "break_even" in record and is_speculative else "",
        " ".join(f"{100 * share:.0f}" for share in record["accepted_per_position"]),
        _milliseconds(record, "draft_seconds"),
        _milliseconds(record, "verify_seconds"),
        _milliseconds(record, "step_seconds"),
        f"{100 * record['repeated_4grams']:.0f}",
        _lossless_cell(record),
    ]


def _milliseconds(record: dict, key: str) -> str:
    return f"{1e3 * record[key]:.2f}" if record.get(key) else ""


def _lossless_cell(record: dict) -> str:
    if record.get("synthetic_acceptance"):
        return "SYNTHETIC"
    if "lossless" not in record:
        return ""
    cell = "yes" if record["lossless"] else f"NO: {record['different']} differ"
    if record["near_ties"]:
        cell += f" ({record['near_ties']} near ties)"
    return cell


def table(records: Sequence[dict]) -> Table:
    """All rows as a table for the terminal."""
    rich_table = Table(*(title for title, _ in COLUMNS))
    for record in records:
        rich_table.add_row(*cells(record))
    return rich_table
