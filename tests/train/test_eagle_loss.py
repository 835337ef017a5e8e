"""EAGLE-1's loss against torch, written from the paper's formulas; its noise; its parts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from peagle_jax.draft.head import DraftHead
from peagle_jax.train.eagle_loss import RegressionConfig, eagle_loss
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.recipe_sections import ComputeConfig
from peagle_jax.types import Model

torch = pytest.importorskip("torch")
F = torch.nn.functional

B, N, D, V = 2, 13, 24, 41
SECOND = 6  # first row of each sequence's second document
CAP = 1.5
REGRESSION = RegressionConfig(weight=0.7, token_weight=0.3, noise=0.0)
HEAD = tiny.EAGLE | {"attention_bias": True}


@functools.cache
def given() -> tuple[TrainingRows, jax.Array]:
    """Shifted rows of two documents each, and the target's output matrix."""
    rng = np.random.default_rng(4)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    segment_ids = jnp.tile(jnp.asarray(np.arange(N) >= SECOND, jnp.int32), (B, 1))
    rows = TrainingRows(
        jnp.asarray(rng.integers(0, V, (B, N)), jnp.int32),
        draw(B, N, D),
        3 * draw(B, N, D),
        segment_ids.at[:, SECOND - 1].set(-1),  # would join the two documents
        jnp.asarray(rng.random((B, N)) < 0.6).at[:, SECOND - 1].set(False),
    )
    return rows, draw(D, V)


def double(x):
    return torch.tensor(np.asarray(x, np.float64))


class TorchHead:
    """A head of two Llama layers, of which the first has no norm before attention."""

    def __init__(self, params, config):
        self.params = jax.tree.map(lambda x: double(x).requires_grad_(), params)
        self.config = config

    def norm(self, x, scale):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config.norm_eps) * scale

    def attention(self, x, params, mask):
        c = self.config
        positions = torch.arange(N, dtype=torch.float64)[:, None]
        exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
        angle = torch.cat([positions / 555.0**exponents] * 2, dim=1)

        def project(name, heads):
            y = x @ params[name]["kernel"] + params[name]["bias"]
            return y.reshape(B, N, heads, c.head_dim).transpose(1, 2)

        def rotate(y):
            half = c.head_dim // 2
            turned = torch.cat([-y[..., half:], y[..., :half]], dim=-1)
            return y * angle.cos() + turned * angle.sin()

        q, k = rotate(project("q", c.heads)), rotate(project("k", c.kv_heads))
        k, v = (
            y.repeat_interleave(c.heads // c.kv_heads, dim=1) for y in (k, project("v", c.kv_heads))
        )
        scores = (q @ k.transpose(2, 3)) / c.head_dim**0.5
        shares = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        y = (shares @ v).transpose(1, 2).reshape(B, N, -1)
        return y @ params["o"]["kernel"] + params["o"]["bias"]

    def __call__(self, tokens, features, segment_ids):
        """Predicted features [B N D]."""
        p = self.params
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = same & torch.ones(N, N, dtype=torch.bool).tril()
        x = torch.cat([p["embed"]["table"][tokens], features], dim=-1) @ p["fc"]["kernel"]
        for index, layer in p["layers"].items():
            y = x if index == 0 else self.norm(x, layer["input_norm"]["scale"])
            x = x + self.attention(y, layer["attn"], mask)
            y, mlp = self.norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]
            gated = F.silu(y @ mlp["gate"]["kernel"]) * (y @ mlp["up"]["kernel"])
            x = x + gated @ mlp["down"]["kernel"]
        return x


def torch_loss(head: TorchHead, rows: TrainingRows, output) -> tuple[torch.Tensor, float]:
    """The loss, with the paper's cross entropy, and the teacher's entropy in it."""
    tokens, segment_ids = (
        torch.tensor(np.asarray(x, np.int64)) for x in (rows.tokens, rows.segment_ids)
    )
    mask = torch.tensor(np.asarray(rows.loss_mask))
    predicted = head(tokens, double(rows.aux_hidden_states), segment_ids)[mask]
    truth = double(rows.teacher_hidden)[mask]
    regression = torch.nn.SmoothL1Loss()(predicted, truth)
    teacher = (CAP * torch.tanh(truth @ double(output) / CAP)).softmax(-1)
    student = predicted @ head.params["lm_head"]["kernel"]
    tokens_loss = -(teacher * student.log_softmax(-1)).sum(-1).mean()
    entropy = -(teacher * teacher.log()).sum(-1).mean()
    return 0.7 * regression + 0.3 * tokens_loss, 0.3 * float(entropy)


def ours(head: Model, rows: TrainingRows, output, cap: float | None = CAP, **options):
    @jax.jit
    def loss_and_grads(params):
        def of(params):
            return eagle_loss(head.bind(params), rows, REGRESSION, output, cap, **options)

        return jax.value_and_grad(of, has_aux=True)(params)

    return loss_and_grads(head.params)


