"""Heads in FP8 and in several dtypes: read exactly, and written in one dtype by choice."""

import ml_dtypes
import numpy as np
import pytest
import tiny
from checkpoints.folder_edits import edit

from peagle_jax import weights
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.inspect import describe
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.types import InputError


def test_an_fp8_head_is_read_exactly(tmp_path):
    """Scales by row, by block and of one number; norms in bfloat16.

    Written as bfloat16 or float32, by choice.
    """
    save_drafter(tiny.head(), tmp_path / "a", dtype="bfloat16")
    rng, want = np.random.default_rng(3), {}

    def quantize(tensors):
        out = dict(tensors)
        for i, name in enumerate(
            sorted(n for n in tensors if "_proj.weight" in n or n == "fc.weight")
        ):
            rows, columns = tensors[name].shape
            matrix = rng.normal(0, 100, (rows, columns)).astype(ml_dtypes.float8_e4m3fn)
            shape, suffix = [
                ((rows, 1), "_scale"),
                ((-(-rows // 8), -(-columns // 16)), "_scale_inv"),
                ((), "_scale"),
            ][i % 3]
            scale = rng.uniform(1e-3, 3e-3, shape).astype(np.float32)
            spread = (
                np.kron(scale, np.ones((8, 16)))[:rows, :columns]
                if suffix == "_scale_inv"
                else scale
            )
            want[name] = (matrix.astype(np.float64) * spread).astype(np.float32)
            out |= {name: matrix, name + suffix: scale}
        return out | {"midlayer.self_attn.k_scale": np.ones(1, np.float32)}

    edit(
        tmp_path / "a",
        tmp_path / "fp8",
        quantize,
        quantization_config={"quant_method": "fp8", "weight_block_size": [8, 16]},
    )
    facts = describe(tmp_path / "fp8")
    assert facts["num_fp8_matrices"] == len(want) and facts["missing_tensors"] == []
    with pytest.raises(InputError, match="FP8 head is written in a dtype of your choice"):
        convert(tmp_path / "fp8", tmp_path / "x", to="vllm")
    for dtype in ("float32", "bfloat16"):
        convert(tmp_path / "fp8", tmp_path / dtype, to="vllm", dtype=dtype)
        for name, tensor in weights.open_folder(tmp_path / dtype).items():
            old = want.get(name)
            if old is not None:
                assert tensor.dtype == np.dtype(dtype) and np.array_equal(
                    tensor, old.astype(dtype)
                ), name
    assert "quantization_config" not in weights.read_json(tmp_path / "float32/config.json")
    assert weights.read_metadata(tmp_path / "bfloat16")["left_out"] == "layers.0.self_attn.k_scale"
    head = load_drafter(tmp_path / "fp8")
    assert np.dtype(head.config.dtype) == ml_dtypes.bfloat16  # that of its other tensors
    assert np.array_equal(
        load_drafter(tmp_path / "fp8", dtype="float32").params["fusion"]["fc"]["kernel"],
        want["fc.weight"].T,
    )


def test_a_run_has_one_dtype(tmp_path):
    """What an Orbax run cannot hold exactly is refused, or cast by choice."""
    save_drafter(tiny.head(), tmp_path / "f", dtype="bfloat16")
    edit(
        tmp_path / "f",
        tmp_path / "mixed",
        lambda t: {n: x.astype(np.float32) if "norm" in n else x for n, x in t.items()},
    )
    with pytest.raises(InputError, match="a training run has one dtype; got several dtypes"):
        convert(tmp_path / "mixed", tmp_path / "run", to="orbax")
    convert(tmp_path / "mixed", tmp_path / "run", to="orbax", dtype="float32")
    convert(tmp_path / "run", tmp_path / "back", to="vllm")
    a, b = weights.open_folder(tmp_path / "mixed"), weights.open_folder(tmp_path / "back")
    assert all(np.array_equal(np.asarray(a[n], np.float32), b[n]) for n in a)
