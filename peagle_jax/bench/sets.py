"""Benchmark questions that people know, by their names, or from files of the same form.

A row of a file has `turns`, a list of what the user says; or one of the columns that data sets of
the hub have in its place: messages, conversations, prompt, problem, question, instruction and text.
Nothing is kept in this package: sets are read by the library `datasets`, from the network or from
its cache, or from a JSONL file, such as those of hemingkx/Spec-Bench (data/spec_bench),
SafeAILab/EAGLE (eagle/data) and deepseek-ai/DeepSpec (eval_datasets).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from peagle_jax.dataset_rows import hub_rows
from peagle_jax.document_rows import ROLES
from peagle_jax.json_files import read_jsonl
from peagle_jax.types import InputError

# in this order: `prompt` of a row that also has `turns` is something else
TEXT_COLUMNS = ("prompt", "problem", "question", "question_content", "instruction", "text")
CATEGORY_COLUMNS = ("category", "subject", "sub_category")
COLUMNS = ("turns", "messages", "conversations", *TEXT_COLUMNS, *CATEGORY_COLUMNS, "input")


@dataclasses.dataclass(frozen=True)
class Question:
    """What a user asks, turn by turn.

    Attributes:
      name: the set and the row, for errors.
      turns: what the user says, at least one.
      category: of the question in its set; the set's name where it says none.
    """

    name: str
    turns: tuple[str, ...]
    category: str


@dataclasses.dataclass(frozen=True)
class BenchmarkSet:
    """Where a set is on the hub.

    Attributes:
      source: NAME, or NAME:CONFIG, of the data set.
      split: that is asked.
      license: as its card says; several forbid copies, so that no set is part of this package.
    """

    source: str
    split: str
    license: str


SETS = {
    "humaneval": BenchmarkSet("openai/openai_humaneval", "test", "MIT"),
    "mt-bench": BenchmarkSet("philschmid/mt-bench", "train", "Apache-2.0 (FastChat)"),
    "gsm8k": BenchmarkSet("openai/gsm8k:main", "test", "MIT"),
    "math-500": BenchmarkSet("HuggingFaceH4/MATH-500", "test", "MIT (MATH)"),
    "mbpp": BenchmarkSet("google-research-datasets/mbpp:full", "test", "CC-BY-4.0"),
    "livecodebench": BenchmarkSet("livecodebench/code_generation_lite", "test", "CC"),
    "arena-hard": BenchmarkSet("lmarena-ai/arena-hard-auto", "train", "Apache-2.0"),
    "aime": BenchmarkSet("HuggingFaceH4/aime_2024", "train", "not said"),
    "alpaca": BenchmarkSet("tatsu-lab/alpaca", "train", "CC-BY-NC-4.0"),
    "speed-bench": BenchmarkSet("nvidia/SPEED-Bench:qualitative", "test", "NVIDIA's, evaluation"),
    "speed-bench-1k": BenchmarkSet(
        "nvidia/SPEED-Bench:throughput_1k", "test", "NVIDIA's, evaluation"
    ),
    "speed-bench-8k": BenchmarkSet(
        "nvidia/SPEED-Bench:throughput_8k", "test", "NVIDIA's, evaluation"
    ),
    "speed-bench-32k": BenchmarkSet(
        "nvidia/SPEED-Bench:throughput_32k", "test", "NVIDIA's, evaluation"
    ),
    "ultrachat": BenchmarkSet("HuggingFaceH4/ultrachat_200k", "test_sft", "MIT"),
    "sharegpt": BenchmarkSet(
        "anon8231489123/ShareGPT_Vicuna_unfiltered", "train", "Apache-2.0, users' own texts"
    ),
}


def read_set(name: str, count: int | None = None) -> list[Question]:
    """Reads a set.

    Args:
      name: of SETS, or a JSONL file.
      count: how many questions; None: all. They are the first ones, so that everybody's are the
        same.

    Raises:
      InputError: the set is unknown or cannot be loaded, has no rows, or a row has no turns.
    """
    path = Path(name)
    if name in SETS:
        place = SETS[name]
        rows = hub_rows("--sets", place.source, place.split, COLUMNS)
    elif path.suffix == ".jsonl":
        rows = read_jsonl(path)
    else:
        rule = f"must be one of {', '.join(SETS)}, or a .jsonl file"
        raise InputError("--sets", rule, name, "give --sets mt-bench, or questions.jsonl")
    label = name if name in SETS else path.stem
    questions = list(_questions(itertools.islice(rows, count), label, name))
    if not questions:
        raise InputError(name, "must have questions", "none", "give a file with rows of turns")
    return questions


def _questions(
    rows: Iterable[tuple[int, Mapping[str, Any]]], label: str, where: str
) -> Iterator[Question]:
    for number, row in rows:
        turns = turns_of_row(row)
        if not turns:
            rule = 'a question needs turns, a list of texts, as {"turns": ["Why?"]}'
            got = ", ".join(sorted(row)) or "an empty row"
            raise InputError(f"{where}:{number}", rule, got, "add turns to the row, or delete it")
        category = next((row[c] for c in CATEGORY_COLUMNS if isinstance(row.get(c), str)), label)
        yield Question(f"{label}:{number}", turns, category)


def turns_of_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What the user says in a row; () where it does not tell."""
    turns = row.get("turns")
    if turns is None:
        turns = _of_user(row.get("messages") or row.get("conversations"))
    if not turns:
        turns = next((row[c] for c in TEXT_COLUMNS if row.get(c)), None)
        if row.get("instruction") and turns == row["instruction"] and row.get("input"):
            turns = f"{turns}\n\n{row['input']}"
    if isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list) or not turns:
        return ()
    if isinstance(turns[0], dict):
        turns = _of_user(turns)
    is_text = bool(turns) and all(isinstance(turn, str) and turn.strip() for turn in turns)
    return tuple(turns) if is_text else ()


def _of_user(messages: Any) -> list[Any]:
    """The contents of a user's messages, also in ShareGPT's keys."""
    if not isinstance(messages, list):
        return []
    return [
        message.get("content", message.get("value"))
        for message in messages
        if isinstance(message, dict) and _role(message) == "user"
    ]


def _role(message: Mapping[str, Any]) -> str | None:
    """Who says a message; None where that is no known name."""
    role = message.get("role", message.get("from"))
    return ROLES.get(role) if isinstance(role, str) else None
