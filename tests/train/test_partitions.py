"""Long sequences: elements in partitions and layers computed twice give the same gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from peagle_jax.draft.head import DraftHead
from peagle_jax.kernels import native_code, packed_attention, packed_attention_native
from peagle_jax.layers import Rope
from peagle_jax.train import cod as cod_module
from peagle_jax.train.cod import CodConfig, cod_sample
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.peagle_loss import FeatureNoise, peagle_loss
from peagle_jax.train.recipe_sections import ComputeConfig
from peagle_jax.types import CodSample, Model

B, N, K = 2, 61, 5
NOISE = FeatureNoise(noise=0.3, dropout=0.2)
OUTPUT = jnp.asarray(np.random.default_rng(5).normal(size=(24, 41)), jnp.float32)


def documents() -> tuple[np.ndarray, np.ndarray]:
    """(segment_ids, loss_mask): several documents a row, and padding at the end of one."""
    segment_ids = np.stack([np.repeat([0, 1, 2], [30, 11, 20]), np.repeat([0, 1, -1], [7, 40, 14])])
    loss_mask = (segment_ids >= 0) & (np.random.default_rng(3).random((B, N)) < 0.8)
    return segment_ids, loss_mask


@functools.cache
def rows() -> TrainingRows:
    rng = np.random.default_rng(2)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    tokens = jnp.asarray(rng.integers(0, 41, (B, N)), jnp.int32)
    return TrainingRows(tokens, draw(B, N, 72), draw(B, N, 24), *map(jnp.asarray, documents()))


def sample(partitions: int, config: CodConfig | None = None) -> CodSample:
    config = config or CodConfig(num_depths=K, down_sample_ratio=0.8)
    segment_ids, loss_mask = documents()
    cod = cod_sample(loss_mask, segment_ids, dataclasses.replace(config, partitions=partitions), 1)
    return CodSample(*(jnp.asarray(x) for x in (cod.anchor, cod.depth, cod.real)))


@functools.cache
def gradients(partitions, compute=None, window=None, noise=None, design="shared", changes=()):
    """(loss, counts, gradients) of a head with a reduced draft vocabulary."""
    changes = {"placeholder_hidden": design, **dict(changes)}
    config = tiny.head_config(draft_vocab=17, windows=(window,) * 2, **changes)
    # As training begins. In float32 the order of sums alone changes gradients of the large random
    # weights of `tiny.head` by 1.5e-6.
    head = Model.from_module(DraftHead(config, rngs=nnx.Rngs(0)), config)
    cod, given = sample(partitions), rows()

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True, allow_int=True)
    def run(params):
        return peagle_loss(
            head.bind(params),
            given,
            cod,
            K,
            OUTPUT,
            feature_noise=noise,
            keys=jax.random.split(jax.random.key(0), B),
            compute=compute,
            partitions=partitions,
        )

    (loss, counts), grads = run(head.params)
    return loss, counts, {k: v for k, v in grads.items() if k != "d2t"}


def check_equal(got, wanted, tolerance=2e-6):
    """Equal losses and counts, and gradients within `tolerance` of each one's norm.

    Float32 sums in another order: the worst that was seen is 1.2e-6, of queries' matrices.
    """
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, got[1], wanted[1])
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got[2]), jax.tree.leaves(wanted[2]), strict=True
    ):
        assert a.dtype == b.dtype and np.linalg.norm(b) > 0, path
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), jax.tree_util.keystr(path)


@pytest.mark.parametrize("partitions", [2, 4, 7])
def test_gradients_are_those_of_one_partition(partitions):
    check_equal(gradients(partitions), gradients(1))


def test_gradients_in_float64(monkeypatch):
    """Within 1e-6, and what more there is in float32 is rounding. Logits are float32 here, too."""
    given, floats = rows(), ("aux_hidden_states", "teacher_hidden")
    with jax.enable_x64(True):
        wide = {name: getattr(given, name).astype(jnp.float64) for name in floats}
        monkeypatch.setitem(globals(), "rows", lambda: dataclasses.replace(given, **wide))
        monkeypatch.setitem(globals(), "OUTPUT", OUTPUT.astype(jnp.float64))
        changes = (("dtype", jnp.float64),)
        whole, parts = (gradients.__wrapped__(n, changes=changes) for n in (1, 4))
    assert {x.dtype for x in jax.tree.leaves(parts[2])} == {jnp.dtype(jnp.float64)}
    check_equal(parts, whole, tolerance=1e-6)


def test_gradients_without_places_that_no_row_uses(monkeypatch):
    monkeypatch.setattr(cod_module, "LEAST_WIDTH", 8)
    monkeypatch.setattr(cod_module, "NUM_WIDTHS", 16)
    whole = sample(1)
    cut = cod_module.narrowed(whole)
    assert cut.real.shape[1] < whole.real.shape[1] and not whole.real.all()
    monkeypatch.setitem(globals(), "sample", lambda partitions: cut)
    check_equal(gradients.__wrapped__(1), gradients(1))


@pytest.mark.parametrize(
    "options",
    [{"noise": NOISE}, {"window": 5}, {"design": "gated"}],
    ids=lambda options: next(iter(options)),
)
def test_also_with(options):
    # gradients of queries are small differences of large numbers
    check_equal(gradients(4, **options), gradients(1, **options))
    # each of them changes the loss, so the comparison is of something
    assert abs(gradients(4, **options)[0] - gradients(4)[0]) > 1e-4


def test_partitions_are_the_elements_in_order():
    """Every partition has whole chains; together they have the elements of one partition."""
    config = CodConfig(num_depths=K, down_sample_ratio=0.8)
    whole = sample(1)
    for partitions in (2, 3, 4, 7, 200):
        width = dataclasses.replace(config, partitions=partitions).partition_width(N)
        cod = sample(partitions)
        assert cod.anchor.shape == (B, partitions * width)
        assert width <= -(-config.capacity(N) // partitions) + K - 2
        for row in range(B):
            real = np.asarray(cod.real[row])
            for name in ("anchor", "depth"):
                np.testing.assert_array_equal(
                    getattr(cod, name)[row][real], getattr(whole, name)[row][whole.real[row]]
                )
            parts = np.where(real, cod.anchor[row], -1).reshape(partitions, width)
            sets = [set(part) - {-1} for part in parts]
            assert not any(a & b for i, a in enumerate(sets) for b in sets[:i]), "a chain is cut"
            assert sum(bool(s) for s in sets) > partitions // 2 or partitions > 100


@pytest.mark.parametrize("partitions", [1, 4])
def test_recomputed_layers_give_the_same_gradients(partitions):
    compute = ComputeConfig(recompute="layers")
    check_equal(gradients(partitions, compute), gradients(1))


def test_memory():
    """What partitions take, by XLA's count of buffers; what the backward pass keeps of layers.

    On a CPU, XLA undoes that layers are computed again, so there is no count of buffers to look at.
    """
    config = tiny.head_config(layers=4, windows=(None,) * 4, mlp_dim=256, num_depths=8)
    head = Model.from_module(DraftHead(config, rngs=nnx.Rngs(0)), config)
    n = 256
    settings = CodConfig(num_depths=8)
    loss_mask, segment_ids = np.ones((1, n), bool), np.zeros((1, n), np.int32)
    tokens, ids = jnp.zeros((1, n), jnp.int32), jnp.asarray(segment_ids)
    features = jnp.zeros((1, n, 72)), jnp.zeros((1, n, 24))
    given = TrainingRows(tokens, *features, ids, jnp.asarray(loss_mask))

    def loss_of(partitions: int, recompute: str):
        parts = dataclasses.replace(settings, partitions=partitions)
        cod = jax.tree.map(jnp.asarray, cod_sample(loss_mask, segment_ids, parts, 0))
        options = {"compute": ComputeConfig(recompute=recompute), "partitions": partitions}
        return lambda params: peagle_loss(head.bind(params), given, cod, 8, OUTPUT, **options)[0]

    def temporary(partitions: int) -> int:
        compiled = jax.jit(jax.grad(loss_of(partitions, "none"))).lower(head.params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def kept(recompute: str) -> int:
        loss = loss_of(1, recompute)
        backward = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], head.params)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(backward))

    assert temporary(6) < 0.5 * temporary(1)
    assert kept("layers") < 0.2 * kept("none")


def test_bfloat16_is_near_float32():
    """Rounded operands, float32 gradients.

    A factor has 8 bits, so an element of the loss is off by some 2**-8 times a few layers; the sum
    over elements is nearer, because their errors have no common sign.
    """
    wanted, got = gradients(1), gradients(4, ComputeConfig(dtype="bfloat16"))
    assert 1e-6 < abs(got[0] / wanted[0] - 1) < 2**-8
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got[2]), jax.tree.leaves(wanted[2]), strict=True
    ):
        assert a.dtype == jnp.float32
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert 1e-6 < error < 0.05, jax.tree_util.keystr(path)


@pytest.mark.parametrize(("partitions", "design"), [(1, "shared"), (3, "gated")])
def test_attention_by_the_kernels_for_a_cpu(partitions, design, monkeypatch):
    """Gradients with heads of whole vectors are those without C++ (kernels/native)."""
    if not native_code.fills_vectors(16):
        pytest.skip("there is no C++ compiler")
    rope = Rope.from_hf({"rope_theta": 555.0}, 16, "")
    changes = (("head_dim", 16), ("rope", rope), ("num_depths", K))
    calls, native = [], packed_attention.native

    def noted(*args):
        calls.append(args[0].shape)
        return native(*args)

    monkeypatch.setattr(packed_attention, "native", noted)
    got = gradients.__wrapped__(partitions, design=design, changes=changes)
    # once for each of two layers, and again for the placeholder rows of partitions
    assert len(calls) == (2 if partitions == 1 else 4)
    monkeypatch.setattr(packed_attention_native, "can_attend", lambda q, k, v: False)
    check_equal(got, gradients.__wrapped__(partitions, design=design, changes=changes))
    assert len(calls) == (2 if partitions == 1 else 4)
