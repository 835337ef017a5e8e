"""One job: its head is trained, or found trained, and measured, and a row comes out.

`python -m experiments.work JOB.json` does one job alone; `experiments.run` writes such files.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import signal
import sys
from pathlib import Path

import jax
import numpy as np

from experiments.arithmetic import training_flops
from experiments.jobs import CODE_HAS_CHANGED, Job
from experiments.measure import measure, measure_on_text, measure_speed
from experiments.rows import rounded
from experiments.stages.cache import Stage
from experiments.stages.prompts import prompts_stage
from peagle_jax import json_files
from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints import export_placeholders, head_writing
from peagle_jax.checkpoints.runs import read_run
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.draft.head import HeadConfig
from peagle_jax.pipelines.train_head import train_head
from peagle_jax.provenance import provenance
from peagle_jax.train.config import HeadRun
from peagle_jax.types import Model

CURVE_POINTS = 24  # of a training curve in a row
DIGITS, CURVE_DIGITS = 8, 6  # significant digits in a row
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def do(job: Job, cache: Path, command: str) -> dict:
    """Trains what is not trained yet, measures, and returns the row. The stages must be there."""
    # of the code that is imported now: it may be changed while the head is trained
    origin = {"key": job.key, **provenance(command), **job.origin}
    run = job.run(cache)
    if (initial := job.initial_job()) is not None:
        train_head(initial.run(cache))
    result = train_head(run)
    head = read_run(Path(run.out))
    target = load_target(
        run.target,
        aux_hidden_state_layers=head.config.aux_hidden_state_layers,
        dtype=head.config.dtype,
    )
    steps = _logged_steps(Path(run.out))
    measurements, exact = _measurements(job, cache, target, head)
    plain_run = job.plain_run()
    row = {
        "experiment": job.experiment.name,
        "variant": job.name,
        "seed": job.seed,
        "budget": job.budget_name,
        **origin,
        "changes": job.changes(),
        "config": dataclasses.asdict(plain_run),
        "stages": {stage.name: stage.key for stage in job.stages()[0].with_parents()},
        "target_digest": target_digest(job, cache),
        "head_key": job.head_key,
        "steps": result.step,
        "train_seconds": steps[-1]["seconds"],
        "train_tokens_per_second": training_speed(run, steps[-1]),
        "num_parameters": sum(x.size for x in jax.tree.leaves(head.params)),
        "train_flops": training_flops(plain_run, job.budget.model),
        "measurements": measurements,
        "speed": _speed(job, cache, target, head),
        "exact": exact,
        "export": _export_status(run, head.config),
    }
    return rounded(row, DIGITS) | {"curve": rounded(_curve(steps), CURVE_DIGITS)}


def target_digest(job: Job, cache: Path) -> str | None:
    """The contents of a job's target; None where it is not made yet.

    A target that is trained on another machine rounds otherwise, and so has other contents.
    """
    path = Path(job.run(cache).target) / "model.safetensors"
    return _digest(path) if path.exists() else None


def _logged_steps(folder: Path) -> list[dict]:
    """The rows of a training run's metrics that have a loss."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def _curve(steps: list[dict]) -> list[dict]:
    """At most `CURVE_POINTS` of the logged steps, the first and the last among them."""
    places = np.unique(np.linspace(0, len(steps) - 1, CURVE_POINTS).astype(int))
    return [steps[place] for place in places]


def _export_status(run: HeadRun, config: HeadConfig) -> str:
    """What became of the head for vLLM, in the words of checkpoints/export_placeholders.py.

    Only the export itself can tell that a fusion does not reach the placeholder's vector.
    """
    if head_writing.needs_own_format(config):
        return "refused: vLLM has no Markov head and no confidence head"
    status = export_placeholders.export_status(config)
    was_exported = (Path(run.out) / "head" / "config.json").exists()
    if was_exported or status.startswith("refused"):
        return status
    if config.predicts_features and config.qk_norm:
        return "refused: vLLM's EAGLE-1 heads have no norms of queries and keys"
    return "refused: fc does not reach its placeholder's vector"


