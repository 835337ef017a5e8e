"""safetensors folders out: tensor by tensor, so that no more than one is in memory, and whole or not at all."""

import errno
import json
import mmap
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path

import numpy as np

from peagle_jax.types import InputError
from peagle_jax.weights.reading import INDEX, SINGLE, read_metadata
from peagle_jax.weights.tensors import (
    BUFFERS,
    NAMES,
    Tensor,
    blocks,
    finite,
    mapped_at,
    release,
    warn_unless_finite,
)

# what the writers of this package put into a folder: only a folder of these alone is replaced
OURS = re.compile(
    r"config\.json|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|README\.md|head\.json|checkpoints|tokenizer(_config)?\.json|tokenizer\.model|"
    r"special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|chat_template\.(jinja|json)|generation_config\.json"
)


def new_folder(path: Path) -> "FolderWriter":
    """A folder that appears whole or not at all: written beside its place, renamed at the end."""
    return FolderWriter(Path(path))


class FolderWriter:
    """Context manager: yields a temporary folder; on success it takes the place of `path`, on failure nothing is left.

    An existing folder is replaced only if it holds nothing but what these writers write, and its weights say that they did.
    A full disk is an InputError.
    """

    def __init__(self, path: Path):
        self.path = path.resolve()

    def __enter__(self) -> Path:
        self.made: list[Path] = []  # folders above the output that were not there
        try:
            self.made = [p for p in self.path.parents if not p.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_dir():
                raise InputError(
                    self.path, "the output must be a folder", "a file", "choose another name"
                )
            if foreign := [p.name for p in self.path.glob("*") if not OURS.fullmatch(p.name)]:
                raise InputError(
                    self.path,
                    "only a checkpoint folder is replaced",
                    f"one that holds {foreign[0]}",
                    "choose another name",
                )
            if (self.path / "README.md").exists() and not (self.path / "config.json").exists():
                raise InputError(
                    self.path,
                    "only a checkpoint folder is replaced",
                    "one without config.json",
                    "choose another name",
                )
            if any(self.path.glob("*.safetensors")) and not _is_ours(self.path):
                got = "one of somebody else's"
                raise InputError(
                    self.path,
                    "only a checkpoint folder that peagle wrote is replaced",
                    got,
                    "choose another name",
                )
            self.work = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        except OSError as error:
            self._forget_parents()
            raise InputError(
                self.path,
                "the output folder must be writable",
                error.strerror,
                "choose another place",
            ) from None
        self.work.chmod(0o755)
        return self.work

    def __exit__(self, kind, error, trace):
        if kind is None:
            try:
                self._take_the_place()
                return
            except OSError as failed:
                error = failed
        shutil.rmtree(self.work, ignore_errors=True)
        self._forget_parents()
        if isinstance(error, OSError):  # the disk is full, or gone
            next_step = "make room; what lay there before is untouched"
            raise InputError(
                self.path,
                "the output must be written to the end",
                error.strerror or error,
                next_step,
            ) from None

    def _take_the_place(self) -> None:
        if not self.path.exists():
            self.work.rename(self.path)
            return
        old = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.old.", dir=self.path.parent))
        try:
            self.path.rename(old / "was")
            try:
                self.work.rename(self.path)
            except OSError:
                (old / "was").rename(self.path)
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)

    def _forget_parents(self) -> None:
        for folder in self.made:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()


def _is_ours(folder: Path) -> bool:
    """Whether the weights of a folder say that this package wrote them (its early versions: in `source`): a download is never replaced."""
    try:
        facts = read_metadata(folder)
    except InputError:
        return False
    return "peagle_jax" in facts.get("writer", "") or "peagle " in facts.get("source", "")


OnBytes = Callable[[int, int], None]  # told of the bytes written and of those to write in all


def write_folder(
    folder: Path,
    config: Mapping,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    max_shard_bytes: int | None = None,
    on_bytes: OnBytes | None = None,
) -> None:
    """Writes config.json and the weights into an existing folder: model.safetensors, or shards with an index where that is too large.

    Shards are filled in the order of the names, as transformers and huggingface_hub do; a tensor larger than the limit
    has a file to itself. Tensors with NaN or infinity are written and warned of.
    """
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    metadata = {"format": "pt", **metadata}
    start = 64 + len(json.dumps(metadata).encode())
    shards: list[dict[str, Tensor]] = [{}]
    held = start
    for name, tensor in tensors.items():
        more = (
            tensor.nbytes + 128 + len(json.dumps(name).encode())
        )  # its bytes, and its line in the header
        if max_shard_bytes is not None and shards[-1] and held + more > max_shard_bytes:
            shards.append({})
            held = start
        shards[-1][name] = tensor
        held += more
    files = [SINGLE]
    if len(shards) > 1:
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    total, done = sum(t.nbytes for t in tensors.values()), 0

    def written(size: int) -> None:
        nonlocal done
        done += size
        if on_bytes is not None:
            on_bytes(done, total)

    for file, shard in zip(files, shards, strict=True):
        write_safetensors(folder / file, shard, metadata, written)
    if len(shards) == 1:
        return
    index = {
        "metadata": {"total_size": total},
        "weight_map": {
            name: file for file, shard in zip(files, shards, strict=True) for name in shard
        },
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    written: Callable[[int], None] = lambda size: None,
) -> None:
    """One file. The library's writer copies all tensors into memory first; this one holds one at a time.

    Data goes by falling size of the element, as the library orders it, so that every tensor is aligned.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    ends, at = {}, 0
    for name in order:
        at += tensors[name].nbytes
        ends[name] = at
    header = {"__metadata__": dict(metadata)} | {
        name: {
            "dtype": NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [ends[name] - t.nbytes, ends[name]],
        }
        for name, t in tensors.items()
    }
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        _write(file, np.frombuffer(len(content).to_bytes(8, "little") + content, np.uint8))
        waiting: deque[tuple[Future, np.ndarray]] = deque()

        def finish(most: int) -> None:
            while len(waiting) > most:
                future, block = waiting.popleft()
                future.result()
                release(block)
                written(block.size)

        for name in order:
            good = True
            for block in blocks(tensors[name]):
                waiting.append((pool.submit(_write, file, block), block))
                good = good and finite(block, tensors[name].dtype)  # while the other thread writes
                finish(BUFFERS - 2)  # one more is being written to by `blocks`, and one is in hand
            finish(0)
            warn_unless_finite(path.name, name, good)


def _write(file: RawIOBase, block: np.ndarray) -> None:
    """Bytes to the end of a file: by the kernel where they lie in another file as they are, faster than by a mapping (LOG.md)."""
    done, place = 0, mapped_at(block)
    if place is not None and hasattr(os, "copy_file_range"):
        owner, start = place
        start += owner.offset - owner.offset % mmap.ALLOCATIONGRANULARITY
        source = os.open(owner.filename, os.O_RDONLY)
        try:
            while done < block.size and (
                copied := os.copy_file_range(source, file.fileno(), block.size - done, start + done)
            ):
                done += copied
        except OSError as error:
            if error.errno not in (
                errno.EXDEV,
                errno.ENOSYS,
                errno.EINVAL,
                errno.EOPNOTSUPP,
                errno.EPERM,
            ):
                raise
        finally:
            os.close(source)
    while done < block.size:
        done += file.write(block[done:])
