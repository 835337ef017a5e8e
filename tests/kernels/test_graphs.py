"""Which programs are compiled with their loops in CUDA graphs.

test_ahead_of_time.py compiles one for a GPU.
"""

import jax
import jax.numpy as jnp
import pytest

from peagle_jax.kernels import graphs


def powers(x, n):
    """x to the power 2^n, by a loop."""
    return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] ** 2), (0, x))[1]


@pytest.mark.parametrize("is_nvidia", [False, True])
def test_the_same_result(monkeypatch, is_nvidia):
    """This XLA knows the options; on a CPU they change nothing."""
    monkeypatch.setattr(graphs, "_is_nvidia", lambda: is_nvidia)
    function = graphs.jit_with_loops(powers, static_argnames="n", donate_argnames="x")
    x = jnp.asarray([2.0, 3.0])
    assert function(x, n=2).tolist() == [16.0, 81.0]
    assert x.is_deleted()
    assert function.__wrapped__ is powers


def test_where_they_are_used(monkeypatch):
    assert not graphs.holds_loops()
    monkeypatch.setattr(graphs, "_is_nvidia", lambda: True)
    assert graphs.holds_loops()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=+WHILE")
    assert not graphs.holds_loops()


def test_options_reach_the_compiler(monkeypatch):
    """One that XLA does not know is an error, but only where options are used."""
    monkeypatch.setattr(graphs, "OPTIONS", {graphs.ENABLED: "UNHEARD_OF"})
    function = graphs.jit_with_loops(powers, static_argnames="n")
    assert function(2.0, n=1) == 4.0
    monkeypatch.setattr(graphs, "_is_nvidia", lambda: True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNHEARD_OF"):
        function(2.0, n=1)
