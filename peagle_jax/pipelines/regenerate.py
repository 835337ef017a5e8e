"""A head learns best on what its target writes: the target continues excerpts of a corpus, and its answers become training data."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle_jax import corpus, text
from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.decode.generate import check_prompts, generate
from peagle_jax.types import InputError

ANSWER = '{"prompt_token_ids": ['  # how every line of an output file begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regeneration:
    """What to write: every batch takes the next temperature in turn, prompt i samples with seed + i."""

    source: str | None
    held_out: float  # share of documents no excerpt is taken from: the same as the head's training holds out
    answers: int
    prompt_tokens: int
    new_tokens: int
    temperatures: tuple[float, ...]
    batch_size: int
    seed: int


def regenerate(
    target_folder: Path, how: Regeneration, out: Path, say: Callable[[str], None] = print
) -> int:
    """Appends answers to `out`, a JSONL of `prompt_token_ids` and `output_token_ids`, until it holds `how.answers`. Resumes.

    Other excerpts are refused; target, temperatures and batch size are not in the file, and must be what they were.

    Answers run through end-of-sequence tokens: a head is trained on rows of equal length.

    Returns:
      Tokens written by the target.

    Raises:
      InputError: the target has no tokenizer, the corpus too little text, or `out` is something else.
    """
    tokenizer = text.load_tokenizer(target_folder)
    if tokenizer is None:
        raise InputError(
            target_folder,
            "excerpts of text need the target's tokenizer",
            "no tokenizer.json",
            "copy it into the folder",
        )
    _check_appendable(out)
    target = load_target(target_folder, aux_hidden_state_layers=())
    text.check_vocabulary(tokenizer, target.config.vocab, target_folder)
    train, _ = corpus.split(corpus.read_corpus(how.source), how.held_out)
    excerpts = excerpts_of(tokenizer, train, how)
    check_prompts(excerpts, target.config, how.new_tokens, 0, None)
    done = _whole_lines(out, how, excerpts)
    say(f"{how.answers} answers of {how.new_tokens} tokens, {done} there already")
    bar = Progress(
        TextColumn("regenerate"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )
    with bar, out.open("a", encoding="utf-8") as file:
        task = bar.add_task("", total=how.answers, completed=done)
        for start in range(done, how.answers, how.batch_size):
            batch = excerpts[start : start + how.batch_size]
            answers = generate(
                target,
                None,
                batch,
                max_new_tokens=how.new_tokens,
                stop_ids=(),
                seed=[how.seed + start + i for i in range(len(batch))],
                temperature=how.temperatures[start // how.batch_size % len(how.temperatures)],
            )
            rows = [
                {"prompt_token_ids": a.prompt_token_ids, "output_token_ids": a.output_token_ids}
                for a in answers
            ]
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            bar.update(task, advance=len(batch))
    return how.answers * how.new_tokens


def excerpts_of(
    tokenizer, documents: Sequence[corpus.Document], how: Regeneration
) -> list[list[int]]:
    """`how.answers` excerpts from random places; longer documents give more, in proportion."""
    encoded = [
        ids[:-1] for ids, _ in text.encode(tokenizer, [d for d in documents if d.text is not None])
    ]
    encoded = [ids for ids in encoded if len(ids) > how.prompt_tokens]
    if not encoded:
        raise InputError(
            how.source,
            f"a document of more than {how.prompt_tokens} tokens is needed",
            "none",
            "use a larger corpus",
        )
    which, where = (
        np.random.default_rng([how.seed, 0]),
        np.random.default_rng([how.seed, 1]),
    )  # more answers begin with the same ones
    sizes = np.array([len(ids) - how.prompt_tokens for ids in encoded], np.float64)
    picks = which.choice(len(encoded), how.answers, p=sizes / sizes.sum())
    starts = [int(where.integers(len(encoded[i]) - how.prompt_tokens)) for i in picks]
    return [
        encoded[i][start : start + how.prompt_tokens].tolist()
        for i, start in zip(picks, starts, strict=True)
    ]


def _check_appendable(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as error:
        raise InputError(
            out, "the output file must be writable", error.strerror, "choose another place"
        ) from None


def _whole_lines(out: Path, how: Regeneration, excerpts: list[list[int]]) -> int:
    """Answers already there, in whole batches; a batch that a kill cut short is dropped, and nothing else ever is."""
    *lines, cut = corpus.read_text(out).split("\n")
    ours = all(_is_answer(line, how.new_tokens) for line in lines) and cut.startswith(
        ANSWER[: len(cut)]
    )
    if not ours:
        raise InputError(
            out,
            f"answers of {how.new_tokens} tokens are appended",
            "a file of something else",
            "choose another file",
        )
    if any(
        json.loads(line)["prompt_token_ids"] != excerpt
        for line, excerpt in zip(lines, excerpts, strict=False)
    ):
        rule = "answers are appended to those of the same corpus, seed and prompt length"
        raise InputError(
            out,
            rule,
            "answers to other excerpts",
            "repeat the options it was begun with, or choose another file",
        )
    if len(lines) >= how.answers:
        return how.answers
    kept = len(lines) // how.batch_size * how.batch_size
    write_atomically(out, "".join(line + "\n" for line in lines[:kept]))
    return kept


def _is_answer(line: str, tokens: int) -> bool:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return False
    return (
        isinstance(row, dict)
        and "prompt_token_ids" in row
        and len(row.get("output_token_ids", ())) == tokens
    )
