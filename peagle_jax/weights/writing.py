"""A writer of safetensors folders that holds one tensor in memory.

A folder appears whole or not at all: it is written beside its final place and renamed at the end,
so that an error or a full disk leaves what lay there before.
"""

import contextlib
import errno
import glob
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
from types import TracebackType

import numpy as np

from peagle_jax.file_lock import lock_briefly, try_lock
from peagle_jax.types import InputError
from peagle_jax.weights.reading import INDEX, SINGLE, read_json, read_metadata
from peagle_jax.weights.tensors import (
    BUFFERS,
    NAMES,
    Tensor,
    all_finite,
    byte_blocks,
    find_mapping,
    is_mapped_file,
    release,
    warn_not_finite,
)

# The files that this package writes into a checkpoint folder. A folder is only replaced if it holds
# no others.
WRITTEN_FILES = re.compile(
    r"config\.json|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|README\.md|head\.json"
    r"|checkpoints|tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.json|merges\.txt|chat_template\.(jinja|json)"
    r"|generation_config\.json|(video_)?(pre)?processor_config\.json"
)


# In the names of the two kinds of temporary folders, behind that of the output.
TEMPORARY, OLD = ".peagle-new.", ".peagle-old."


def new_folder(path: Path | str) -> "FolderWriter":
    """A folder that appears whole or not at all: see FolderWriter."""
    return FolderWriter(Path(path))


def new_file(path: Path | str, is_replaced: Callable[[Path], bool]) -> "FileWriter":
    """A file that appears whole or not at all: see FileWriter."""
    return FileWriter(Path(path), is_replaced)


class _OnlyTried(Exception):
    """Ends a folder that nobody wanted to write."""


def check_output(path: Path | str) -> None:
    """Raises InputError where `new_folder` would, before long work; writes nothing."""
    with contextlib.suppress(_OnlyTried), new_folder(path):
        raise _OnlyTried


