"""Trains a draft head on a target: P-EAGLE with COD sampling, or EAGLE-3 with test-time training."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax import text, weights
from peagle_jax.decode.generate import acceptance_length, generate
from peagle_jax.draft import folders, vocab
from peagle_jax.draft.head import HeadConfig, random_head
from peagle_jax.pipelines.convert import start_run
from peagle_jax.targets import load_target
from peagle_jax.train.cod import cod_sample
from peagle_jax.train.config import HeadRun, PeagleRun
from peagle_jax.train.data import PackedRows, pack
from peagle_jax.train.features import shifted, training_rows
from peagle_jax.train.fit import claim, fit
from peagle_jax.train.step import peagle_loss
from peagle_jax.train.ttt import eagle3_loss
from peagle_jax.types import InputError, Model

HELD_OUT_PROMPTS, PROMPT, ANSWER = 8, 48, 64  # what the closing measurement decodes: prompts, tokens each


@dataclasses.dataclass(frozen=True)
class HeadResult:
    folder: Path  # in vLLM's layout
    parameters: int
    step: int
    acceptance_length: float | None  # greedy, on held-out prompts, at the trained K
    accepted_per_position: list[float]  # share of drafts accepted at each position
    tokens_per_second: float | None  # of training


def train_head(run: HeadRun, say: Callable[[str], None] = print) -> HeadResult:
    """Target features online, training, export to `run.out`/head, and a greedy measurement on held-out documents.

    Raises:
      InputError: the target cannot be read, has no tokenizer, or does not fit the head's configuration.
    """
    claim(run)
    folder = weights.find_folder(run.target)
    tokenizer = text.load_tokenizer(folder)
    if tokenizer is None:
        raise InputError(
            run.target, "training on text needs the target's tokenizer", "no tokenizer.json", "copy it into the target's folder"
        )
    target = load_target(folder, taps=run.head.taps)
    documents = text.read_corpus(run.data.source)
    train, held_out = text.split(documents, run.data.held_out)
    encoded = text.encode(tokenizer, text.limit(train, run.data.max_chars, run.seed))
    rows = pack(encoded, run.data.length, run.data.source)
    say(f"corpus: {len(encoded)} documents, {rows.tokens.size:,} tokens; {len(held_out)} documents held out")
    head, ids = new_head(run, target, rows, tokenizer)
    say(f"head: {sum(x.size for x in jax.tree.leaves(head.params)):,} parameters, taps {list(target.config.taps)}")

    trained, frozen = _split(run, head)
    start_run(head, frozen, Path(run.out))
    loss = functools.partial(_loss, run, target, head)
    done = fit(run, trained, loss, functools.partial(_batch, run, rows), (target.params, frozen))
    head = dataclasses.replace(head, params={**done.params, **frozen})
    folder = Path(run.out) / "head"
    source = f"peagle train, task {run.task}, step {done.step}, seed {run.seed}, target {Path(run.target).name}"
    folders.save_drafter(head, folder, target=str(run.target), metadata={"source": source})
    answers = held_out_answers(target, head, tokenizer, held_out, depths(run))
    accepted = np.sum([a.accepted_per_position for a in answers], axis=0) / max(sum(a.num_drafts for a in answers), 1)
    parameters = sum(x.size for x in jax.tree.leaves(head.params))
    return HeadResult(folder, parameters, done.step, acceptance_length(answers), np.round(accepted, 4).tolist(),
                      done.tokens / done.seconds if done.tokens else None)  # fmt: skip


def depths(run: HeadRun) -> int:
    return run.cod.depths if isinstance(run, PeagleRun) else run.ttt.steps


def new_head(run: HeadRun, target: Model, rows: PackedRows, tokenizer) -> tuple[Model, np.ndarray | None]:
    """The head to train, and the target ids of its draft vocabulary (None: all of them)."""
    config = head_config(run, target, tokenizer.mask_token_id)
    ids = None
    if config.draft_vocab != config.vocab:
        counts = np.bincount(rows.tokens[rows.supervised], minlength=config.vocab)
        ids = vocab.choose(counts, config.draft_vocab)
    module = target.bind(target.params)
    embedding, output = module.embed.table[...], module.output_weight()
    return random_head(config, seed=run.seed, embedding=embedding, output=output, ids=ids), ids


def head_config(run: HeadRun, target: Model, mask_token: int | None) -> HeadConfig:
    """Nulls in the run's head take the target's value."""
    h, t = run.head, target.config
    pick = lambda mine, theirs: theirs if mine is None else mine  # noqa: E731
    parallel = isinstance(run, PeagleRun)
    mask_token = pick(h.mask_token, mask_token)
    if parallel and mask_token is None:
        raise InputError(run.target, "P-EAGLE needs a mask token", "a tokenizer without one", "set head.mask_token to an unused id")
    if parallel and not 0 <= mask_token < t.vocab:
        raise InputError("head.mask_token", f"must lie in 0..{t.vocab - 1}", mask_token, "mend the config")
    if list(t.taps) != sorted(set(t.taps)):
        raise InputError("head.taps", "must ascend, as vLLM collects them", list(t.taps), "mend the config")
    if h.draft_vocab is not None and not 1 <= h.draft_vocab <= t.vocab:
        raise InputError("head.draft_vocab", f"must lie in 1..{t.vocab}", h.draft_vocab, "mend the config")
    return HeadConfig(
        vocab=t.vocab, draft_vocab=pick(h.draft_vocab, t.vocab), dim=pick(h.dim, t.dim), layers=h.layers,
        mlp_dim=pick(h.mlp_dim, t.mlp_dim), heads=pick(h.heads, t.heads), kv_heads=pick(h.kv_heads, t.kv_heads),
        head_dim=pick(h.head_dim, t.head_dim), rope=t.rope, norm_eps=t.norm_eps, context=t.context, target_dim=t.dim,
        taps=t.taps, mask_token=mask_token if parallel else None, depths=depths(run), qk_norm=h.qk_norm,
        attention_bias=False, norm_before_residual=h.norm_before_residual, norm_before_fc=h.norm_before_fc,
        fc_norm=h.fc_norm, norm_output=h.norm_output, windows=(None,) * h.layers, dtype=jnp.float32,
    )  # fmt: skip


def _split(run: HeadRun, head: Model) -> tuple[dict, dict]:
    """(trained, frozen) top-level parts of the head's parameters; `d2t` is an integer table, never trained."""
    still = {"d2t"} | ({"embed"} if not run.train_embedding else set()) | ({"lm_head"} if not run.train_lm_head else set())
    return {k: v for k, v in head.params.items() if k not in still}, {k: v for k, v in head.params.items() if k in still}


