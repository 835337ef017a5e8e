"""Tables that others published, as data: results/published/*.json.

A table has `name`, `title`, `source`, `engine`, `target` (a name in configs/targets), `device` (a
name that `peagle plan` knows, or null), `dtype`, `texts`, `heads`, `differs` (why it is not our
measurement), notes, and `rows`. A row has a method and what was measured: `tokens_per_second` or
`tpot_ms`, `speedup`, `acceptance_length`, or `accepted_percent` by position.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle_jax import weights
from peagle_jax.types import InputError

FOLDER = Path("results/published")
REQUIRED = ("name", "title", "source", "engine", "target", "texts", "differs", "rows")


@dataclasses.dataclass(frozen=True)
class PublishedTable:
    """One table.

    Attributes:
      name: of its file.
      facts: everything but the rows.
      rows: as they stand in the file.
    """

    name: str
    facts: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def acceptance_length(self, row: Mapping[str, Any]) -> int | float | None:
        """Of a row: as published, or from its rates by position; 1 for plain decoding."""
        if row["method"] == "none":
            return 1.0
        if "accepted_percent" in row:
            return 1 + sum(row["accepted_percent"]) / 100
        return row.get("acceptance_length")

    def step_seconds(self, row: Mapping[str, Any]) -> float | None:
        """Seconds of a step of all sequences; None where the row does not tell."""
        length = self.acceptance_length(row)
        if length is None or "concurrency" not in row:
            return None
        if "tpot_ms" in row:
            return row["tpot_ms"] / 1e3 * length
        if "tokens_per_second" in row:
            return row["concurrency"] * length / row["tokens_per_second"]
        return None


def read_tables(folder: Path = FOLDER) -> dict[str, PublishedTable]:
    """All tables of a folder, by name.

    Raises:
      InputError: the folder has none, or a file misses a key.
    """
    tables = {}
    for path in sorted(folder.glob("*.json")):
        facts = weights.read_json(path)
        missing = [key for key in REQUIRED if not facts.get(key)]
        if missing or facts["name"] != path.stem:
            rule = f"a table needs {', '.join(REQUIRED)}, and its file's name"
            raise InputError(path, rule, ", ".join(missing) or facts["name"], "add them")
        rows = facts.pop("rows")
        tables[path.stem] = PublishedTable(path.stem, facts, rows)
    if not tables:
        raise InputError(folder, "must have published tables", "none", "run from a checkout")
    return tables
