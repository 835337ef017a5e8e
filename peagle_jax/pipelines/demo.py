"""The main job end to end, on text that every machine has: train a target and two heads, decode, check, export, report."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from peagle_jax import bench, report, text
from peagle_jax.draft.folders import load_drafter
from peagle_jax.pipelines.convert import convert
from peagle_jax.pipelines.train_head import held_out_prompts, train_head
from peagle_jax.targets import load_target
from peagle_jax.train.cod import Cod
from peagle_jax.train.config import Data, Eagle3Run, HeadShape, LmRun, LmShape, Optimizer, PeagleRun, Ttt
from peagle_jax.train.lm import train_lm


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much of everything a demo does."""

    model: LmShape
    max_chars: int
    length: int
    lm: tuple[int, int]  # steps, rows a step
    peagle: tuple[int, int]
    eagle3: tuple[int, int]
    peagle_layers: int
    depths: int  # K in training
    ks: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int
    repeats: int


BUDGETS = {
    "smoke": Budget(
        LmShape(vocab=1024, layers=4, dim=128, mlp_dim=384, heads=4, kv_heads=2, head_dim=32, rope_theta=1e4, context=2048),
        max_chars=4_000_000, length=128, lm=(900, 4), peagle=(250, 4), eagle3=(150, 4), peagle_layers=2, depths=5, ks=(1, 4),
        batches=(1,), new_tokens=64, repeats=3,
    ),
    "small": Budget(
        LmShape(vocab=2048, layers=6, dim=192, mlp_dim=576, heads=6, kv_heads=2, head_dim=32, rope_theta=1e4, context=4096),
        max_chars=20_000_000, length=256, lm=(1200, 4), peagle=(400, 4), eagle3=(200, 4), peagle_layers=2, depths=8, ks=(1, 3, 5, 7, 11),
        batches=(1, 8), new_tokens=128, repeats=5,
    ),
}  # fmt: skip
HELD_OUT, PROMPTS, PROMPT_TOKENS = 0.05, 8, 48


@dataclasses.dataclass(frozen=True)
class DemoResult:
    report: Path
    lossless: bool
    records: list[dict]


def run_demo(out: Path, budget: str, say: Callable[[str], None] = print) -> DemoResult:
    """Everything under `out`: target/, peagle/, eagle3/, exported folders, results.jsonl, report.html. Resumes."""
    b, seed = BUDGETS[budget], 0
    records = report.Records(out)
    say(f"[bold]1/4 target[/bold]: a Qwen3 of {b.model.layers} layers, width {b.model.dim}, from scratch")
    lm = train_lm(lm_run(b, out, seed), say)
    say(f"held out: {lm.bits_per_byte:.3f} bits per byte")
    say("[bold]2/4 heads[/bold]: P-EAGLE, then EAGLE-3")
    trained = {"peagle": train_head(peagle_run(b, out, seed), say), "eagle3": train_head(eagle3_run(b, out, seed), say)}
    say("[bold]3/4 decoding[/bold] held-out prompts, three ways")
    tokenizer = text.load_tokenizer(lm.folder)
    prompts = standard_prompts(tokenizer)
    heads = {name: load_drafter(result.folder) for name, result in trained.items()}
    target = load_target(lm.folder, taps=heads["peagle"].config.taps)
    suite = bench.run_suite(
        target, heads, prompts, ks=b.ks, batches=b.batches, new_tokens=b.new_tokens, repeats=b.repeats,
        on_record=lambda r: (records.add(r | {"name": f"demo/{budget}"}), say(report.one_line(r))),
    )  # fmt: skip
    say("[bold]4/4 export[/bold] for vLLM and speculators")
    for name, result in trained.items():
        convert(result.folder, out / f"{name}-vllm", to="vllm", target=lm.folder)
        convert(result.folder, out / f"{name}-speculators", to="speculators", target=lm.folder)
    runs = [("Target", vars(lm)), *((report.NAMES[name], vars(result)) for name, result in trained.items())]
    page = report.write_report(
        out, suite.records, sample=_pieces(tokenizer, suite.sample), runs=runs, prompt=_prompt(tokenizer, suite.sample)
    )
    say(report.table(suite.records))
    return DemoResult(page, suite.lossless, suite.records)


def standard_prompts(tokenizer, count: int = PROMPTS) -> list[list[int]]:
    """Prompts from files of the standard library that no demo is trained on."""
    _, held_out = text.split(text.read_corpus(None), HELD_OUT)
    return held_out_prompts(tokenizer, held_out, count, PROMPT_TOKENS)


def _pieces(tokenizer, sample) -> Sequence[tuple[str, bool]] | None:
    """The sample's text in pieces, each accepted draft or not; byte-level tokens that split a character stay whole runs."""
    if sample is None:
        return None
    pieces: list[tuple[str, bool]] = []
    run: list[int] = []
    for i, token in enumerate(sample.output_token_ids):
        run.append(token)
        last = i + 1 == len(sample.output_token_ids)
        if last or sample.drafted[i + 1] != sample.drafted[i]:
            pieces.append((tokenizer.decode(run), sample.drafted[i]))
            run = []
    return pieces


def _prompt(tokenizer, sample) -> str:
    return "" if sample is None else tokenizer.decode(sample.prompt_token_ids)


# ---------------------------------------------------------------- the runs


def _data(b: Budget, rows: int) -> Data:
    return Data(source=None, max_chars=b.max_chars, held_out=HELD_OUT, length=b.length, batch=rows)


def _often(steps: int) -> dict:
    return {"log_every": max(1, steps // 20), "save_every": max(1, steps // 2), "max_seconds": None}


def lm_run(b: Budget, out: Path, seed: int) -> LmRun:
    steps, rows = b.lm
    how = Optimizer(steps=steps, peak_lr=4e-3, warmup=steps // 20, weight_decay=0.1, clip=1.0)
    return LmRun(task="lm", out=str(out / "target"), seed=seed, model=b.model, data=_data(b, rows), optimizer=how, **_often(steps))


def _head(layers: int, before_residual: bool) -> HeadShape:
    return HeadShape(
        layers=layers, dim=None, mlp_dim=None, heads=None, kv_heads=None, head_dim=None, draft_vocab=None, taps=None, qk_norm=False,
        norm_before_residual=before_residual, norm_before_fc=False, fc_norm=False, norm_output=False, mask_token=None,
    )  # fmt: skip


def peagle_run(b: Budget, out: Path, seed: int) -> PeagleRun:
    steps, rows = b.peagle
    how = Optimizer(steps=steps, peak_lr=5e-3, warmup=steps // 20, weight_decay=0.01, clip=1.0)
    return PeagleRun(
        task="peagle", target=str(out / "target" / "model"), out=str(out / "peagle"), seed=seed, head=_head(b.peagle_layers, False),
        cod=Cod(depths=b.depths, ratio=0.8, floor=0.2), train_embedding=True, train_lm_head=True, data=_data(b, rows), optimizer=how,
        **_often(steps),
    )  # fmt: skip


def eagle3_run(b: Budget, out: Path, seed: int) -> Eagle3Run:
    steps, rows = b.eagle3
    how = Optimizer(steps=steps, peak_lr=2e-3, warmup=steps // 20, weight_decay=0.01, clip=1.0)
    return Eagle3Run(
        task="eagle3", target=str(out / "target" / "model"), out=str(out / "eagle3"), seed=seed, head=_head(1, False),
        ttt=Ttt(steps=b.depths, decay=1.0), train_embedding=False, train_lm_head=True, data=_data(b, rows), optimizer=how,
        **_often(steps),
    )  # fmt: skip
