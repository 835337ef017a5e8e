"""Trains a draft head on a target: P-EAGLE with COD sampling, or EAGLE-3 with test-time training."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from peagle_jax import corpus, text, weights
from peagle_jax.checkpoints import export_placeholders, head_io
from peagle_jax.checkpoints.runs import write_run_header
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.train.config import HeadRun, PeagleRun
from peagle_jax.train.data import pack
from peagle_jax.train.eagle3_loss import eagle3_loss
from peagle_jax.train.head_batches import HeadBatch, HeadBatches
from peagle_jax.train.new_head import new_head
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.train.trainer import fit, init_run_dir, write_result
from peagle_jax.types import InputError, Model

# (run, target, tokenizer, held-out documents) -> what measures a head, or None where there is nothing to measure it on
MakeEvaluator = Callable[..., Callable[[Model], dict] | None]
NOT_EVALUATED = {"acceptance_length": None, "accepted_per_position": [], "repeated_4grams": 0.0}


@dataclasses.dataclass(frozen=True)
class HeadResult:
    folder: Path  # in vLLM's layout; of placeholders that vLLM does not know, the run's own
    parameters: int
    step: int
    acceptance_length: float | None  # greedy, on held-out prompts, at the trained K
    accepted_per_position: list[float]  # share of drafts accepted at each position
    repeated_4grams: float  # share of the decoded text's 4-grams that it had written before
    tokens_per_second: float | None  # of training
    minutes: float  # of training, all sessions together


def train_head(
    run: HeadRun, say: Callable[[str], None] = print, make_evaluator: MakeEvaluator | None = None
) -> HeadResult:
    """Target features online, training, export to `run.out`/head, and a greedy measurement on held-out documents.

    Raises:
      InputError: the target cannot be read, has no tokenizer, or does not fit the head's configuration.
    """
    init_run_dir(run)
    folder = weights.find_folder(run.target)
    tokenizer = text.load_tokenizer(folder)
    if tokenizer is None:
        raise InputError(
            run.target,
            "training on text needs the target's tokenizer",
            "no tokenizer.json",
            "copy it into the target's folder",
        )
    target = load_target(
        folder,
        aux_hidden_state_layers=run.head.aux_hidden_state_layers,
        dtype=jnp.dtype(run.target_dtype),
    )
    text.check_vocabulary(tokenizer, target.config.vocab, run.target)
    documents = corpus.read_corpus(run.data.source)
    train, held_out = corpus.split(documents, run.data.held_out)
    encoded = text.encode(tokenizer, corpus.limit(train, run.data.max_chars, run.seed))
    rows = pack(encoded, run.data.seq_len, run.data.source)
    say(
        f"corpus: {len(encoded)} documents, {rows.tokens.size:,} tokens; {len(held_out)} documents held out"
    )
    batches = HeadBatches(run, rows, target)
    head = new_head(run, target, rows, tokenizer)
    say(
        f"head: {sum(x.size for x in jax.tree.leaves(head.params)):,} parameters, taps {list(target.config.aux_hidden_state_layers)}"
    )

    trained, frozen = _split(run, head)
    loss = functools.partial(head_loss, run, target, head)
    evaluate = make_evaluator(run, target, tokenizer, held_out) if make_evaluator else None
    if evaluate is None:
        say(
            "nothing is held out that could be a prompt: acceptance is not measured (data.held_out, or measure.prompts)"
        )
    write_run_header(head, frozen, Path(run.out))

    def whole(params):
        return dataclasses.replace(head, params={**params, **frozen})

    def eval_fn(step: int, params) -> dict | None:
        if run.eval.every is None or evaluate is None or step % run.eval.every:
            return None
        return evaluate(whole(params))

    done = fit(run, trained, loss, batches, (target.params, frozen), eval_fn)
    head = whole(done.params)
    folder = _export(run, head, done.step, say)
    found = NOT_EVALUATED if evaluate is None else evaluate(head)
    parameters = sum(x.size for x in jax.tree.leaves(head.params))
    speed = done.tokens / done.seconds if done.tokens else None
    result = HeadResult(
        folder, parameters, done.step, **found, tokens_per_second=speed, minutes=done.minutes
    )
    write_result(run, vars(result))
    return result


def _export(run: HeadRun, head: Model, step: int, say) -> Path:
    """`run.out`/head in vLLM's layout; or, for placeholders that vLLM does not know, the run itself, which decodes here."""
    try:
        export_placeholders.to_vllm_placeholders(head_io.of_model(head))
    except InputError as error:
        say(f"no folder for vLLM is written: {error}")
        return Path(run.out)
    folder = Path(run.out) / "head"
    source = f"peagle train, task {run.task}, step {step}, seed {run.seed}, target {Path(run.target).name}"
    head_io.save_drafter(head, folder, target=str(run.target), metadata={"source": source})
    return folder


def _split(run: HeadRun, head: Model) -> tuple[dict, dict]:
    """(trained, frozen) top-level parts of the head's parameters; `d2t` is an integer table, never trained."""
    still = (
        {"d2t"}
        | ({"embed"} if not run.train_embedding else set())
        | ({"lm_head"} if not run.train_lm_head else set())
    )
    return {k: v for k, v in head.params.items() if k not in still}, {
        k: v for k, v in head.params.items() if k in still
    }


def head_loss(run: HeadRun, target: Model, head: Model, params, batch: HeadBatch, frozen_params):
    """(loss, metrics) of one step; `params` are the trained parts, `fixed` the target's parameters and the head's other parts."""
    target_params, frozen = frozen_params
    module, reader = head.bind({**params, **frozen}), target.bind(target_params)
    rows, output = batch.rows(reader, target.config.dtype), reader.lm_head_weight()
    if isinstance(run, PeagleRun):
        key = jax.random.fold_in(jax.random.key(run.seed), batch.step)
        loss, by_depth = peagle_loss(
            module,
            rows,
            batch.cod,
            batch.num_depths,
            output,
            reader.logit_cap,
            run.loss,
            run.feature_noise,
            key,
        )
    else:
        loss, by_depth = eagle3_loss(
            module, rows, batch.num_depths, run.ttt.decay, output, reader.logit_cap, run.loss
        )
    return loss, {"accuracy": by_depth["correct"] / jnp.maximum(by_depth["total"], 1)}
