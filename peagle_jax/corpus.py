"""Corpora: documents from folders, JSONL, Parquet, Hugging Face datasets, and Python source.

Which documents are held out is decided here too. Tokenizers are the business of text.py.

A dataset of the hub is named `hf:NAME`, `hf:NAME:SPLIT` or `hf:NAME:CONFIG:SPLIT`. The prefix tells
it apart from a folder of the same name, which a bare `org/name` could be as well, and the colons
tell the split apart from the name, which has slashes. NAME may also be a folder that the `datasets`
library reads, of which one split is wanted.
"""

import contextlib
import dataclasses
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.dataset_rows import parquet_rows, saved_rows, stream_rows
from peagle_jax.document_rows import CONTENT_KEYS, ROW_KEYS, document_of_row
from peagle_jax.documents import BadRows, Document
from peagle_jax.json_files import HEAD_BYTES, json_rows, read_jsonl, read_text, unreadable
from peagle_jax.types import InputError

# fmt: off
SUFFIXES = {
    ".py", ".txt", ".md", ".rst", ".c", ".h", ".js", ".ts", ".java", ".go", ".rs", ".json", ".html",
    ".csv", ".tex",
}
# fmt: on
PROSE = {".txt", ".md", ".rst", ".json", ".html", ".csv", ".tex"}  # of these no source code
INSTALLED = "installed"  # the corpus of all Python source of this environment
HUB = "hf:"  # before the name of a dataset that the `datasets` library finds
# Files beside those of rows in a dataset's folder that are about it, and what the names of such
# files end with that `peagle regenerate` writes.
CARDS = {"README.md", "dataset_infos.json", "dataset_info.json", "LICENSE.txt", "LICENSE.md"}
ABOUT = ".about.json"
# Digests that are looked up in a set before they are merged into the sorted array.
RECENT_DIGESTS = 1 << 16


def read_corpus(
    source: str | Path | None,
    bad_rows: BadRows | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens: bool = False,
    split_turns: bool = False,
) -> list[Document]:
    """`stream_corpus` as a list, for work that needs all documents at once."""
    how = chat_template_kwargs, special_tokens, split_turns
    return list(stream_corpus(source, bad_rows, *how))


def stream_corpus(
    source: str | Path | None,
    bad_rows: BadRows | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens: bool = False,
    split_turns: bool = False,
) -> Iterator[Document]:
    """Reads the documents of a corpus, in a fixed order and without exact duplicates.

    One document is in memory at a time; of those before it, 16 bytes each.

    Args:
      source: a JSONL, JSON or Parquet file with rows as `document_rows` lists them; a folder of
        such files, or one that `datasets` saved; a folder of text files;
        `hf:NAME[:CONFIG][:SPLIT]` for a dataset of the hub, whose split is "train" if none is
        named; None for the source code of this machine's Python standard library, its tests
        included; "installed" for that and all packages of this environment.
      bad_rows: takes the rows that cannot be used; None: the first is an error.
      chat_template_kwargs: of conversations and prompts, where their rows do not set them.
      special_tokens: of texts and prompts, as `Document` has it.
      split_turns: give each answer of a conversation apart, after the turns before it.

    Raises:
      InputError: there are no documents, or a file is not UTF-8, or a row is none of the above; or
        the optional library that reads Parquet files and datasets is missing.
    """
    bad_rows = bad_rows or BadRows()
    if source is None:
        documents = _standard_library()
    elif source == INSTALLED:
        documents = _installed()
    elif str(source).startswith(HUB):
        documents = _hub(str(source), bad_rows)
    elif Path(source).is_dir():
        documents = _folder(Path(source), bad_rows)
    else:
        documents = _file(Path(source), Path(source).name, bad_rows)
    seen = _SeenDigests()
    is_empty = True
    for document in _apart(documents) if split_turns else documents:
        if not document.is_empty and seen.add(document.digest()[:16]):
            is_empty = False
            if chat_template_kwargs and document.may_be_chat:
                options = {**chat_template_kwargs, **document.chat_template_kwargs}
                document = dataclasses.replace(document, chat_template_kwargs=options)
            if special_tokens and document.is_plain:
                document = dataclasses.replace(document, special_tokens=True)
            yield document
    if is_empty and bad_rows.errors:
        rule, next_step = "a corpus needs at least one row that can be used", "correct the rows"
        got = f"{bad_rows.count:,} that cannot, first {bad_rows.errors[0]}"
        raise InputError(source, rule, got, next_step)
    if is_empty:
        rule = f"a corpus needs at least one document ({', '.join(sorted(SUFFIXES))})"
        next_step = "name a folder with such files, or a JSONL or Parquet file"
        raise InputError(source, rule, "none", next_step)


def _apart(documents: Iterable[Document]) -> Iterator[Document]:
    """Each answer of a conversation apart; one row that continues another has its answers, too."""
    for document in documents:
        yield from document.answers_apart()


