"""One run: a head is trained, or found trained, and measured; a row comes out. `python -m experiments.work JOB.json` does it alone."""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from experiments.base import Experiment, Measured, Variant
from experiments.budgets import BUDGETS, Answers, Budget
from experiments.stages import (
    DECODING,
    Stage,
    answers_stage,
    code_hash,
    features_stage,
    prompts_stage,
    target_stage,
)
from peagle_jax import corpus
from peagle_jax.atomic_write import write_atomically
from peagle_jax.train.cod import CodConfig
from peagle_jax.train.config import (
    DataConfig,
    DepthStage,
    Eagle3Run,
    EvalConfig,
    HeadRun,
    HeadShape,
    OptimizerConfig,
    PeagleRun,
    PlaceholderConfig,
    TttConfig,
)
from peagle_jax.train.peagle_loss import FeatureNoise

TRAINING = (
    "peagle_jax/train/cod.py",
    "peagle_jax/train/peagle_loss.py",
    "peagle_jax/train/eagle3_loss.py",
    "peagle_jax/train/loss.py",
    "peagle_jax/train/trainer.py",
    "peagle_jax/train/attention.py",
    "peagle_jax/train/hidden_states.py",
    "peagle_jax/train/data.py",
    "peagle_jax/draft/head.py",
    "peagle_jax/draft/placeholders.py",
    "peagle_jax/draft/fusion.py",
    "peagle_jax/draft/init.py",
    "peagle_jax/draft/draft_vocab.py",
    "peagle_jax/layers",
    "peagle_jax/kernels/packed_attention.py",
    "peagle_jax/train/head_batches.py",
    "peagle_jax/train/new_head.py:new_head",
    "peagle_jax/train/new_head.py:head_config",
    "peagle_jax/train/train_head.py:head_loss",
    "peagle_jax/train/train_head.py:_split",
    "peagle_jax/train/config.py:HeadRun",
)
MEASURING = (*DECODING, "experiments/work.py:measure", "experiments/work.py:speed")
CURVE = 24  # points of a training curve kept in a row


