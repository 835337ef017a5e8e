"""Designs of attention in training: the packed loss is that of every chain run alone.

What attends to what comes from tests/block_attention.py, which uses no code of the library.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_designs
import test_partitions
import tiny
from block_attention import MaskedAttention, mask_of
from scipy import special
from test_designs import DOCUMENT, MASK, B, K, N

from peagle_jax.train.peagle_loss import peagle_loss

SHAPE = {"layers": 2, "windows": (None, 3), "num_depths": K}
DESIGNS = {
    "bidirectional": {"placeholder_attention": "bidirectional"},
    "committed": {"placeholder_attention": "committed"},
    "injected": {"placeholder_context": "injected"},
    "both": {"placeholder_attention": "bidirectional", "placeholder_context": "injected"},
}
KEYS = jax.random.split(jax.random.key(3), B)


def losses_of_chains(head, reads_text) -> list[float]:
    """Of every element in the loss, from a run of its document up to the anchor and its chain.

    Args:
      reads_text: anchors [B N] whose placeholders have the text's tokens.
    """
    rows, cod, output = test_designs.case()
    module = head.bind(head.params)
    fused, embeddings = module.fuse(rows.aux_hidden_states), module.embed(rows.tokens)
    mask_hidden = module.fuse(head.params["mask_hidden"][None])
    mask_token = module.embed(jnp.array([MASK]))
    found = []
    for b in range(B):
        depths = {a: [] for a in range(N)}
        for a, d, real in zip(cod.anchor[b], cod.depth[b], cod.real[b], strict=True):
            if real:
                depths[int(a)].append(int(d))
        for a in range(N):
            if DOCUMENT[b, a] < 0:
                continue
            first = np.flatnonzero(DOCUMENT[b] == DOCUMENT[b, a])[0]
            chain = sorted(depths[a])
            assert chain == list(range(1, len(chain) + 1))
            tokens = [mask_token[0]] * len(chain)
            if reads_text[b, a]:
                tokens = [embeddings[b, a + d] for d in chain]
            token_rows = jnp.stack([*embeddings[b, first : a + 1], *tokens])[None]
            hidden_rows = jnp.stack([*fused[b, first : a + 1], *[mask_hidden[0]] * len(chain)])
            num_committed = a + 1 - first
            mask = mask_of(head.config.placeholder_attention, num_committed, len(chain))
            positions = first + jnp.arange(len(mask))[None]
            hidden, _ = module(
                token_rows,
                hidden_rows[None],
                positions,
                MaskedAttention(mask),
                None,
                is_placeholder=jnp.arange(len(mask))[None] >= num_committed,
            )
            logits = np.asarray(module.compute_logits(hidden[0, num_committed - 1 :]), np.float64)
            for d, student in enumerate(logits):
                if not rows.loss_mask[b, a + d]:
                    continue
                teacher = np.asarray(rows.teacher_hidden[b, a + d] @ output, np.float64)
                p, q = special.softmax(teacher), special.softmax(student)
                found.append(special.rel_entr(p, q).sum())
    return found


@functools.cache
def packed_loss(name: str, true_tokens: float = 0.0) -> float:
    rows, cod, output = test_designs.case()
    head = tiny.head(**SHAPE, **DESIGNS.get(name, {}))
    loss, _ = jax.jit(
        lambda params: peagle_loss(
            head.bind(params), rows, cod, K, output, keys=KEYS, true_tokens=true_tokens
        )
    )(head.params)
    return float(loss)


@pytest.mark.parametrize("name", DESIGNS)
def test_packed_loss_is_that_of_every_chain_run_alone(name):
    head = tiny.head(**SHAPE, **DESIGNS[name])
    want = np.mean(losses_of_chains(head, np.zeros((B, N), bool)))
    np.testing.assert_allclose(packed_loss(name), want, rtol=1e-5)
    assert abs(packed_loss(name) - packed_loss("causal")) > 1e-4  # of another loss


def test_placeholders_of_drawn_anchors_read_the_text():
    """The draw is fixed by the keys; all of an anchor's placeholders read the text, or none."""
    share = 0.4
    head = tiny.head(**SHAPE)
    drawn = [jax.random.bernoulli(jax.random.fold_in(key, 2), share, (N,)) for key in KEYS]
    drawn = np.stack([np.asarray(x) for x in drawn])
    assert 0 < drawn.sum() < drawn.size
    want = np.mean(losses_of_chains(head, drawn))
    np.testing.assert_allclose(packed_loss("causal", share), want, rtol=1e-5)
    assert abs(packed_loss("causal", share) - packed_loss("causal")) > 1e-4


@pytest.mark.parametrize(
    "options",
    [{"design": "bidirectional"}, {"design": "committed", "window": 5}, {"context": "injected"}],
    ids=lambda options: next(iter(options.values())),
)
def test_partitions_change_no_gradient(options):
    changes = {}
    if "design" in options:
        changes["placeholder_attention"] = options["design"]
    if "context" in options:
        changes["placeholder_context"] = options["context"]
    given = {"window": options.get("window"), "changes": tuple(changes.items())}
    got, want = (test_partitions.gradients(count, **given) for count in (4, 1))
    test_partitions.check_equal(got, want)
    papers = test_partitions.gradients(1, window=options.get("window"))
    assert abs(want[0] - papers[0]) > 1e-5