class _SeenDigests:
    """Digests of 16 bytes that have been seen: most of them in a sorted array, without overhead."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, "S16")
        self._recent: set[bytes] = set()

    def add(self, digest: bytes) -> bool:
        """Adds a digest, and says whether it is new."""
        # NumPy compares S16 as bytes, padded with zeros: of equal lengths, exactly
        key = np.array(digest, "S16")
        place = int(np.searchsorted(self._sorted, key))
        is_old = place < len(self._sorted) and self._sorted[place] == key
        if is_old or digest in self._recent:
            return False
        self._recent.add(digest)
        if len(self._recent) == RECENT_DIGESTS:
            recent = np.array(list(self._recent), "S16")
            self._sorted = np.sort(np.concatenate([self._sorted, recent]))
            self._recent.clear()
        return True


def source_state(source: str | Path | None) -> list[tuple[str, int, int]]:
    """What tells whether a corpus has changed: (name, bytes, time of change in ns) of its files.

    A dataset of the hub is known by its name alone, so that a run goes on without a network.
    """
    if source is None or source == INSTALLED:
        kinds = ["stdlib"] if source is None else ["stdlib", "purelib", "platlib"]
        roots = [Path(sysconfig.get_paths()[kind]) for kind in kinds]
        paths = [path for root in roots for path in root.rglob("*.py")]
    elif str(source).startswith(HUB):
        paths = list(Path(_hub_parts(str(source))[0]).rglob("*"))
    elif Path(source).is_dir():
        paths = list(Path(source).rglob("*"))
    else:
        paths = [Path(source)]
    found = []
    for path in sorted(path for path in paths if path.is_file()):
        with contextlib.suppress(FileNotFoundError):  # it was there when the folder was listed
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns))
    return found


# ---------------------------------------------------------------- texts


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from _python(root, (p for p in root.rglob("*.py") if "site-packages" not in p.parts))


def _installed() -> Iterator[Document]:
    """The standard library under its own names, so that the same files are held out; then
    packages."""
    yield from _standard_library()
    for root in sorted({Path(sysconfig.get_paths()[kind]) for kind in ("purelib", "platlib")}):
        yield from _python(root, root.rglob("*.py"))


def _python(root: Path, paths: Iterable[Path]) -> Iterator[Document]:
    for path in sorted(paths):
        try:
            yield Document(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            # the library tests itself on files in other encodings, and installations have broken
            # links
            continue


def _folder(root: Path, bad_rows: BadRows) -> Iterator[Document]:
    """A folder of texts, of files of rows, or one that `datasets` saved."""
    if (root / "dataset_dict.json").exists():
        splits = sorted(p.name for p in root.iterdir() if p.is_dir())
        rule, next_step = "one split of a dataset is read", f"name it as {HUB}{root}:{splits[0]}"
        raise InputError(root, rule, f"the splits {', '.join(splits)}", next_step)
    if _is_saved(root):
        yield from _documents(saved_rows(root, ROW_KEYS), root.name, str(root), bad_rows)
        return
    files = sorted(p for p in root.rglob("*") if p.is_file())
    parquet = [p for p in files if p.suffix == ".parquet"]
    texts = [p for p in files if p.suffix in SUFFIXES]
    others = [p for p in texts if p.name not in CARDS and not p.name.endswith(ABOUT)]
    if parquet and others:
        rule = "a folder has Parquet files, or texts"
        got = f"{others[0].relative_to(root)} beside {parquet[0].relative_to(root)}"
        next_step = f"name the folder of the Parquet files: {parquet[0].parent}"
        raise InputError(root, rule, got, next_step)
    tables = parquet or row_files(root)
    for path in tables:
        yield from _file(path, str(path.relative_to(root)), bad_rows)
    if not tables:
        for path in texts:
            if not path.name.endswith(ABOUT):  # of answers beside them
                yield Document(str(path.relative_to(root)), read_text(path))


# ---------------------------------------------------------------- rows


def row_files(root: Path) -> list[Path]:
    """The JSONL files of a folder, and those of JSON that have rows, if it has no texts.

    Source code has such files for its tests, in folders of their own, and answers to a corpus may
    be written beside it: these are none of the corpus.

    Raises:
      InputError: there are texts, and rows that seem to be a corpus.
    """
    files = sorted(p for p in root.rglob("*") if p.is_file())
    tables = [p for p in files if p.suffix == ".jsonl" or p.suffix == ".json" and _has_rows(p)]
    others = [p for p in files if p.suffix in SUFFIXES and p not in tables]
    texts = [p for p in others if p.name not in CARDS and not p.name.endswith(ABOUT)]
    if not texts:
        return tables
    has_code = any(p.suffix not in PROSE for p in texts)
    for path in tables:
        is_answers = path.with_name(path.name + ABOUT).exists() or not path.stat().st_size
        is_of_code = has_code and path.parent not in (root, root / "data")
        if not (is_answers or is_of_code):
            got = f"{texts[0].relative_to(root)} beside {path.relative_to(root)}"
            next_step = f"name {path}, or a folder that has texts alone"
            raise InputError(root, "a folder has files of rows, or texts", got, next_step)
    return []


def _file(path: Path, name: str, bad_rows: BadRows) -> Iterator[Document]:
    """The documents of a file of rows; `name` is the file's in the names of documents."""
    if path.suffix == ".parquet":
        rows = parquet_rows(path, ROW_KEYS)
    elif path.suffix == ".json" and _head(path).startswith("["):
        rows = json_rows(path, bad_rows)
    else:
        rows = read_jsonl(path, bad_rows)
    return _documents(rows, name, str(path), bad_rows)