def base(budget: Budget, seed: int) -> PeagleRun:
    """What every variant changes a little. Folders are filled in by `Job`."""
    m = budget.model
    head = HeadShape(
        layers=budget.layers,
        dim=m.dim,
        mlp_dim=m.mlp_dim,
        heads=m.heads,
        kv_heads=m.kv_heads,
        head_dim=m.head_dim,
        draft_vocab=m.vocab,
        aux_hidden_state_layers=budget.aux_hidden_state_layers,
        qk_norm=True,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        mask_token=None,
        rope=None,
    )
    return PeagleRun(
        task="peagle",
        target="",
        target_dtype="float32",
        out="",
        seed=seed,
        hidden_states_dir="",
        head=head,
        loss="forward_kl",
        init="target",
        init_from=None,
        depth_schedule=growth(budget.steps, budget.k),
        train_embedding=True,
        train_lm_head=False,
        cod=CodConfig(
            num_depths=budget.k, down_sample_ratio=0.8, down_sample_ratio_min=0.1, max_anchors=None
        ),
        placeholder=PlaceholderConfig(hidden="shared", token="mask"),
        feature_noise=FeatureNoise(noise=0.0, dropout=0.0),
        data=DataConfig(
            source="", max_chars=None, held_out=0.0, seq_len=budget.length, batch_size=budget.rows
        ),
        optimizer=OptimizerConfig(
            steps=budget.steps,
            peak_lr=budget.rate,
            warmup=max(1, budget.steps // 24),
            weight_decay=0.01,
            max_grad_norm=1.0,
        ),
        eval=EvalConfig(every=None, prompts=None, num_prompts=1, max_new_tokens=8),
        log_every=max(1, budget.steps // 48),
        save_every=max(1, budget.steps // 8),
        max_seconds=None,
    )


def growth(steps: int, num_depths: int) -> tuple[DepthStage, ...]:
    """A fifth of the steps each for one depth, two, and three: placeholders learn little before depth 0 has."""
    return tuple(
        DepthStage(until=steps * (i + 1) // 5, num_depths=i + 1)
        for i in range(min(3, num_depths - 1))
    )


def with_depths(run: PeagleRun, num_depths: int) -> PeagleRun:
    cod = dataclasses.replace(run.cod, num_depths=num_depths)
    return dataclasses.replace(run, cod=cod, depth_schedule=growth(run.optimizer.steps, num_depths))


def as_eagle3(run: PeagleRun, *, layers: int = 1) -> Eagle3Run:
    """The same data and steps for an autoregressive head; its embedding is trained too, so that the two learn with equal means."""
    shared = {f.name: getattr(run, f.name) for f in dataclasses.fields(HeadRun)}
    head = dataclasses.replace(run.head, layers=layers)
    return Eagle3Run(
        **shared
        | {"task": "eagle3", "head": head, "ttt": TttConfig(steps=run.cod.num_depths, decay=1.0)}
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """A variant, a seed, a budget: everything else follows."""

    experiment: Experiment
    name: str  # of the variant
    seed: int
    budget_name: str

    @property
    def variant(self) -> Variant:
        return self.experiment.variants[self.name]

    @property
    def budget(self) -> Budget:
        return BUDGETS[self.budget_name]

    @property
    def answers(self) -> Answers:
        return (
            self.variant.answers(self.budget.answers)
            if self.variant.answers
            else self.budget.answers
        )

    def plain_run(self) -> HeadRun:
        """Without folders."""
        return self.variant.run(base(self.budget, self.seed))

    def measured(self) -> list[Measured]:
        return [m.filled(self.budget) for m in self.variant.measured]

    def stages(self) -> list[Stage]:
        run = self.plain_run()
        prompts = {m.prompt_tokens for m in self.measured()} | {self.budget.answers.prompt_tokens}
        return [
            features_stage(self.budget, self.answers, run.data.seq_len),
            *(prompts_stage(self.budget, n) for n in sorted(prompts)),
        ]

    def warm(self) -> "Job | None":
        """The job whose head this one starts from."""
        return (
            dataclasses.replace(self, name=self.variant.init_from)
            if self.variant.init_from
            else None
        )

    @property
    def head_key(self) -> str:
        """Of the trained head: equal for variants of different experiments that are the same run."""
        warm = self.warm()
        facts = [
            dataclasses.asdict(self.plain_run()),
            self.stages()[0].key,
            code_hash(TRAINING),
            warm and warm.head_key,
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def key(self) -> str:
        facts = [
            self.head_key,
            self.budget_name,
            [dataclasses.asdict(m) for m in self.measured()],
            [s.key for s in self.stages()[1:]],
            self.variant.method,
            code_hash(MEASURING),
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def run(self, cache: Path) -> HeadRun:
        budget, plain, warm = self.budget, self.plain_run(), self.warm()
        answers = answers_stage(budget, self.answers).folder(cache) / "answers.jsonl"
        features = self.stages()[0].folder(cache) / "features"
        return dataclasses.replace(
            plain,
            target=str(target_stage(budget).folder(cache) / "model"),
            hidden_states_dir=str(features),
            out=str(self.head_folder(cache)),
            data=dataclasses.replace(plain.data, source=str(answers)),
            init_from=str(warm.head_folder(cache)) if warm else None,
        )

    def head_folder(self, cache: Path) -> Path:
        return cache / "heads" / self.head_key

    def changes(self) -> list[str]:
        """What the run differs in from the base, in words."""
        mine, theirs = (
            _flat(dataclasses.asdict(r)) for r in (self.plain_run(), base(self.budget, self.seed))
        )
        said = [
            f"{k}: {theirs.get(k)} -> {mine.get(k)}"
            for k in sorted(mine.keys() | theirs.keys())
            if mine.get(k) != theirs.get(k)
        ]
        ours, usual = (_flat(dataclasses.asdict(a)) for a in (self.answers, self.budget.answers))
        said += [f"answers.{k}: {usual[k]} -> {ours[k]}" for k in ours if ours[k] != usual[k]]
        ours, usual = (
            _flat(dataclasses.asdict(m))
            for m in (self.measured()[0], Measured().filled(self.budget))
        )
        said += [f"decoding.{k}: {usual[k]} -> {ours[k]}" for k in ours if ours[k] != usual[k]]
        return said + ([f"start_from: {self.variant.init_from}"] if self.variant.init_from else [])


def _flat(tree: dict, prefix: str = "") -> dict:
    out = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


# ---------------------------------------------------------------- doing it


def do(job: Job, cache: Path, command: str) -> dict:
    """Trains what is not trained yet, measures, and returns the row. The stages must be there."""
    import jax

    from experiments.arithmetic import training_flops
    from peagle_jax.checkpoints.runs import read_run
    from peagle_jax.checkpoints.target_io import load_target
    from peagle_jax.pipelines.train_head import train_head
    from peagle_jax.provenance import provenance

    run = job.run(cache)
    if (warm := job.warm()) is not None:
        train_head(warm.run(cache))
    result = train_head(run)
    head = read_run(Path(run.out))
    target = load_target(
        run.target,
        aux_hidden_state_layers=run.head.aux_hidden_state_layers,
        dtype=head.config.dtype,
    )
    steps = [
        json.loads(line) for line in (Path(run.out) / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in steps if "loss" in row]
    curve = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, CURVE).astype(int))]
    measured, exact = measure(job, cache, target, head)
    plain = job.plain_run()
    return {
        "experiment": job.experiment.name,
        "variant": job.name,
        "seed": job.seed,
        "budget": job.budget_name,
        "key": job.key,
        "changes": job.changes(),
        "config": dataclasses.asdict(plain),
        **provenance(command),
        "stages": {s.name: s.key for s in job.stages()[0].all()},
        "head": job.head_key,
        "steps": result.step,
        "train_seconds": steps[-1]["seconds"],
        "train_tokens_per_second": training_speed(run, steps[-1]),
        "parameters": sum(x.size for x in jax.tree.leaves(head.params)),
        "train_flops": training_flops(plain),
        "curve": curve,
        "measured": measured,
        "speed": speed(job, cache, target, head),
        "exact": exact,
        "export": exported(run, head.config),
    }


def exported(run: HeadRun, config) -> str:
    """What became of the head for vLLM: in the words of `export_placeholders.how`, unless its fusion turned out not to reach the vector."""
    from peagle_jax.checkpoints import export_placeholders

    said = export_placeholders.how(config)
    whole = (Path(run.out) / "head" / "config.json").exists()
    return (
        said
        if whole or said.startswith("refused")
        else "refused: fc does not reach its placeholder's vector"
    )


def training_speed(run: HeadRun, last: dict) -> float:
    """Tokens a second, of the session that trained the head: the one that finds it trained has timed nothing.

    Args:
      last: metrics of the last step. Where all that a session had left was too little to time, its seconds count, compilation included.
    """
    timed = json.loads((Path(run.out) / "result.json").read_text(encoding="utf-8"))[
        "tokens_per_second"
    ]
    return timed or run.data.batch_size * run.data.seq_len * last["step"] / last["seconds"]


def prompts_of(job: Job, cache: Path, tokens: int) -> list[dict]:
    path = prompts_stage(job.budget, tokens).folder(cache) / "prompts.jsonl"
    return [row for _, row in corpus.read_jsonl(path)]


def measure(job: Job, cache: Path, target, head) -> tuple[list[dict], dict]:
    """(every decoding, how the greedy ones compare with plain decoding)."""
    from peagle_jax.bench.exact import compare
    from peagle_jax.bench.suite import repeated_share
    from peagle_jax.decode.generate import acceptance_length, generate

    out, exact = [], {"same": 0, "near_ties": 0, "different": 0}
    for m in job.measured():
        rows = prompts_of(job, cache, m.prompt_tokens)
        prompts = [row["prompt_token_ids"] for row in rows]
        how = {
            "max_new_tokens": m.new_tokens,
            "stop_ids": (),
            "temperature": m.temperature,
            "seed": list(range(len(prompts))),
        }
        answers = generate(
            target,
            head,
            prompts,
            k=m.k,
            method=job.variant.method,
            sample_drafts=m.sample_drafts,
            **how,
        )
        if m.temperature == 0:
            plain = generate(target, None, prompts, **how)
            found = compare(
                target,
                prompts,
                [a.output_token_ids for a in answers],
                [a.output_token_ids for a in plain],
            )
            exact = {name: exact[name] + getattr(found, name) for name in exact}
        drafts = sum(a.num_drafts for a in answers)
        counts = [{"drafts": a.num_drafts, "accepted": a.accepted_per_position} for a in answers]
        out.append(
            dataclasses.asdict(m)
            | {
                "prompts_stage": prompts_stage(job.budget, m.prompt_tokens).key,
                "prompts": [
                    {"kind": row["kind"], **count} for row, count in zip(rows, counts, strict=True)
                ],
                "acceptance_length": acceptance_length(answers),
                "mean_acceptance_length": float(np.mean([a.acceptance_length for a in answers])),
                "accepted_per_position": np.round(
                    np.sum([c["accepted"] for c in counts], axis=0) / drafts, 5
                ).tolist(),
                "repeated_4grams": repeated_share([a.output_token_ids for a in answers]),
            }
        )
    return out, exact


def speed(job: Job, cache: Path, target, head) -> dict | None:
    """One prompt at a time, plain and speculative decoding in turns, greedily; None for a variant that samples."""
    from peagle_jax.bench.suite import run_suite

    first = job.measured()[0]
    if first.temperature:
        return None
    rows = prompts_of(job, cache, first.prompt_tokens)
    prompts = [
        row["prompt_token_ids"] for row in rows[:: max(1, len(rows) // job.budget.speed_prompts)]
    ]
    suite = run_suite(
        target,
        {job.variant.method: head},
        prompts,
        ks=[first.k],
        batches=[1],
        new_tokens=first.new_tokens,
        repeats=job.budget.repeats,
        on_record=lambda record: None,
    )
    plain, ours = suite.records
    return {
        "k": first.k,
        "tokens_per_second": ours["tokens_per_second"],
        "plain_tokens_per_second": plain["tokens_per_second"],
        "speedup": ours["speedup"],
        "draft_seconds": ours["draft_seconds"],
        "verify_seconds": ours["verify_seconds"],
    }


def main(argv: list[str]) -> int:
    from experiments.registry import EXPERIMENTS

    spec = json.loads(Path(argv[0]).read_text())
    job = Job(EXPERIMENTS[spec["experiment"]], spec["variant"], spec["seed"], spec["budget"])
    row = do(job, Path(spec["cache"]), spec["command"])
    write_atomically(Path(spec["out"]), json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
