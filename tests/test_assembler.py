"""An NVIDIA GPU without an assembler: one line before anything is read, and no traceback later."""

import functools
import types
from pathlib import Path

import jax
import pytest
import tiny

from peagle_jax import assembler
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.cli import main
from peagle_jax.kernels import launch
from peagle_jax.pipelines import devices
from peagle_jax.train import pretrain
from peagle_jax.train.config import load_run
from peagle_jax.types import InputError
from peagle_jax.weights import param_table

RECIPE = Path(__file__).parents[1] / "configs" / "train" / "demo_target.yaml"
# as XLA of jaxlib 0.11.2 says it; test_ahead_of_time.py asks XLA itself
XLA_SAYS = (
    "UNAVAILABLE: No PTX compilation provider is available. Neither ptxas/nvlink nor nvjtlink is "
    "available. As a fallback you can enable JIT compilation in the CUDA driver via the flag"
)
LINE = (
    "peagle: CUDA: XLA must find ptxas, which makes machine code for an NVIDIA GPU; got none in "
    "PATH, beside JAX or in /usr/local/cuda; install it (pip install 'jax[cuda13]'), or put the "
    "bin folder of CUDA 13 into PATH\n"
)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without CUDA; where its files would be."""
    for name in ("CUDA_ROOT", "CUDA_HOME", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(jax, "__file__", str(tmp_path / "site" / "jax" / "__init__.py"))
    monkeypatch.setattr(assembler.sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(assembler, "USUAL_ROOTS", (str(tmp_path / "usual"),))
    return tmp_path


@pytest.mark.parametrize(
    "folder, variable, value",
    [
        ("path", None, None),
        ("named/bin", "CUDA_ROOT", "{}/named"),
        ("named/bin", "CUDA_HOME", "{}/named"),
        ("named/bin", "XLA_FLAGS", "--xla_a=1 --xla_gpu_cuda_data_dir={}/named --xla_b=2"),
        ("site/nvidia/cu13/bin", None, None),
        ("site/nvidia/cuda_nvcc/bin", None, None),
        ("prefix/bin", None, None),
        ("usual/bin", None, None),
    ],
)
def test_where_it_is_found(bare, monkeypatch, folder, variable, value):
    assert assembler.find_ptxas() is None
    if variable:
        monkeypatch.setenv(variable, value.format(bare))
    ptxas = bare / folder / "ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.write_text("#!/bin/sh\n")
    assert assembler.find_ptxas() is None  # nobody may run it
    ptxas.chmod(0o755)
    assert assembler.find_ptxas() == str(ptxas)


@pytest.fixture
def gpu(monkeypatch):
    """As if JAX saw a GPU."""
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assembler._compile_something.cache_clear()
    yield device
    assembler._compile_something.cache_clear()


@pytest.fixture
def compile_fails(monkeypatch):
    """What XLA says when it compiles anything; programs that it was asked for."""
    asked = []

    def fail(self, *_, **__):
        asked.append(self)
        raise jax.errors.JaxRuntimeError(XLA_SAYS)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    return asked


def test_it_is_said_before_anything_is_read(gpu, compile_fails, monkeypatch, tmp_path, capsys):
    save_target(tiny.target(), tmp_path / "target")

    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(param_table._ParamReader, "read", read)
    assert main(["generate", "--target", str(tmp_path / "target"), "--prompt", "x"]) == 2
    assert capsys.readouterr().err == LINE
    assert len(compile_fails) == 1


def test_a_cpu_needs_none(gpu, compile_fails):
    gpu.platform = "cpu"
    assembler.check_assembler()
    assert not compile_fails


def test_where_xla_compiles_it_is_asked_once(gpu, monkeypatch):
    """It may look where we do not."""
    asked = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: asked.append(self))
    for _ in range(2):
        assembler.check_assembler()
    assert len(asked) == 1


def test_another_failure_is_not_hidden(gpu, monkeypatch):
    def fail(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        assembler.check_assembler()


@pytest.fixture
def hopper(bare, monkeypatch):
    """An H200 with versions that were tried, on a machine without CUDA's tools."""
    client = types.SimpleNamespace(platform_version="cuda 13000")
    device = types.SimpleNamespace(client=client, compute_capability="9.0", core_count=132)
    versions = {"jax": "0.11.2", "jax-triton": "0.4.1", "triton": "3.9.0"}
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    monkeypatch.setattr(jax, "__version__", versions["jax"])
    monkeypatch.setattr(launch, "platform", lambda: "gpu")
    monkeypatch.setattr(launch, "import_jax_triton", lambda: None)
    monkeypatch.setattr(launch.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(launch, "sys", types.SimpleNamespace(version_info=(3, 12)))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for cached in (launch._unavailable_reason, launch._local_gpu):
        cached.cache_clear()
    yield bare
    for cached in (launch._unavailable_reason, launch._local_gpu):
        cached.cache_clear()


def test_kernels_need_ptxas_whatever_xla_needs(hopper):
    """jax-triton takes no other assembler; it would fail when the first kernel runs."""
    want = "they need ptxas, and neither PATH nor JAX's wheels have one (pip install 'jax[cuda13]')"
    assert launch.unavailable_reason("triton") == want
    # what is compiled for another machine is assembled there
    with launch.target_gpu(launch.H200):
        assert launch.unavailable_reason("triton") is None
    launch._unavailable_reason.cache_clear()
    ptxas = Path(hopper) / "path" / "ptxas"
    ptxas.parent.mkdir()
    ptxas.write_text("#!/bin/sh\n")
    ptxas.chmod(0o755)
    assert launch.unavailable_reason("triton") is None


@pytest.mark.parametrize("start", ["measure_this_machine", "train_lm"])
def test_what_loads_no_checkpoint_asks_too(gpu, compile_fails, start):
    """A plan of this machine; a target from scratch, before its corpus is read."""
    if start == "train_lm":
        begin = functools.partial(pretrain.train_lm, load_run(RECIPE))
    else:
        begin = devices.measure_this_machine
    with pytest.raises(InputError, match="got none in PATH"):
        begin()
