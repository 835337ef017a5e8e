"""The main job end to end, on text that every machine has: models, exactness, speed, training, export, report."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.status import Status

from peagle_jax import corpus, text, weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.bench.suite import Suite, run_suite
from peagle_jax.checkpoints.convert import convert, read_serving
from peagle_jax.checkpoints.head_io import CHECKPOINT_FORMATS, load_drafter
from peagle_jax.checkpoints.inspect import describe, printable
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.decode.generate import Generation
from peagle_jax.pipelines import budgets
from peagle_jax.pipelines.budgets import BUDGETS, HELD_OUT, Budget
from peagle_jax.pipelines.evaluate import PROMPT_TOKENS, held_out_prompts
from peagle_jax.pipelines.train_head import HeadResult, train_head
from peagle_jax.provenance import provenance
from peagle_jax.report import plots, records
from peagle_jax.report.method import draw_method
from peagle_jax.report.page import write_report
from peagle_jax.train.pretrain import train_lm

PACKAGE = Path(__file__).parent.parent
ASSETS = PACKAGE / "assets"  # target/, peagle/, eagle3/: ordinary folders, with their cards
SEED = 0


@dataclasses.dataclass(frozen=True)
class Models:
    """Folders of a target and its heads, and the metrics their training wrote."""

    target: Path
    heads: dict[str, Path]
    curves: dict[str, list[dict]]


@dataclasses.dataclass(frozen=True)
class DemoResult:
    report: Path
    lossless: bool


def run_demo(
    out: Path, budget: str, say: Callable[[str], None] = print, *, from_scratch: bool = False
) -> DemoResult:
    """Everything under `out`: results.jsonl, report.html and its pictures, a trained head, exported folders. Resumes stage by stage."""
    b = BUDGETS[budget]
    results = records.Records(out)
    scratch = from_scratch or b.needs_scratch
    say(
        f"[bold]1/5 models[/bold]: {'trained here, from scratch' if scratch else f'those that come with the package ({ASSETS})'}"
    )
    models = _models(b, out, scratch, say)
    tokenizer = text.load_tokenizer(models.target)
    prompts = standard_prompts(tokenizer, b.prompts)
    say(
        f"[bold]2/5 decoding[/bold] {len(prompts)} excerpts of held-out files: plain, EAGLE-3, P-EAGLE; greedy texts are compared"
    )
    name = f"demo/{budget}{'/from-scratch' if from_scratch else ''}"
    suite = _decode(b, models, prompts, out, name, results, say)
    fresh = _fresh(b, models, out, say)
    say("[bold]4/5 export[/bold] for vLLM and speculators")
    for kind, folder in {**models.heads, **({"fresh": fresh.folder} if fresh else {})}.items():
        for checkpoint_format in CHECKPOINT_FORMATS:
            convert(
                folder,
                out / f"{kind}-{checkpoint_format}",
                to=checkpoint_format,
                target=models.target,
            )
    say("[bold]5/5 report[/bold]")
    pictures = [
        draw_method(out),
        *plots.draw(
            out, suite.records, models.curves, read_metrics(out / ("fresh" if fresh else "peagle"))
        ),
    ]
    facts = [
        (title, {key: printable(value) for key, value in describe(folder).items()})
        for title, folder in _named(models)
    ]
    facts += (
        [
            (
                "The head trained in this run",
                {key: _rounded(value) for key, value in vars(fresh).items()},
            )
        ]
        if fresh
        else []
    )
    sample = suite.sample
    page = write_report(
        out,
        suite.records,
        pictures=pictures,
        sample=sample and _pieces(tokenizer, sample),
        sample_k=suite.sample_k,
        runs=facts,
        prompt=tokenizer.decode(sample.prompt_token_ids) if sample else "",
    )
    say(records.table(suite.records))
    for line in records.headline(suite.records):
        say(line)
    return DemoResult(page, suite.lossless)


def plan(budget: str, out: Path, from_scratch: bool) -> list[tuple[str, str, str]]:
    """What `run_demo` would do: (stage, what, whether it is there already)."""
    b, s = BUDGETS[budget], BUDGETS[budget].scratch

    def done(path):
        return "done" if (out / path).exists() else "to do"

    stages = []
    scratch = from_scratch or b.needs_scratch

    def tokens(how):
        return f"{how[0]} steps of {how[1]} x {s.length} tokens"

    models = (
        (
            "target",
            f"{s.model.layers} layers, width {s.model.dim}, vocabulary {s.model.vocab}; {tokens(s.lm)}",
            "target/model",
        ),
        (
            "peagle",
            f"{s.peagle_layers} layers, K = {s.num_depths}; {tokens(s.peagle)}",
            "peagle/head",
        ),
        ("eagle3", f"1 layer, {s.num_depths} unrolled steps; {tokens(s.eagle3)}", "eagle3/head"),
    )
    for name, what, place in models:
        packaged = not scratch and _is_packaged(name)
        stages.append(
            (name, "comes with the package", "done")
            if packaged
            else (name, f"trained: {what}", done(place))
        )
    ks = ", ".join(map(str, b.ks))
    what = f"{b.prompts} prompts x {b.new_tokens} tokens, K = {ks}, batch {', '.join(map(str, b.batches))}, {b.repeats} rounds, {b.dtype}"
    stages.append(("decoding", what, done("suite.json")))
    if b.fresh and not scratch and _is_packaged("peagle"):
        stages.append(
            (
                "a fresh P-EAGLE head",
                f"{b.fresh[0]} steps of {b.fresh[1]} x {s.length} tokens",
                done("fresh/head"),
            )
        )
    return [
        *stages,
        (
            "export and report",
            "all heads to vLLM and speculators; report.html",
            done("report.html"),
        ),
    ]


# ---------------------------------------------------------------- stages


def _is_packaged(name: str) -> bool:
    return (ASSETS / name / "config.json").exists()


def _models(b: Budget, out: Path, scratch: bool, say) -> Models:
    """The package's target and heads; what does not come with it, or all of them from scratch, is trained here."""
    s, target = b.scratch, ASSETS / "target"
    if scratch:
        lm = train_lm(budgets.lm_run(s, out, SEED), say)
        say(f"target, held out: {lm.bits_per_byte:.3f} bits per byte")
        target = lm.folder
    heads, curves = {}, {}
    for method, make, how in (
        ("peagle", budgets.peagle_run, s.peagle),
        ("eagle3", budgets.eagle3_run, s.eagle3),
    ):
        if not scratch and _is_packaged(method):
            heads[method], curves[method] = (
                ASSETS / method,
                read_metrics(ASSETS / method, "training.jsonl"),
            )
        else:
            say(f"training the {records.NAMES[method]} head, which does not come with this target")
            heads[method] = train_head(make(s, target, out / method, SEED, *how), say).folder
            curves[method] = read_metrics(out / method)
    return Models(target, heads, curves)


