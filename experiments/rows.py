"""Rows of finished jobs: one line of JSON each, in results/experiments/EXPERIMENT.jsonl."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.old_names import experiment_name, with_present_names
from experiments.texts import KINDS
from peagle_jax.types import InputError

NUMBER, TEXT = (int, float), (str, type(None))
NEEDED = {
    "experiment": str,
    "variant": str,
    "seed": int,
    "budget": str,
    "changes": list,
    "time": str,
    "commit": TEXT,
    "dirty": bool,
    "command": str,
    "device": str,
    "steps": int,
    "train_seconds": NUMBER,
    "train_tokens_per_second": NUMBER,
    "num_parameters": NUMBER,
    "curve": list,
    "measurements": list,
    "speed": (dict, type(None)),
    "exact": (dict, type(None)),
    "export": TEXT,
}
NEEDED_STEP = {"step": int, "loss": NUMBER, "accuracy": list}
NEEDED_EXACT = {"same": int, "near_ties": int, "different": int}
NEEDED_MEASUREMENT = {
    "k": int,
    "temperature": NUMBER,
    "prompt_tokens": int,
    "max_new_tokens": int,
    "prompts": list,
}
NEEDED_PROMPT = {"kind": str, "num_drafts": NUMBER, "num_accepted_per_pos": list}
NAME = re.compile(r"\w[\w.-]*")  # it becomes a file's name and a place in the page


def rounded(value: Any, digits: int) -> Any:
    """JSON whose numbers have so many significant digits."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def read_lines(folder: Path) -> Iterator[tuple[Path, int, bytes]]:
    """File, line number and line of all lines of `folder`/*.jsonl that are not empty.

    Raises:
      InputError: a file cannot be read.
    """
    # files with former names of experiments are older than those with today's
    files = folder.glob("*.jsonl")
    for path in sorted(files, key=lambda path: (experiment_name(path.stem) == path.stem, path)):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            next_step = "move what has this name to another folder, or make it readable"
            raise InputError(path, "results must be readable", error.strerror, next_step) from None
        yield from ((path, number, line) for number, line in enumerate(lines, 1) if line.strip())


def read_rows(folder: Path) -> tuple[list[dict], list[str]]:
    """All usable rows of `folder`/*.jsonl in the order of their lines, in today's words.

    Returns:
      The rows, and a warning for each line that was left out.

    Raises:
      InputError: a file cannot be read.
    """
    rows, warnings = [], []
    for path, number, line in read_lines(folder):
        row, problem = _parse(line, path.stem)
        if problem is None:
            rows.append(row)
        else:
            warnings.append(f"{path}:{number}: {problem}; the line is left out")
    return rows, warnings


def latest(rows: Sequence[Mapping]) -> list[Mapping]:
    """The rows that count: of one variant, seed and budget the last one."""
    last = {(row["experiment"], row["variant"], row["seed"], row["budget"]): row for row in rows}
    return list(last.values())


def _parse(line: bytes, stem: str) -> tuple[dict, str | None]:
    """A row in today's words, and why it cannot be used, if so."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # the former also for what is not UTF-8
        return {}, f"no JSON ({error})"
    if not isinstance(row, dict):
        return {}, f"a run is a JSON object, this is {type(row).__name__}"
    row = with_present_names(row)
    return row, _problem(row, experiment_name(stem))


def _problem(row: dict, stem: str) -> str | None:
    """Why a row cannot be used, if so."""
    if problem := _lacks(row, NEEDED, ""):
        return problem
    name = row["experiment"]
    if name != stem:
        return f"it tells of the experiment {name[:80]!r}, whose file has another name"
    if not NAME.fullmatch(name):
        return f"an experiment is named by letters, digits and _, this one {name[:80]!r}"
    if not row["measurements"]:
        return "it has no measurement"
    parts = [(row["exact"], NEEDED_EXACT, "exact"), (row["speed"], {"speedup": NUMBER}, "speed")]
    parts += [(step, NEEDED_STEP, f"curve[{i}]") for i, step in enumerate(row["curve"])]
    for part, needed, where in parts:
        if part is not None and (problem := _lacks(part, needed, where)):
            return problem
    for i, measurement in enumerate(row["measurements"]):
        if problem := _measurement_problem(measurement, f"measurements[{i}]"):
            return problem
    return None


def _measurement_problem(measurement: Any, where: str) -> str | None:
    if problem := _lacks(measurement, NEEDED_MEASUREMENT, where):
        return problem
    k = measurement["k"]
    for i, prompt in enumerate(measurement["prompts"]):
        place = f"{where}.prompts[{i}]"
        if problem := _lacks(prompt, NEEDED_PROMPT, place):
            return problem
        kind, num_drafts = prompt["kind"], prompt["num_drafts"]
        if kind not in KINDS:
            return f"{place}.kind must be one of {', '.join(KINDS)}, it is {kind[:80]!r}"
        accepted = prompt["num_accepted_per_pos"]
        most = num_drafts * (1 + 1e-6)  # expected numbers were rounded
        in_range = all(isinstance(a, NUMBER) and 0 <= a <= most for a in accepted)
        if len(accepted) != k or not in_range:
            rule = f"must be {k} counts of at most {num_drafts} each"
            return f"{place}.num_accepted_per_pos {rule}"
        chances = prompt.get("chance_per_pos", [0.0] * k)
        if not (
            isinstance(chances, list)
            and len(chances) == k
            and all(isinstance(chance, NUMBER) and 0 <= chance <= 1 + 1e-6 for chance in chances)
        ):
            return f"{place}.chance_per_pos must be {k} chances"
    if not any(prompt["num_drafts"] for prompt in measurement["prompts"]):
        return f"{where} has no drafts"
    return None


def _lacks(part: Any, needed: Mapping[str, Any], where: str) -> str | None:
    """What is missing in a part of a row, or has the wrong type."""
    if not isinstance(part, dict):
        return f"{where} must be an object"
    dot = f"{where}." if where else ""
    missing = [f"{dot}{key}" for key in needed if key not in part]
    if missing:
        return f"it lacks {', '.join(missing)}"
    for key, kind in needed.items():
        value = part[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return f"{dot}{key} has the wrong type: {str(value)[:80]!r}"
    return None
