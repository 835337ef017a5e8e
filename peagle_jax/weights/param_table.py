"""The one-table mapping between checkpoint tensors and model parameters: loading, exporting and completeness read it.

Knows no model.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.types import InputError, Model, Params
from peagle_jax.weights.tensors import FLOATING, Tensor, apply, finite, warn_unless_finite


@dataclasses.dataclass(frozen=True)
class ParamTransform:
    """How torch stores a tensor that we store differently; `to_torch(to_jax(t))` is t, bit for bit."""

    name: str
    to_jax: Callable[[np.ndarray], np.ndarray]
    to_torch: Callable[[np.ndarray], np.ndarray]
    fits: Callable[[tuple, tuple], bool] = lambda got, want: (
        got == want
    )  # whether a torch shape may stand for another
    place: tuple[int | slice, ...] | None = (
        None  # the part of our parameter that the tensor is, an expert first; None: all of it
    )

    def at(self, *place: int | slice) -> "ParamTransform":
        return dataclasses.replace(self, place=place)

    def part(self, leaf):
        return leaf if self.place is None else leaf[self.place]


IDENTITY = ParamTransform("same", lambda t: t, lambda t: t)
TRANSPOSE = ParamTransform("linear", lambda t: t.T, lambda t: t.T)  # torch [out, in] <-> [in, out]
TRANSPOSE_EXPERTS = ParamTransform(
    "bank", lambda t: t.swapaxes(1, 2), lambda t: t.swapaxes(1, 2)
)  # the same for every expert of a stack
ParamTable = Mapping[str, tuple[str, ParamTransform]]  # checkpoint name -> (our path, layout)


def flatten_params(params: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path -> leaf of a pure dict."""
    for key, value in params.items():
        path = f"{prefix}{key}"
        yield from flatten_params(value, path + ".") if isinstance(value, dict) else [(path, value)]


def unflatten_params(flat_params: Mapping[str, Any]) -> Params:
    root: dict = {}
    for path, leaf in flat_params.items():
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        node = root
        for p in parents:
            node = node.setdefault(p, {})
        node[last] = leaf
    return root


def check_tensors(
    make: Callable[[], nnx.Module], tensors: Mapping[str, Tensor], table: ParamTable, where
):
    """Whether the tensors are those of a model, exactly; `make` is only traced. Returns its graph, and path -> shape and dtype.

    Raises:
      InputError: naming missing and unknown tensors, or those of a wrong shape or kind.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    expected = dict(flatten_params(nnx.to_pure_dict(state)))
    if stray := {path for path, _ in table.values()} ^ expected.keys():
        raise AssertionError(f"the table and the model disagree on parameters: {_sample(stray)}")
    filled = collections.Counter()
    for path, layout in table.values():
        filled[path] += math.prod(_torch_shape(layout, expected[path]))
    if gaps := [path for path, size in filled.items() if size != math.prod(expected[path].shape)]:
        raise AssertionError(f"the table fills these parameters in part or twice: {_sample(gaps)}")
    misshapen, other = [], []
    for name in table.keys() & tensors.keys():
        path, layout = table[name]
        mine, theirs = tensors[name], expected[path]
        want = _torch_shape(layout, theirs)
        if not layout.fits(mine.shape, want):
            misshapen.append(f"{name} {list(mine.shape)} where the config says {list(want)}")
        packed = (
            theirs.dtype == jnp.uint8 and mine.dtype != np.uint8
        )  # bits, not numbers: there is no conversion
        if packed or (mine.dtype in FLOATING) != jnp.issubdtype(theirs.dtype, jnp.floating):
            other.append(f"{name} {mine.dtype.name} instead of {theirs.dtype.name}")
    problems = {
        "missing": table.keys() - tensors.keys(),
        "unknown": tensors.keys() - table.keys(),
        "wrong shape": misshapen,
        "wrong dtype": other,
    }
    if got := "; ".join(f"{what}: {_sample(names)}" for what, names in problems.items() if names):
        raise InputError(
            where,
            "the tensors must fit config.json",
            got,
            "take weights and config from one checkpoint",
        )
    return graph, expected


Placement = Callable[
    [str, Any], jax.sharding.Sharding
]  # path and shape of a parameter -> where it lies


def load_params(
    make: Callable[[], nnx.Module],
    config,
    tensors: Mapping[str, Tensor],
    table: ParamTable,
    where,
    place: Placement | None = None,
) -> Model:
    """Fills a model from checkpoint tensors, one parameter after the other.

    Args:
      place: each device's slice is read from the file and put there, and this process reads no other. None: every
        parameter whole, on the default device.

    Raises:
      InputError: see `check`.
    """
    graph, expected = check_tensors(make, tensors, table, where)
    sources: dict[str, list[tuple[str, ParamTransform]]] = {}
    for name, (path, layout) in table.items():
        sources.setdefault(path, []).append((name, layout))
    warned: set[str] = set()
    newest: dict[
        str, np.ndarray
    ] = {}  # the tensor read last: several devices may want slices of it

    def tensor(name: str, layout: ParamTransform, index) -> np.ndarray:
        if name not in newest:
            newest.clear()
            newest[name] = np.asarray(tensors[name])
        array = layout.to_jax(newest[name])[index]
        if name not in warned and not finite(
            np.ascontiguousarray(array).reshape(-1).view(np.uint8), array.dtype
        ):
            warned.add(name)
            warn_unless_finite(where, name, False)
        return array

    def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
        """That part of a parameter; perhaps a view of the file."""
        name, layout = sources[path][0]
        if layout.place is None:
            return tensor(name, layout, index)
        want = expected[path]
        rows = range(want.shape[0])[index[0]]
        out = np.empty((len(rows), *want.shape[1:]), want.dtype)
        for name, layout in sources[path]:
            if layout.place[0] in rows:
                out[layout.place[0] - rows.start, *layout.place[1:]] = tensor(name, layout, ...)
        return out[:, *index[1:]]

    filled = {}
    for path, want in expected.items():

        def copy(index, path=path, want=want):
            return np.array(read(path, index), want.dtype)  # the file may change

        if place is None:
            filled[path] = jnp.array(read(path, (slice(None),) * len(want.shape)), want.dtype)
        else:
            filled[path] = jax.make_array_from_callback(
                want.shape, place(path, want), copy, dtype=want.dtype
            )
        newest.clear()
    return Model(config, graph, unflatten_params(filled))


def _torch_shape(layout: ParamTransform, leaf) -> tuple[int, ...]:
    return layout.to_torch(
        layout.part(np.broadcast_to(np.empty((), bool), leaf.shape))
    ).shape  # a view of one number


def export_params(params: Params, table: ParamTable) -> dict[str, Tensor]:
    """The inverse of `load`, lazily: checkpoint name -> tensor in torch layout."""
    leaves = dict(flatten_params(params))
    result = {}
    for name, (path, layout) in table.items():

        def whole(leaf, layout=layout):
            return layout.to_torch(layout.part(leaf))

        if path not in leaves:
            got = "FP8 matrices" if path.replace(".kernel", ".values") in leaves else f"no {path}"
            raise InputError(
                "parameters",
                "a model is written from weights in floating point",
                got,
                "load it without fp8",
            )
        result[name] = apply(
            whole, leaves[path], _torch_shape(layout, leaves[path]), leaves[path].dtype
        )
    return result


def _sample(names, limit: int = 4) -> str:
    names = sorted(names)
    return ", ".join(names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )
