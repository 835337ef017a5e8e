"""The one-table mapping between checkpoint tensors and model parameters: loading, exporting and completeness read it.

Knows no model.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.types import InputError, Model, Params
from peagle_jax.weights.tensors import FLOATING, Tensor, apply, finite, warn_unless_finite


@dataclasses.dataclass(frozen=True)
class Layout:
    """How torch stores a tensor that we store differently; `to_torch(to_jax(t))` is t, bit for bit."""

    name: str
    to_jax: Callable[[np.ndarray], np.ndarray]
    to_torch: Callable[[np.ndarray], np.ndarray]
    fits: Callable[[tuple, tuple], bool] = lambda got, want: got == want  # whether a torch shape may stand for another


SAME = Layout("same", lambda t: t, lambda t: t)
LINEAR = Layout("linear", lambda t: t.T, lambda t: t.T)  # torch [out, in] <-> [in, out]
Table = Mapping[str, tuple[str, Layout]]  # checkpoint name -> (our path, layout)


def flat(params: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path -> leaf of a pure dict."""
    for key, value in params.items():
        path = f"{prefix}{key}"
        yield from flat(value, path + ".") if isinstance(value, dict) else [(path, value)]


def nest(flat_params: Mapping[str, Any]) -> Params:
    root: dict = {}
    for path, leaf in flat_params.items():
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        node = root
        for p in parents:
            node = node.setdefault(p, {})
        node[last] = leaf
    return root


def check(make: Callable[[], nnx.Module], tensors: Mapping[str, Tensor], table: Table, where):
    """Whether the tensors are those of a model, exactly; `make` is only traced. Returns its graph, and path -> shape and dtype.

    Raises:
      InputError: naming missing and unknown tensors, or those of a wrong shape or kind.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    expected = dict(flat(nnx.to_pure_dict(state)))
    if stray := {path for path, _ in table.values()} ^ expected.keys():
        raise AssertionError(f"the table and the model disagree on parameters: {_sample(stray)}")
    misshapen, other = [], []
    for name in table.keys() & tensors.keys():
        path, layout = table[name]
        mine, theirs = tensors[name], expected[path]
        want = jax.eval_shape(layout.to_torch, jax.ShapeDtypeStruct(theirs.shape, theirs.dtype)).shape
        if not layout.fits(mine.shape, want):
            misshapen.append(f"{name} {list(mine.shape)} where the config says {list(want)}")
        if (mine.dtype in FLOATING) != jnp.issubdtype(theirs.dtype, jnp.floating):
            other.append(f"{name} {mine.dtype.name} instead of {theirs.dtype.name}")
    problems = {
        "missing": table.keys() - tensors.keys(), "unknown": tensors.keys() - table.keys(), "wrong shape": misshapen, "wrong dtype": other,
    }  # fmt: skip
    if got := "; ".join(f"{what}: {_sample(names)}" for what, names in problems.items() if names):
        raise InputError(where, "the tensors must fit config.json", got, "take weights and config from one checkpoint")
    return graph, expected


def load(make: Callable[[], nnx.Module], config, tensors: Mapping[str, Tensor], table: Table, where) -> Model:
    """Fills a model from checkpoint tensors, one after the other.

    Raises:
      InputError: see `check`.
    """
    graph, expected = check(make, tensors, table, where)
    filled = {}
    for name, (path, layout) in table.items():
        array = np.asarray(tensors[name])
        good = finite(np.ascontiguousarray(array).reshape(-1).view(np.uint8), array.dtype)
        warn_unless_finite(where, name, good)
        filled[path] = jnp.array(layout.to_jax(array), expected[path].dtype)  # a copy: the file may change
    return Model(config, graph, nest(filled))


def export(params: Params, table: Table) -> dict[str, Tensor]:
    """The inverse of `load`, lazily: checkpoint name -> tensor in torch layout."""
    leaves = dict(flat(params))
    result = {}
    for name, (path, layout) in table.items():
        leaf = leaves[path]
        shape = jax.eval_shape(layout.to_torch, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)).shape
        result[name] = apply(layout.to_torch, leaf, shape, leaf.dtype)
    return result


def _sample(names, limit: int = 4) -> str:
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
