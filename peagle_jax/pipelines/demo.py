"""The demo: models, lossless decoding and its speed, training, export and a report, end to end.

It needs no download: its text is the Python standard library of this machine, and its models come
with the package or are trained.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerBase

from peagle_jax import corpus, json_files, text, weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.bench.suite import Sample, Suite, run_suite
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import SERVED_FORMATS
from peagle_jax.checkpoints.inspect import describe, printable_rows
from peagle_jax.checkpoints.pair import load_drafter_for, load_pair
from peagle_jax.decode.requests import Generation
from peagle_jax.pipelines import budgets
from peagle_jax.pipelines.budgets import HELD_OUT, Budget, TrainingSize, budget_here
from peagle_jax.pipelines.evaluate import PROMPT_TOKENS, held_out_prompts
from peagle_jax.pipelines.train_head import HeadResult, train_head
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import provenance
from peagle_jax.report import peers, plots, records
from peagle_jax.report.method import draw_method
from peagle_jax.report.page import SampleText, write_report
from peagle_jax.report.statements import headline
from peagle_jax.train.pretrain import train_lm
from peagle_jax.types import InputError, Model

PACKAGE = Path(__file__).parent.parent
ASSETS = PACKAGE / "assets"  # target/, peagle/ and eagle3/: ordinary folders with model cards
PEERS = PACKAGE.parent / "results" / "peers.jsonl"  # only in a checkout
DEMO_FILE = "demo.json"  # which demo a folder has
SEED = 0
# New tokens per answer of the float32 check, where the timed decoding has another dtype.
EXACTNESS_TOKENS = 64

Say = Callable[[Any], None]  # prints a line, or a table of rich


@dataclasses.dataclass(frozen=True)
class Models:
    """Folders of the target and of its heads by method, and the metrics of their training."""

    target: Path
    heads: dict[str, Path]
    curves: dict[str, list[dict]]


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """The report, and whether every greedy float32 text was plain decoding's."""

    report: Path
    lossless: bool


def run_demo(out: Path, budget: str, say: Say = print, *, from_scratch: bool = False) -> DemoResult:
    """Runs the demo. Whatever it writes is in `out`; a second call continues where one stopped.

    Args:
      out: is given results.jsonl, report.html with its pictures, a trained head, and every head
        exported for vLLM and speculators.
      budget: "smoke", "small" or "full".
      say: is given lines, and tables of rich.
      from_scratch: train the target and both heads instead of using the packaged ones.

    Raises:
      InputError: `out` has another demo, or cannot be written.
    """
    b = budget_here(budget)
    _check_same_demo(out, budget, from_scratch)
    results = records.Records(out)
    write_atomically(out / DEMO_FILE, json.dumps(_demo_facts(budget, from_scratch)) + "\n")
    scratch = from_scratch or b.needs_scratch

    origin = "trained here, from scratch" if scratch else f"those of the package ({ASSETS})"
    say(f"[bold]1/5 models[/bold]: {origin}")
    models = _models(b, out, scratch, say)

    tokenizer = text.load_tokenizer(models.target)
    prompts = standard_prompts(tokenizer, b.num_prompts)
    what = f"{len(prompts)} excerpts of held-out files with plain decoding, EAGLE-3 and P-EAGLE"
    say(f"[bold]2/5 decoding[/bold] {what}; greedy texts are compared")
    name = f"demo/{budget}{'/from-scratch' if from_scratch else ''}"
    suite = _measure(b, models, prompts, out, name, results, say)

    fresh_head = _train_fresh_head(b, models, out, say)

    say("[bold]4/5 export[/bold] for vLLM and speculators")
    exported = dict(models.heads)
    if fresh_head is not None:
        exported["fresh"] = fresh_head.folder
    _export(exported, models.target, out)

    say("[bold]5/5 report[/bold]")
    page = _write_report(out, suite, models, fresh_head, tokenizer)
    say(records.table(suite.records))
    for line in headline(suite.records):
        say(line)
    return DemoResult(page, suite.lossless)


def _demo_facts(budget: str, from_scratch: bool) -> dict[str, Any]:
    """What all that is in the folder of a demo depends on."""
    return {"budget": budget, "from_scratch": from_scratch or budget_here(budget).needs_scratch}


