"""Corpora: documents from folders, JSONL files and this machine's Python source; who is held out; no tokenizer here."""

import dataclasses
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from peagle_jax.types import InputError

SUFFIXES = {
    ".py",
    ".txt",
    ".md",
    ".rst",
    ".c",
    ".h",
    ".js",
    ".ts",
    ".java",
    ".go",
    ".rs",
    ".json",
    ".html",
    ".csv",
    ".tex",
}
INSTALLED = "installed"  # the corpus of all Python source of this environment


@dataclasses.dataclass(frozen=True)
class Document:
    """One text, one conversation, or one answer in tokens; `name` decides on which side of the held-out split it falls."""

    name: str
    text: str | None
    messages: tuple[dict, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[
        int, ...
    ] = ()  # a target's own answer to `prompt_ids`: what `peagle regenerate` and `generate --out` write

    @property
    def plain(self) -> str:
        """The text, or what the conversation's messages say."""
        return (
            self.text
            if self.text is not None
            else "\n".join(str(m.get("content") or "") for m in self.messages)
        )

    @property
    def size(self) -> int:
        """Characters; of an answer in tokens, its tokens."""
        return len(self.plain) or len(self.prompt_ids) + len(self.output_ids)


def read_corpus(source: str | Path | None) -> list[Document]:
    """Documents of a corpus, in a fixed order, without exact duplicates.

    Args:
      source: a folder of text files; a JSONL with `text`, `prompt`, `messages`, `turns`, or `prompt_token_ids` and
        `output_token_ids` a line; None for the source code of this machine's Python standard library, its tests included;
        "installed" for that and all packages of this environment.

    Raises:
      InputError: nothing is there, or a file is not UTF-8, or a line is not what it must be.
    """
    if source is None:
        documents = _standard_library()
    elif source == INSTALLED:
        documents = _installed()
    elif Path(source).is_dir():
        documents = _folder(Path(source))
    else:
        documents = _jsonl(Path(source))
    seen: set[bytes] = set()
    kept = []
    for document in documents:
        content = document.text or json.dumps(
            [document.messages, document.prompt_ids, document.output_ids]
        )
        digest = hashlib.sha256(content.encode()).digest()
        if digest not in seen and (document.text or document.messages or document.output_ids):
            seen.add(digest)
            kept.append(document)
    if not kept:
        raise InputError(
            source,
            f"a corpus needs at least one document ({', '.join(sorted(SUFFIXES))})",
            "none",
            "name another corpus",
        )
    return kept


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from _python(root, (p for p in root.rglob("*.py") if "site-packages" not in p.parts))


def _installed() -> Iterator[Document]:
    """The standard library under its own names, so that its held-out files stay held out; then the packages."""
    yield from _standard_library()
    for root in sorted({Path(sysconfig.get_paths()[kind]) for kind in ("purelib", "platlib")}):
        yield from _python(root, root.rglob("*.py"))


def _python(root: Path, paths) -> Iterator[Document]:
    for path in sorted(paths):
        try:
            yield Document(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue  # the library tests itself on files in other encodings; an installation may hold broken links


def _folder(root: Path) -> Iterator[Document]:
    for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
        yield Document(str(path.relative_to(root)), read_text(path))


def _jsonl(path: Path) -> Iterator[Document]:
    for number, row in read_jsonl(path):
        name = f"{path.name}:{number}"
        if "output_token_ids" in row:
            ids = [row.get("prompt_token_ids"), row["output_token_ids"]]
            if not all(
                isinstance(part, list) and all(type(t) is int and t >= 0 for t in part)
                for part in ids
            ):
                rule = "prompt_token_ids and output_token_ids must be lists of token ids"
                raise InputError(f"{path}:{number}", rule, json.dumps(ids)[:60], "mend the line")
            yield Document(name, None, (), *map(tuple, ids))
        elif isinstance(row.get("text") or row.get("prompt"), str):
            yield Document(name, row.get("text") or row["prompt"])
        elif isinstance(row.get("messages"), list):
            yield Document(name, None, tuple(row["messages"]))
        elif isinstance(row.get("turns"), list):
            yield Document(
                name, None, tuple({"role": "user", "content": turn} for turn in row["turns"])
            )
        else:
            rule = "a line needs text, prompt, messages, turns or output_token_ids"
            raise InputError(f"{path}:{number}", rule, sorted(row), "mend the line")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(path, "this file must exist", "nothing", "check the name") from None
    except IsADirectoryError:
        raise InputError(path, "must be a file", "a folder", "name a file in it") from None
    except OSError as error:
        raise InputError(
            path, "this file must be readable", error.strerror, "check the name"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            path,
            "must be UTF-8 text",
            f"byte {error.object[error.start]:#04x} at {error.start}",
            "convert or remove it",
        ) from None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path}:{number}", "each line must be a JSON object", error, "mend the line"
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                f"{path}:{number}",
                "each line must be a JSON object",
                type(row).__name__,
                "mend the line",
            )
        yield number, row


def split(documents: Sequence[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """(train, held out), by a hash of each document's name: a file stays on its side whatever else is there."""
    place = [
        int.from_bytes(hashlib.sha256(d.name.encode()).digest()[:8], "big") / 2**64
        for d in documents
    ]
    train = [d for d, p in zip(documents, place, strict=True) if p >= held_out]
    return train, [d for d, p in zip(documents, place, strict=True) if p < held_out]


def limit(documents: Sequence[Document], characters: int | None, seed: int) -> list[Document]:
    """A random choice of documents of about that many characters in all (tokens, for answers in tokens)."""
    if characters is None:
        return list(documents)
    kept, total = [], 0
    for i in np.random.default_rng(seed).permutation(len(documents)):
        if total >= characters:
            break
        kept.append(documents[i])
        total += documents[i].size
    return kept
