"""The folder writer: the library reads what it writes, and nothing is ever half-written.

It holds one tensor in memory at a time.
"""

import errno
import gc
import json
import os
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from peagle_jax import weights
from peagle_jax.types import InputError, WeightsWarning
from peagle_jax.weights import tensors as tensors_module
from peagle_jax.weights import writing
from peagle_jax.weights.tensors import DTYPES, all_finite


def test_the_library_reads_what_is_written(tmp_path):
    rng = np.random.default_rng(3)
    tensors = {
        "t2d": rng.random(7) < 0.5,
        "d2t": rng.integers(-9, 9, 5),
        "bf16": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
        "f16": rng.normal(size=(2, 1, 3)).astype(np.float16),
        "f32": rng.normal(size=(4, 3)).astype(np.float32).T,
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "u8": np.arange(3, dtype=np.uint8),
    }
    weights.write_safetensors(
        tmp_path / "x.safetensors", tensors, {"format": "pt", "wörds": "\u2713 \x01"}
    )
    read = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, want in tensors.items():
        assert read[name].dtype == want.dtype and np.array_equal(read[name], want), name
    with safetensors.safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt", "wörds": "\u2713 \x01"}
    ours = weights.open_safetensors(tmp_path / "x.safetensors")
    assert list(ours) == list(tensors) and all(t.flags.aligned for t in ours.values())


def test_float8_is_written_too(tmp_path):
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    with pytest.warns(WeightsWarning, match="x.safetensors: t holds NaN"):
        weights.write_safetensors(tmp_path / "x.safetensors", {"t": every}, {})
    assert weights.open_safetensors(tmp_path / "x.safetensors")["t"].tobytes() == every.tobytes()


def test_one_tensor_at_a_time(tmp_path):
    """Every tensor is gone before the next is read."""
    references, alive_counts = [], []

    class WeaklyReferenced(np.ndarray):
        """An array that a weak reference can point to."""

    def read(i):
        gc.collect()
        alive_counts.append(sum(array() is not None for array in references))
        array = np.full((50, 10), i, np.float32).view(WeaklyReferenced)
        references.append(weakref.ref(array))
        return array

    tensors = {
        f"t{i}": weights.LazyTensor((50, 10), np.dtype(np.float32), lambda i=i: read(i))
        for i in range(6)
    }
    weights.write_folder(tmp_path, {}, tensors, {})
    assert alive_counts == [0] * 6
    assert [t[0, 0] for t in weights.open_folder(tmp_path).values()] == list(range(6))


@pytest.mark.parametrize("kernel", ["copies", "is asked in vain", "is not asked"])
def test_from_file_to_file_block_by_block(kernel, tmp_path, monkeypatch):
    """Copied by the kernel, or by a mapping where it cannot; every block's pages are released."""
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=1001).astype(np.float32),
        "odd": np.arange(7, dtype=np.uint8),
        "b": rng.normal(size=(30, 40)).astype(np.float16),
    }
    # a header of several pages: the mapping of the data then begins inside the file
    weights.write_safetensors(tmp_path / "x.safetensors", tensors, {"long": "x" * 9000})
    monkeypatch.setattr(tensors_module, "BLOCK", 1024)
    released, released_of_cast, kernel_copies = [], [], []
    release, copy_file_range = tensors_module.release, os.copy_file_range

    def release_after_writing(block):
        released.append(block.nbytes)
        release(block)

    def release_after_cast(block):
        released_of_cast.append(block.nbytes)
        release(block)

    def copy_at_most_700_bytes(source, out, count, *offsets):
        kernel_copies.append(count)
        return copy_file_range(source, out, min(count, 700), *offsets)

    monkeypatch.setattr(writing, "release", release_after_writing)
    monkeypatch.setattr(tensors_module, "release", release_after_cast)
    if kernel == "copies":
        monkeypatch.setattr(os, "copy_file_range", copy_at_most_700_bytes)
    elif kernel == "is asked in vain":

        def refuse(*args):
            raise OSError(errno.EXDEV, "across file systems")

        monkeypatch.setattr(os, "copy_file_range", refuse)
    else:
        monkeypatch.delattr(os, "copy_file_range")
    source = weights.open_safetensors(tmp_path / "x.safetensors")
    weights.write_safetensors(
        tmp_path / "y.safetensors",
        source | {"cast": weights.cast({"a": source["a"]}, np.float16)["a"]},
        {},
    )
    read = weights.open_safetensors(tmp_path / "y.safetensors")
    for name, want in (tensors | {"cast": tensors["a"].astype(np.float16)}).items():
        assert np.array_equal(read[name], want), name
    assert max(released) == 1024
    assert sum(released) == sum(t.nbytes for t in read.values())
    assert bool(kernel_copies) == (kernel == "copies")
    assert released_of_cast == [1024, 1024, 1024, 932]  # what was cast came from the file, too
    # released pages are read again when asked for
    assert np.array_equal(source["a"], tensors["a"])