class FolderWriter:
    """Context manager that yields a temporary folder, which takes the place of `path` on success.

    On failure nothing is left. What a killed process has left is removed by the next one that
    writes to the same path; two at a time are refused by a lock, which ends with its process. An
    existing folder is replaced only if it is empty, or holds nothing but files that this package
    writes, and if the metadata of its weights, or its head.json, say that this package wrote them.

    Raises:
      InputError: `path` is a file or a folder of something else, is not writable, or another
        process writes it; or the disk is full.
    """

    kind = "folder"  # what error messages call the output

    def __init__(self, path: Path):
        self.path = path.resolve()

    def __enter__(self) -> Path:
        self.created_parents: list[Path] = []  # folders above the output, to be removed on failure
        try:
            self.created_parents = [p for p in self.path.parents if not p.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # one after another: a writer that sees no other's folder has made its own before the
            # next one looks
            with lock_briefly(self.path.parent):
                self._clear_up()
                self._refuse_to_replace()
                self.work = self._temporary_folder(TEMPORARY)
                self._handle = os.open(self.work, os.O_RDONLY)
                is_mine = try_lock(self._handle)
            os.fchmod(self._handle, 0o755)
        except OSError as error:
            self._remove_parents()
            raise InputError(
                self.path,
                rule=f"the output {self.kind} must be writable",
                got=error.strerror,
                next_step="choose another place",
            ) from None
        # a writer that did not wait may have taken it for what a killed process has left
        if not is_mine or not self.work.exists():
            os.close(self._handle)
            raise self._busy()
        return self.work

    def _clear_up(self) -> None:
        """Removes what killed processes have left; an output that one had moved away comes back.

        Raises:
          InputError: another process writes to the same path.
        """
        for left in self._left(TEMPORARY):
            try:
                handle = os.open(left, os.O_RDONLY)
            except FileNotFoundError:  # its writer has just ended
                continue
            try:
                if not try_lock(handle):
                    raise self._busy()
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)
        for left in self._left(OLD):
            if (left / "was").exists() and not self.path.exists():
                (left / "was").rename(self.path)
            shutil.rmtree(left, ignore_errors=True)

    def _busy(self) -> InputError:
        rule, got = f"one process writes a {self.kind} at a time", "another one at it"
        return InputError(self.path, rule, got, "wait for it, or choose another name")

    def _left(self, kind: str) -> list[Path]:
        return list(self.path.parent.glob(f".{glob.escape(self.path.name)}{kind}*"))

    def _temporary_folder(self, kind: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f".{self.path.name}{kind}", dir=self.path.parent))

    def _refuse_to_replace(self) -> None:
        """Raises an InputError if what lies at the path is not a checkpoint that peagle wrote."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(
                self.path, "the output must be a folder", "a file", "choose another name"
            )
        foreign_files = [p.name for p in self.path.glob("*") if not WRITTEN_FILES.fullmatch(p.name)]
        has_config = (self.path / "config.json").exists()
        rule, got = "only a checkpoint folder is replaced", ""
        if foreign_files:
            got = f"one that holds {foreign_files[0]}"
        elif (self.path / "README.md").exists() and not has_config:
            got = "one without config.json"
        elif any(self.path.glob("*")) and not _is_written_by_peagle(self.path):
            rule = "only a checkpoint folder that peagle wrote is replaced"
            got = "one of somebody else's"
        if got:
            raise InputError(self.path, rule, got, "choose another name")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end(kind, error)
        finally:
            os.close(self._handle)  # and so gives the lock back

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        if kind is None:
            try:
                self._take_the_place()
                return
            except OSError as failure:
                error = failure
        shutil.rmtree(self.work, ignore_errors=True)
        self._remove_parents()
        if isinstance(error, OSError):  # the disk is full, or gone
            next_step = "make room; what lay there before is untouched"
            raise InputError(
                self.path,
                rule="the output must be written to the end",
                got=error.strerror or error,
                next_step=next_step,
            ) from None

    def _take_the_place(self) -> None:
        """Renames the temporary folder to the output; the old output comes back if that fails."""
        if not self.path.exists():
            self.work.rename(self.path)
            return
        old = self._temporary_folder(OLD)
        try:
            self.path.rename(old / "was")
            try:
                self.work.rename(self.path)
            except OSError:
                (old / "was").rename(self.path)
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)

    def _remove_parents(self) -> None:
        for folder in self.created_parents:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()


class FileWriter(FolderWriter):
    """The same for one file: yields the path of a temporary one, which takes the place of `path`.

    The temporary file lies in a folder of its own beside `path`, which has the lock.

    Args:
      is_replaced: whether a file that is there may be replaced.

    Raises:
      InputError: as of a folder, or `path` is a folder, or a file that is not replaced.
    """

    kind = "file"

    def __init__(self, path: Path, is_replaced: Callable[[Path], bool]):
        super().__init__(path)
        self.is_replaced = is_replaced

    def __enter__(self) -> Path:
        return super().__enter__() / self.path.name

    def _refuse_to_replace(self) -> None:
        """Raises an InputError if a folder lies at the path, or a file of somebody else's."""
        if self.path.is_dir():
            raise InputError(
                self.path, "the output must be a file", "a folder", "choose another name"
            )
        if self.path.exists() and not self.is_replaced(self.path):
            rule = "only a file that peagle wrote is replaced"
            raise InputError(self.path, rule, "one of somebody else's", "choose another name")

    def _take_the_place(self) -> None:
        (self.work / self.path.name).replace(self.path)
        shutil.rmtree(self.work, ignore_errors=True)


def _is_written_by_peagle(folder: Path) -> bool:
    """Whether the metadata of the weights say so, in `writer`, or in `source` of early versions.

    A folder without weights of its own must be a head in Orbax's format: head.json, with where the
    head comes from, and numbered checkpoints.
    """
    if not any(folder.glob("*.safetensors")):
        try:
            is_head = "origin" in read_json(folder / "head.json")
        except InputError:
            return False
        checkpoints = list((folder / "checkpoints").glob("*"))
        return is_head and all(path.name.isdecimal() and path.is_dir() for path in checkpoints)
    try:
        metadata = read_metadata(folder)
    except InputError:
        return False
    return "peagle_jax" in metadata.get("writer", "") or "peagle " in metadata.get("source", "")


OnBytes = Callable[[int, int], None]  # is told of the bytes written so far, and of all of them


