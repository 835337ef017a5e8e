"""Our machine code is compiled once, kept, and done without where it cannot be."""

import os
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
    """The commands of compilers, which write what they were asked to."""
    commands = []

    def run(command, **options):
        assert options["check"] and options["timeout"] == native_code.COMPILE_SECONDS
        commands.append(command)
        Path(command[-1]).write_text("machine code")

    monkeypatch.setattr(native_code.subprocess, "run", run)
    monkeypatch.setattr(native_code, "find_compiler", lambda: ["/usr/bin/c++"])
    return commands


def test_it_is_compiled_once(cache, compiled):
    library = native_code._library()
    assert library.read_text() == "machine code" and native_code._library() == library
    assert [*cache.iterdir()] == [library]  # and nothing half-written
    (command,) = compiled
    assert command[0] == "/usr/bin/c++" and str(native_code.SOURCES / "native.cc") in command
    assert set(native_code.FLAGS) < set(command)


@pytest.mark.parametrize("change", ["source", "compiler", "processor", "flags"])
def test_another_machine_has_another_file(cache, compiled, change, monkeypatch, tmp_path):
    first = native_code._library()
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
    else:
        monkeypatch.setattr(native_code, "FLAGS", (*native_code.FLAGS, "-g"))
    assert native_code._library() != first and len(compiled) == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError("no space"),
        subprocess.CalledProcessError(1, "c++"),
        subprocess.TimeoutExpired("c++", 120),
    ],
)
def test_a_compiler_that_fails(cache, compiled, error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(native_code.subprocess, "run", fail)
    assert native_code._library() is None and not [*cache.iterdir()]


def test_a_folder_that_cannot_be_written(cache, compiled):
    cache.parent.write_text("a file in its place")
    assert native_code._library() is None


def test_a_damaged_library_is_made_anew(cache):
    if native_code.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    path = native_code._library()
    path.write_bytes(path.read_bytes()[:1000])
    assert native_code._loaded().peagle_lanes() in (8, 16)


def test_a_folder_from_which_nothing_can_be_loaded(cache, compiled):
    """Such as one of a disk without the right to execute."""
    assert native_code._loaded() is None and len(compiled) == 3


def test_without_a_compiler(cache, monkeypatch):
    monkeypatch.setenv("PATH", str(cache))
    assert native_code.find_compiler() is None and native_code._library() is None


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
    native_code.load.cache_clear()
    try:
        assert not native_code.is_available()
        with pytest.raises(RuntimeError, match="peagle_tiled_products needs a CPU"):
            native_code.function("peagle_tiled_products", jax.ShapeDtypeStruct((1,), jnp.float32))
    finally:
        native_code.load.cache_clear()


def test_warnings_are_errors():
    """Of both compilers, where they are here; those in XLA's headers are not ours."""
    compiler = native_code.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = (*native_code.FLAGS, "-fsyntax-only", "-Wall", "-Wextra", "-Werror")
    native_code.compile_library(compiler, Path(os.devnull), flags)
