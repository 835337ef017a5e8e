"""Trains a small Qwen3 target from scratch on a corpus, and saves a Hugging Face folder."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from transformers import PreTrainedTokenizerBase

from peagle_jax import corpus, text
from peagle_jax.assembler import check_assembler
from peagle_jax.chat.apply_template import check_template_kwargs
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.documents import BadRows
from peagle_jax.layers import Decoder, Rope
from peagle_jax.targets import qwen3
from peagle_jax.train.attention import PackedCausal
from peagle_jax.train.config import LmRun
from peagle_jax.train.data import pack
from peagle_jax.train.mesh import (
    from_first_process,
    is_first_process,
    make_training_mesh,
    on_mesh,
    to_host,
    wait_for_all,
)
from peagle_jax.train.run_folder import (
    check_same_data,
    has_checkpoints,
    locked_run_folder,
    read_result,
    write_result,
)
from peagle_jax.train.trackers import import_libraries
from peagle_jax.train.trainer import fit
from peagle_jax.train.update import Objective
from peagle_jax.types import Batch, Model, Params

CHUNK = 2048  # tokens whose logits exist at one time
TOKENIZER_SECONDS = 3600.0  # that other processes wait for the first one's tokenizer
EVAL_ROWS, EVAL_BATCH = 64, 8  # packed rows of the held-out evaluation, and rows of a forward


@dataclasses.dataclass(frozen=True)
class LmResult:
    """What a training run of a target came to.

    Attributes:
      folder: the target, in Hugging Face's format.
      parameters: of the target.
      step: steps trained, over all sessions.
      bits_per_byte: of held-out texts; None if there are none.
      tokens_per_second: of training, in this session; None if nothing was left to train.
      minutes: of training, over all sessions.
    """

    folder: Path
    parameters: int
    step: int
    bits_per_byte: float | None
    tokens_per_second: float | None
    minutes: float


def train_lm(run: LmRun, say: Callable[[str], None] = print) -> LmResult:
    """Trains a tokenizer and a target, exports them to `run.out`/model, and evaluates the target.

    Args:
      run: a recipe with `task: lm`, from `load_run` or made in Python.
      say: is told in a line what is read.

    Returns:
      The target's folder, its bits per byte on held-out texts, and the speed of its training.

    Raises:
      InputError: the corpus cannot be read, `run.out` cannot be used, or nothing can be compiled
        for the device.
    """
    import_libraries(run.trackers)
    check_assembler()
    with locked_run_folder(run):
        finished = read_result(run, LmResult, say)
        return _train(run, say) if finished is None else finished


def _train(run: LmRun, say: Callable[[str], None]) -> LmResult:
    """What is left of `train_lm` for a run that has not finished."""
    max_chars, bad_rows = run.data.max_chars, BadRows(run.data.bad_rows)
    data = run.data
    how = data.chat_template_kwargs, data.special_tokens, data.split_turns
    documents = corpus.read_corpus(data.source, bad_rows, *how)
    train, held_out = corpus.split(documents, data.held_out)
    train = corpus.subsample(train, max_chars, run.seed)
    held_out = corpus.subsample(held_out, max_chars and max_chars // 20, run.seed)
    tokenizer_folder = Path(run.out) / "tokenizer"
    make = functools.partial(_make_tokenizer, run, tokenizer_folder, train)
    from_first_process(make, "train the tokenizer", TOKENIZER_SECONDS)
    tokenizer = text.load_tokenizer(tokenizer_folder)
    assert tokenizer is not None
    if data.chat_template_kwargs:
        check_template_kwargs(tokenizer, data.chat_template_kwargs, "data.chat_template_kwargs")
    encoded = text.encode(tokenizer, train, bad_rows)
    bad_rows.report(say)
    rows = pack(encoded, run.data.seq_len, run.data.source, run.data.packing)
    check_same_data(run, rows)
    say(
        f"corpus: {len(train)} documents, {rows.num_tokens:,} tokens in {len(rows):,} rows, "
        f"{rows.padding:.2%} of them padding; "
        f"{len(held_out)} held out; vocabulary {len(tokenizer)}"
    )

    config = _target_config(run, len(tokenizer), cast(int, tokenizer.eos_token_id))
    model = Model.from_module(qwen3.Qwen3(config, rngs=nnx.Rngs(run.seed)), config)

    def batch_at(step: int) -> Batch:
        return rows.batch(run.data.batch_size, run.seed, step)

    rows_at = functools.partial(rows.indices_at, run.data.batch_size, run.seed)
    objective = Objective(functools.partial(_loss, model), _num_in_loss, _metrics)
    mesh = make_training_mesh(run.mesh)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        params = on_mesh(model, mesh).params
        fitted = fit(run, params, objective, batch_at, None, None, say, rows_at, mesh)
    on_host = jax.tree.map(jnp.asarray, to_host(fitted.params)) if mesh else fitted.params
    trained = dataclasses.replace(model, params=on_host)
    bits_per_byte = held_out_bits(trained, tokenizer, held_out, run.data.seq_len)
    folder = Path(run.out) / "model"
    metadata = {"source": f"peagle train, step {fitted.step}"}
    if is_first_process():
        save_target(trained, folder, tokenizer_from=tokenizer_folder, metadata=metadata)
    result = LmResult(
        folder,
        parameters=sum(x.size for x in jax.tree.leaves(fitted.params)),
        step=fitted.step,
        bits_per_byte=bits_per_byte,
        tokens_per_second=fitted.tokens / fitted.seconds if fitted.tokens else None,
        minutes=fitted.minutes,
    )
    if is_first_process():
        write_result(run, vars(result))
    wait_for_all("the run is finished")
    return result


def _make_tokenizer(run: LmRun, folder: Path, documents: Sequence[corpus.Document]) -> str:
    """Makes the run's tokenizer, and returns its folder.

    It is saved before the first step, so that a resumed run keeps it even if the corpus has
    changed.
    """
    tokenizer = text.load_tokenizer(folder) if has_checkpoints(run) else None
    if tokenizer is None:
        tokenizer = text.train_tokenizer((d.plain for d in documents), run.model.vocab)
        tokenizer.save_pretrained(folder)
    return str(folder)


def _target_config(run: LmRun, vocab: int, stop_id: int) -> qwen3.Qwen3Config:
    shape = run.model
    return qwen3.Qwen3Config(
        vocab=vocab,
        layers=shape.layers,
        dim=shape.dim,
        mlp_dim=shape.mlp_dim,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope=Rope.from_hf({"rope_theta": shape.rope_theta}, shape.head_dim, "model"),
        norm_eps=1e-6,
        attention_bias=False,
        tied_embeddings=False,
        windows=(None,) * shape.layers,
        context=shape.context,
        aux_hidden_state_layers=(),
        dtype=jnp.float32,
        stop_ids=(stop_id,),
        source=None,
    )


def _loss(
    model: Model, params: Params, batch: Batch, frozen_params: None, count: Float[Array, ""]
) -> tuple[Float[Array, ""], dict]:
    total, _ = next_token_loss(cast(Decoder, model.bind(params)), batch)
    return total / count, {}


def _num_in_loss(batch: Batch) -> Float[Array, ""]:
    return jnp.maximum(_tokens_in_loss(batch).sum(), 1)


def _metrics(sums: dict) -> dict:
    return sums


def _tokens_in_loss(batch: Batch) -> Float[Array, "B T"]:
    """1 for each token whose successor counts, which is in the loss mask and the same document."""
    segment_ids, loss_mask = jnp.asarray(batch.segment_ids), jnp.asarray(batch.loss_mask)
    follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    in_loss = (follows & loss_mask[:, 1:]).astype(jnp.float32)
    return jnp.pad(in_loss, [(0, 0), (0, 1)])


def next_token_loss(target: Decoder, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Summed cross entropy of next tokens, in nats, and their number.

    A token counts if it is in the loss mask and follows a token of its own document.
    """
    B, T = batch.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    out, _ = target(tokens, positions, PackedCausal(segment_ids), None)
    weight = _tokens_in_loss(batch)
    labels = jnp.pad(tokens[:, 1:], [(0, 0), (0, 1)])
    chunks = max(1, -(-B * T // CHUNK))

    def split(x: Array) -> Array:
        """[B T ..] -> [chunks B n ..], padded with zeros: each device keeps its sequences."""
        padding = [(0, 0), (0, -T % chunks), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, padding).reshape(B, chunks, -1, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def chunk_loss(total, chunk):
        hidden, labels, weight = chunk
        log_probs = jax.nn.log_softmax(target.compute_logits(hidden).astype(jnp.float32))
        of_labels = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
        return total - jnp.sum(weight * of_labels), None

    total, _ = jax.lax.scan(
        chunk_loss, jnp.zeros(()), (split(out.hidden), split(labels), split(weight))
    )
    return total, weight.sum()


def held_out_bits(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[corpus.Document],
    seq_len: int,
) -> float | None:
    """Bits per byte of held-out texts, on at most EVAL_ROWS packed rows.

    Bits per token are measured on these rows, and converted by the bytes and tokens of all texts.
    Conversations are left out.

    Args:
      model: a target.
      tokenizer: the target's.
      documents: held-out documents.
      seq_len: tokens of a packed row.

    Returns:
      None if there are no texts.
    """
    texts = [d for d in documents if d.text is not None]
    if not texts:
        return None
    rows = pack(text.encode(tokenizer, texts), seq_len)

    @jax.jit
    def summed_loss(params: Params, batch: Batch):
        return next_token_loss(cast(Decoder, model.bind(params)), batch)

    nats = count = 0.0
    for begin in range(0, min(len(rows), EVAL_ROWS), EVAL_BATCH):
        batch = rows.take(slice(begin, begin + EVAL_BATCH))
        if len(batch.tokens) < EVAL_BATCH and begin:
            break  # a last, smaller batch is not worth another compilation
        batch_nats, batch_count = summed_loss(model.params, batch)
        nats, count = nats + float(batch_nats), count + float(batch_count)
    num_bytes = sum(len((d.text or "").encode()) for d in texts)
    tokens = rows.num_tokens
    return nats / np.log(2) / count * tokens / num_bytes
