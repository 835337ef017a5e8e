"""Loss and every gradient against speculators 0.9, in float32.

Weights and (anchor, depth) are the same. The golden files come from
scripts/generate/make_golden.py, which runs speculators' own PyTorch trainer.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import weights
from peagle_jax.checkpoints import param_mapping
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.draft.head import DraftHead
from peagle_jax.train.eagle3_loss import eagle3_loss
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.types import CodSample

GOLDEN = Path(__file__).parent.parent / "golden"
RELATIVE = 1e-5  # max |ours - theirs| / max |theirs| of each tensor


def read(name, tmp_path):
    data = dict(np.load(GOLDEN / f"{name}.npz"))
    tensors = {k[2:]: v for k, v in data.items() if k.startswith("w/")}
    weights.write_folder(tmp_path, json.loads(str(data["config"])), tensors, {})
    head = load_drafter(tmp_path)
    teacher = jnp.asarray(data["teacher"])
    normed = teacher * jax.lax.rsqrt((teacher**2).mean(-1, keepdims=True) + head.config.norm_eps)
    normed *= tensors["verifier_norm.weight"][None, None]
    rows = TrainingRows(
        jnp.asarray(data["tokens"]),
        jnp.asarray(data["aux_hidden_states"]),
        normed,
        jnp.asarray(data["segment_ids"]),
        jnp.asarray(data["loss_mask"]),
    )
    # our losses take the target's whole output matrix, and read only the draft vocabulary's columns
    output = np.full((head.config.dim, head.config.vocab), np.nan, np.float32)
    ids = np.asarray(head.bind(head.params).target_ids())
    output[:, ids] = tensors["verifier_lm_head.weight"].T
    return data, head, rows, jnp.asarray(output)


def check_gradients(data, head, grads, count):
    """Our gradients, under speculators' tensor names, beside theirs."""
    ours = weights.export_params(
        grads, {n: t for n, t in param_mapping.table(head.config).items() if n != "d2t"}
    )
    theirs = {k[2:]: v for k, v in data.items() if k.startswith("g/")}
    assert len(theirs) == count and theirs.keys() <= ours.keys()
    for name, want in theirs.items():
        error = np.abs(ours[name] - want).max() / np.abs(want).max()
        assert error < RELATIVE, f"{name}: relative error {error:.2e}"


def split(head, loss):
    """value_and_grad over the trained arrays only: d2t is an integer table."""
    fixed = {k: v for k, v in head.params.items() if k == "d2t"}
    trained = {k: v for k, v in head.params.items() if k != "d2t"}
    return jax.jit(jax.value_and_grad(lambda p: loss(head.bind({**p, **fixed})), has_aux=True))(
        trained
    )


@pytest.mark.parametrize("name, gradients", [("peagle_qwen3", 42), ("peagle_llama", 33)])
def test_peagle(name, gradients, tmp_path):
    data, head, rows, output = read(name, tmp_path)
    assert head.config.num_depths == 5 and isinstance(head.bind(head.params), DraftHead)
    anchor, depth = data["anchor"][data["depth"] > 0], data["depth"][data["depth"] > 0]
    order = np.lexsort((depth, anchor))

    def pad(x):
        return jnp.asarray(np.pad(x[order], (0, 6))[None], jnp.int32)

    cod = CodSample(pad(anchor), pad(depth), jnp.arange(len(anchor) + 6)[None] < len(anchor))
    (loss, by_depth), grads = split(head, lambda h: peagle_loss(h, rows, cod, 5, output))
    np.testing.assert_allclose(loss, data["loss"], rtol=RELATIVE)
    np.testing.assert_array_equal(by_depth["correct"], data["correct"])
    check_gradients(data, head, grads, gradients)


@pytest.mark.parametrize("name, gradients", [("eagle3_llama", 17), ("eagle3_qwen3", 18)])
def test_eagle3(name, gradients, tmp_path):
    data, head, rows, output = read(name, tmp_path)
    (loss, _), grads = split(head, lambda h: eagle3_loss(h, rows, 5, 0.9, output))
    np.testing.assert_allclose(loss, data["loss"], rtol=RELATIVE)
    check_gradients(data, head, grads, gradients)
