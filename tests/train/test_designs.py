"""Every placeholder design in training.

The packed loss is compared with one plain run of the head for each element, and it is checked what
is learned. What a placeholder contains comes from tests/designs.py, which uses no code of the
library.
"""

import functools

import designs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from scipy import special

from peagle_jax.train.attention import PackedCausal
from peagle_jax.train.cod import CodConfig, cod_sample
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.train.recipe_sections import OptimizerConfig
from peagle_jax.train.update import decay_mask, make_optimizer
from peagle_jax.types import CodSample
from peagle_jax.weights import flatten_params

B, N, K, E, MASK = 2, 11, 4, 7, 5
DOCUMENT = np.array([[0, 0, 0, 0, 0, -1, 1, 1, 1, 1, 1], [2] * 9 + [-1, -1]])
SHAPE = {"layers": 1, "windows": (None,), "num_depths": K}
LEARNED = {
    "shared": {"mask_hidden"},
    "shared_fused": {"fused"},
    "per_depth": {"table"},
    "shared_depth": {"mask_hidden", "depth"},
    "low_rank": {"mask_hidden", "codes", "directions"},
    "last_feature": set(),
    "gated": {"mask_hidden", "gate"},
    "mean_feature": set(),
    "zero": set(),
    "frozen_random": set(),
}
FROZEN = {
    "mean_feature": {"mask_hidden"},
    "frozen_random": {"mask_hidden"},
    "frozen": {"token"},
    "mean": {"token"},
}


def own(params) -> dict[str, np.ndarray]:
    """The parameters that placeholders have for themselves, by name."""
    named = {
        **params.get("placeholder", {}),
        **({"mask_hidden": params["mask_hidden"]} if "mask_hidden" in params else {}),
    }
    return {name: np.asarray(x) for name, x in named.items()}


@functools.cache
def case() -> tuple[TrainingRows, CodSample, jax.Array]:
    rng = np.random.default_rng(4)
    # only placeholders have the mask token
    tokens = rng.choice(np.delete(np.arange(41), MASK), (B, N))

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    loss_mask = (DOCUMENT >= 0) & (rng.random((B, N)) < 0.85)
    cod = cod_sample(
        loss_mask,
        DOCUMENT,
        CodConfig(num_depths=K, down_sample_ratio=0.8, down_sample_ratio_min=0.3, max_anchors=None),
        3,
    )
    assert not cod.real.all() and set(cod.depth[cod.real]) == {1, 2, 3}  # padding, and every depth
    rows = TrainingRows(
        *(
            jnp.asarray(x)
            for x in (
                tokens.astype(np.int32),
                draw(B, N, 72),
                draw(B, N, E),
                DOCUMENT.astype(np.int32),
                loss_mask,
            )
        )
    )
    return (
        rows,
        CodSample(*(jnp.asarray(x) for x in (cod.anchor, cod.depth, cod.real))),
        jnp.asarray(draw(E, 41)),
    )


@functools.cache
def plainly():
    """(params, embeddings, fused hidden states, length) -> logits of the last row.

    Embeddings and fused hidden states are [elements N D]. One program serves all designs.
    """
    base = tiny.head(**SHAPE)
    positions = jnp.arange(N)[None]

    def last(module, embeddings, fused, length):
        attend = PackedCausal(jnp.where(positions < length, 0, -1))
        hidden, _ = module(embeddings[None], fused[None], positions, attend, None)
        return module.compute_logits(hidden[0, length - 1])

    @jax.jit
    def run(params, embeddings, fused, lengths):
        module = base.bind(
            {**base.params, **{name: params[name] for name in ("layers", "norm", "lm_head")}}
        )
        return jax.vmap(functools.partial(last, module))(embeddings, fused, lengths)

    return run