def training_speed(run: HeadRun, last_step: dict) -> float:
    """Tokens per second of the session that trained the head.

    A session that finds the head trained has timed nothing. Where all that a session had left was
    too little to time, the seconds of the whole training count, compilation included.

    Args:
      run: with folders.
      last_step: metrics of the last step.
    """
    result = json.loads((Path(run.out) / "result.json").read_text(encoding="utf-8"))
    if result["tokens_per_second"]:
        return result["tokens_per_second"]
    tokens = run.data.batch_size * run.data.seq_len * last_step["step"]
    return tokens / last_step["seconds"]


def _prompts(job: Job, cache: Path, num_tokens: int) -> list[dict]:
    path = prompts_stage(job.budget, num_tokens).folder(cache) / "prompts.jsonl"
    return [row for _, row in json_files.read_jsonl(path)]


def _measurements(
    job: Job, cache: Path, target: Model, head: Model
) -> tuple[list[dict], dict[str, int]]:
    """Every measurement, and how all greedy decodings together compare with plain decoding."""
    measured, exact = [], {"same": 0, "near_ties": 0, "different": 0}
    for measurement in job.measurements():
        if (stage := job.text_of(measurement)) is not None:
            path = stage.folder(cache) / "continuations.jsonl"
            texts = [row for _, row in json_files.read_jsonl(path)]
            numbers = measure_on_text(target, head, texts, measurement)
            measured.append(numbers | _origin(stage, path))
            continue
        prompts = _prompts(job, cache, measurement.prompt_tokens)
        numbers, counts = measure(target, head, prompts, measurement, job.variant.method)
        stage = prompts_stage(job.budget, measurement.prompt_tokens)
        measured.append(numbers | _origin(stage, stage.folder(cache) / "prompts.jsonl"))
        exact = {name: exact[name] + counts[name] for name in exact}
    return measured, exact


def _origin(stage: Stage, path: Path) -> dict[str, str]:
    """What a row says of its prompts: a key of code and settings, and a digest of the contents."""
    return {"prompts_stage": stage.key, "prompts_digest": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _speed(job: Job, cache: Path, target: Model, head: Model) -> dict | None:
    """Of the first measurement, on a few prompts; None for one that samples or decodes nothing."""
    first = job.measurements()[0]
    if first.temperature or first.on_text:
        return None
    prompts = _prompts(job, cache, first.prompt_tokens)
    chosen = prompts[:: max(1, len(prompts) // job.budget.num_speed_prompts)]
    return measure_speed(target, head, chosen, first, job.variant.method, job.budget.repeats)


def end_with_parent() -> None:
    """On Linux, SIGTERM as soon as the command ends that began this process, however it ends.

    The runs of a command that is killed would otherwise go on, and hold heads that the next command
    wants to train.
    """
    with contextlib.suppress(AttributeError, OSError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main(argv: list[str]) -> int:
    from experiments.registry import EXPERIMENTS

    if len(argv) != 1:
        rule = "one argument is needed, a job's file as experiments.run writes it"
        print(f"experiments.work: {rule}; got {len(argv)}", file=sys.stderr)
        return 2
    spec = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    if spec.get("ends_with_command"):  # and not with a shell, in which somebody runs it alone
        end_with_parent()
    job = Job(EXPERIMENTS[spec["experiment"]], spec["variant"], spec["seed"], spec["budget"])
    if job.key != spec.get("key", job.key):
        rule = "a run is made by the code that its command began with"
        next_step = "begin experiments.run again"
        print(f"experiments.work: {rule}; got other code; {next_step}", file=sys.stderr)
        return CODE_HAS_CHANGED
    row = do(job, Path(spec["cache"]), spec["command"])
    write_atomically(Path(spec["out"]), json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
