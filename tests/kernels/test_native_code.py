"""C++ kernels are compiled once, kept, and done without where they cannot be."""

import concurrent.futures
import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from peagle_jax.kernels import native_code


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder for what is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "peagle_jax" / "native"


@pytest.fixture
def compiled(cache, monkeypatch):
    """The commands of compilers, which write what they were asked to; and what is loaded."""
    commands = []

    def run(command, **options):
        assert options["check"] and options["timeout"] == native_code.COMPILE_SECONDS
        commands.append(command)
        Path(command[-1]).write_text("machine code")

    class Library(ctypes.CDLL):
        def __init__(self, path):
            if Path(path).read_text() != "machine code":
                raise OSError("invalid ELF header")
            self._name = path

    monkeypatch.setattr(native_code.subprocess, "run", run)
    monkeypatch.setattr(native_code, "find_compiler", lambda: ["/usr/bin/c++"])
    monkeypatch.setattr(native_code.ctypes, "CDLL", Library)
    return commands


def test_it_is_compiled_once(cache, compiled):
    library = native_code._library()._name
    assert native_code._library()._name == library
    assert [*map(str, cache.iterdir())] == [library]  # and nothing half-written
    (command,) = compiled
    assert command[0] == "/usr/bin/c++" and str(native_code.SOURCES / "native.cc") in command
    assert set(native_code.FLAGS) < set(command)


@pytest.mark.parametrize("change", ["source", "compiler", "processor", "flags", "machine"])
def test_another_machine_has_another_file(cache, compiled, change, monkeypatch, tmp_path):
    first = native_code._library()._name
    if change == "source":
        sources = tmp_path / "native"
        sources.mkdir()
        for path in native_code.SOURCES.iterdir():
            (sources / path.name).write_bytes(path.read_bytes() + b"// changed")
        monkeypatch.setattr(native_code, "SOURCES", sources)
    elif change == "compiler":
        monkeypatch.setattr(native_code, "find_compiler", lambda: ["/usr/bin/clang++"])
    elif change == "processor":
        monkeypatch.setattr(native_code, "instructions", lambda: "another")
    elif change == "machine":
        monkeypatch.setattr(native_code.machine, "machine", lambda: "aarch64")
    else:
        monkeypatch.setattr(native_code, "FLAGS", (*native_code.FLAGS, "-g"))
    assert native_code._library()._name != first and len(compiled) == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError("no space"),
        subprocess.CalledProcessError(1, "c++", stderr="a\nnative.cc:3: error: b\nc"),
        subprocess.CalledProcessError(1, "c++", stderr=""),
        subprocess.TimeoutExpired("c++", 120),
    ],
)
def test_a_compiler_that_fails(cache, compiled, error, monkeypatch, caplog):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(native_code.subprocess, "run", fail)
    assert native_code._library() is None and not [*cache.iterdir()]
    assert ("native.cc:3: error: b" in caplog.text) == ("native.cc" in str(vars(error)))
    assert "programs on this CPU are slower" in caplog.text


def test_a_folder_that_cannot_be_written(cache, compiled):
    cache.parent.write_text("a file in its place")
    assert native_code._library() is None


def test_a_damaged_library_is_made_anew(cache, compiled):
    library = native_code._library()._name
    Path(library).write_text("half")
    assert native_code._library()._name == library and len(compiled) == 2


def test_a_folder_from_which_nothing_can_be_loaded(cache, compiled, monkeypatch):
    """Such as one of a disk without the right to execute: compiled once by each process."""

    def load(path):
        raise OSError("failed to map segment")

    monkeypatch.setattr(native_code.ctypes, "CDLL", load)
    assert native_code._library() is None and len(compiled) == 1


def test_several_threads_load_it_once(cache, compiled, monkeypatch):
    monkeypatch.setattr(native_code, "FUNCTIONS", ())
    # in the place of what this process has loaded, which XLA registers once
    once = functools.cache(native_code._registered.__wrapped__)
    monkeypatch.setattr(native_code, "_registered", once)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = {*pool.map(lambda _: native_code.load(), range(32))}
    assert len(found) == 1 == len(compiled)


def test_without_a_compiler(cache, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(cache))
    assert native_code.find_compiler() is None and native_code._library() is None
    assert "no C++ compiler" in caplog.text


def test_which_compiler(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("clang++", "g++", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert native_code.find_compiler() == [str(tmp_path / "g++")]
    monkeypatch.setenv("CXX", "mine --fast 'a b'")
    assert native_code.find_compiler() == [str(tmp_path / "mine"), "--fast", "a b"]
    for nothing in ("nobody", "g++ '"):
        monkeypatch.setenv("CXX", nothing)
        assert native_code.find_compiler() is None


def test_other_devices_have_none(monkeypatch):
    monkeypatch.setattr(native_code, "platform", lambda: "gpu")
    assert not native_code.is_available()
    with pytest.raises(RuntimeError, match="peagle_tiled_products needs a CPU"):
        native_code.function("peagle_tiled_products", jax.ShapeDtypeStruct((1,), jnp.float32))


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_there_are_no_warnings(compiler, monkeypatch):
    """But in XLA's headers, which are not ours."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    monkeypatch.setenv("CXX", compiler)
    flags = "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unused-command-line-argument"
    native_code.compile_library(Path(os.devnull), (*native_code.FLAGS, *flags))