def _batch(run: HeadRun, rows: PackedRows, step: int):
    batch = rows.batch(run.data.batch, run.seed, step)
    document, supervised = shifted(batch)
    cod = cod_sample(supervised, document, run.cod, [run.seed, step]) if isinstance(run, PeagleRun) else None
    return batch, document, supervised, cod


def _loss(run: HeadRun, target: Model, head: Model, params, batch, fixed):
    batch, document, supervised, cod = batch
    target_params, frozen = fixed
    module, reader = head.bind({**params, **frozen}), target.bind(target_params)
    rows = training_rows(reader, batch, document, supervised)
    if isinstance(run, PeagleRun):
        loss, by_depth = peagle_loss(module, rows, cod, run.cod.depths, reader.output_weight())
    else:
        loss, by_depth = eagle3_loss(module, rows, run.ttt.steps, run.ttt.decay, reader.output_weight())
    return loss, {"accuracy": by_depth["correct"] / jnp.maximum(by_depth["total"], 1)}


def held_out_prompts(tokenizer, documents, count: int, length: int) -> list[list[int]]:
    """The first tokens after a quarter of each of the first long enough held-out documents, where code is under way."""
    prompts = []
    for document in documents:
        ids = [] if document.text is None else tokenizer(document.text, add_special_tokens=False)["input_ids"]
        if len(ids) >= 4 * length:
            prompts.append(ids[len(ids) // 4 :][:length])
        if len(prompts) == count:
            break
    return prompts


def held_out_answers(target: Model, head: Model, tokenizer, documents, k: int):
    prompts = held_out_prompts(tokenizer, documents, HELD_OUT_PROMPTS, PROMPT)
    return generate(target, head, prompts, k=k, max_new_tokens=ANSWER, stop_ids=()) if prompts else []
