"""Corpora: documents from folders, JSONL files and this machine's Python source.

Which documents are held out is decided here too. Tokenizers are the business of text.py.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from peagle_jax.documents import BadRows, Document, document_of_row
from peagle_jax.types import InputError

# fmt: off
SUFFIXES = {
    ".py", ".txt", ".md", ".rst", ".c", ".h", ".js", ".ts", ".java", ".go", ".rs", ".json", ".html",
    ".csv", ".tex",
}
# fmt: on
INSTALLED = "installed"  # the corpus of all Python source of this environment


def read_corpus(source: str | Path | None, bad_rows: BadRows | None = None) -> list[Document]:
    """Reads the documents of a corpus, in a fixed order and without exact duplicates.

    Args:
      source: a folder of text files; a JSONL with rows as `documents` lists them; None for the
        source code of this machine's Python standard library, its tests included; "installed" for
        that and all packages of this environment.
      bad_rows: takes the lines of a JSONL that cannot be used; None: the first is an error.

    Raises:
      InputError: there are no documents, or a file is not UTF-8, or a line is none of the above.
    """
    if source is None:
        documents = _standard_library()
    elif source == INSTALLED:
        documents = _installed()
    elif Path(source).is_dir():
        documents = _folder(Path(source))
    else:
        documents = _jsonl(Path(source), bad_rows or BadRows())
    unique: dict[bytes, Document] = {}
    for document in documents:
        if not document.is_empty:
            unique.setdefault(document.digest(), document)
    if not unique:
        rule = f"a corpus needs at least one document ({', '.join(sorted(SUFFIXES))})"
        next_step = "name a folder with such files, or a JSONL file"
        raise InputError(source, rule, "none", next_step)
    return list(unique.values())


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


def _folder(root: Path) -> Iterator[Document]:
    for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
        yield Document(str(path.relative_to(root)), read_text(path))


def _jsonl(path: Path, bad_rows: BadRows) -> Iterator[Document]:
    for number, row in read_jsonl(path, bad_rows):
        try:
            document = document_of_row(row, f"{path.name}:{number}", f"{path}:{number}")
        except InputError as error:
            bad_rows.take(error)
        else:
            yield document


def read_text(path: Path) -> str:
    """Reads a UTF-8 file.

    Raises:
      InputError: it is missing, a folder, not readable, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(path, "this file must exist", "nothing", "check the name") from None
    except IsADirectoryError:
        raise InputError(path, "must be a file", "a folder", "name a file in it") from None
    except OSError as error:
        next_step = "name a file that you may read"
        raise InputError(path, "this file must be readable", error.strerror, next_step) from None
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]:#04x} at {error.start}"
        next_step = "convert the file to UTF-8, or remove it"
        raise InputError(path, "must be UTF-8 text", got, next_step) from None


def read_jsonl(path: Path, bad_rows: BadRows | None = None) -> Iterator[tuple[int, dict]]:
    """The line number, from 1, and the object of each line that is not blank.

    Args:
      path: the file.
      bad_rows: takes lines that are no JSON objects; None: the first is an error.

    Raises:
      InputError: the file cannot be read, or a line is not a JSON object.
    """
    bad_rows = bad_rows or BadRows()
    rule, next_step = "each line must be a JSON object", "correct or remove the line"
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            bad_rows.take(InputError(f"{path}:{number}", rule, error, next_step))
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            bad_rows.take(InputError(f"{path}:{number}", rule, type(row).__name__, next_step))


def split(documents: Sequence[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """Splits documents into (train, held out) by a hash of their sources' names.

    A file is therefore on the same side whatever else is in the corpus.

    Args:
      documents: all documents.
      held_out: share of names that is held out, 0 to 1.
    """
    train, kept_back = [], []
    for document in documents:
        name = document.name if document.source is None else document.source
        digest = hashlib.sha256(name.encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64  # in 0..1
        (kept_back if place < held_out else train).append(document)
    return train, kept_back


def subsample(documents: Sequence[Document], characters: int | None, seed: int) -> list[Document]:
    """A random choice of documents.

    Args:
      documents: all documents.
      characters: about so many in all (tokens, for answers in tokens); None: all documents.
      seed: of the choice.
    """
    if characters is None:
        return list(documents)
    chosen, total = [], 0
    for i in np.random.default_rng(seed).permutation(len(documents)):
        if total >= characters:
            break
        chosen.append(documents[i])
        total += documents[i].size
    return chosen
