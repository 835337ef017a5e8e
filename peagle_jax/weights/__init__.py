"""Checkpoint folders in and out, and the one-table mapping between their tensors and model parameters. Knows no model."""

from peagle_jax.weights import fp8, mxfp4
from peagle_jax.weights.fields import Fields
from peagle_jax.weights.fp8 import Dequantised, dequantise
from peagle_jax.weights.hub import find_folder, split_revision
from peagle_jax.weights.reading import INDEX, open_folder, open_safetensors, read_json, read_metadata
from peagle_jax.weights.table import BANK, LINEAR, SAME, Layout, Table, check, export, flat, load, nest
from peagle_jax.weights.tensors import FLOATING, Lazy, Tensor, apply, cast
from peagle_jax.weights.writing import new_folder, write_folder, write_safetensors

__all__ = [
    "BANK", "FLOATING", "INDEX", "LINEAR", "SAME", "Dequantised", "Fields", "Layout", "Lazy", "Table", "Tensor", "apply", "cast",
    "check", "dequantise", "export", "find_folder", "flat", "fp8", "load", "mxfp4", "nest", "new_folder", "open_folder", "open_safetensors",
    "read_json", "read_metadata", "split_revision", "write_folder", "write_safetensors",
]  # fmt: skip
