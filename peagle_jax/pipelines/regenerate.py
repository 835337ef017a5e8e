"""Writes a target's answers to excerpts of a corpus, as training data for its heads.

A head learns best from what its target writes, because that is what it will draft.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from peagle_jax import corpus, text
from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.decode.engine import Engine
from peagle_jax.decode.requests import Generation, Request, check_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.types import InputError

ANSWER_BEGINS = '{"prompt_token_ids": ['  # as does every line of an output file


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerationOptions:
    """What to write.

    Attributes:
      source: the corpus, as `corpus.read_corpus` takes it.
      held_out: share of documents that no excerpt is taken from; the same as the head's training
        holds out.
      num_samples: answers in all.
      prompt_tokens: tokens of an excerpt.
      max_new_tokens: tokens of an answer. All answers have as many: they run on through
        end-of-sequence tokens, because training rows have one length.
      temperatures: every `batch_size` answers take the next of them.
      batch_size: answers that are written at the same time.
      seed: of the excerpts; answer i is sampled with seed + i.
    """

    source: str | None
    held_out: float = 0.05
    num_samples: int = 4096
    prompt_tokens: int = 32
    max_new_tokens: int = 224
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_size: int = 64
    seed: int = 0


def regenerate(
    target_folder: Path,
    options: RegenerationOptions,
    out: Path,
    say: Callable[[str], None] = print,
) -> int:
    """Appends answers to a JSONL file until it has as many as the options say. Resumes.

    The file's excerpts are compared with the options. Target, temperatures and batch size are not
    in the file: whoever resumes has to repeat them.

    Args:
      target_folder: the target, with its tokenizer.
      options: what to write.
      out: each line gets `prompt_token_ids` and `output_token_ids`.
      say: is told how many answers are already there.

    Returns:
      Tokens that the target wrote, over all sessions.

    Raises:
      InputError: the target has no tokenizer, the corpus has too little text, an answer does not
        fit the target's context, or `out` contains something else or answers to other excerpts.
    """
    tokenizer = text.load_tokenizer(target_folder)
    if tokenizer is None:
        rule = "excerpts of text need the target's tokenizer"
        next_step = "copy tokenizer.json into the target's folder"
        raise InputError(target_folder, rule, "no tokenizer.json", next_step)
    _check_appendable(out)
    target = load_target(target_folder, aux_hidden_state_layers=())
    text.check_vocabulary(tokenizer, target.config.vocab, target_folder)
    train, _ = corpus.split(corpus.read_corpus(options.source), options.held_out)
    excerpts = excerpts_of(tokenizer, train, options)
    check_prompts(excerpts, target.config, options.max_new_tokens, 0, None)
    done = _answers_there(out, options, excerpts)
    total, batch_size = options.num_samples, options.batch_size
    say(f"{total} answers of {options.max_new_tokens} tokens, {done} there already")
    requests = (
        Request(
            prompt=excerpts[i],
            max_new_tokens=options.max_new_tokens,
            stop_ids=(),
            seed=options.seed + i,
            temperature=options.temperatures[i // batch_size % len(options.temperatures)],
        )
        for i in range(done, total)
    )
    engine = Engine(target, max_batch=batch_size)
    progress = ProgressReport("regenerate", total, done, "answers")
    with progress, out.open("a", encoding="utf-8") as file:
        for answer in _in_order(engine.run(requests)):
            if answer.error is not None:
                next_step = "look for NaN in its weights"
                raise InputError(target_folder, "must answer", answer.error, next_step)
            row = {
                "prompt_token_ids": answer.prompt_token_ids,
                "output_token_ids": answer.output_token_ids,
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
            done += 1
            progress.update(done)
    return total * options.max_new_tokens


def _in_order(answers: Iterator[tuple[int, Generation]]) -> Iterator[Generation]:
    """Answers in the order of their requests. One that is early waits for those before it."""
    early: dict[int, Generation] = {}
    place = 0
    for i, answer in answers:
        early[i] = answer
        while place in early:
            yield early.pop(place)
            place += 1


def excerpts_of(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[corpus.Document],
    options: RegenerationOptions,
) -> list[list[int]]:
    """`num_samples` excerpts of `prompt_tokens` tokens from random places.

    Longer documents give more of them, in proportion. The excerpts of a larger `num_samples` begin
    with those of a smaller one.

    Raises:
      InputError: every document is too short.
    """
    length = options.prompt_tokens
    texts = [document for document in documents if document.text is not None]
    encoded = [ids[:-1] for ids, _ in text.encode(tokenizer, texts)]  # without the end token
    encoded = [ids for ids in encoded if len(ids) > length]
    if not encoded:
        rule = f"a document of more than {length} tokens is needed"
        next_step = "use longer documents, or fewer prompt tokens"
        raise InputError(options.source, rule, "none", next_step)
    # two generators, so that the first draws do not depend on how many follow
    document_rng = np.random.default_rng([options.seed, 0])
    place_rng = np.random.default_rng([options.seed, 1])
    sizes = np.array([len(ids) - length for ids in encoded], np.float64)
    picks = document_rng.choice(len(encoded), options.num_samples, p=sizes / sizes.sum())
    excerpts = []
    for i in picks:
        begin = int(place_rng.integers(len(encoded[i]) - length))
        excerpts.append(encoded[i][begin : begin + length].tolist())
    return excerpts


def _check_appendable(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as error:
        rule, next_step = "the output file must be writable", "choose another place with --out"
        raise InputError(out, rule, error.strerror, next_step) from None


def _answers_there(out: Path, options: RegenerationOptions, excerpts: list[list[int]]) -> int:
    """The number of answers that are already in the file.

    A line that a killed process has left incomplete is dropped. Nothing else ever is.
    """
    *lines, unfinished = corpus.read_text(out).split("\n")
    is_ours = unfinished.startswith(ANSWER_BEGINS[: len(unfinished)]) and all(
        _is_answer(line, options.max_new_tokens) for line in lines
    )
    if not is_ours:
        rule = f"answers of {options.max_new_tokens} tokens are appended"
        next_step = "choose another file with --out"
        raise InputError(out, rule, "a file of something else", next_step)
    prompts = [json.loads(line)["prompt_token_ids"] for line in lines]
    if any(p != excerpt for p, excerpt in zip(prompts, excerpts, strict=False)):
        rule = "answers are appended to those of the same corpus, seed and prompt length"
        next_step = "repeat the options it was begun with, or choose another file with --out"
        raise InputError(out, rule, "answers to other excerpts", next_step)
    if unfinished:
        write_atomically(out, "".join(line + "\n" for line in lines))
    return min(len(lines), options.num_samples)


def _is_answer(line: str, tokens: int) -> bool:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return False
    if not isinstance(row, dict) or "prompt_token_ids" not in row:
        return False
    return len(row.get("output_token_ids", ())) == tokens
