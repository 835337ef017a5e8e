"""Trains a draft head: P-EAGLE with COD sampling, EAGLE-3 with test-time training, or EAGLE-1."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from peagle_jax import text, weights
from peagle_jax.chat.apply_template import check_template_kwargs
from peagle_jax.checkpoints import head_writing
from peagle_jax.checkpoints.runs import write_run_header
from peagle_jax.checkpoints.target_io import load_target, target_hash
from peagle_jax.documents import Document
from peagle_jax.draft.head import DraftHead
from peagle_jax.layers import Decoder
from peagle_jax.train.config import Eagle3Run, EagleRun, HeadRun, PeagleRun
from peagle_jax.train.corpus_store import CorpusChoice, make_store, read_store
from peagle_jax.train.data import PackedRows
from peagle_jax.train.eagle3_loss import eagle3_loss, positions_in_loss
from peagle_jax.train.eagle_loss import eagle_loss
from peagle_jax.train.frozen_params import in_place_of, kept_frozen
from peagle_jax.train.head_batches import HeadBatch, HeadBatches
from peagle_jax.train.held_out import Measure, evaluation_run, held_out_rows, make_measure
from peagle_jax.train.loss import DepthCounts
from peagle_jax.train.mesh import (
    from_first_process,
    is_first_process,
    make_training_mesh,
    on_mesh,
    to_host,
    unused_devices,
    wait_for_all,
)
from peagle_jax.train.new_head import new_head
from peagle_jax.train.peagle_loss import element_weights, peagle_loss, sum_of_weights
from peagle_jax.train.run_folder import (
    check_same_data,
    has_checkpoints,
    locked_run_folder,
    read_result,
    write_result,
)
from peagle_jax.train.trackers import import_libraries
from peagle_jax.train.trainer import Evaluation, fit
from peagle_jax.train.update import Objective
from peagle_jax.types import InputError, Model, Params

Evaluate = Callable[[Model], dict]  # a head -> the acceptance fields of HeadResult


# (run, target, tokenizer, held-out documents) -> the evaluation; None if there are no prompts
MakeEvaluator = Callable[
    [HeadRun, Model, PreTrainedTokenizerBase, Sequence[Document]], Evaluate | None
]
# The others wait at most so long for the first process. A million conversations take it half an
# hour on two cores (results/corpus_memory.jsonl).
ENCODING_SECONDS = 6 * 3600.0
NOT_EVALUATED = {"acceptance_length": None, "accepted_per_position": [], "repeated_4grams": 0.0}


@dataclasses.dataclass(frozen=True)
class HeadResult:
    """What a training run of a head came to.

    Attributes:
      folder: the head in vLLM's format; if vLLM does not know its placeholder design, the run's
        folder.
      parameters: of the head.
      step: steps trained, over all sessions.
      kept_step: after which the head was such: `step`, or that of the best evaluation.
      stopped_early: whether evaluations no longer became better.
      acceptance_length: greedy, on held-out prompts, at the trained K; None without prompts.
      accepted_per_position: share of the drafts that were accepted at each position.
      repeated_4grams: share of the decoded text's 4-grams that it had already written before. A
        text that repeats itself is easy to draft.
      tokens_per_second: of training, in the last session that trained; None if there was none.
      minutes: of training, over all sessions.
    """

    folder: Path
    parameters: int
    step: int
    kept_step: int
    stopped_early: bool
    acceptance_length: float | None
    accepted_per_position: list[float]
    repeated_4grams: float
    tokens_per_second: float | None
    minutes: float


def train_head(
    run: HeadRun, say: Callable[[str], None] = print, make_evaluator: MakeEvaluator | None = None
) -> HeadResult:
    """Trains a head, exports it to `run.out`/head, and measures its acceptance length.

    Args:
      run: the training run.
      say: is told in a line each what is read and made.
      make_evaluator: makes the evaluation; None: acceptance is not measured.

    Raises:
      InputError: the target cannot be read, has no tokenizer, or does not fit the run's head; or
        `run.out` cannot be used.
    """
    import_libraries(run.trackers)
    with locked_run_folder(run):
        finished = read_result(run, HeadResult, say)
        if finished is not None:
            return finished
        mesh = make_training_mesh(run.mesh)
        if unused := unused_devices(mesh):
            say(unused)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            return _train(run, mesh, say, make_evaluator)


def _train(
    run: HeadRun,
    mesh: Mesh | None,
    say: Callable[[str], None],
    make_evaluator: MakeEvaluator | None,
) -> HeadResult:
    """What is left of `train_head` for a run that has not finished."""
    target, tokenizer = _load_target(run, mesh)
    rows, held_out = _read_rows(run, tokenizer, say)
    check_same_data(run, rows, target_hash(weights.find_folder(run.target)))
    batches = HeadBatches(run, rows, target, mesh)
    kept = kept_frozen(run)
    head = new_head(run, target, rows, tokenizer, resumes=kept is not None)
    layers = list(target.config.aux_hidden_state_layers)
    say(f"head: {_count(head):,} parameters, aux hidden states of layers {layers}")

    trained, frozen = split_params(run, on_mesh(head, mesh))
    evaluate = make_evaluator(run, target, tokenizer, held_out) if make_evaluator else None
    if evaluate is None:
        _say_not_measured(run, len(held_out), say)
    if kept is not None:
        frozen = in_place_of(run, frozen, kept)
    write_run_header(head, {} if kept is not None else to_host(frozen), Path(run.out))

    def with_params(params: Params) -> Model:
        """The whole head, of its trained and its frozen parameters."""
        return dataclasses.replace(head, params={**params, **frozen})

    frozen_params = target.params, frozen
    measure = _measure_of_held_out(run, target, head, tokenizer, held_out, frozen_params, mesh)

    def is_due(step: int) -> bool:
        # the best can only be known if the last was measured as well
        is_last = run.eval.keep == "best" and step == run.optimizer.steps
        return run.eval.every is not None and (step % run.eval.every == 0 or is_last)

    def evaluate_at(step: int, params: Params) -> dict | None:
        measured = {} if evaluate is None else evaluate(with_params(params))
        return measured | ({} if measure is None else measure(params)) or None

    objective = head_objective(run, target, head)
    rows_at = functools.partial(rows.indices_at, run.data.batch_size, run.seed)
    last_stage = max((stage.until for stage in run.depth_schedule), default=0)
    evaluation = Evaluation(
        evaluate_at, run.eval.keep == "best", run.eval.patience, last_stage, is_due
    )
    fitted = fit(run, trained, objective, batches, frozen_params, evaluation, say, rows_at, mesh)
    head = with_params(fitted.params)
    on_host = dataclasses.replace(head, params=to_host(head.params)) if mesh else head
    folder = _export(run, on_host, fitted.kept_step, say)
    wait_for_all("the head was exported")
    acceptance = NOT_EVALUATED if evaluate is None else evaluate(head)
    speed = fitted.tokens / fitted.seconds if fitted.tokens else None
    result = HeadResult(
        folder,
        _count(head),
        fitted.step,
        fitted.kept_step,
        fitted.stopped_early,
        **acceptance,
        tokens_per_second=speed,
        minutes=fitted.minutes,
    )
    if is_first_process():
        write_result(run, vars(result))
    wait_for_all("the run is finished")
    return result


def _say_not_measured(run: HeadRun, num_held_out: int, say: Callable[[str], None]) -> None:
    """Tells that there are no prompts to measure acceptance with.

    Raises:
      InputError: the run is to keep the best head, or to stop early, which needs measurements.
    """
    got = f"{num_held_out} documents held out at data.held_out {run.data.held_out}, no prompt"
    next_step = "set eval.prompts to a file of prompts, or data.held_out higher"
    needs = "keep: best" if run.eval.keep == "best" else "patience"
    if (run.eval.keep == "best" or run.eval.patience is not None) and not has_checkpoints(run):
        raise InputError("eval", f"{needs} needs prompts to measure with", got, next_step)
    say(f"acceptance is not measured: {got}; {next_step}")


def _measure_of_held_out(
    run: HeadRun,
    target: Model,
    head: Model,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    frozen_params: tuple[Params, Params],
    mesh: Mesh | None,
) -> Measure | None:
    """What measures loss and accuracy on held-out documents; None where there are none of use."""
    if run.eval.every is None:
        return None
    rows = held_out_rows(run, tokenizer, documents)
    if rows is None:
        return None
    as_used = evaluation_run(run)
    loss = functools.partial(head_loss, as_used, target, head)
    denominators = functools.partial(head_denominators, as_used)
    return make_measure(as_used, rows, loss, denominators, frozen_params, mesh)


def _load_target(run: HeadRun, mesh: Mesh | None) -> tuple[Model, PreTrainedTokenizerBase]:
    """The run's target with its tokenizer."""
    folder = weights.find_folder(run.target)
    tokenizer = text.load_tokenizer(folder)
    if tokenizer is None:
        rule = "training on text needs the target's tokenizer"
        next_step = "copy tokenizer.json into the target's folder"
        raise InputError(run.target, rule, "no tokenizer.json", next_step)
    target = load_target(
        folder,
        aux_hidden_state_layers=run.aux_hidden_state_layers,
        dtype=jnp.dtype(run.target_dtype),
        mesh=mesh,
    )
    text.check_vocabulary(tokenizer, target.config.vocab, run.target)
    if options := run.data.chat_template_kwargs:
        check_template_kwargs(tokenizer, options, "data.chat_template_kwargs")
    check_row_length(run, target)
    return target, tokenizer


