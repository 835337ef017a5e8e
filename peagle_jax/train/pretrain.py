"""Trains a small Qwen3 target from scratch on a corpus, and saves an ordinary Hugging Face folder."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax import corpus, text
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.layers import Rope
from peagle_jax.targets import qwen3
from peagle_jax.train.attention import PackedCausal
from peagle_jax.train.config import LmRun
from peagle_jax.train.data import pack
from peagle_jax.train.trainer import fit, has_checkpoints, init_run_dir, write_result
from peagle_jax.types import Batch, Model

ROWS = 2048  # tokens whose logits exist at one time


@dataclasses.dataclass(frozen=True)
class LmResult:
    folder: Path
    parameters: int
    step: int
    bits_per_byte: float | None  # on held-out texts; None where there is none
    tokens_per_second: float | None
    minutes: float  # of training, all sessions together


def train_lm(run: LmRun, say: Callable[[str], None] = print) -> LmResult:
    """Tokenizer, training, held-out bits per byte, export to `run.out`/model."""
    init_run_dir(run)
    documents = corpus.read_corpus(run.data.source)
    train, held_out = corpus.split(documents, run.data.held_out)
    train = corpus.limit(train, run.data.max_chars, run.seed)
    held_out = corpus.limit(held_out, run.data.max_chars and run.data.max_chars // 20, run.seed)
    tokenizer_folder = Path(run.out) / "tokenizer"
    tokenizer = text.load_tokenizer(tokenizer_folder) if has_checkpoints(run) else None
    if (
        tokenizer is None
    ):  # saved before the first step: a resumed run must not get another one, were its corpus to change
        tokenizer = text.train_tokenizer((d.plain for d in train), run.model.vocab)
        tokenizer.save_pretrained(tokenizer_folder)
    rows = pack(text.encode(tokenizer, train), run.data.seq_len, run.data.source)
    say(
        f"corpus: {len(train)} documents, {rows.tokens.size:,} tokens; {len(held_out)} held out; vocabulary {len(tokenizer)}"
    )

    config = _config(run, len(tokenizer), tokenizer.eos_token_id)
    model = Model.of(qwen3.Qwen3(config, rngs=nnx.Rngs(run.seed)), config)
    loss = functools.partial(_loss, model)
    done = fit(
        run, model.params, loss, lambda step: rows.batch(run.data.batch_size, run.seed, step), None
    )
    trained = dataclasses.replace(model, params=done.params)
    bits = held_out_bits(trained, tokenizer, held_out, run.data.seq_len)
    folder = Path(run.out) / "model"
    save_target(
        trained,
        folder,
        tokenizer_from=tokenizer_folder,
        metadata={"source": f"peagle train, step {done.step}"},
    )
    parameters = sum(x.size for x in jax.tree.leaves(done.params))
    result = LmResult(
        folder,
        parameters,
        done.step,
        bits,
        done.tokens / done.seconds if done.tokens else None,
        done.minutes,
    )
    write_result(run, vars(result))
    return result


def _config(run: LmRun, vocab: int, stop: int) -> qwen3.Qwen3Config:
    m = run.model
    return qwen3.Qwen3Config(
        vocab=vocab,
        layers=m.layers,
        dim=m.dim,
        mlp_dim=m.mlp_dim,
        heads=m.heads,
        kv_heads=m.kv_heads,
        head_dim=m.head_dim,
        rope=Rope.from_hf({"rope_theta": m.rope_theta}, m.head_dim, "model"),
        norm_eps=1e-6,
        attention_bias=False,
        tied_embeddings=False,
        windows=(None,) * m.layers,
        context=m.context,
        aux_hidden_state_layers=(),
        dtype=jnp.float32,
        stop_ids=(stop,),
        source=None,
    )


def _loss(model: Model, params, batch: Batch, frozen_params):
    total, count = next_token_loss(model.bind(params), batch)
    return total / jnp.maximum(count, 1), {}


def next_token_loss(target, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Summed cross entropy in nats over supervised tokens that follow one of their own document, and their number."""
    B, T = batch.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    out, _ = target(batch.tokens, positions, PackedCausal(batch.segment_ids), None)
    same = (batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]) & (batch.segment_ids[:, 1:] >= 0)
    weight = jnp.pad((same & batch.loss_mask[:, 1:]).astype(jnp.float32), [(0, 0), (0, 1)]).reshape(
        -1
    )
    wanted = jnp.pad(batch.tokens[:, 1:], [(0, 0), (0, 1)]).reshape(-1)
    hidden = out.hidden.reshape(B * T, -1)
    parts = max(1, -(-B * T // ROWS))

    def split(x):
        return jnp.pad(x, [(0, -len(x) % parts), *[(0, 0)] * (x.ndim - 1)]).reshape(
            parts, -1, *x.shape[1:]
        )

    @jax.checkpoint
    def part(total, xs):
        hidden, wanted, weight = xs
        logits = jax.nn.log_softmax(target.compute_logits(hidden).astype(jnp.float32))
        return total - jnp.sum(
            weight * jnp.take_along_axis(logits, wanted[:, None], axis=1)[:, 0]
        ), None

    total, _ = jax.lax.scan(part, jnp.zeros(()), (split(hidden), split(wanted), split(weight)))
    return total, weight.sum()


def held_out_bits(
    model: Model, tokenizer, documents, length: int, most_rows: int = 64
) -> float | None:
    """Bits per byte of held-out texts (conversations do not count), on at most `most_rows` packed rows."""
    documents = [d for d in documents if d.text is not None]
    if not documents:
        return None
    rows = pack(text.encode(tokenizer, documents), length)
    measure = jax.jit(lambda params, batch: next_token_loss(model.bind(params), batch))
    nats = count = 0.0
    for start in range(0, min(len(rows), most_rows), 8):
        pick = slice(start, start + 8)
        if len(rows.tokens[pick]) < 8 and start:
            break  # one compiled shape is enough
        total, n = measure(
            model.params, Batch(rows.tokens[pick], rows.segment_ids[pick], rows.loss_mask[pick])
        )
        nats, count = nats + float(total), count + float(n)
    size = sum(len(d.text.encode()) for d in documents)
    tokens = int((rows.segment_ids >= 0).sum())
    return nats / np.log(2) / count * tokens / size
