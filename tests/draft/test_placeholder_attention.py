"""Designs of attention: what placeholders see, and keys and values from fused hidden states."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from block_attention import MaskedAttention, mask_of

from peagle_jax.draft.placeholder_attention import ATTENTION_DESIGNS, attended
from peagle_jax.draft.placeholders import DESIGNS, PAPER_DESIGN


@pytest.mark.parametrize("design", ATTENTION_DESIGNS)
def test_who_sees_whom_in_a_step(design):
    counts, num_places, num_placeholders = np.array([1, 4, 2]), 4, 3
    num_rows = num_places + num_placeholders
    seen = attended(design, jnp.arange(num_rows)[None] - counts[:, None], num_placeholders)
    for b, count in enumerate(counts):
        padding = num_rows - count - num_placeholders
        want = mask_of(design, count, num_placeholders, padding)
        real = count + num_placeholders  # what padding sees is not read
        np.testing.assert_array_equal(np.asarray(seen[b])[:real], want[:real])


def test_the_paper_has_the_first_of_each():
    assert {name: next(iter(designs)) for name, designs in DESIGNS.items()} == PAPER_DESIGN


@pytest.mark.parametrize("window", [None, 3])
def test_injected_keys_and_values_are_of_fused_hidden_states(window):
    """An ordinary layer over two rows a token: one with queries, one with keys and values.

    The latter have the fused hidden state for their input, where the token is a committed one.
    """
    shape = {"layers": 2, "windows": (None, window), "qk_norm": True}
    head = tiny.head(**shape, placeholder_context="injected")
    module, n, num_placeholders = head.bind(head.params), 7, 2
    rng = np.random.default_rng(6)
    embeddings, fused = (jnp.asarray(rng.normal(size=(1, n, 20)), jnp.float32) for _ in range(2))
    positions = jnp.arange(n)[None]
    is_placeholder = positions >= n - num_placeholders
    mask = mask_of("causal", n - num_placeholders, num_placeholders)
    attend = MaskedAttention(mask)
    got, _ = module(embeddings, fused, positions, attend, None, is_placeholder=is_placeholder)

    first, second = module.layers
    x, _ = first(fused, embeddings, positions, 0, attend, None)
    assert second.context_norm is not None and second.context_token_norm is not None
    contexts = second.context_norm(fused) + second.context_token_norm(embeddings)
    kv_rows = jnp.where(is_placeholder[..., None], second.input_norm(x), contexts)
    both = jnp.concatenate([second.input_norm(x), kv_rows], axis=1)

    class Halves(MaskedAttention):
        def __call__(self, layer, q, k, v, state, rule):
            return super().__call__(layer, q[:, :n], k[:, n:], v[:, n:], state, rule)

    twice = jnp.concatenate([positions, positions], axis=1)
    y, _ = second.attn(both, twice, 1, Halves(mask), None)
    x = x + y
    want = x + second.mlp(second.mlp_norm(x))
    np.testing.assert_allclose(got, want, atol=2e-5)
    # not what an ordinary head of the same parameters computes
    other = without_injection(head)
    plain, _ = other(embeddings, fused, positions, attend, None)
    assert np.abs(np.asarray(plain) - np.asarray(want)).max() > 1e-2


def without_injection(head):
    """The head's parameters in a head without injection."""
    plain = tiny.head(layers=2, windows=head.config.windows, qk_norm=True)
    layers = {
        name: {key: value for key, value in layer.items() if not key.startswith("context")}
        for name, layer in head.params["layers"].items()
    }
    return plain.bind({**head.params, "layers": layers})