def check_row_length(run: HeadRun, target: Model) -> None:
    """Raises InputError where rows are longer than the target's context."""
    context = target.config.context
    if run.data.seq_len > context:
        rule = f"must be at most the target's context of {context:,} tokens"
        raise InputError("data.seq_len", rule, run.data.seq_len, f"set data.seq_len: {context}")


def choice_of(run: HeadRun) -> CorpusChoice:
    """The documents that a run trains on."""
    data = run.data
    return CorpusChoice(
        data.source,
        data.held_out,
        data.max_chars,
        run.seed,
        data.bad_rows,
        data.chat_template_kwargs,
        data.special_tokens,
        data.split_turns,
    )


def _read_rows(
    run: HeadRun, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]
) -> tuple[PackedRows, Sequence[Document]]:
    """The packed rows to train on, and the documents that are held out.

    They are in a folder of the run, which a run that goes on finds there. Of several processes the
    first encodes the corpus.
    """
    data = run.data
    choice = choice_of(run)
    folder = Path(run.out) / "corpus"
    key = from_first_process(
        functools.partial(make_store, folder, choice, tokenizer, say),
        "encode the corpus",
        ENCODING_SECONDS,
    )
    store = read_store(folder, key)
    rows = store.pack(data.seq_len, data.packing)
    say(
        f"corpus: {len(store.order)} documents, {rows.num_tokens:,} tokens in {len(rows):,} rows, "
        f"{rows.padding:.2%} of them padding; {len(store.held_out)} documents held out"
    )
    return rows, store.held_out


