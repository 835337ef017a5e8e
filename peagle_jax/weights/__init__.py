"""Checkpoint folders: reading, writing, and mapping their tensors to model parameters.

Nothing in this folder knows a model.
"""

from peagle_jax.weights import fp8, mxfp4
from peagle_jax.weights.fields import Fields
from peagle_jax.weights.fp8 import Dequantized, dequantize
from peagle_jax.weights.hub import CHECKPOINT_FILES, TOKENIZER_FILES, find_folder, split_revision
from peagle_jax.weights.param_table import (
    IDENTITY,
    TRANSPOSE,
    TRANSPOSE_EXPERTS,
    ParamTable,
    ParamTransform,
    check_tensors,
    export_params,
    flatten_params,
    load_params,
    unflatten_params,
)
from peagle_jax.weights.reading import (
    INDEX,
    absent_shards,
    is_inside,
    open_folder,
    open_safetensors,
    parse_json,
    read_json,
    read_metadata,
)
from peagle_jax.weights.tensors import (
    FLOATING,
    LazyTensor,
    Tensor,
    all_finite,
    apply,
    cast,
    warn_not_finite,
)
from peagle_jax.weights.writing import (
    check_output,
    new_file,
    new_folder,
    write_folder,
    write_safetensors,
)

__all__ = [
    "CHECKPOINT_FILES",
    "TOKENIZER_FILES",
    "TRANSPOSE_EXPERTS",
    "FLOATING",
    "INDEX",
    "TRANSPOSE",
    "IDENTITY",
    "Dequantized",
    "Fields",
    "ParamTransform",
    "LazyTensor",
    "ParamTable",
    "Tensor",
    "absent_shards",
    "is_inside",
    "all_finite",
    "apply",
    "cast",
    "check_tensors",
    "dequantize",
    "export_params",
    "find_folder",
    "flatten_params",
    "fp8",
    "load_params",
    "mxfp4",
    "unflatten_params",
    "check_output",
    "new_file",
    "new_folder",
    "open_folder",
    "open_safetensors",
    "parse_json",
    "read_json",
    "read_metadata",
    "split_revision",
    "warn_not_finite",
    "write_folder",
    "write_safetensors",
]
