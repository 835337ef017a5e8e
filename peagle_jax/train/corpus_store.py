"""A corpus as token ids on disk: documents are encoded as they are read, none is held in memory.

A folder has

    index.json           what it was made from, and the sizes and SHA-256 of the other files
    tokens.bin           int32, all documents one after another
    loss_mask.bin        a byte for each token: whether a loss may read it
    ends.bin             int64 for each document: where it ends
    order.bin            int64 for each document: its place in the order in which they are packed
    held_out.jsonl       the documents that are held out, as text
    held_out.jsonl.ends  int64 for each of them: where it ends
"""

import array
import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle_jax import corpus, text
from peagle_jax.chat.encoding import Encoded, special_token_pattern, spelled_special_token
from peagle_jax.documents import BadRows, Document
from peagle_jax.progress import ProgressReport
from peagle_jax.train.data import PackedRows, check_any, rows_of
from peagle_jax.train.document_file import ENDS, DocumentFile, DocumentWriter
from peagle_jax.types import InputError

INDEX, HELD_OUT = "index.json", "held_out.jsonl"
FORMAT_VERSION = 1
DTYPES = {
    "tokens.bin": np.dtype(np.int32),
    "loss_mask.bin": np.dtype(bool),
    "ends.bin": np.dtype(np.int64),
    "order.bin": np.dtype(np.int64),
}
FILES = (*DTYPES, HELD_OUT, HELD_OUT + ENDS)
OWN = {INDEX, *FILES}
SPECIAL_TOKENS = "data.special_tokens: true (extract: --special-tokens)"  # what sets it
READ_BYTES = 1 << 20  # of a file whose SHA-256 is computed


@dataclasses.dataclass(frozen=True)
class CorpusChoice:
    """Which documents of a corpus are trained on.

    Attributes:
      source: the corpus, as `corpus.stream_corpus` takes it.
      held_out: share of documents that are held out.
      max_chars: a random choice of documents of about so many characters; None: all.
      seed: of the random choice.
      bad_rows: what to do with rows that cannot be used, one of `documents.BAD_ROWS`.
      chat_template_kwargs, special_tokens, split_turns: as of `corpus.stream_corpus`.
    """

    source: str | None
    held_out: float = 0.0
    max_chars: int | None = None
    seed: int = 0
    bad_rows: str = "refuse"
    chat_template_kwargs: dict[str, Any] | None = None
    special_tokens: bool = False
    split_turns: bool = False

    def documents(self, bad_rows: BadRows) -> Iterator[Document]:
        """All documents of the corpus, those that are held out among them."""
        options = self.chat_template_kwargs, self.special_tokens, self.split_turns
        return corpus.stream_corpus(self.source, bad_rows, *options)


@dataclasses.dataclass(frozen=True)
class CorpusStore:
    """The documents of a folder, which is mapped and not read.

    Attributes:
      tokens: token ids of all documents, one after another.
      loss_mask: which of them a loss may read.
      ends: where each document ends.
      order: numbers of the documents, as they are packed.
      held_out: documents that are not trained on.
    """

    tokens: Int[np.ndarray, " t"]
    loss_mask: Bool[np.ndarray, " t"]
    ends: Int[np.ndarray, " n"]
    order: Int[np.ndarray, " n"]
    held_out: Sequence[Document]

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        """Tokens of each document, in the order of `ends`."""
        return np.diff(self.ends, prepend=0)

    def pack(self, seq_len: int, packing: str = "cut") -> PackedRows:
        """The documents as rows, as `data.rows_of` says."""
        lengths = self.lengths
        begins = self.ends - lengths
        if not np.array_equal(self.order, np.arange(len(self.order))):
            begins, lengths = begins[self.order], lengths[self.order]
        return rows_of(self.tokens, self.loss_mask, begins, lengths, seq_len, packing)


def open_corpus(
    folder: Path,
    choice: CorpusChoice,
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], None] = print,
) -> CorpusStore:
    """The corpus in a folder, which is made if it is not there, or is of something else.

    Args:
      folder: appears whole or not at all; what is there is replaced where it does not fit.
      choice: which documents.
      tokenizer: of the target.
      say: is told which rows were skipped, and whether the folder is made again.

    Raises:
      InputError: the corpus cannot be read or cannot be trained on, or the folder not be written.
    """
    return read_store(folder, make_store(folder, choice, tokenizer, say))


