"""Loss and accuracy of a head on documents that are held out, while it trains.

The decoding of prompts measures what users get, of some hundreds of tokens. This reads the target's
own text, so that it needs no decoding, and says at which depth a head begins to learn by heart.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import PreTrainedTokenizerBase

from peagle_jax import text
from peagle_jax.documents import BadRows, Document
from peagle_jax.free_memory import is_out_of_memory
from peagle_jax.train.cod import cod_sample
from peagle_jax.train.config import EagleRun, HeadRun, PeagleRun
from peagle_jax.train.data import EncodedDocument, PackedRows, pack
from peagle_jax.train.head_batches import HeadBatch
from peagle_jax.train.hidden_states import shifted
from peagle_jax.train.loss import DepthCounts
from peagle_jax.train.mesh import put_rows
from peagle_jax.train.peagle_loss import FeatureNoise
from peagle_jax.types import Params

MOST_ROWS = 16  # packed rows that are read at each evaluation

# (parameters, batch, frozen parameters, denominators of all batches) -> its share of the loss, and
# by depth how often the head was right
Loss = Callable[[Params, HeadBatch, Any, Any], tuple[jax.Array, DepthCounts]]
# parameters that are trained -> keys of a row of metrics.jsonl
Measure = Callable[[Params], dict[str, Any]]


def evaluation_run(run: HeadRun) -> HeadRun:
    """The run as its head is used: all depths alike, no noise, and placeholders in every place.

    Each device reads a row at a time, so that it takes no more memory than a step of training.
    """
    data = dataclasses.replace(run.data, batch_size=run.mesh.data * run.mesh.fsdp)
    changes: dict[str, Any] = {
        "data": data,
        "gradient_accumulation": 1,
        "depth_schedule": (),
        "hidden_states_dir": None,  # of other rows
    }
    if isinstance(run, PeagleRun):
        changes["placeholder"] = dataclasses.replace(run.placeholder, true_tokens=0.0)
        changes |= {"feature_noise": FeatureNoise(), "depth_weights": None}
    if isinstance(run, EagleRun):
        changes["regression"] = dataclasses.replace(run.regression, noise=0.0)
    return dataclasses.replace(run, **changes)


def held_out_rows(
    run: HeadRun, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]
) -> PackedRows | None:
    """Packed rows of the first held-out documents; None where nothing of them is to be trained."""
    encoded: list[EncodedDocument] = []
    num_tokens = 0
    for _, one in text.encode_stream(tokenizer, documents, BadRows("skip")):
        encoded.append((one.tokens, one.loss_mask))
        num_tokens += len(one.tokens)
        if num_tokens >= MOST_ROWS * run.data.seq_len:
            break
    return pack(encoded, run.data.seq_len, packing=run.data.packing) if encoded else None


def make_measure(
    run: HeadRun,
    rows: PackedRows,
    loss: Loss,
    denominators: Callable[[HeadBatch], Any],
    frozen_params: Any,
    mesh: Mesh | None,
) -> Measure:
    """Makes the function that measures a head on held-out rows.

    What it measures does not depend on how many devices read rows together.

    Args:
      run: from `evaluation_run`.
      rows: from `held_out_rows`.
      loss: of a batch, of that run.
      denominators: of a batch, what the sums in its loss are divided by.
      frozen_params: of `loss`.
      mesh: as for `trainer.fit`.

    Returns:
      A function to `held_out_loss`, pooled over all rows, `held_out_accuracy` by depth, and
      `expected_acceptance_length`, in tokens: 1 and the chances that the first d drafts are all
      right, if they were right independently. With a reduced draft vocabulary a draft is right if
      it is the likeliest token of those. Nothing, where the memory does not suffice.
    """
    size, num_rows = run.data.batch_size, min(MOST_ROWS, len(rows))
    of_all = np.asarray(denominators(_batch(run, rows, range(num_rows), num_rows)))
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    program = jax.jit(loss, out_shardings=everywhere)

    def measure(params: Params) -> dict[str, Any]:
        try:
            found = []
            for start in range(0, num_rows, size):
                batch = put_rows(_batch(run, rows, range(start, start + size), num_rows), mesh)
                result = program(params, batch, frozen_params, of_all)
                found.append(jax.block_until_ready(result))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return {}
        losses, counts = zip(*jax.device_get(found), strict=True)
        correct, total = (sum(np.asarray(c[key]) for c in counts) for key in ("correct", "total"))
        accuracy = correct / np.maximum(total, 1)
        measured = {
            "held_out_loss": round(float(np.sum(losses)), 6),
            "held_out_accuracy": np.round(accuracy, 6).tolist(),
        }
        if len(accuracy) == run.num_depths:
            expected = 1 + float(np.cumprod(accuracy).sum())
            measured["expected_acceptance_length"] = round(expected, 4)
        return measured

    return measure


def _batch(run: HeadRun, rows: PackedRows, numbers: Sequence[int], num_rows: int) -> HeadBatch:
    """Rows to read together, each as if it were read alone.

    Args:
      numbers: which of the evaluation's rows; those from `num_rows` on fill places, without a loss.
    """
    batch = rows.take([i for n in numbers for i in rows.indices_at(1, run.seed, n % num_rows)])
    segment_ids, loss_mask = shifted(batch)
    loss_mask = loss_mask & (np.asarray(numbers) < num_rows)[:, None]
    cod = None
    if isinstance(run, PeagleRun):
        config = dataclasses.replace(run.cod, num_depths=run.num_depths)
        samples = [
            cod_sample(loss_mask[i : i + 1], segment_ids[i : i + 1], config, [run.seed, n])
            for i, n in enumerate(numbers)
        ]
        cod = jax.tree.map(lambda *parts: np.concatenate(parts), *samples)
    noise_ids = np.array([(n, 0) for n in numbers], np.int32)
    return HeadBatch(batch, None, segment_ids, loss_mask, cod, noise_ids, run.num_depths)
