"""Copies of head folders with other names, tensors or keys; and what equal means."""

import numpy as np

from peagle_jax import weights


def edit(folder, out, tensors=None, **changes):
    """A copy of a folder with other tensors or keys.

    `tensors` maps the dict of tensors to another. A key whose value is ... is removed.
    """
    raw = {**weights.read_json(folder / "config.json"), **changes}
    raw = {key: value for key, value in raw.items() if value is not ...}
    out.mkdir()
    arrays = {name: np.asarray(t) for name, t in weights.open_folder(folder).items()}
    weights.write_folder(out, raw, arrays if tensors is None else tensors(arrays), {})
    return out


def equal(a, b):
    """Same configuration, same parameters, bit for bit."""
    x, y = dict(weights.flatten_params(a.params)), dict(weights.flatten_params(b.params))
    assert x.keys() == y.keys()
    for path in x:
        assert x[path].dtype == y[path].dtype and np.array_equal(
            np.asarray(x[path]), np.asarray(y[path])
        ), path
    assert {**vars(a.config), "dtype": 0} == {**vars(b.config), "dtype": 0}
    assert np.dtype(a.config.dtype) == np.dtype(b.config.dtype)


def files_equal(a, b):
    """Same tensors under the same names, bit for bit, whatever files they lie in."""
    x, y = weights.open_folder(a), weights.open_folder(b)
    assert x.keys() == y.keys()
    assert all(
        x[n].dtype == y[n].dtype and x[n].shape == y[n].shape and x[n].tobytes() == y[n].tobytes()
        for n in x
    )