def test_loss_and_gradients():
    """Two layers, biases, grouped heads, packed documents, a loss mask, capped teacher."""
    head, (rows, output) = tiny.head(**HEAD), given()
    (loss, counts), grads = ours(head, rows, output)
    theirs = TorchHead(head.params, head.config)
    want, entropy = torch_loss(theirs, rows, output)
    want.backward()
    np.testing.assert_allclose(loss, float(want.detach()) - entropy, rtol=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    assert len(leaves) == 3 + 2 * 12 + 1  # fc, embed, lm_head; two layers, one norm less in one
    for path, got in leaves:
        node = theirs.params
        for key in path:
            node = node[key.key]
        grad = np.asarray(node.grad)
        np.testing.assert_allclose(got, grad, rtol=1e-4, atol=1e-5 * abs(grad).max(), err_msg=path)
    mask = np.asarray(rows.loss_mask)
    assert counts["total"].tolist() == [mask.sum()] and counts["correct"].shape == (1,)


def test_what_counts_as_correct():
    """The argmax of lm_head over the predicted feature, beside that over the true one."""
    head, (rows, _) = tiny.head(**HEAD), given()
    theirs = TorchHead(head.params, head.config)
    tokens, segment_ids = (
        torch.tensor(np.asarray(x, np.int64)) for x in (rows.tokens, rows.segment_ids)
    )
    predicted = theirs(tokens, double(rows.aux_hidden_states), segment_ids).detach().numpy()
    # the teacher is right where it is asked for what this head says
    teacher = jnp.asarray(predicted, jnp.float32).at[0].multiply(-1)
    same = dataclasses.replace(rows, teacher_hidden=teacher)
    # without a cap: so large logits would all be as large as it
    (_, counts), _ = ours(head, same, head.params["lm_head"]["kernel"], cap=None)
    assert counts["correct"].tolist() == [np.asarray(rows.loss_mask)[1].sum()]


def test_parts_of_a_batch_add_up():
    """With the whole batch's denominator, loss and gradients of its rows sum to its own."""
    head, (rows, output) = tiny.head(**HEAD), given()
    whole = ours(head, rows, output)
    count = jnp.asarray([rows.loss_mask.sum()], jnp.float32)
    parts = [
        ours(head, jax.tree.map(lambda x, i=i: x[i : i + 1], rows), output, denominators=count)
        for i in range(B)
    ]
    summed = jax.tree.map(lambda a, b: a + b, *parts)
    for got, want in zip(jax.tree.leaves(summed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_how_it_is_computed():
    """Layers that are computed twice change nothing; bfloat16 rounds, and gradients are float32."""
    head, (rows, output) = tiny.head(**HEAD), given()
    whole = ours(head, rows, output)
    again = ours(head, rows, output, compute=ComputeConfig(recompute="layers"))
    rounded = ours(head, rows, output, compute=ComputeConfig(dtype="bfloat16"))
    leaves = [jax.tree.leaves(x[1]) for x in (whole, again, rounded)]
    for want, same, near in zip(*leaves, strict=True):
        np.testing.assert_allclose(same, want, rtol=1e-4, atol=1e-6)
        assert near.dtype == jnp.float32
    # of all gradients together: operands have 8 bits, and the sums of single biases cancel
    want, _, near = (np.concatenate([np.ravel(x) for x in of_one]) for of_one in leaves)
    assert 1e-4 < np.linalg.norm(near - want) / np.linalg.norm(want) < 0.05
    assert 1e-6 < abs(rounded[0][0] / whole[0][0] - 1) < 2**-7


class Watched(DraftHead):
    """Keeps the features that it was called with."""

    seen: list = []  # noqa: RUF012

    def __call__(self, embeddings, features, positions, attend, state, **options):
        Watched.seen.append(features)
        return super().__call__(embeddings, features, positions, attend, state, **options)


def test_noise_is_on_what_the_head_reads():
    """Uniform, of either sign, up to the bound; drawn by key; the truth has none."""
    config = tiny.head_config(**HEAD)
    model = Model.from_module(Watched(config, rngs=nnx.Rngs(0)), config)
    rows, output = given()
    keys = jax.random.split(jax.random.key(5), B)
    seen = []
    for noise, these in ((0.0, None), (0.25, keys), (0.25, keys), (0.25, keys[::-1])):
        Watched.seen.clear()
        regression = RegressionConfig(noise=noise)
        module = model.bind(model.params)
        eagle_loss(module, rows, regression, output, keys=these)
        (features,) = Watched.seen
        seen.append(np.asarray(features - rows.aux_hidden_states))
    none, first, again, other = seen
    assert not none.any() and np.array_equal(first, again) and not np.array_equal(first, other)
    np.testing.assert_allclose(first[0], other[1], atol=1e-6)  # a row's noise is its key's
    assert abs(first).max() <= 0.25 + 1e-6 and abs(first).max() > 0.24
    assert abs(first.mean()) < 0.03 and abs(first.std() - 0.25 / 3**0.5) < 0.02
    with pytest.raises(ValueError, match="noise needs PRNG keys"):
        eagle_loss(model.bind(model.params), rows, RegressionConfig(noise=0.1), output)
