"""The table that maps checkpoint tensors to model parameters, for loading, exporting and checking.

A model family writes one table. Nothing in this file knows a model.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.assembler import check_assembler
from peagle_jax.free_memory import free_bytes
from peagle_jax.types import InputError, Model, Params
from peagle_jax.weights.tensors import FLOATING, Tensor, all_finite, apply, warn_not_finite

Shape = tuple[int, ...]


def _is_same_shape(stored: Shape, expected: Shape) -> bool:
    return stored == expected


@dataclasses.dataclass(frozen=True)
class ParamTransform:
    """How a checkpoint tensor becomes a parameter, and back.

    Attributes:
      name: names the transform; two with one name do the same.
      to_jax: torch's tensor -> our parameter, or our part of it.
      to_torch: the inverse; `to_torch(to_jax(t))` is t, bit for bit.
      fits: (stored shape, expected torch shape) -> whether the stored tensor can be read.
      expert: the index on the parameter's first axis where the tensor lies, of a parameter that
        stacks the matrices of all experts; None: the tensor is the whole parameter.
      slices: where the tensor lies on the axes behind the first; () is all of them.
    """

    name: str
    to_jax: Callable[[np.ndarray], np.ndarray]
    to_torch: Callable[[np.ndarray], np.ndarray]
    fits: Callable[[Shape, Shape], bool] = _is_same_shape
    expert: int | None = None
    slices: tuple[slice, ...] = ()

    def at(self, expert: int, *slices: slice) -> "ParamTransform":
        """The same transform of a tensor that is one part of a parameter."""
        return dataclasses.replace(self, expert=expert, slices=slices)

    def select(self, param: Any) -> Any:
        """The part of a parameter that the tensor is."""
        return param if self.expert is None else param[(self.expert, *self.slices)]


def _unchanged(tensor: np.ndarray) -> np.ndarray:
    return tensor


def _transposed(tensor: np.ndarray) -> np.ndarray:
    return tensor.T


def _each_transposed(tensor: np.ndarray) -> np.ndarray:
    return tensor.swapaxes(1, 2)


IDENTITY = ParamTransform("identity", _unchanged, _unchanged)
# torch's Linear stores [out, in], ours [in, out]
TRANSPOSE = ParamTransform("transpose", _transposed, _transposed)
# [E, out, in] <-> [E, in, out]
TRANSPOSE_EXPERTS = ParamTransform("transpose experts", _each_transposed, _each_transposed)
# checkpoint name -> (dotted path of our parameter, transform)
ParamTable = Mapping[str, tuple[str, ParamTransform]]


def flatten_params(params: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, leaf) of a nested dict of parameters.

    Args:
      prefix: comes before every path.
    """
    for key, value in params.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten_params(value, path + ".")
        else:
            yield path, value


def unflatten_params(flat_params: Mapping[str, Any]) -> Params:
    """The inverse of `flatten_params`. Parts of a path that are numbers become integer keys."""
    root: dict = {}
    for path, leaf in flat_params.items():
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        node = root
        for p in parents:
            node = node.setdefault(p, {})
        node[last] = leaf
    return root