def write_folder(
    folder: Path,
    config: Mapping,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    max_shard_bytes: int | None = None,
    on_bytes: OnBytes | None = None,
) -> None:
    """Writes config.json and the weights into an existing folder.

    The weights are one model.safetensors, or shards with an index where `max_shard_bytes` asks for
    more than one. Shards are filled in the order of the names, as transformers and huggingface_hub
    do; a tensor larger than the limit has a file to itself. Tensors with NaN or infinity are
    written, with a WeightsWarning.

    Args:
      config: the content of config.json.
      tensors: read one after the other, so that no more than one is in memory.
      metadata: strings for the header of every weights file.
      max_shard_bytes: the largest size of a file; None: one file.
      on_bytes: called after each block with the bytes written so far, and with all to be written.
    """
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    metadata = {"format": "pt", **metadata}
    shards = _split_into_shards(tensors, metadata, max_shard_bytes)
    files = [SINGLE]
    if len(shards) > 1:
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    total, done = sum(t.nbytes for t in tensors.values()), 0

    def count_block(size: int) -> None:
        nonlocal done
        done += size
        if on_bytes is not None:
            on_bytes(done, total)

    for file, shard in zip(files, shards, strict=True):
        write_safetensors(folder / file, shard, metadata, count_block)
    if len(shards) == 1:
        return
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split_into_shards(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], max_shard_bytes: int | None
) -> list[dict[str, Tensor]]:
    """The tensors of each file, in order."""
    header_bytes = 64 + len(json.dumps(metadata).encode())
    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = header_bytes
    for name, tensor in tensors.items():
        # the tensor's bytes, and those of its line in the header
        more = tensor.nbytes + 128 + len(json.dumps(name).encode())
        if max_shard_bytes is not None and shards[-1] and shard_bytes + more > max_shard_bytes:
            shards.append({})
            shard_bytes = header_bytes
        shards[-1][name] = tensor
        shard_bytes += more
    return shards


def _ignore_size(size: int) -> None:
    pass


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    on_block: Callable[[int], None] = _ignore_size,
) -> None:
    """Writes one safetensors file, holding one tensor at a time.

    The library's own writer copies all tensors into memory first. The data lie by falling size of
    the element, as the library orders them, so that every tensor is aligned.

    Args:
      on_block: called with the size in bytes of each block that was written.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header = _header_bytes(tensors, order, metadata)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        _write(file, np.frombuffer(header, np.uint8))
        unfinished: deque[tuple[Future, np.ndarray]] = deque()

        def finish_writes(max_unfinished: int) -> None:
            while len(unfinished) > max_unfinished:
                future, block = unfinished.popleft()
                future.result()
                release(block)
                on_block(block.size)

        for name in order:
            is_finite = True
            for block in byte_blocks(tensors[name]):
                unfinished.append((pool.submit(_write, file, block), block))
                # checked while the other thread writes
                is_finite = is_finite and all_finite(block, tensors[name].dtype)
                # Of the BUFFERS blocks, `byte_blocks` fills one, and `block` still names another.
                finish_writes(BUFFERS - 2)
            finish_writes(0)
            if not is_finite:
                warn_not_finite(path.name, name)


def _header_bytes(
    tensors: Mapping[str, Tensor], order: list[str], metadata: Mapping[str, str]
) -> bytes:
    """The length of the header and the header, padded to a multiple of 8 bytes.

    Args:
      order: the names in the order of the data. The header lists them in the order of `tensors`.
    """
    ends, end = {}, 0
    for name in order:
        end += tensors[name].nbytes
        ends[name] = end
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [ends[name] - tensor.nbytes, ends[name]],
        }
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


# What copy_file_range answers where it cannot copy between two files of this kind.
NOT_COPYABLE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def _write(file: RawIOBase, block: np.ndarray) -> None:
    """Appends bytes to a file.

    Bytes that lie unchanged in another, mapped file are copied by the kernel, which is faster than
    reading them through the mapping (LOG.md).
    """
    done, mapping = 0, find_mapping(block)
    if mapping is not None and hasattr(os, "copy_file_range"):
        owner, start = mapping
        assert owner.filename is not None  # a mapping of a file by its name
        start += owner.offset - owner.offset % mmap.ALLOCATIONGRANULARITY
        try:
            source = os.open(owner.filename, os.O_RDONLY)
        except FileNotFoundError:  # what is mapped is there all the same
            source = os.open(os.devnull, os.O_RDONLY)
        is_mapped = is_mapped_file(owner, source)
        try:
            while is_mapped and done < block.size:
                left = block.size - done
                copied = os.copy_file_range(source, file.fileno(), left, start + done)
                if not copied:
                    break
                done += copied
        except OSError as error:
            if error.errno not in NOT_COPYABLE:
                raise
        finally:
            os.close(source)
    while done < block.size:
        done += file.write(block[done:].data) or 0