def make_store(
    folder: Path,
    choice: CorpusChoice,
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], None] = print,
) -> str:
    """Makes the folder of `open_corpus` where it is not there, or is of something else.

    Returns:
      The key of its contents, for `read_store`.

    Raises:
      InputError: as for `open_corpus`.
    """
    folder = folder.resolve()  # a link may lead to a larger disk
    _check_owned(folder, choice)
    key = _key(choice, tokenizer)
    index = _read_index(folder)
    if index is not None and index.get("key") == key:
        damaged = next((name for name in FILES if _facts(folder / name) != index[name]), None)
        if damaged is not None:
            say(f"{folder / damaged} is not what was written: the corpus is encoded again")
            index = None
    if index is None or index.get("key") != key:
        index = _make(folder, choice, tokenizer, key)
    for line in index["skipped"]:
        say(line)
    return key


def read_store(folder: Path, key: str) -> CorpusStore:
    """The corpus that `make_store` has made, in this process or in another.

    Raises:
      InputError: it is not there, as where processes of several machines share no disk.
    """
    folder = folder.resolve()
    index = _read_index(folder)
    if index is None or index["key"] != key:
        rule = "the encoded corpus must be seen by all processes that train together"
        got = "none" if index is None else "that of another corpus"
        next_step = "set out to a folder on a disk that all of them share"
        raise InputError(folder, rule, got, next_step)
    # plain views: indexing of np.memmap makes objects of its own class
    arrays = {
        name.removesuffix(".bin"): np.asarray(np.memmap(folder / name, dtype, "r"))
        for name, dtype in DTYPES.items()
    }
    return CorpusStore(**arrays, held_out=DocumentFile(folder / HELD_OUT))


def _check_owned(folder: Path, choice: CorpusChoice) -> None:
    """Raises InputError where the folder holds something of somebody else, or lies in the corpus.

    What is there will be replaced, and what is written beside texts would be read as such.
    """
    others = [] if not folder.is_dir() else sorted({p.name for p in folder.iterdir()} - OWN)
    if others:
        rule = "the folder of an encoded corpus must hold nothing else"
        raise InputError(folder, rule, others[0], "move that, or choose another `out`")
    source = None if choice.source is None else Path(choice.source).resolve()
    if source is not None and source.is_dir() and folder.is_relative_to(source):
        rule = "the run's folder must not lie in its corpus"
        raise InputError(choice.source, rule, folder, "choose an `out` beside it")