@pytest.mark.parametrize("kind", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_finite_is_isfinite(kind):
    """Every bit pattern of the small dtypes, a million of the large ones, and each border."""
    dtype = np.dtype(DTYPES[kind])
    bits = np.dtype(f"u{dtype.itemsize}")
    most = 2 ** (8 * dtype.itemsize)
    rng = np.random.default_rng(0)
    patterns = (
        np.arange(most, dtype=bits)
        if dtype.itemsize < 4
        else rng.integers(0, most, 1000, dtype=bits)
    )
    for value in patterns.view(dtype)[:: max(1, patterns.size // 2000)]:
        with np.errstate(invalid="ignore"):  # a signaling NaN
            is_finite = bool(np.isfinite(value.astype(np.float64)))
        assert all_finite(np.array([value]).view(np.uint8), dtype) == is_finite, value
    top = ml_dtypes.finfo(dtype).max
    good = np.full(200_000, -top, dtype)
    assert all_finite(good.view(np.uint8), dtype)
    good[-1] = np.nan
    assert not all_finite(good.view(np.uint8), dtype)


def test_nan_and_overflow_are_warned_of_and_written(tmp_path):
    tensors = {
        "good": np.ones(3, np.float32),
        "bad": np.array([1, np.nan], np.float32),
        "large": np.array([1e5], np.float32),
    }
    with pytest.warns(WeightsWarning) as seen:
        weights.write_safetensors(tmp_path / "x.safetensors", weights.cast(tensors, np.float16), {})
    assert [str(w.message) for w in seen] == [
        f"x.safetensors: {n} holds NaN or infinite numbers" for n in ("bad", "large")
    ]
    assert np.isnan(weights.open_safetensors(tmp_path / "x.safetensors")["bad"][1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights.write_safetensors(
            tmp_path / "y.safetensors", {"good": tensors["good"], "ids": np.array([-1])}, {}
        )


def test_cast_leaves_tables_alone():
    tensors = {
        "d2t": np.array([2**40]),
        "t2d": np.array([True]),
        "w": np.ones(2, ml_dtypes.bfloat16),
        "same": np.ones(2, np.float16),
    }
    out = weights.cast(tensors, np.float16)
    for name in ("d2t", "t2d", "same"):
        assert out[name] is tensors[name]
    assert out["w"].dtype == np.float16 and np.asarray(out["w"]).dtype == np.float16


# ---------------------------------------------------------------- whole or not at all


def write_ours(folder):
    """What the next writer may replace."""
    weights.write_folder(folder, {}, {"a": np.ones(2)}, {"writer": "peagle_jax 0.1.0"})


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "deep" / "out"
    with weights.new_folder(out) as work:
        write_ours(work)
        assert not out.exists()
    with pytest.raises(RuntimeError), weights.new_folder(out) as work:
        (work / "b").write_text("2")
        raise RuntimeError
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    with weights.new_folder(out) as work:
        (work / "c").write_text("3")
    assert [p.name for p in out.iterdir()] == ["c"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_a_file_that_another_one_replaced_meanwhile(tmp_path):
    """What is written is what was opened and checked."""
    source = tmp_path / "x.safetensors"
    weights.write_safetensors(source, {"a": np.arange(5000.0)}, {})
    opened = weights.open_safetensors(source)
    weights.write_safetensors(tmp_path / "other", {"a": -np.arange(5000.0)}, {})
    (tmp_path / "other").replace(source)
    weights.write_safetensors(tmp_path / "y.safetensors", opened, {})
    written = weights.open_safetensors(tmp_path / "y.safetensors")["a"]
    np.testing.assert_array_equal(written, np.arange(5000.0))
    source.unlink()
    weights.write_safetensors(tmp_path / "z.safetensors", opened, {})
    written = weights.open_safetensors(tmp_path / "z.safetensors")["a"]
    np.testing.assert_array_equal(written, np.arange(5000.0))


def test_a_failure_leaves_no_folders_above_it(tmp_path):
    with pytest.raises(RuntimeError), weights.new_folder(tmp_path / "x" / "y" / "out"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_the_old_output_stays_if_the_new_cannot_take_its_place(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with weights.new_folder(out) as work:
        write_ours(work)
        (work / "config.json").write_text("old")
    real, calls = Path.rename, []

    def rename(self, target):
        calls.append(self)
        if len(calls) == 2:
            raise OSError(errno.EACCES, "no")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with (
        pytest.raises(InputError, match="must be written to the end"),
        weights.new_folder(out) as work,
    ):
        (work / "config.json").write_text("new")
    assert (out / "config.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


WRITES_ON = """
import sys, time
from peagle_jax import weights
with weights.new_folder(sys.argv[1]) as work:
    (work / "config.json").write_text("half")
    print(work, flush=True)
    time.sleep(300)
"""


def test_two_at_a_time_and_what_a_killed_one_leaves(tmp_path):
    """The second is refused while the first lives, and clears up behind it when it is killed."""
    out, bystander = tmp_path / "out", tmp_path / ".out.settings"
    bystander.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES_ON, str(out)], stdout=subprocess.PIPE, text=True
    )
    try:
        left = Path(process.stdout.readline().strip())
        with pytest.raises(InputError, match="one process writes a folder at a time; got another"):
            weights.new_folder(out).__enter__()
        assert left.is_dir() and not out.exists()
    finally:
        process.kill()
        process.communicate()
    assert left.is_dir()
    with weights.new_folder(out) as work:
        (work / "config.json").write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.settings", "out"]
    assert (out / "config.json").read_text() == "whole"


def test_what_another_removes_meanwhile(tmp_path, monkeypatch):
    """Between listing and opening what a killed process had left, another writer cleared it up."""
    left = tmp_path / f".out{writing.TEMPORARY}x"
    left.mkdir()
    real = os.open

    def open_after_it_went(path, *args, **options):
        if Path(path) == left and left.exists():
            left.rmdir()
        return real(path, *args, **options)

    monkeypatch.setattr(writing.os, "open", open_after_it_went)
    with weights.new_folder(tmp_path / "out") as work:
        (work / "config.json").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_that_a_killed_process_had_moved_away_comes_back(tmp_path):
    """Killed between two renames: then neither the new output nor the old one has its name."""
    out = tmp_path / "out"
    with weights.new_folder(out) as work:
        write_ours(work)
        (work / "config.json").write_text("old")
    away = tmp_path / ".out.peagle-old.abcd1234"
    away.mkdir()
    out.rename(away / "was")
    with pytest.raises(RuntimeError), weights.new_folder(out):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").read_text() == "old"


def test_a_transposed_matrix_is_written_by_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_module, "BLOCK", 256)
    matrix = np.arange(60 * 50, dtype=np.float32).reshape(50, 60)
    tensors = {"t": weights.apply(lambda a: a.T, matrix, (60, 50), np.float32)}
    weights.write_safetensors(
        tmp_path / "x.safetensors", tensors | {"c": weights.cast(tensors, np.float16)["t"]}, {}
    )
    read = weights.open_safetensors(tmp_path / "x.safetensors")
    assert np.array_equal(read["t"], matrix.T)
    assert np.array_equal(read["c"], matrix.T.astype(np.float16))


def test_output_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(InputError, match="output"), weights.new_folder(bad):
            pass
    assert os.listdir(tmp_path) == ["file"]


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
# a write beyond this size is refused half-way, as by a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
import numpy as np
from peagle_jax import weights
from peagle_jax.types import InputError
try:
    tensors = {f"t{i}": np.ones(40_000, np.float32) for i in range(4)}
    with weights.new_folder(sys.argv[1]) as folder:
        weights.write_folder(folder, {}, tensors, {})
except InputError as error:
    print(error)
    sys.exit(2)
"""


def test_a_disk_that_is_full_half_way(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_ours(out)
    before = (out / "model.safetensors").read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(out)], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "must be written to the end" in done.stdout
    assert "what lay there before is untouched" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (out / "model.safetensors").read_bytes() == before


def test_shards_of_a_limited_size_are_read_back(tmp_path):
    rng = np.random.default_rng(0)
    rows = (10, 40, 1, 200, 30)  # 4, 16, 0.4, 80, 12 kB
    tensors = {f"t{i}": rng.normal(size=(n, 100)).astype(np.float32) for i, n in enumerate(rows)}
    reports = []
    weights.write_folder(
        tmp_path,
        {},
        tensors,
        {"source": "x" * 3000},
        max_shard_bytes=30_000,
        on_bytes=lambda *counts: reports.append(counts),
    )
    total = sum(t.nbytes for t in tensors.values())
    assert reports == sorted(reports) and reports[-1] == (total, total) and len(reports) >= 5
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    sizes = {file: (tmp_path / file).stat().st_size for file in files}
    index = json.loads((tmp_path / weights.INDEX).read_text())
    weight_map = index["weight_map"]
    # one tensor alone is larger than a shard, and has a file to itself
    large = weight_map["t3"]
    assert all(size <= 30_000 for file, size in sizes.items() if file != large)
    assert list(weight_map.values()).count(large) == 1
    assert index["metadata"]["total_size"] == total
    read = weights.open_folder(tmp_path)
    assert list(read) == list(tensors) and all(np.array_equal(read[n], tensors[n]) for n in tensors)
    whole = tmp_path / "whole"
    whole.mkdir()
    weights.write_folder(whole, {}, tensors, {}, max_shard_bytes=10**9)
    assert (whole / "model.safetensors").exists() and not (whole / weights.INDEX).exists()


def test_the_result_of_arithmetic_on_a_mapped_file_is_written(tmp_path):
    """NumPy calls it a memmap, and it maps nothing."""
    np.arange(6, dtype=np.float32).tofile(tmp_path / "x")
    weights.write_safetensors(
        tmp_path / "y.safetensors", {"x": np.memmap(tmp_path / "x", np.float32) * 2}, {}
    )
    assert np.array_equal(
        weights.open_safetensors(tmp_path / "y.safetensors")["x"], 2 * np.arange(6)
    )
