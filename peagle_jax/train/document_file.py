"""Documents in a file, for corpora that do not fit into memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import overload

import numpy as np

from peagle_jax.documents import Document

TUPLES = ("messages", "prompt_ids", "output_ids", "tools")  # fields of a document
ENDS = ".ends"  # after the name of the file: where each document ends in it, int64


class DocumentWriter:
    """Writes documents, one line of JSON each, and where each ends into a second file.

    Args:
      path: the file; one that is there is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._lines = path.open("wb")
        self._ends = path.with_name(path.name + ENDS).open("wb")
        self.count = 0

    def add(self, document: Document) -> None:
        """Writes a document behind the others."""
        fields = {
            key: value
            for key, value in vars(document).items()
            if value not in (None, (), {}, False)
        }
        self._lines.write(json.dumps(fields, default=str).encode() + b"\n")
        self._ends.write(np.int64(self._lines.tell()).tobytes())
        self.count += 1

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.close()
        self._ends.close()


class DocumentFile(Sequence[Document]):
    """The documents that a `DocumentWriter` wrote. Each is read when it is asked for.

    Args:
      path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        ends = path.with_name(path.name + ENDS)
        # an empty file cannot be mapped
        is_empty = ends.stat().st_size == 0
        self._ends = np.zeros(0, np.int64) if is_empty else np.memmap(ends, np.int64, "r")

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Document: ...

    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...

    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        begin = int(self._ends[i - 1]) if i else 0
        with self.path.open("rb") as file:
            file.seek(begin)
            fields = json.loads(file.read(int(self._ends[i]) - begin))
        for key in TUPLES:
            fields[key] = tuple(fields.get(key, ()))
        return Document(**{"text": None} | fields)