def _count(head: Model) -> int:
    """Parameters of a head."""
    return sum(x.size for x in jax.tree.leaves(head.params))


def _export(run: HeadRun, head: Model, step: int, say: Callable[[str], None]) -> Path:
    """Writes `run.out`/head in vLLM's format, if that has a place for all that the head has.

    A head with a Markov head or a confidence head is written in this package's own format.

    Returns:
      That folder; otherwise the run's own, which `peagle generate` and `peagle convert` read.
    """
    folder = Path(run.out) / "head"
    checkpoint_format = "peagle_jax" if head_writing.needs_own_format(head.config) else "vllm"
    try:
        head_writing.check_expressible(head_writing.from_model(head), folder, checkpoint_format)
    except InputError as error:
        say(f"no folder for vLLM is written: {error}")
        return Path(run.out)
    if not is_first_process():
        return folder
    source = (
        f"peagle train, task {run.task}, step {step}, seed {run.seed}, "
        f"target {Path(run.target).name}"
    )
    head_writing.save_drafter(
        head, folder, checkpoint_format, target=str(run.target), metadata={"source": source}
    )
    return folder


def split_params(run: HeadRun, head: Model) -> tuple[Params, Params]:
    """(trained, frozen) parts of the head's parameters; `d2t`, a table of ids, is frozen."""
    if isinstance(run, PeagleRun) and run.trained_alone:
        names = {*run.trained_alone, *(("confidence",) if run.confidence else ())}
        others = {name: part for name, part in head.params.items() if name not in names}
        return {name: head.params[name] for name in sorted(names)}, others
    frozen_names = {"d2t"}
    if not run.train_embedding:
        frozen_names.add("embed")
    if not run.train_lm_head:
        frozen_names.add("lm_head")
    trained = {name: part for name, part in head.params.items() if name not in frozen_names}
    frozen = {name: part for name, part in head.params.items() if name in frozen_names}
    return trained, frozen


