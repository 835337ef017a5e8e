"""Writes a target's answers as training data: of conversations, or to excerpts of a corpus.

A head learns best from what its target writes, because that is what it will draft.
"""

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from peagle_jax import corpus, text
from peagle_jax.chat.apply_template import TEMPLATE_OPTION, check_template_kwargs
from peagle_jax.chat.encoding import first_tokens
from peagle_jax.checkpoints.target_io import context_of, load_target, target_hash
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.decode.requests import Generation, Request, check_prompts
from peagle_jax.documents import BadRows, Document
from peagle_jax.pipelines.answer_file import (
    ANSWER_BEGINS,
    CONVERSATION_BEGINS,
    appendable,
    begun_with,
    continue_file,
)
from peagle_jax.pipelines.answer_writers import EngineWriter, ServerWriter, Writer
from peagle_jax.pipelines.regenerate_conversations import rewrite
from peagle_jax.pipelines.temporary_folder import temporary_folder
from peagle_jax.progress import ProgressReport
from peagle_jax.targets.sharding import parallel_mesh
from peagle_jax.train.document_file import DocumentFile, DocumentWriter
from peagle_jax.types import InputError, Model

DEFAULT_EXCERPTS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerationOptions:
    """What to write.

    Attributes:
      source: the corpus, as `corpus.stream_corpus` takes it.
      held_out: share of documents that nothing is taken from. Training chooses by the same names:
        with the same share it then finds no answer to measure a head on, and needs prompts. None:
        0, or what the output file was begun with.
      num_samples: answers to excerpts, or conversations, in all; more conversations than the corpus
        has are sampled again. None: 4,096 excerpts, or every conversation once.
      prompt_tokens: tokens of an excerpt.
      max_new_tokens: the most tokens of an answer.
      temperatures: answers to excerpts, and conversations, take them in turn.
      batch_size: answers that are written at the same time.
      seed: of the excerpts and of sampling.
      part: (i, n): conversations i, i + n, i + 2 n and so on alone, for one of n processes.
      server: URL of a server with OpenAI's chat completions that writes in the target's place.
      server_model: the target's name there; None for the first that the server lists.
      bad_rows: what to do with lines that cannot be used, one of `documents.BAD_ROWS`.
      chat_template_kwargs: as of `corpus.stream_corpus`; rows keep them for training.
      special_tokens: as of `corpus.stream_corpus`, of texts that are continued.
      dtype: "float32" or "bfloat16", of the target's weights where it writes here.
      data_parallel_size: groups of devices that then share the answers, each with a whole target.
      tensor_parallel_size: devices over which it is spread in a group.
    """

    source: str | None
    held_out: float | None = None
    num_samples: int | None = None
    prompt_tokens: int = 32
    max_new_tokens: int = 224
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_size: int = 64
    seed: int = 0
    part: tuple[int, int] = (0, 1)
    server: str | None = None
    server_model: str | None = None
    bad_rows: str = "refuse"
    chat_template_kwargs: dict[str, Any] | None = None
    special_tokens: bool = False
    dtype: str = "float32"
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1


@dataclasses.dataclass(frozen=True)
class Regenerated:
    """What is in the file, of this session and those before it."""

    rows: int
    tokens: int


def regenerate(
    target_folder: Path,
    options: RegenerationOptions,
    out: Path,
    say: Callable[[str], None] = print,
) -> Regenerated:
    """Appends answers to a JSONL file until it has as many as the options say. Resumes.

    A corpus of conversations, or of prompts, is answered turn by turn, and becomes rows with
    `messages`; of texts, excerpts are continued, as rows of token ids. A file beside `out` says
    what it was begun with.

    Args:
      target_folder: the target, with its tokenizer. Where a server writes, only the latter is read.
      options: what to write.
      out: the output file.
      say: is told how much is already there.

    Raises:
      InputError: the target has no tokenizer, the corpus has too little text, or texts beside
        conversations, an answer does not fit the target's context, `out` contains something else or
        was begun with something else, or a server does not answer.
    """
    tokenizer = text.load_tokenizer(target_folder)
    if tokenizer is None:
        rule = "a corpus of text needs the target's tokenizer"
        next_step = "copy tokenizer.json into the target's folder"
        raise InputError(target_folder, rule, "no tokenizer.json", next_step)
    if options.chat_template_kwargs:
        check_template_kwargs(tokenizer, options.chat_template_kwargs, TEMPLATE_OPTION)
    if options.server is None:
        _check_context(target_folder, options, prompt_tokens=1)  # before a corpus is read
    source = None if options.source is None else Path(options.source)
    if source is not None and source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        if {path.resolve() for path in corpus.row_files(source)} - {out.resolve()}:
            rule, next_step = "answers must not lie in the corpus", "name a file in another folder"
            raise InputError(out, rule, f"one in {source}", next_step)
    if options.held_out is None:  # as the file was begun, or nothing
        options = dataclasses.replace(options, held_out=begun_with(out).get("held_out", 0.0))
    # they are answered in any order, and need not fit into memory
    with appendable(out), contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(temporary_folder())
            conversations, texts = _read_documents(options, temporary, say)
        except OSError as error:
            rule = "the corpus must fit the folder for temporary files"
            next_step = "set TMPDIR to a folder on a larger disk"
            where = tempfile.gettempdir() if error.filename is None else error.filename
            raise InputError(where, rule, error.strerror or error, next_step) from None
        return _answer(target_folder, tokenizer, conversations, texts, options, out, say)


