"""Weights that do not fit a device are refused before any of them is read."""

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from peagle_jax.checkpoints.target_io import load_target, save_target
from peagle_jax.cli import main
from peagle_jax.types import InputError
from peagle_jax.weights import flatten_params, param_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "target"
    save_target(tiny.target(), path)
    return path


def num_bytes(model) -> int:
    return sum(x.nbytes for _, x in flatten_params(model.params))


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Reading a tensor fails."""

    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(param_table._ParamReader, "read", read)


@pytest.mark.parametrize("options", [{}, {"dtype": jnp.bfloat16}, {"fp8": True}], ids=str)
def test_the_bytes_are_those_that_lie_in_memory(folder, options, monkeypatch):
    """In the dtype that is loaded, and not in that of the file."""
    wanted = num_bytes(load_target(folder, **options))
    monkeypatch.setattr(param_table, "free_bytes", lambda: wanted)
    assert num_bytes(load_target(folder, **options)) == wanted
    monkeypatch.setattr(param_table, "free_bytes", lambda: wanted - 1)
    with pytest.raises(InputError, match="the weights must fit the device's memory"):
        load_target(folder, **options)
    monkeypatch.setattr(param_table, "free_bytes", lambda: None)  # unknown
    assert num_bytes(load_target(folder, **options)) == wanted


def test_it_is_said_with_the_bytes_before_loading(folder, monkeypatch, nothing_is_read, capsys):
    monkeypatch.setattr(param_table, "free_bytes", lambda: -10)
    assert main(["generate", "--target", str(folder), "--prompt", "x"]) == 2
    assert capsys.readouterr().err == (
        f"peagle: {folder}: the weights must fit the device's memory; got 0.0 GB wanted, 0.0 GB "
        "free; load them in fewer bits (--dtype bfloat16 or fp8; target_dtype in a recipe), or on "
        "a larger device\n"
    )


def test_a_device_of_a_mesh_needs_room_for_its_part(monkeypatch):
    """Of a matrix that is spread half, and all of one that every device has."""
    mesh = AbstractMesh((2,), ("model",))
    specs = {"spread": PartitionSpec("model"), "whole": PartitionSpec()}
    shapes = dict.fromkeys(specs, jax.ShapeDtypeStruct((4, 6), jnp.float32))

    def placement(path, _):
        return NamedSharding(mesh, specs[path])

    monkeypatch.setattr(param_table, "free_bytes", lambda: (2 + 4) * 6 * 4)
    param_table._check_memory(shapes, placement, "here")
    monkeypatch.setattr(param_table, "free_bytes", lambda: (2 + 4) * 6 * 4 - 1)
    with pytest.raises(InputError, match="here: the weights must fit"):
        param_table._check_memory(shapes, placement, "here")