def head_objective(run: HeadRun, target: Model, head: Model) -> Objective:
    """What the training of a head minimizes."""
    loss = functools.partial(head_loss, run, target, head)
    denominators = functools.partial(head_denominators, run)
    return Objective(loss, denominators, head_metrics)


def head_loss(
    run: HeadRun,
    target: Model,
    head: Model,
    params: Params,
    batch: HeadBatch,
    frozen_params: tuple[Params, Params],
    denominators: jax.Array | None = None,
) -> tuple[jax.Array, DepthCounts]:
    """The loss of a batch, or the share of a part of it; and by depth how often the head was right.

    Args:
      run: the training run.
      target: its target.
      head: the head, for its configuration and graph.
      params: the head's trained parameters.
      batch: the step's input.
      frozen_params: the target's parameters, and the head's frozen ones.
      denominators: of the whole batch, from `head_denominators`; None: `batch` is all of it.
    """
    target_params, frozen = frozen_params
    draft_head = cast(DraftHead, head.bind({**params, **frozen}))
    decoder = cast(Decoder, target.bind(target_params))
    rows, output = batch.rows(decoder, target.config.dtype), decoder.lm_head_weight()

    def key_of(step_and_row: jax.Array) -> jax.Array:
        return functools.reduce(jax.random.fold_in, step_and_row, jax.random.key(run.seed))

    if isinstance(run, PeagleRun):
        return peagle_loss(
            draft_head,
            rows,
            batch.cod,
            batch.num_depths,
            output,
            decoder.logit_cap,
            run.loss,
            run.feature_noise,
            jax.vmap(key_of)(jnp.asarray(batch.noise_ids)),
            denominators,
            run.compute,
            run.cod.partitions,
            run.depth_weights,
            run.placeholder.true_tokens,
        )
    if isinstance(run, EagleRun):
        return eagle_loss(
            draft_head,
            rows,
            run.regression,
            output,
            decoder.logit_cap,
            run.loss,
            jax.vmap(key_of)(jnp.asarray(batch.noise_ids)),
            denominators,
            run.compute,
        )
    return eagle3_loss(
        draft_head,
        rows,
        batch.num_depths,
        cast(Eagle3Run, run).ttt.decay,
        output,
        decoder.logit_cap,
        run.loss,
        denominators,
        run.compute,
    )


def head_denominators(run: HeadRun, batch: HeadBatch) -> jax.Array:
    """What sums are divided by: weights of a batch's elements (P-EAGLE), or positions by step."""
    loss_mask, segment_ids = jnp.asarray(batch.loss_mask), jnp.asarray(batch.segment_ids)
    if isinstance(run, PeagleRun):
        weights = run.depth_weights
        return sum_of_weights(element_weights(loss_mask, batch.cod, batch.num_depths, weights))
    steps = range(batch.num_depths)
    count = jnp.stack([positions_in_loss(loss_mask, segment_ids, s).sum() for s in steps])
    return jnp.maximum(count.astype(jnp.float32), 1)


def head_metrics(counts: DepthCounts) -> dict[str, jax.Array]:
    """Of a step: by depth, how often the head's likeliest token is the target's.

    And the mean loss of a confidence head, which the step's loss includes.
    """
    total = jnp.maximum(counts["total"], 1)
    metrics = {"accuracy": counts["correct"] / total}
    if "confidence_loss" in counts:
        metrics["confidence_loss"] = counts["confidence_loss"] / total
    return metrics