def slowly(head) -> list[tuple[int, float, bool]]:
    """(depth, loss, whether the argmax is right) of every element in the loss.

    Each has a run of its own, from its document's first row to its last placeholder.
    """
    rows, cod, output = case()
    kernel = np.asarray(head.params["fusion"]["fc"]["kernel"])

    def fuse(aux_hidden_states):
        return np.asarray(aux_hidden_states) @ kernel  # the tiny head has no norm before fc

    fused, table = fuse(rows.aux_hidden_states), np.asarray(head.params["embed"]["table"])
    loss_mask, tokens = np.asarray(rows.loss_mask), np.asarray(rows.tokens)
    elements = [(b, a, 0) for b in range(B) for a in range(N)]
    elements += [
        (b, int(a), int(d))
        for b in range(B)
        for a, d, real in zip(
            *(np.asarray(x)[b] for x in (cod.anchor, cod.depth, cod.real)), strict=True
        )
        if real
    ]
    elements = [(b, a, d) for b, a, d in elements if loss_mask[b, a + d]]
    inputs = np.zeros((2, len(elements), N, table.shape[1]), np.float32)
    lengths = np.zeros(len(elements), np.int32)
    for i, (b, a, d) in enumerate(elements):
        first = np.flatnonzero(DOCUMENT[b] == DOCUMENT[b, a])[0]
        behind = table[tokens[b, a]], fused[b, a]
        made = [
            (designs.embedding(head, behind[0]), designs.fused(head, depth, behind[1], fuse))
            for depth in range(1, d + 1)
        ]
        run = [(table[tokens[b, j]], fused[b, j]) for j in range(first, a + 1)] + made
        lengths[i] = len(run)
        inputs[:, i, : len(run)] = np.stack([np.stack(pair) for pair in run], axis=1)
    logits = np.asarray(
        plainly()(head.params, *jnp.asarray(inputs), jnp.asarray(lengths)), np.float64
    )
    found = []
    for (b, a, d), student in zip(elements, logits, strict=True):
        teacher = np.asarray(rows.teacher_hidden[b, a + d], np.float64) @ np.asarray(
            output, np.float64
        )
        loss = special.rel_entr(special.softmax(teacher), special.softmax(student)).sum()
        found.append((d, loss, bool(teacher.argmax() == student.argmax())))
    return found


OPTIMIZER = make_optimizer(
    OptimizerConfig(steps=8, peak_lr=1e-2, warmup=1, weight_decay=0.3, max_grad_norm=1.0)
)


@functools.cache
def step(name):
    """A design's head, and one step of its training.

    The step maps (params, optimizer state, COD) to loss, counts by depth, gradients, params and
    state.
    """
    head = tiny.head(**SHAPE, **designs.ALL[name])
    rows, _, output = case()

    @jax.jit
    def run(params, opt, cod):
        (loss, by_depth), grads = jax.value_and_grad(
            lambda p: peagle_loss(head.bind(p), rows, cod, K, output), has_aux=True
        )(params)
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return loss, by_depth, grads, optax.apply_updates(params, updates), opt

    return head, run


@pytest.mark.parametrize("name", designs.ALL)
def test_packed_loss_is_that_of_every_element_run_alone(name):
    head, run = step(name)
    _, cod, _ = case()
    opt, found = OPTIMIZER.init(head.params), slowly(head)
    loss, by_depth, *_ = run(head.params, opt, cod)
    np.testing.assert_allclose(loss, np.mean([x for _, x, _ in found]), rtol=1e-5)
    for key, value in (("total", lambda hit: 1), ("correct", int)):
        np.testing.assert_array_equal(
            by_depth[key],
            [sum(value(hit) for d, _, hit in found if d == depth) for depth in range(K)],
        )
    counts = np.asarray(by_depth["total"])
    assert (counts > 0).all() and sum(counts) == len(found)
    for depth in range(1, K):  # the depth's own elements, beside depth 0
        loss, by_depth, *_ = run(
            head.params, opt, CodSample(cod.anchor, cod.depth, cod.real & (cod.depth == depth))
        )
        np.testing.assert_array_equal(
            by_depth["total"], np.where(np.isin(range(K), (0, depth)), counts, 0)
        )
        np.testing.assert_allclose(
            loss, np.mean([x for d, x, _ in found if d in (0, depth)]), rtol=1e-5
        )


