"""What `peagle plan` takes from a config.json before any arithmetic."""

from pathlib import Path

import pytest

from peagle_jax.pipelines.plan_models import stored_dtype
from peagle_jax.types import InputError

FLOAT8 = {"weights": {"type": "float", "num_bits": 8}}
INT4 = {"weights": {"type": "int", "num_bits": 4}}
FLOAT4 = {"weights": {"type": "float", "num_bits": 4}}
CONFIG = Path("config.json")


def compressed(**groups):
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (None, "bfloat16"),
        ({}, "bfloat16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (compressed(a=FLOAT8), "fp8"),
        (compressed(a=FLOAT8, b=FLOAT8), "fp8"),
    ],
)
def test_stored_dtypes(quantization, dtype):
    assert stored_dtype({"quantization_config": quantization}, CONFIG) == dtype
    assert stored_dtype({}, CONFIG) == "bfloat16"


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({"bits": 4}, "None"),
        ("fp8", "None"),
        (compressed(a=INT4), "compressed-tensors"),
        (compressed(a=FLOAT4), "compressed-tensors"),
        (compressed(a=FLOAT8, b=INT4), "compressed-tensors"),
        (compressed(b={"weights": None}), "compressed-tensors"),
        (compressed(), "compressed-tensors"),
    ],
)
def test_others_are_one_line(quantization, method):
    with pytest.raises(InputError, match=f"{method}.*give --dtype") as error:
        stored_dtype({"quantization_config": quantization}, CONFIG)
    assert "\n" not in str(error.value) and str(error.value).startswith("config.json")