def check_tensors(
    make: Callable[[], nnx.Module],
    tensors: Mapping[str, Tensor],
    table: ParamTable,
    where: str | Path,
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Checks that the tensors of a checkpoint are exactly those of a model.

    Args:
      make: makes the model; it is only traced, and allocates nothing.
      where: the checkpoint, for errors.

    Returns:
      The model's graph, and dotted path -> shape and dtype of its parameters.

    Raises:
      InputError: naming missing and unknown tensors, and those of a wrong shape or dtype.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    expected = dict(flatten_params(nnx.to_pure_dict(state)))
    _check_table(table, expected)
    misshapen, mistyped = [], []
    for name in table.keys() & tensors.keys():
        path, transform = table[name]
        tensor, param = tensors[name], expected[path]
        torch_shape = _torch_shape(transform, param)
        if not transform.fits(tensor.shape, torch_shape):
            shape, needed = list(tensor.shape), list(torch_shape)
            misshapen.append(f"{name} {shape} where the config says {needed}")
        # MXFP4's packed bits are not numbers: nothing else is converted to them.
        is_unpacked = param.dtype == jnp.uint8 and tensor.dtype != np.uint8
        is_floating = jnp.issubdtype(param.dtype, jnp.floating)
        if is_unpacked or (tensor.dtype in FLOATING) != is_floating:
            mistyped.append(f"{name} {tensor.dtype.name} instead of {param.dtype.name}")
    problems = {
        "missing": table.keys() - tensors.keys(),
        "unknown": tensors.keys() - table.keys(),
        "wrong shape": misshapen,
        "wrong dtype": mistyped,
    }
    if got := "; ".join(f"{what}: {_sample(names)}" for what, names in problems.items() if names):
        raise InputError(
            where,
            rule="the tensors must fit config.json",
            got=got,
            next_step="take weights and config from one checkpoint",
        )
    return graph, expected


def _check_table(table: ParamTable, expected: Mapping[str, Any]) -> None:
    """Asserts that a table fills every parameter of its model once. An error is a bug of ours."""
    if stray := {path for path, _ in table.values()} ^ expected.keys():
        raise AssertionError(f"the table and the model disagree on parameters: {_sample(stray)}")
    filled_sizes = collections.Counter()
    for path, transform in table.values():
        filled_sizes[path] += math.prod(_torch_shape(transform, expected[path]))
    gaps = [path for path, size in filled_sizes.items() if size != math.prod(expected[path].shape)]
    if gaps:
        raise AssertionError(f"the table fills these parameters in part or twice: {_sample(gaps)}")


# (dotted path, shape and dtype of a parameter) -> on which devices it lies
Placement = Callable[[str, Any], jax.sharding.Sharding]


def load_params(
    make: Callable[[], nnx.Module],
    config: Any,
    tensors: Mapping[str, Tensor],
    table: ParamTable,
    where: str | Path,
    placement: Placement | None = None,
) -> Model:
    """Fills a model from checkpoint tensors, one parameter after the other.

    Args:
      make: makes the model; it is only traced.
      config: the model's configuration, for the result.
      where: the checkpoint, for errors and warnings.
      placement: the sharding of each parameter. Each device's slice is read from the file and put
        there, and this process reads no other slice. None: every parameter whole, on the default
        device.

    Raises:
      InputError: the tensors are not those of the model (see `check_tensors`), they do not fit the
        device's memory, or nothing can be compiled for it. Nothing has been read then.
    """
    graph, expected = check_tensors(make, tensors, table, where)
    check_assembler()
    _check_memory(expected, placement, where)
    reader = _ParamReader(tensors, table, where)
    filled = {}
    for path, param in expected.items():

        def read_copy(index: Any, path: str = path, param: Any = param) -> np.ndarray:
            """A device's slice; a copy, because the file may change."""
            return np.array(reader.read(path, param, index), param.dtype)

        if placement is None:
            everything = (slice(None),) * len(param.shape)
            filled[path] = jnp.array(reader.read(path, param, everything), param.dtype)
        else:
            filled[path] = jax.make_array_from_callback(
                param.shape, placement(path, param), read_copy, dtype=param.dtype
            )
        reader.forget()
    return Model(config, graph, unflatten_params(filled))


def _check_memory(
    expected: Mapping[str, Any], placement: Placement | None, where: str | Path
) -> None:
    """Checks that what a device gets of all parameters fits its free memory.

    Raises:
      InputError: it does not.
    """
    wanted = 0
    for path, param in expected.items():
        shape = param.shape
        if placement is not None:
            shape = placement(path, param).shard_shape(shape)
        wanted += math.prod(shape) * param.dtype.itemsize
    free = free_bytes()
    if free is not None and wanted > free:
        raise InputError(
            where,
            rule="the weights must fit the device's memory",
            got=f"{wanted / 1e9:.1f} GB wanted, {max(free, 0) / 1e9:.1f} GB free",
            next_step="load them in fewer bits (--dtype bfloat16 or fp8; target_dtype in a "
            "recipe), or on a larger device",
        )


class _ParamReader:
    """Reads slices of parameters from checkpoint tensors.

    The tensor that was read last stays in memory, because several devices may want slices of it.
    Each tensor with NaN or infinity is warned of once.
    """

    def __init__(self, tensors: Mapping[str, Tensor], table: ParamTable, where: str | Path):
        self.tensors, self.where = tensors, where
        self.sources: dict[str, list[tuple[str, ParamTransform]]] = {}
        for name, (path, transform) in table.items():
            self.sources.setdefault(path, []).append((name, transform))
        self.warned: set[str] = set()
        self.newest: dict[str, np.ndarray] = {}

    def forget(self) -> None:
        """Frees the tensor that was read last."""
        self.newest.clear()

    def read(self, path: str, param: Any, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a parameter; perhaps a view of the file."""
        name, transform = self.sources[path][0]
        if transform.expert is None:
            return self._read_tensor(name, transform, index)
        experts = range(param.shape[0])[index[0]]
        out = np.empty((len(experts), *param.shape[1:]), param.dtype)
        for name, transform in self.sources[path]:
            expert = transform.expert
            if expert is not None and expert in experts:
                part = (expert - experts.start, *transform.slices)
                out[part] = self._read_tensor(name, transform, ...)
        return out[:, *index[1:]]

    def _read_tensor(self, name: str, transform: ParamTransform, index: Any) -> np.ndarray:
        if name not in self.newest:
            self.newest.clear()
            self.newest[name] = np.asarray(self.tensors[name])
        array = transform.to_jax(self.newest[name])[index]
        if name not in self.warned:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if not all_finite(data, array.dtype):
                self.warned.add(name)
                warn_not_finite(self.where, name)
        return array


def _torch_shape(transform: ParamTransform, param: Any) -> Shape:
    """The shape of the checkpoint tensor that fills a parameter, or a part of one."""
    one_number = np.broadcast_to(np.empty((), bool), param.shape)  # a view without memory
    return transform.to_torch(transform.select(one_number)).shape


def export_params(params: Params, table: ParamTable) -> dict[str, Tensor]:
    """The inverse of `load_params`, lazily: checkpoint name -> tensor as torch stores it.

    Raises:
      InputError: the model's matrices are in FP8.
    """
    leaves = dict(flatten_params(params))
    result = {}
    for name, (path, transform) in table.items():
        if path not in leaves:
            is_fp8 = path.replace(".kernel", ".values") in leaves
            raise InputError(
                "parameters",
                rule="a model is written from weights in floating point",
                got="FP8 matrices" if is_fp8 else f"no {path}",
                next_step="load it without fp8",
            )

        def to_torch(leaf: np.ndarray, transform: ParamTransform = transform) -> np.ndarray:
            return transform.to_torch(transform.select(leaf))

        leaf = leaves[path]
        result[name] = apply(to_torch, leaf, _torch_shape(transform, leaf), leaf.dtype)
    return result


def _sample(names: Collection[str], limit: int = 4) -> str:
    """The first names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