def _has_rows(path: Path) -> bool:
    """Whether a JSON file seems to have rows: a list of them, as ShareGPT's, or one each line."""
    head = _head(path)
    if head.startswith("{"):
        first, is_whole, rest = head.partition("\n")
        if not is_whole:  # a row may be longer than a head; one object alone is no file of rows
            return len(first) > HEAD_BYTES // 2 and any(f'"{key}"' in first for key in CONTENT_KEYS)
        try:
            row = json.loads(first)
        except (ValueError, RecursionError):
            return False
        return rest.lstrip().startswith("{") and any(key in row for key in CONTENT_KEYS)
    is_list = head.startswith("[") and head[1:].lstrip().startswith("{")
    return is_list and any(f'"{key}"' in head for key in ROW_KEYS)


def _head(path: Path) -> str:
    """How a file begins, without space before it."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES).decode(errors="replace").lstrip("\ufeff \n\r\t")
    except OSError as error:
        raise unreadable(path, error) from None


def _documents(
    rows: Iterable[tuple[int, dict]], name: str, where: str, bad_rows: BadRows
) -> Iterator[Document]:
    """The documents of numbered rows; `name` and `where` are those of what the rows are in."""
    for number, row in rows:
        try:
            document = document_of_row(row, f"{name}:{number}", f"{where}:{number}")
        except InputError as error:
            bad_rows.take(error)
        else:
            yield document


def _hub(source: str, bad_rows: BadRows) -> Iterator[Document]:
    """One split of a dataset of the hub, or of a folder that `datasets` reads, as a stream."""
    name, config, split = _hub_parts(source)
    folder = Path(name)
    is_saved = _is_saved(folder / split)
    rows = (
        saved_rows(folder / split, ROW_KEYS)
        if is_saved
        else stream_rows(source, name, config, split, ROW_KEYS)
    )
    parts = [folder.name if folder.is_dir() else name, *([config] if config else []), split]
    yield from _documents(rows, ":".join(parts), source, bad_rows)


def _hub_parts(source: str) -> tuple[str, str | None, str]:
    """(name, configuration, split) of `hf:NAME[:CONFIG][:SPLIT]`."""
    name, *parts = source.removeprefix(HUB).split(":")
    if not name or len(parts) > 2 or not all(parts):
        rule = f"a dataset is named {HUB}NAME, {HUB}NAME:SPLIT or {HUB}NAME:CONFIG:SPLIT"
        raise InputError(source, rule, source, f"write {HUB}org/name:train")
    return name, parts[0] if len(parts) == 2 else None, parts[-1] if parts else "train"


def _is_saved(folder: Path) -> bool:
    """Whether a folder is of `Dataset.save_to_disk`."""
    return (folder / "state.json").exists() and (folder / "dataset_info.json").exists()


# ---------------------------------------------------------------- choices


def is_held_out(document: Document, share: float) -> bool:
    """Whether a document is held out: by a hash of its source's name.

    A file is therefore on the same side whatever else is in the corpus.

    Args:
      document: any.
      share: of names that are held out, 0 to 1.
    """
    name = document.name if document.source is None else document.source
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def split(documents: Sequence[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """Splits documents into (train, held out), as `is_held_out` says.

    Args:
      documents: all documents.
      held_out: share of names that is held out, 0 to 1.
    """
    sides: tuple[list[Document], list[Document]] = [], []
    for document in documents:
        sides[is_held_out(document, held_out)].append(document)
    return sides


def subsample(documents: Sequence[Document], characters: int | None, seed: int) -> list[Document]:
    """A random choice of documents.

    Args:
      documents: all documents.
      characters: about so many in all (tokens, for answers in tokens); None: all documents.
      seed: of the choice.
    """
    if characters is None:
        return list(documents)
    return [documents[i] for i in choose([d.size for d in documents], characters, seed)]


def choose(sizes: Sequence[int], characters: int, seed: int) -> list[int]:
    """The numbers of the documents that `subsample` chooses, in its order, by their sizes."""
    chosen, total = [], 0
    for i in np.random.default_rng(seed).permutation(len(sizes)):
        if total >= characters:
            break
        chosen.append(int(i))
        total += sizes[i]
    return chosen