def _check_context(target_folder: Path, options: RegenerationOptions, prompt_tokens: int) -> None:
    """Raises InputError where no answer to a prompt of so many tokens fits the target's context."""
    context = context_of(str(target_folder))
    if context is not None and prompt_tokens + options.max_new_tokens > context:
        rule = f"prompt + new tokens must fit the target's context of {context} tokens"
        got = f"{prompt_tokens} + {options.max_new_tokens}"
        next_step = f"use --max-new-tokens {max(1, context - prompt_tokens)} or less"
        raise InputError("--max-new-tokens", rule, got, next_step)


def _read_documents(
    options: RegenerationOptions, folder: Path, say: Callable[[str], None]
) -> tuple[Sequence[Document], Sequence[Document]]:
    """(conversations and prompts, texts) that are not held out, written to files of a folder."""
    bad_rows = BadRows(options.bad_rows)
    paths = folder / "conversations", folder / "texts"
    with DocumentWriter(paths[0]) as conversations, DocumentWriter(paths[1]) as texts:
        how = options.chat_template_kwargs, options.special_tokens
        for document in corpus.stream_corpus(options.source, bad_rows, *how):
            if corpus.is_held_out(document, options.held_out or 0.0):
                continue
            if document.messages or document.prompt is not None:
                # a prompt is a user's turn here, and goes through the template
                conversations.add(dataclasses.replace(document, special_tokens=False))
            elif document.text is not None:
                texts.add(document)
    bad_rows.report(say)
    return DocumentFile(paths[0]), DocumentFile(paths[1])


def _answer(
    target_folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Document],
    texts: Sequence[Document],
    options: RegenerationOptions,
    out: Path,
    say: Callable[[str], None],
) -> Regenerated:
    """What is left of `regenerate` when the documents are known."""
    if conversations and texts:
        rule = "a corpus has conversations and prompts, or texts"
        got = f"both, {texts[0].name} being a text"
        raise InputError(options.source, rule, got, "write them to two files")
    if not conversations and (options.server is not None or options.part != (0, 1)):
        rule = "excerpts of texts are continued here, by one process"
        next_step = "give a corpus of conversations, or leave out --server and --part"
        raise InputError(options.source, rule, "a corpus of texts", next_step)
    if conversations:
        return _answer_conversations(target_folder, tokenizer, conversations, options, out, say)
    return _continue_excerpts(target_folder, tokenizer, texts, options, out, say)


# ---------------------------------------------------------------- conversations


def _answer_conversations(
    target_folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Document],
    options: RegenerationOptions,
    out: Path,
    say: Callable[[str], None],
) -> Regenerated:
    writer: Writer
    limits = options.max_new_tokens, options.batch_size
    if options.server is None:
        target = _load_target(target_folder, tokenizer, options)
        writer, name = EngineWriter(target, tokenizer, *limits), target_hash(target_folder)
    else:
        writer = ServerWriter(options.server, options.server_model, *limits)
        name = writer.model
    bad_rows = BadRows(options.bad_rows)
    digest = hashlib.sha256()
    for document in conversations:
        digest.update(document.digest())
    about = _about(options, name) | {"conversations": digest.hexdigest()[:16]}
    first, step = options.part
    num_tokens, last = 0, first - step

    def visit(row: dict[str, Any]) -> None:
        nonlocal num_tokens, last
        num_tokens, last = num_tokens + row["num_tokens"], row["sample"]

    num_rows = continue_file(out, CONVERSATION_BEGINS, about, visit)
    total = options.num_samples or len(conversations)
    mine = range(last + step, total, step)
    say(f"{len(range(first, total, step)):,} conversations, {num_rows:,} rows there already")
    documents = ((i, conversations[i % len(conversations)]) for i in mine)
    num_all = num_rows + len(mine)
    progress = ProgressReport("regenerate", num_all, num_rows, "conversations")
    with progress, out.open("a", encoding="utf-8") as file:
        temperatures, under_way = options.temperatures, 2 * options.batch_size
        how = temperatures, options.seed, under_way, bad_rows, len(conversations)
        for row in rewrite(documents, writer, tokenizer, *how):
            file.write(json.dumps(row) + "\n")
            file.flush()
            num_rows += 1
            num_tokens += row["num_tokens"]
            progress.update(num_rows)
    bad_rows.report(say)
    if not num_rows and isinstance(writer, ServerWriter) and writer.too_long is not None:
        raise writer.too_long  # of all turns: an option is wrong, and no conversation
    left_out = num_all - num_rows
    if left_out > 0:
        why = "too long, nobody asks anything in them, or refused"
        say(f"{left_out:,} conversations gave no row: {why}")
    return Regenerated(num_rows, num_tokens)


