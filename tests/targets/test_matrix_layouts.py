"""Matrices in other layouts: the same products, and which matrices they are."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from peagle_jax.kernels import native_code
from peagle_jax.kernels.tiled_products import from_tiles, to_tiles
from peagle_jax.layers import Linear, matrix_layouts
from peagle_jax.layers.basic import joint_tiled_products
from peagle_jax.layers.matrix_layouts import (
    LAYOUTS,
    PLAIN,
    in_layout,
    is_copied,
    layout_of,
    layout_of_matrix,
    matrices,
    tied_table,
    to_plain,
)
from peagle_jax.layers.moe import GLU, Experts
from peagle_jax.layers.products import product, product_of_layout


def random(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


# of matrices with a whole number of tiles
SIZES = {"vocab": 96, "dim": 32, "mlp_dim": 64, "head_dim": 24}


@pytest.fixture(autouse=True)
def compiler():
    if not native_code.is_available():
        pytest.skip("there is no C++ compiler")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_those_of_the_plain_matrix(rows, dtype, layout):
    x, w = random(rows, 24), random(24, 192, dtype=dtype, seed=1)
    other, part = LAYOUTS[layout](w), 4 // w.dtype.itemsize
    shape = {"tiles": (6, 24 // part, 32, part), "transposed": (192, 24, 1)}[layout]
    assert other.shape == shape and layout_of_matrix(other) == layout
    got = product_of_layout(x, other)
    assert got.dtype == jnp.float32 and got.shape == (rows, 192)
    np.testing.assert_allclose(got, product(x, w), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(to_plain(other), w)


def test_plain_matrices_are_multiplied_as_ever():
    x, w = random(5, 24), random(24, 192, seed=1)
    assert layout_of_matrix(w) == PLAIN
    np.testing.assert_array_equal(product_of_layout(x, w), product(x, w))
    assert to_plain(w) is w


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_takes_each_layout(bias, layout):
    linear = Linear(12, 64, dtype=jnp.float32, rngs=nnx.Rngs(3), bias=bias)
    if bias:
        linear.bias[...] = random(64)
    x = random(2, 5, 12, seed=2)
    want, ids = linear(x), linear.argmax_logits(x)
    linear.kernel = nnx.Param(LAYOUTS[layout](linear.kernel[...]))
    np.testing.assert_allclose(linear(x), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(linear.argmax_logits(x), ids)


@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
def test_layers_together(biases):
    """In one call, with the biases of each; and apart where one has another layout."""
    layers = [
        Linear(12, n, dtype=jnp.float32, rngs=nnx.Rngs(n), bias=bias)
        for n, bias in zip((64, 32), biases, strict=True)
    ]
    for layer in layers:
        if layer.bias is not None:
            layer.bias[...] = random(*layer.bias.shape, seed=5)
    x = random(2, 5, 12, seed=2)
    want = [layer(x) for layer in layers]
    assert joint_tiled_products(x, layers) is None
    for layer in layers:
        layer.kernel = nnx.Param(to_tiles(layer.kernel[...]))
    for y, z in zip(joint_tiled_products(x, layers), want, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-6, atol=1e-6)
    assert joint_tiled_products(x, [*layers, nnx.Dropout(0.5)]) is None
    narrow = Linear(12, 32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    narrow.kernel = nnx.Param(to_tiles(narrow.kernel[...]))
    assert joint_tiled_products(x, [*layers, narrow]) is None


@pytest.mark.parametrize(
    "layout, names, count",
    [
        # k and v have 48 columns, no whole number of tiles
        ("tiles", {"q", "o", "gate", "up", "down", "lm_head"}, 4 * 5 + 1),
        ("transposed", {"q", "k", "v", "o", "gate", "up", "down", "lm_head"}, 4 * 7 + 1),
    ],
)
def test_large_matrices_of_a_target(layout, names, count):
    params = tiny.target(**SIZES).params
    changed = in_layout(params, layout)
    assert layout_of(changed) == layout and layout_of(params) == PLAIN
    found = set()
    pairs = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(changed), strict=True)
    for (path, before), after in pairs:
        if after is before:
            continue
        found.add(jax.tree_util.keystr(path[-2:-1], simple=True))
        back = after[..., 0].T if layout == "transposed" else from_tiles(after)
        np.testing.assert_array_equal(back, before)
    assert found == names
    assert len(matrices(params, layout)) == count
    changed_target = tiny.target(**SIZES).bind(changed)
    np.testing.assert_array_equal(changed_target.lm_head_weight(), params["lm_head"]["kernel"])
    assert in_layout(params, PLAIN) is params


@pytest.mark.parametrize("layout", ["tiles", "transposed"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_that_kernels_compute_have_scales_in_float32(dtype, layout):
    """Every call of a program would convert each of them."""
    params = jax.tree.map(lambda x: x.astype(dtype), tiny.target(**SIZES).params)
    changed = in_layout(params, layout)
    is_widened = layout == "tiles" and dtype == jnp.bfloat16
    scales = {
        jax.tree_util.keystr(path[-2:], simple=True, separator="."): x
        for path, x in jax.tree_util.tree_leaves_with_path(changed)
        if x.ndim == 1
    }
    norms = {"attn_norm.scale", "mlp_norm.scale", "q_norm.scale", "k_norm.scale", "norm.scale"}
    assert norms <= set(scales)
    for name, x in scales.items():
        is_scale = name.endswith("norm.scale")
        assert x.dtype == (jnp.float32 if is_widened and is_scale else dtype)
    before, after = params["norm"]["scale"], changed["norm"]["scale"]
    np.testing.assert_array_equal(after.astype(jnp.float32), before.astype(jnp.float32))
    assert is_copied(before, layout) == is_widened


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tied_embedding_is_the_output_matrix(dtype):
    """Its tiles are those of the transpose, and tokens are read from them."""
    target = tiny.target(**SIZES, tied_embeddings=True, dtype=dtype)
    table = tied_table(target.params)
    assert table is target.params["embed"]["table"] and tied_table(tiny.target().params) is None
    found = [id(w) for w in matrices(target.params, "tiles", table)]
    assert id(table) in found and len(found) == len(matrices(target.params, "tiles")) + 1
    changed = in_layout(target.params, "tiles", tied=table)
    tiles = changed["embed"]["table"]
    np.testing.assert_array_equal(tiles, to_tiles(table.T))
    assert is_copied(table, "tiles") and not is_copied(table, "transposed")
    # a head that reads the same table gets the same copy; an embedding of its own stays
    head = {"embed": {"table": table}, "lm_head": {"kernel": random(8, 20)}}
    assert in_layout(head, "tiles", tied=table)["embed"]["table"] is tiles
    own = {"embed": {"table": jnp.copy(table)}}
    assert in_layout(own, "tiles", tied=table) == own
    assert in_layout(target.params, "transposed", tied=table)["embed"]["table"] is table
    before, after = target.bind(target.params), target.bind(changed)
    tokens, hidden = jnp.array([[95, 3, 64]]), random(2, 3, 32)
    np.testing.assert_array_equal(after.embed(tokens), before.embed(tokens))
    np.testing.assert_allclose(
        after.compute_logits(hidden), before.compute_logits(hidden), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(after.argmax_logits(hidden), before.argmax_logits(hidden))
    np.testing.assert_array_equal(after.lm_head_weight(), before.lm_head_weight())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_experts_have_tiles(dtype, bias):
    """One matrix after the other; torch's layout is for others."""
    experts = Experts(
        5, 32, 64, GLU(jax.nn.silu), bias=bias, packed=False, dtype=dtype, rngs=nnx.Rngs(1)
    )
    if bias:
        experts.gate_up.bias[...] = random(5, 128, dtype=dtype)
    graph, state = nnx.split(experts)
    params = {"experts": nnx.to_pure_dict(state)}
    assert in_layout(params, "transposed") == params
    changed = in_layout(params, "tiles")["experts"]
    part = 4 // jnp.dtype(dtype).itemsize
    assert changed["gate_up"]["kernel"].shape == (5, 4, 32 // part, 32, part)
    assert changed["down"]["kernel"].shape == (5, 1, 64 // part, 32, part)
    assert is_copied(params["experts"]["down"]["kernel"], "tiles")
    nnx.replace_by_pure_dict(state, changed)
    tiled = nnx.merge(graph, state)
    x, ids = random(7, 32), jnp.asarray(np.random.default_rng(2).integers(0, 5, (7, 2)))
    weights = jnp.abs(random(7, 2, seed=4))
    want, got = experts(x, ids, weights), tiled(x, ids, weights)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for which in (3, slice(1, 4), jnp.array([4, 0])):
        for one, other in ((experts.gate_up, tiled.gate_up), (experts.down, tiled.down)):
            np.testing.assert_array_equal(other.matrices(which, dtype), one.matrices(which, dtype))


def test_experts_without_whole_tiles_stay():
    params = {"experts": {"gate_up": {"kernel": random(3, 8, 48)}}}
    assert in_layout(params, "tiles") == params


def test_heads_have_fc_too():
    head = tiny.head(dim=32, mlp_dim=40, draft_vocab=32, vocab=41)
    changed = in_layout(head.params, "tiles")
    assert changed["fusion"]["fc"]["kernel"].shape == (1, 72, 32, 1)
    assert changed["lm_head"]["kernel"].shape == (1, 32, 32, 1)
    assert in_layout(head.params, "transposed")["fusion"]["fc"]["kernel"].shape == (32, 72, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mlp.experts.up", "mlp.router", "markov.w2", "old_lm_head"])
def test_other_matrices_stay(name, layout):
    params = {name + ".kernel": random(3, 8, 64) if "experts" in name else random(8, 64)}
    assert in_layout(params, layout) == params
    assert layout_of(params) == PLAIN


def test_arrays_of_numpy_stay():
    params = {"lm_head.kernel": np.ones((8, 64), np.float32)}
    assert in_layout(params, "tiles") == params


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_are_shared_and_leave_with_their_matrices(monkeypatch, layout):
    monkeypatch.setattr(matrix_layouts, "_copies", {})
    params = {"attn": {"q": {"kernel": random(4, 64)}}}
    first = in_layout(params, layout)["attn"]["q"]["kernel"]
    assert in_layout(params, layout)["attn"]["q"]["kernel"] is first
    assert len(matrix_layouts._copies) == 1
    other = {"attn": {"q": {"kernel": random(4, 64, seed=1)}}}
    assert in_layout(other, layout)["attn"]["q"]["kernel"] is not first
    params["attn"]["q"]["kernel"] = None
    gc.collect()
    assert len(matrix_layouts._copies) == 1


def test_each_layout_has_a_copy_of_its_own():
    params = {"attn": {"q": {"kernel": random(4, 64)}}}
    shapes = [in_layout(params, name)["attn"]["q"]["kernel"].shape for name in LAYOUTS]
    assert shapes == [(2, 4, 32, 1), (64, 4, 1)]