def _decode(
    b: Budget, models: Models, prompts, out: Path, name: str, results: records.Records, say
) -> Suite:
    """The table of decoders. What an earlier call with the same code and options measured is kept."""
    kept, key = out / "suite.json", _suite_key(b, models, name)
    if kept.exists() and (saved := json.loads(kept.read_text(encoding="utf-8")))["key"] == key:
        say("measured already; delete suite.json to measure again")
        del saved["key"]
        return Suite(**{**saved, "sample": saved["sample"] and Generation(**saved["sample"])})

    def load(dtype):
        target = load_target(
            models.target,
            aux_hidden_state_layers=read_serving(
                models.heads["peagle"]
            ).config.aux_hidden_state_layers,
            dtype=dtype,
        )
        embedding = target.params["embed"]["table"]  # for a head that shares it
        return target, {
            m: load_drafter(folder, dtype=dtype, embedding=embedding)
            for m, folder in models.heads.items()
        }

    def on_record(record: dict) -> None:
        results.add(record)
        say(records.one_line(record))

    options = {
        "ks": b.ks,
        "batches": b.batches,
        "new_tokens": b.new_tokens,
        "repeats": b.repeats,
        "sampled_k": b.sampled_k,
    }
    label = {"name": name, "dtype": b.dtype, "seed": SEED}
    exact = True
    if b.dtype != "float32":  # exactness is a float32 rule: few tokens, no timing worth keeping
        say("exactness, in float32")
        less = options | {
            "batches": b.batches[:1],
            "new_tokens": min(64, b.new_tokens),
            "repeats": 1,
            "sampled_k": None,
        }
        exact = run_suite(
            *load(jnp.float32),
            prompts,
            **less,
            on_record=on_record,
            label=label | {"name": f"{name}/exactness", "dtype": "float32"},
        ).lossless
        say(
            f"{'every text is as plain decoding writes it' if exact else 'TEXTS DIFFER'}; rows in {results.path.name}"
        )
    with Status("decoding") as status:  # compiling takes most of it: some 20 programs
        suite = run_suite(
            *load(jnp.dtype(b.dtype)),
            prompts,
            **options,
            on_record=on_record,
            label=label,
            progress=status.update,
        )
    suite = dataclasses.replace(suite, lossless=exact and suite.lossless)
    body = {"key": key, **vars(suite), "sample": suite.sample and vars(suite.sample)}
    write_atomically(kept, json.dumps(body))
    return suite