# ---------------------------------------------------------------- excerpts


def _continue_excerpts(
    target_folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Document],
    options: RegenerationOptions,
    out: Path,
    say: Callable[[str], None],
) -> Regenerated:
    total = options.num_samples or DEFAULT_EXCERPTS
    _check_context(target_folder, options, options.prompt_tokens)
    target = _load_target(target_folder, tokenizer, options)
    chosen = _excerpts(tokenizer, texts, dataclasses.replace(options, num_samples=total))
    excerpts = [ids for _, ids in chosen]
    check_prompts(excerpts, target.config, options.max_new_tokens, 0, None)
    about = _about(options, target_hash(target_folder)) | {"prompt_tokens": options.prompt_tokens}
    answered, num_tokens = iter(excerpts), 0

    def visit(row: dict[str, Any]) -> None:
        nonlocal num_tokens
        num_tokens += len(row["output_token_ids"])
        # a file may have more answers than are asked for today
        if row["prompt_token_ids"] != next(answered, row["prompt_token_ids"]):
            rule = "answers are appended to those of the same corpus, seed and prompt length"
            next_step = "repeat the options it was begun with, or choose another file with --out"
            raise InputError(out, rule, "answers to other excerpts", next_step)

    num_rows = continue_file(out, ANSWER_BEGINS, about, visit)
    done = min(num_rows, total)
    say(f"{total:,} answers of up to {options.max_new_tokens} tokens, {done:,} there already")
    requests = (
        Request(
            prompt=excerpts[i],
            max_new_tokens=options.max_new_tokens,
            seed=options.seed + i,
            temperature=options.temperatures[i % len(options.temperatures)],
        )
        for i in range(done, total)
    )
    engine = make_engine(target, max_batch=options.batch_size, donate_models=True)
    progress = ProgressReport("regenerate", total, done, "answers")
    with progress, out.open("a", encoding="utf-8") as file:
        for answer in _in_order(engine.run(requests)):
            if answer.error is not None:
                next_step = "look for NaN in its weights, or lower --batch-size"
                raise InputError(target_folder, "must answer", answer.error, next_step)
            row = {
                "prompt_token_ids": answer.prompt_token_ids,
                "output_token_ids": answer.output_token_ids,
                "source": chosen[done][0],
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
            done += 1
            num_tokens += len(answer.output_token_ids)
            progress.update(done)
    return Regenerated(max(num_rows, done), num_tokens)


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
    return [ids for _, ids in _excerpts(tokenizer, documents, options)]


def _excerpts(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], options: RegenerationOptions
) -> list[tuple[str, list[int]]]:
    """`excerpts_of`, with the name of the document that each is of."""
    length = options.prompt_tokens
    texts = [document for document in documents if document.text is not None]
    # without the end token
    ids_of_texts = [ids[:-1] for ids, _ in text.encode(tokenizer, texts)]
    long = [(d.name, ids) for d, ids in zip(texts, ids_of_texts, strict=True) if len(ids) > length]
    encoded = [ids for _, ids in long]
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
    first = first_tokens(tokenizer)
    for i in picks:
        begin = int(place_rng.integers(len(encoded[i]) - length))
        ids = encoded[i][begin : begin + length].tolist()
        if begin:  # where a prompt begins with tokens of its own, so does one from the middle
            ids = [*first, *ids[: length - len(first)]]
        excerpts.append((long[i][0], ids))
    return excerpts


# ---------------------------------------------------------------- both


def _load_target(
    folder: Path, tokenizer: PreTrainedTokenizerBase, options: RegenerationOptions
) -> Model:
    target = load_target(
        folder,
        aux_hidden_state_layers=(),
        dtype=jnp.dtype(options.dtype),
        mesh=parallel_mesh(options.tensor_parallel_size, options.data_parallel_size),
    )
    text.check_vocabulary(tokenizer, target.config.vocab, folder)
    return target


def _about(options: RegenerationOptions, writer: str) -> dict[str, Any]:
    """What rows depend on, beside their number."""
    dtype = {} if options.server else {"dtype": options.dtype}
    return dtype | {
        "target": writer,
        "held_out": options.held_out,
        "max_new_tokens": options.max_new_tokens,
        "temperature": list(options.temperatures),
        "seed": options.seed,
        "part": list(options.part),
    }
