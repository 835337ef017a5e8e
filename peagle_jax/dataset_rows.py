"""Rows of tables: Parquet files, datasets of the Hugging Face hub, and saved ones.

All are read by the library `datasets` and its pyarrow, as streams, and only the columns that are
asked for.
"""

import datetime
import decimal
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from peagle_jax.types import InputError

PARQUET_BATCH = 256  # rows of a Parquet file that are in memory at one time


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict]]:
    """The number, from 1, and the values of each row of a Parquet file.

    Args:
      columns: that are read, where the file has them; all, where it has none of them.

    Raises:
      InputError: it is missing or damaged, or has values that Python cannot hold.
    """
    _import_datasets(path)
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    if not path.exists():
        raise InputError(path, "this file must exist", "nothing", "check the name")
    number = 0
    try:
        with ParquetFile(path) as file:
            there = _row_columns(file.schema_arrow.names, columns)
            for batch in file.iter_batches(PARQUET_BATCH, columns=there):
                for row in _values(batch, path):
                    number += 1
                    yield number, _without_nulls(row)
    except InputError:
        raise
    except (ArrowException, OSError, ValueError) as error:  # the last for names in its metadata
        rule, next_step = "must be a whole Parquet file", "download or write it again"
        raise InputError(path, rule, _first_line(error), next_step) from None


def _values(batch: Any, path: Path) -> list[dict]:
    """The rows of a batch as Python has them: texts that are UTF-8, times that a calendar has."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        rule, next_step = "must have values that Python can hold", "write it again"
        raise InputError(path, rule, _first_line(error), next_step) from None


def hub_rows(
    where: str, source: str, split: str, columns: Sequence[str]
) -> Iterator[tuple[int, dict]]:
    """Rows of a dataset of the hub, with their numbers, as a stream.

    Args:
      where: for errors.
      source: NAME or NAME:CONFIG.
      split: of the dataset.
      columns: that are read, where the dataset has them; all, where it has none of them.

    Raises:
      InputError: `datasets` is not installed, or cannot read it; it may be offline.
    """
    name, _, config = source.partition(":")
    yield from stream_rows(f"{where} {source}", name, config or None, split, columns)


def stream_rows(
    source: str, name: str, config: str | None, split: str, columns: Sequence[str]
) -> Iterator[tuple[int, dict]]:
    """As `hub_rows`, of a name in its parts; `source` is for errors."""
    datasets = _import_datasets(source)
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        if rows.column_names is not None:
            rows = rows.select_columns(_row_columns(rows.column_names, columns))
        for number, row in enumerate(rows, start=1):
            yield number, _without_nulls(row)
    # of its own, of pyarrow, of fsspec and of two HTTP clients: they have no common base
    except Exception as error:
        next_step = "check the name, the split and the network, or give a Parquet file"
        rule = "must be a dataset that `datasets` can read"
        raise InputError(source, rule, _first_line(error), next_step) from None


def saved_rows(folder: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict]]:
    """As `hub_rows`, of a folder of `Dataset.save_to_disk`, which is memory-mapped."""
    datasets = _import_datasets(folder)
    try:
        rows = datasets.load_from_disk(str(folder))
        rows = rows.select_columns(_row_columns(rows.column_names, columns))
        for number, row in enumerate(rows, start=1):
            yield number, _without_nulls(row)
    # of its own, of pyarrow and of JSON: they have no common base
    except Exception as error:
        rule, next_step = "must be a dataset that `datasets` saved", "save it again"
        raise InputError(folder, rule, _first_line(error), next_step) from None


def _import_datasets(where: str | Path) -> ModuleType:
    """The `datasets` library, which brings pyarrow, without its bars and warnings."""
    try:
        import datasets
    except ImportError as error:
        rule = "Parquet files and datasets are read by the library datasets"
        next_step = "pip install 'peagle-jax[data]', or give a JSONL file"
        raise InputError(where, rule, f"no {error.name}", next_step) from None
    datasets.disable_progress_bars()
    # it logs what it raises as well
    datasets.logging.set_verbosity(logging.CRITICAL)
    return datasets


def _row_columns(there: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Of the columns that are there those that are wanted: others may be large. Or else all."""
    return [column for column in there if column in wanted] or list(there)


def _without_nulls(value: Any) -> Any:
    """A value of a table without the keys that it lacks, as the same row has in a JSONL.

    Every row of a table has every key, null where there is nothing; to a template, a key that is
    null is there. The content of a message stays: next to calls of tools it may be null. Arguments
    of calls may have that name, too: they are no messages, which have a role.
    """
    if isinstance(value, dict):
        kept = "content" if value.get("role") is not None else None
        return {
            key: _without_nulls(item)
            for key, item in value.items()
            if item is not None or key == kept
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    # what JSON has no kind of number or time for
    is_other = isinstance(value, datetime.date | datetime.time | decimal.Decimal)
    return str(value) if is_other else value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