def _check_same_demo(out: Path, budget: str, from_scratch: bool) -> None:
    """Raises InputError where a folder has a demo of another budget: its parts do not fit."""
    path = out / DEMO_FILE
    if not path.exists():
        return
    former = weights.read_json(path, "delete it, or choose another folder with --out")
    facts = _demo_facts(budget, from_scratch)
    if changed := [key for key in facts if former.get(key) != facts[key]]:
        rule = "a folder has one demo"
        got = ", ".join(f"{key} {facts[key]}, was {former.get(key)}" for key in changed)
        raise InputError(out, rule, got, "choose another folder with --out")


# ---------------------------------------------------------------- what would be done


def plan(budget: str, out: Path, from_scratch: bool) -> list[tuple[str, str, str]]:
    """What `run_demo` would do: (stage, description, whether it is done already).

    Raises:
      InputError: `out` has another demo.
    """
    b = budget_here(budget)
    _check_same_demo(out, budget, from_scratch)
    scratch = from_scratch or b.needs_scratch
    stages = [_planned_model(b, out, scratch, name) for name in ("target", "peagle", "eagle3")]
    decoding = (
        f"{b.num_prompts} prompts x {b.max_new_tokens} tokens, K = {_commas(b.ks)}, "
        f"batch size {_commas(b.batch_sizes)}, {b.repeats} rounds, {b.dtype}"
    )
    stages.append(("decoding", decoding, _state(out / "suite.json")))
    if b.fresh_head is not None and not scratch and _is_packaged("peagle"):
        training = _training_words(b, b.fresh_head)
        stages.append(("a fresh P-EAGLE head", training, _state(out / "fresh" / "head")))
    export = "all heads for vLLM and speculators; report.html"
    return [*stages, ("export and report", export, _state(out / "report.html"))]


def _planned_model(b: Budget, out: Path, scratch: bool, name: str) -> tuple[str, str, str]:
    """The line of the plan for the target or a head."""
    if not scratch and _is_packaged(name):
        return name, "comes with the package", "done"
    shape = b.scratch.target_shape
    words, size, folder = {
        "target": (
            f"{shape.layers} layers, width {shape.dim}, vocabulary {shape.vocab}",
            b.scratch.target,
            "target/model",
        ),
        "peagle": (
            f"{b.scratch.peagle_layers} layers, K = {b.scratch.num_depths}",
            b.scratch.peagle,
            "peagle/head",
        ),
        "eagle3": (
            f"1 layer, {b.scratch.num_depths} unrolled steps",
            b.scratch.eagle3,
            "eagle3/head",
        ),
    }[name]
    return name, f"trained: {words}; {_training_words(b, size)}", _state(out / folder)


def _training_words(b: Budget, size: TrainingSize) -> str:
    return f"{size.steps} steps of {size.batch_size} x {b.scratch.seq_len} tokens"


def _state(path: Path) -> str:
    return "done" if path.exists() else "to do"


