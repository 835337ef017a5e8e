"""Loss and every gradient against speculators 0.9, in float32.

Weights and (anchor, depth) are the same. Ours are computed at once, with attention in C++ and by
XLA, with layers computed twice, in partitions, in parts of a batch (gradient accumulation), and
with all of these. The golden files
come from scripts/generate/make_golden.py, which runs speculators' own PyTorch trainer.
"""

import dataclasses
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
from peagle_jax.kernels import packed_attention_native
from peagle_jax.train.eagle3_loss import eagle3_loss, positions_in_loss
from peagle_jax.train.hidden_states import TrainingRows
from peagle_jax.train.peagle_loss import element_weights, peagle_loss, sum_of_weights
from peagle_jax.train.recipe_sections import ComputeConfig
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


WAYS = {
    "whole": {},
    "attention by XLA": {"by_xla": True},  # elsewhere in C++, where there is a compiler
    "layers computed twice": {"recompute": "layers"},
    "partitions": {"partitions": 3},
    "parts of a batch": {"documents": (0, 1)},
    "all of it": {"recompute": "layers", "partitions": 3, "documents": (0, 1)},
}


def in_partitions(anchor: np.ndarray, depth: np.ndarray, count: int) -> CodSample:
    """The elements in `count` stretches of the same width, each with whole chains and padding."""
    anchors = np.unique(anchor)
    stretches = [np.isin(anchor, some) for some in np.array_split(anchors, count)]
    width = max(int(stretch.sum()) for stretch in stretches) + 6

    def pad(x):
        rows = [np.pad(x[stretch], (0, width - stretch.sum())) for stretch in stretches]
        return jnp.asarray(np.concatenate(rows)[None], jnp.int32)

    return CodSample(pad(anchor), pad(depth), pad(np.ones_like(anchor)) > 0)


def parts_of(rows: TrainingRows, cod: CodSample | None, documents: tuple[int, ...]) -> list:
    """The rows and elements as if each document were of another part of the batch.

    All parts have all tokens, and the loss of one document.
    """
    parts = []
    for number in documents:
        is_here = rows.segment_ids == number
        part = dataclasses.replace(rows, loss_mask=rows.loss_mask & is_here)
        of_cod = None
        if cod is not None:
            real = cod.real & jnp.take_along_axis(is_here, jnp.asarray(cod.anchor), axis=1)
            of_cod = dataclasses.replace(cod, real=real)
        parts.append((part, of_cod))
    return parts


def sum_of(parts: list):
    """(sum of losses, sum of counts) of the parts of a batch."""
    return jax.tree.map(lambda *xs: sum(xs), *parts)


@pytest.mark.parametrize(
    "name, gradients, way",
    [
        *(("peagle_qwen3", 42, way) for way in WAYS),
        ("peagle_llama", 33, "whole"),
        ("peagle_llama", 33, "all of it"),
    ],
)
def test_peagle(name, gradients, way, tmp_path, monkeypatch):
    if WAYS[way].get("by_xla"):
        monkeypatch.setattr(packed_attention_native, "can_attend", lambda q, k, v: False)
    data, head, rows, output = read(name, tmp_path)
    assert head.config.num_depths == 5 and isinstance(head.bind(head.params), DraftHead)
    anchor, depth = data["anchor"][data["depth"] > 0], data["depth"][data["depth"] > 0]
    order = np.lexsort((depth, anchor))
    options = WAYS[way]
    partitions = options.get("partitions", 1)
    cod = in_partitions(anchor[order], depth[order], partitions)
    compute = ComputeConfig(recompute=options.get("recompute", "none"))
    parts, denominator = [(rows, cod)], None
    if "documents" in options:
        parts = parts_of(rows, cod, options["documents"])
        denominator = sum_of_weights(element_weights(rows.loss_mask, cod, 5))

    def loss_of(module):
        return sum_of(
            [
                peagle_loss(
                    module,
                    *part,
                    5,
                    output,
                    denominator=denominator,
                    compute=compute,
                    partitions=partitions,
                )
                for part in parts
            ]
        )

    (loss, by_depth), grads = split(head, loss_of)
    np.testing.assert_allclose(loss, data["loss"], rtol=RELATIVE)
    np.testing.assert_array_equal(by_depth["correct"], data["correct"])
    check_gradients(data, head, grads, gradients)


@pytest.mark.parametrize(
    "name, gradients, way",
    [
        ("eagle3_llama", 17, "whole"),
        ("eagle3_llama", 17, "attention by XLA"),
        ("eagle3_llama", 17, "parts of a batch"),
        ("eagle3_qwen3", 18, "whole"),
        ("eagle3_qwen3", 18, "layers computed twice"),
    ],
)
def test_eagle3(name, gradients, way, tmp_path, monkeypatch):
    if WAYS[way].get("by_xla"):
        monkeypatch.setattr(packed_attention_native, "can_attend", lambda q, k, v: False)
    data, head, rows, output = read(name, tmp_path)
    options = WAYS[way]
    compute = ComputeConfig(recompute=options.get("recompute", "none"))
    parts, denominators = [rows], None
    if "documents" in options:
        parts = [part for part, _ in parts_of(rows, None, options["documents"])]
        counts = [positions_in_loss(rows.loss_mask, rows.segment_ids, s).sum() for s in range(5)]
        denominators = jnp.stack(counts).astype(jnp.float32)

    def loss_of(module):
        return sum_of(
            [
                eagle3_loss(
                    module, part, 5, 0.9, output, denominators=denominators, compute=compute
                )
                for part in parts
            ]
        )

    (loss, _), grads = split(head, loss_of)
    np.testing.assert_allclose(loss, data["loss"], rtol=RELATIVE)
    check_gradients(data, head, grads, gradients)
