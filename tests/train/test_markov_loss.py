"""The loss of a head with a Markov head, and all its gradients, against torch.

The hidden state of every element comes from a run of its own, without packing. From there on torch
computes logits, biases and loss from their definitions, states chain by chain. The token before an
element is the true one, whatever the head would have drafted.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.draft.markov import KINDS
from peagle_jax.train.attention import PackedCausal
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.types import CodSample
from peagle_jax.weights import flatten_params

torch = pytest.importorskip("torch")
F = torch.nn.functional

N, K, E, W = 8, 3, 7, 17
# (anchor, depth) of every element; two are not in the loss
DEPTH0 = [(a, 0) for a in range(N)]
DEEPER = [(1, 1), (1, 2), (2, 1), (4, 1), (4, 2), (5, 1)]  # in two partitions of three
LOSS_MASK = np.array([True, True, False, True, True, True, True, True])


@functools.cache
def given(kind: str):
    head = tiny.head(draft_vocab=W, markov_rank=5, markov_kind=kind, num_depths=K)
    rng = np.random.default_rng(3)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    rows = TrainingRows(
        jnp.asarray(rng.permutation(41)[:N][None], jnp.int32),
        draw(1, N, head.config.sizes.aux_dim),
        draw(1, N, E),
        jnp.zeros((1, N), jnp.int32),
        jnp.asarray(LOSS_MASK[None]),
    )
    anchor, depth = (jnp.asarray([x], jnp.int32) for x in zip(*DEEPER, strict=True))
    return head, rows, CodSample(anchor, depth, jnp.ones_like(anchor, bool)), draw(E, 41)


def normed_of_elements(head, rows, elements=None):
    """params -> the normed hidden state of every element, each from a run of its own [M D]."""
    elements = elements or [(a, d) for a, d in [*DEPTH0, *DEEPER] if LOSS_MASK[a + d]]
    anchor, depth = (jnp.asarray(x) for x in zip(*elements, strict=True))
    place = jnp.arange(N)

    def of_element(module, anchor, depth):
        is_mask = (place > anchor)[:, None]
        masks = module.embed(jnp.full(N, head.config.mask_token))
        embeddings = jnp.where(is_mask, masks, module.embed(rows.tokens[0]))
        mask_fused = jnp.broadcast_to(
            module.fuse(module.mask_hidden[...][None]), (N, masks.shape[1])
        )
        fused = jnp.where(is_mask, mask_fused, module.fuse(rows.aux_hidden_states[0]))
        attend = PackedCausal(jnp.where(place <= anchor + depth, 0, -1)[None])
        hidden, _ = module(embeddings[None], fused[None], place[None], attend, None)
        return module.final_norm(hidden[0, anchor + depth][None])[0]

    def run(params):
        return jax.vmap(functools.partial(of_element, head.bind(params)))(anchor, depth)

    return elements, run


def trained_part(params):
    return {k: v for k, v in params.items() if k != "d2t"}


def codes_by_torch(kind, elements, embedded, normed, named):
    """What the bias is made of, of every element [M r]."""
    if kind == "vanilla":
        return embedded
    if kind == "gated":
        joint = torch.cat([normed, embedded], -1)
        gate = joint @ named["markov.gate.kernel"] + named["markov.gate.bias"]
        return embedded * torch.sigmoid(gate)
    codes, after = [], {}
    for i, (anchor, depth) in enumerate(elements):
        zeros = torch.zeros(5, dtype=torch.float64)
        state = after[anchor, depth - 1] if depth else zeros
        joint = torch.cat([state, embedded[i], normed[i]])
        joint = joint @ named["markov.joint.kernel"] + named["markov.joint.bias"]
        gate, candidate, code = joint.chunk(3)
        gate = torch.sigmoid(gate)
        after[anchor, depth] = gate * state + (1 - gate) * torch.tanh(candidate)
        codes.append(torch.tanh(code))
    return torch.stack(codes)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(kind):
    head, rows, cod, output = given(kind)
    d2t = {"d2t": head.params["d2t"]}

    @jax.jit
    def ours(params):
        return jax.value_and_grad(
            lambda p: peagle_loss(head.bind({**p, **d2t}), rows, cod, K, output), has_aux=True
        )(params)

    (loss, by_depth), grads = ours(trained_part(head.params))
    # those outside of the loss have a state, too
    elements, run = normed_of_elements(head, rows, [*DEPTH0, *DEEPER])
    normed, pull = jax.vjp(jax.jit(lambda p: run({**p, **d2t})), trained_part(head.params))

    named = {
        name: torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=True)
        for name, x in [*flatten_params(head.params), ("normed", normed)]
        if name.startswith("markov.") or name in ("normed", "lm_head.kernel")
    }
    positions = [a + d for a, d in elements]
    embedded = F.embedding(
        torch.tensor(np.asarray(rows.tokens)[0, positions]), named["markov.w1.table"]
    )
    code = codes_by_torch(kind, elements, embedded, named["normed"], named)
    logits = named["normed"] @ named["lm_head.kernel"] + code @ named["markov.w2.kernel"]
    columns = np.asarray(output, np.float64)[:, np.arange(W) + np.asarray(head.params["d2t"])]
    teacher = torch.tensor(np.asarray(rows.teacher_hidden, np.float64)[0, positions] @ columns)
    in_loss = LOSS_MASK[positions]
    want = F.kl_div(
        F.log_softmax(logits[in_loss], -1),
        F.log_softmax(teacher[in_loss], -1),
        log_target=True,
        reduction="sum",
    ) / int(in_loss.sum())
    want.backward()

    np.testing.assert_allclose(loss, want.item(), rtol=1e-5)
    is_right = (logits.argmax(-1) == teacher.argmax(-1)).numpy() & in_loss
    hits = [
        sum(hit for (_, d), hit in zip(elements, is_right, strict=True) if d == k) for k in range(K)
    ]
    np.testing.assert_array_equal(by_depth["correct"], hits)
    (through_layers,) = pull(jnp.asarray(named["normed"].grad.numpy(), jnp.float32))
    theirs = dict(flatten_params(through_layers))
    for name, got in flatten_params(grads):
        wanted = named[name].grad.numpy() if name in named else np.asarray(theirs[name])
        assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max(), name
        assert np.abs(wanted).max() > 0 or name == "embed.table", name


@pytest.mark.parametrize("partitions", [1, 2])
def test_rows_with_other_chains(partitions):
    """Padding behind the chains of a row, in each partition, and a row without any."""
    head, rows, _, output = given("rnn")
    elements = np.zeros((3, 8, 3), np.int32)  # anchor, depth, whether it is one
    elements[0, :3] = [(1, 1, 1), (1, 2, 1), (4, 1, 1)]
    elements[1, :2] = [(0, 1, 1), (3, 1, 1)]
    begin = {1: 2, 2: 4}[partitions]  # of the second partition
    elements[1, begin : begin + 2] = [(5, 1, 1), (5, 2, 1)]
    three = jax.tree.map(lambda x: jnp.concatenate([x, x[:, ::-1], x]), rows)
    total = np.zeros(K)

    def loss_of(some, chosen, parts):
        anchor, depth, real = (jnp.asarray(chosen[..., i]) for i in range(3))
        cod = CodSample(anchor, depth, real.astype(bool))
        one = jnp.float32(1)
        return peagle_loss(
            head.bind(head.params), some, cod, K, output, denominator=one, partitions=parts
        )

    loss, counts = jax.jit(functools.partial(loss_of, parts=partitions))(three, elements)
    alone = 0.0
    for i in range(3):
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], three)
        chosen = elements[i : i + 1][:, elements[i, :, 2] > 0]
        if not chosen.size:
            chosen = elements[i : i + 1, :1]
        part, by_depth = loss_of(row, chosen, 1)
        alone, total = alone + part, total + by_depth["total"]
    np.testing.assert_allclose(loss, alone, rtol=1e-6)
    np.testing.assert_array_equal(counts["total"], total)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_partitions_change_nothing(kind):
    """Two stretches of as many elements, and no chain in both."""
    head, rows, cod, output = given(kind)
    params = trained_part(head.params)

    def loss(params, partitions):
        bound = head.bind({**params, "d2t": head.params["d2t"]})
        return peagle_loss(bound, rows, cod, K, output, partitions=partitions)[0]

    whole, parts = (
        jax.jit(jax.value_and_grad(functools.partial(loss, partitions=n)))(params) for n in (1, 2)
    )
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
    for x, y in zip(jax.tree.leaves(parts[1]), jax.tree.leaves(whole[1]), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * float(np.abs(y).max()) + 1e-9)