def _commas(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


# ---------------------------------------------------------------- 1: models


def _is_packaged(name: str) -> bool:
    return (ASSETS / name / "config.json").exists()


def _models(b: Budget, out: Path, scratch: bool, say: Say) -> Models:
    """The packaged models. All of them from scratch, or a head that is missing, is trained."""
    target = ASSETS / "target"
    if scratch:
        result = train_lm(budgets.lm_run(b.scratch, out, SEED), say)
        say(f"target, held out: {result.bits_per_byte:.3f} bits per byte")
        target = result.folder
    runs = {
        "peagle": (budgets.peagle_run, b.scratch.peagle),
        "eagle3": (budgets.eagle3_run, b.scratch.eagle3),
    }
    heads, curves = {}, {}
    for method, (make_run, size) in runs.items():
        if not scratch and _is_packaged(method):
            heads[method] = ASSETS / method
            curves[method] = read_metrics(ASSETS / method, "training.jsonl")
            continue
        say(f"training the {records.NAMES[method]} head, which does not come with this target")
        run = make_run(b.scratch, target, out / method, SEED, size)
        heads[method] = train_head(run, say).folder
        curves[method] = read_metrics(out / method)
    return Models(target, heads, curves)


def read_metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The rows of a training run's metrics."""
    return [row for _, row in json_files.read_jsonl(folder / name)]


# ---------------------------------------------------------------- 2: decoding


def standard_prompts(tokenizer: PreTrainedTokenizerBase | None, count: int = 8) -> list[list[int]]:
    """Prompts from files of the standard library that no model of the package is trained on."""
    _, held_out = corpus.split(corpus.read_corpus(None), HELD_OUT)
    assert tokenizer is not None, "the prompts are excerpts of text"
    return held_out_prompts(tokenizer, held_out, count, PROMPT_TOKENS)


def _measure(
    b: Budget,
    models: Models,
    prompts: Sequence[Sequence[int]],
    out: Path,
    name: str,
    results: records.Records,
    say: Say,
) -> Suite:
    """The result rows of all decoders, from `out`/suite.json if nothing changed since."""
    saved, key = out / "suite.json", _suite_key(b, models, prompts, name)
    if (suite := _read_suite(saved, key)) is not None:
        say("measured already; delete suite.json to measure again")
        return suite

    def on_record(record: dict) -> None:
        results.add(record)
        say(records.one_line(record))

    label = {"name": name, "dtype": b.dtype, "seed": SEED}
    is_exact = True
    if b.dtype != "float32":
        is_exact = _check_exactness(b, models, prompts, label, on_record)
        result = "every text is plain decoding's" if is_exact else "TEXTS DIFFER"
        say(f"lossless in float32: {result}; rows in {results.path.name}")
    with ProgressReport("decoding", None, unit="activities") as report:
        counter = itertools.count()
        suite = run_suite(
            *_load(models, jnp.dtype(b.dtype)),
            prompts,
            ks=b.ks,
            batch_sizes=b.batch_sizes,
            max_new_tokens=b.max_new_tokens,
            repeats=b.repeats,
            ignore_eos=True,
            sampled_k=b.sampled_k,
            on_record=on_record,
            label=label,
            progress=lambda activity: report.update(next(counter), note=activity),
        )
    # what was measured with is not kept: the next run reads rows
    suite = dataclasses.replace(suite, lossless=is_exact and suite.lossless, decodings=())
    write_atomically(saved, json.dumps({"key": key, "suite": dataclasses.asdict(suite)}))
    return suite


def _check_exactness(
    b: Budget,
    models: Models,
    prompts: Sequence[Sequence[int]],
    label: dict,
    on_record: Callable[[dict], None],
) -> bool:
    """Whether greedy texts are plain decoding's in float32, in which alone that is promised.

    Few tokens at the first batch size are enough; the times of these rows are not used.
    """
    suite = run_suite(
        *_load(models, jnp.float32),
        prompts,
        ks=b.ks,
        batch_sizes=b.batch_sizes[:1],
        max_new_tokens=min(EXACTNESS_TOKENS, b.max_new_tokens),
        repeats=1,
        ignore_eos=True,
        on_record=on_record,
        label=label | {"name": f"{label['name']}/exactness", "dtype": "float32"},
    )
    return suite.lossless


def _load(models: Models, dtype: DTypeLike) -> tuple[Model, dict[str, Model]]:
    """The target and its heads. The heads read the same layers, and may share its embedding."""
    first, *others = models.heads
    target, head = load_pair(models.target, models.heads[first], dtype=dtype)
    heads = {first: head}
    heads |= {method: load_drafter_for(target, models.heads[method]) for method in others}
    return target, heads


def _read_suite(saved: Path, key: dict) -> Suite | None:
    """What an earlier call measured; None if nothing is readable, or something changed since."""
    if not saved.exists():
        return None
    try:
        content = weights.read_json(saved)
        if content["key"] != key:
            return None
        fields = content["suite"]
        if fields["sample"] is not None:
            answer = Generation(**fields["sample"]["answer"])
            fields["sample"] = Sample(**fields["sample"] | {"answer": answer})
        return Suite(**fields)
    except (InputError, KeyError, TypeError):  # damaged, or of another version
        return None


def _suite_key(b: Budget, models: Models, prompts: Sequence[Sequence[int]], name: str) -> dict:
    """Everything that the numbers depend on: budget, code, weights, prompts, machine."""
    digest = hashlib.sha256(json.dumps([list(map(int, prompt)) for prompt in prompts]).encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    for folder in (models.target, *models.heads.values()):
        # the tensors, and not the files, whose headers come in any order
        for _, tensor in sorted(weights.open_folder(folder).items()):
            digest.update(np.asarray(tensor).tobytes())
    origin = provenance()
    return {
        "name": name,
        "budget": repr(b),
        "digest": digest.hexdigest(),
        "device": origin["device"],
        "jax": origin["jax"],
    }


# ---------------------------------------------------------------- 3 to 5: training, export, report


def _train_fresh_head(b: Budget, models: Models, out: Path, say: Say) -> HeadResult | None:
    """A P-EAGLE head for the packaged target, trained for minutes; None where one was trained."""
    if b.fresh_head is None or models.heads["peagle"].is_relative_to(out):
        say("[bold]3/5 training[/bold]: done above")
        return None
    steps = f"{b.fresh_head.steps} steps"
    say(f"[bold]3/5 training[/bold] a fresh P-EAGLE head for {steps}, to show training")
    run = budgets.fresh_head_run(b.scratch, models.target, out / "fresh", SEED, b.fresh_head)
    return train_head(run, say)


def _export(heads: dict[str, Path], target: Path, out: Path) -> None:
    """Every head in every format that is written, as `out`/NAME-FORMAT."""
    for name, folder in heads.items():
        for checkpoint_format in SERVED_FORMATS:
            place = out / f"{name}-{checkpoint_format}"
            convert(folder, place, to=checkpoint_format, target=target)


def _write_report(
    out: Path,
    suite: Suite,
    models: Models,
    fresh_head: HeadResult | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Path:
    """Pictures and report.html."""
    trained_here = "peagle" if fresh_head is None else "fresh"
    metrics = read_metrics(out / trained_here)
    curves = plots.draw(
        out, suite.records, models.curves, metrics, fresh_is_measured=fresh_head is None
    )
    pictures = [draw_method(out), *curves]
    facts: list[tuple[str, dict[str, Any]]] = [("Target", printable_rows(describe(models.target)))]
    for method, folder in models.heads.items():
        facts.append((f"{records.NAMES[method]} head", printable_rows(describe(folder))))
    if fresh_head is not None:
        facts.append(("The head trained in this run", vars(fresh_head)))
    sample = None
    if suite.sample is not None and tokenizer is not None:
        sample = _sample_text(tokenizer, suite.sample)
    return write_report(
        out,
        suite.records,
        pictures=pictures,
        sample=sample,
        runs=facts,
        peer_rows=peers.newest(PEERS),
    )


def _sample_text(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> SampleText:
    """A sample as text."""
    return SampleText(
        prompt=_decode(tokenizer, sample.answer.prompt_token_ids),
        pieces=list(_pieces(tokenizer, sample.answer)),
        k=sample.k,
        temperature=sample.temperature,
        repeated_4grams=sample.repeated_4grams,
        num_candidates=sample.num_candidates,
    )


def _pieces(tokenizer: PreTrainedTokenizerBase, answer: Generation) -> Iterator[tuple[str, bool]]:
    """An answer's text in pieces that were all drafted, or all written by the target itself.

    A token may be a part of a character's bytes. A character whose bytes are of both kinds counts
    as its last byte.
    """
    token_ids, is_draft = answer.output_token_ids, answer.is_draft
    run: list[int] = []
    for i, token in enumerate(token_ids):
        run.append(token)
        piece = _decode(tokenizer, run)
        is_last = i + 1 == len(token_ids)
        is_whole = not piece.endswith("\N{REPLACEMENT CHARACTER}")
        if is_last or (is_draft[i + 1] != is_draft[i] and is_whole):
            yield piece, is_draft[i]
            run = []


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """The text of one sequence of token ids; of several, `decode` would give a list."""
    return cast(str, tokenizer.decode(token_ids))
