"""What EAGLE-3's first pass over the committed tokens computes on a CPU."""

import jax
import jax.numpy as jnp
import tiny

from peagle_jax.decode.generate import make_drafter
from peagle_jax.layers import products
from peagle_jax.types import DraftState


def test_the_first_pass_of_eagle3_computes_one_row(monkeypatch):
    """Of its last layer; keys and values are those of all rows."""
    target, head = tiny.target(), tiny.head(layers=1)
    drafter = make_drafter(head, 3, "eagle3")
    found = []

    def note(x, w):
        found.append((x.size // x.shape[-1], *w.shape))
        return x.sum(axis=-1, keepdims=True) * w[:1].astype(x.dtype)

    monkeypatch.setattr(products, "_matmul", note)
    state = DraftState(drafter.init(5, 64), None)
    aux = jnp.zeros((5, 4, 3 * target.config.dim))
    tokens, count = jnp.ones((5, 4), jnp.int32), jnp.full(5, 2)

    def drafts(tokens, aux):
        return drafter.step(head.params, state, tokens, aux, count)[0]

    jax.eval_shape(drafts, tokens, aux)
    gate = 20, 36
    assert (5, *gate) in found and (20, *gate) not in found
    assert (20, 40, 20) in found  # keys, from embedding and hidden state