@pytest.mark.parametrize("name", designs.ALL)
def test_what_is_learned_and_what_is_frozen(name):
    """Gradients of the first step, and parameters after five of them with weight decay."""
    head, run = step(name)
    hidden, token = name.split("-")
    _, cod, _ = case()
    frozen = FROZEN.get(hidden, set()) | FROZEN.get(token, set())
    assert own(head.params).keys() == LEARNED[hidden] | frozen
    params, opt = head.params, OPTIMIZER.init(head.params)
    _, _, grads, *_ = run(params, opt, cod)
    for which, gradient in own(grads).items():
        if which in frozen:
            assert not gradient.any(), which
        elif which in ("table", "depth", "codes"):
            assert gradient.shape[0] == K - 1 and gradient.any(axis=1).all()  # of every depth
        else:
            assert (np.abs(gradient) > 0).mean() > 0.95, which
    row = np.asarray(grads["embed"]["table"])[MASK]
    assert row.any() == (token == "mask")  # read as a placeholder's token, or not at all
    for _ in range(5):
        *_, params, opt = run(params, opt, cod)
    still = {"mask_hidden"} if "mask_hidden" in frozen else {"placeholder"} if frozen else set()
    _nothing_is_missing(
        head,
        run,
        cod,
        grads,
        {"fusion", "embed", "mask_hidden", "placeholder"} & head.params.keys() - still,
    )
    before, after = own(head.params), own(params)
    for which in before:
        if which in frozen:
            np.testing.assert_array_equal(after[which], before[which])
        else:
            assert (after[which] != before[which]).mean() > 0.95, which
    assert (
        np.asarray(params["fusion"]["fc"]["kernel"])
        != np.asarray(head.params["fusion"]["fc"]["kernel"])
    ).all()


def _nothing_is_missing(head, run, cod, grads, parts):
    """The loss changes along random directions as its gradient says.

    Also where it reaches a placeholder through the row before it.
    """
    opt = OPTIMIZER.init(head.params)
    for part in parts:
        leaves, tree = jax.tree.flatten(grads[part])
        size = sum(x.size for x in leaves)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            draws = [rng.normal(0, size**-0.5, x.shape).astype(np.float32) for x in leaves]
            losses = []
            for distance in (0.03, -0.03):
                values = jax.tree.leaves(head.params[part])
                moved = [x + distance * draw for x, draw in zip(values, draws, strict=True)]
                params = {**head.params, part: jax.tree.unflatten(tree, moved)}
                losses.append(float(run(params, opt, cod)[0]))
            got = (losses[0] - losses[1]) / 0.06
            want = sum(float(np.vdot(g, draw)) for g, draw in zip(leaves, draws, strict=True))
            np.testing.assert_allclose(
                got,
                want,
                rtol=0,
                atol=0.02 * float(optax.tree.norm(grads[part])) * size**-0.5,
                err_msg=part,
            )


def test_what_is_decayed():
    """Matrices of layers, not vectors.

    Nor a placeholder's table, which is where the paper's design has a vector.
    """
    for name in ("shared", "per_depth", "low_rank", "shared_depth"):
        params = tiny.head(**designs.ALL[f"{name}-mask"]).params
        marks = dict(flatten_params(decay_mask(params)))
        assert not any(
            mark
            for path, mark in marks.items()
            if path.startswith("placeholder") or path == "mask_hidden"
        )
        assert all(
            mark == (x.ndim > 1)
            for (path, x), mark in zip(flatten_params(params), marks.values(), strict=True)
            if not path.startswith("placeholder")
        )
        assert marks["layers.0.attn.q.kernel"]