def _suite_key(b: Budget, models: Models, name: str) -> dict:
    """What the numbers depend on: budget, code, weights, machine."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    for folder in (models.target, *models.heads.values()):
        for _, tensor in sorted(
            weights.open_folder(folder).items()
        ):  # not the files: their headers come in any order
            digest.update(np.asarray(tensor).tobytes())
    origin = provenance()
    return {
        "name": name,
        "budget": repr(b),
        "digest": digest.hexdigest(),
        "device": origin["device"],
        "jax": origin["jax"],
    }


def _fresh(b: Budget, models: Models, out: Path, say) -> HeadResult | None:
    if b.fresh is None or models.heads["peagle"].is_relative_to(out):
        say("[bold]3/5 training[/bold]: done above")
        return None
    say(f"[bold]3/5 training[/bold] a fresh P-EAGLE head for {b.fresh[0]} steps, to show training")
    return train_head(budgets.fresh_run(b, models.target, out / "fresh", SEED), say)


def read_metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [row for _, row in corpus.read_jsonl(folder / name)]


def standard_prompts(tokenizer, count: int = 8) -> list[list[int]]:
    """Prompts from files of the standard library that no demo is trained on."""
    _, held_out = corpus.split(corpus.read_corpus(None), HELD_OUT)
    return held_out_prompts(tokenizer, held_out, count, PROMPT_TOKENS)


def _rounded(value):
    return (
        [_rounded(v) for v in value]
        if isinstance(value, list)
        else round(value, 3)
        if isinstance(value, float)
        else value
    )


def _named(models: Models) -> list[tuple[str, Path]]:
    return [
        ("Target", models.target),
        *((f"{records.NAMES[method]} head", folder) for method, folder in models.heads.items()),
    ]


def _pieces(tokenizer, sample: Generation) -> Sequence[tuple[str, bool]]:
    """The sample's text in pieces, each accepted draft or not; a character in bytes of both kinds counts as its last byte."""
    pieces: list[tuple[str, bool]] = []
    run: list[int] = []
    for i, token in enumerate(sample.output_token_ids):
        run.append(token)
        last = i + 1 == len(sample.output_token_ids)
        piece = tokenizer.decode(run)
        if (
            last
            or sample.is_draft[i + 1] != sample.is_draft[i]
            and not piece.endswith("\N{REPLACEMENT CHARACTER}")
        ):
            pieces.append((piece, sample.is_draft[i]))
            run = []
    return pieces