def _key(choice: CorpusChoice, tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that the folder's contents depend on."""
    options = dataclasses.asdict(choice)
    if not choice.split_turns:  # keys are of corpora from before there was this option
        del options["split_turns"]
    made_from = {
        "format_version": FORMAT_VERSION,
        **options,
        # it decides a choice only
        "seed": choice.seed if choice.max_chars is not None else None,
        "files": corpus.source_state(choice.source),
        "tokenizer": _tokenizer_state(tokenizer),
        "special_tokens_map": {key: str(x) for key, x in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that a tokenizer does, as text; of a slow one, which only answers need, its tokens."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer.backend_tokenizer.to_str()
    return json.dumps(tokenizer.get_vocab(), sort_keys=True)


def _read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a folder; None if it has none that can be used."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_whole = isinstance(index, dict) and {"key", "skipped", *FILES} <= index.keys()
    return index if is_whole and isinstance(index["skipped"], list) else None


def _facts(path: Path) -> list[int | str]:
    """[bytes, SHA-256] of a file; both empty if it is not there."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
                size += len(block)
    except OSError:
        return [0, ""]
    return [size, digest.hexdigest()]


# ---------------------------------------------------------------- making it


def _make(
    folder: Path, choice: CorpusChoice, tokenizer: PreTrainedTokenizerBase, key: str
) -> dict[str, Any]:
    """Writes a folder under a temporary name, then renames it. Returns its index."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    bad_rows = BadRows(choice.bad_rows)
    skipped: list[str] = []
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        spelling = _write_documents(temporary, choice, tokenizer, bad_rows)
        bad_rows.report(skipped.append)
        if spelling.texts:
            skipped.append(
                f"{spelling.texts:,} texts spell special tokens, which are read as plain text; if "
                f"they are conversations that were rendered already, set {SPECIAL_TOKENS}"
            )
        if spelling.conversations:
            skipped.append(
                f"{spelling.conversations:,} conversations spell special tokens in their messages, "
                f"the first is {spelling.first}; a chat template makes these tokens of them, in "
                "training as at a server. Remove them where nobody meant that"
            )
        index: dict[str, Any] = {"key": key, "skipped": skipped}
        index |= {name: _facts(temporary / name) for name in FILES}
        (temporary / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except OSError as error:
        rule = "the corpus must be written to disk as token ids, 5 bytes each"
        next_step = "make room, or choose another disk"
        raise InputError(folder, rule, error.strerror or error, next_step) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return index


@dataclasses.dataclass
class _Spelling:
    """Documents whose own words spell special tokens.

    Attributes:
      pattern: finds these; None where the tokenizer has none.
      texts: how many texts, in which they are plain text.
      conversations: how many conversations, in which they become tokens.
      first: the first of those, with what it spells.
    """

    pattern: re.Pattern[str] | None
    texts: int = 0
    conversations: int = 0
    first: str = ""
    _last: str = ""

    def look(self, document: Document) -> None:
        """Counts a document. Answers of one conversation that are read apart follow each other."""
        if self.pattern is None or (document.is_plain and document.special_tokens):
            return
        if not (spelled := spelled_special_token(self.pattern, document)):
            return
        if document.is_plain:
            self.texts += 1
            return
        name = document.name
        if document.only_last:  # "answers.jsonl:3, answer 2"
            name = name.rpartition(", answer ")[0] or name
        self.conversations += name != self._last
        self.first = self.first or f"{name} with {spelled}"
        self._last = name


def _write_documents(
    folder: Path, choice: CorpusChoice, tokenizer: PreTrainedTokenizerBase, bad_rows: BadRows
) -> _Spelling:
    """Writes all files but the index; which documents spell special tokens."""
    spelling = _Spelling(special_token_pattern(tokenizer))
    with contextlib.ExitStack() as stack:
        held_out = stack.enter_context(DocumentWriter(folder / HELD_OUT))
        tokens, loss_mask, ends = (
            stack.enter_context((folder / name).open("wb"))
            for name in ("tokens.bin", "loss_mask.bin", "ends.bin")
        )
        progress = stack.enter_context(ProgressReport("encode the corpus", None, 0, "documents"))
        # by the place at which it is packed: the document's number among those that were written
        places = array.array("q")
        end = 0
        chosen = _chosen(choice, tokenizer, bad_rows, held_out)
        for place, document, encoded in _encoded(tokenizer, chosen, bad_rows):
            spelling.look(document)
            tokens.write(encoded.tokens.astype(np.int32).tobytes())
            loss_mask.write(encoded.loss_mask.tobytes())
            end += len(encoded.tokens)
            ends.write(np.int64(end).tobytes())
            places.append(place)
            progress.update(len(places), note=f"{end:,} tokens")
    check_any(len(places), choice.source)
    order = np.argsort(np.frombuffer(places, np.int64), kind="stable")
    order.astype(np.int64).tofile(folder / "order.bin")
    return spelling


def _encoded(
    tokenizer: PreTrainedTokenizerBase, chosen: Iterator[tuple[int, Document]], bad_rows: BadRows
) -> Iterator[tuple[int, Document, Encoded]]:
    for place, document in chosen:
        for _, encoded in text.encode_stream(tokenizer, [document], bad_rows):
            yield place, document, encoded


def _chosen(
    choice: CorpusChoice,
    tokenizer: PreTrainedTokenizerBase,
    bad_rows: BadRows,
    held_out: DocumentWriter,
) -> Iterator[tuple[int, Document]]:
    """The documents to train on, as they are read, each with its place in their order.

    Those that are held out go into their file, if they can be used. A random choice needs the sizes
    of all documents, so that they are read twice.
    """

    def to_train(bad_rows: BadRows) -> Iterator[Document]:
        for document in choice.documents(bad_rows):
            if not corpus.is_held_out(document, choice.held_out):
                yield document
            elif is_first:
                for usable, _ in text.encode_stream(tokenizer, [document], bad_rows):
                    held_out.add(usable)

    is_first = True
    if choice.max_chars is None:
        yield from enumerate(to_train(bad_rows))
        return
    sizes = array.array("q", (document.size for document in to_train(bad_rows)))
    is_first = False
    numbers = corpus.choose(sizes, choice.max_chars, choice.seed)
    place_of = {number: place for place, number in enumerate(numbers)}
    # what cannot be used was counted before
    for number, document in enumerate(to_train(BadRows("skip"))):
        if number in place_of:
            yield place_of[number], document
