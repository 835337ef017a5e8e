"""Runs experiments: `python -m experiments.run NAME [NAME ...] [--seeds 3] [--budget small]`.

Each run is a process of its own on one core, and as many run at a time as there are cores. A
finished run is one row of results/experiments/NAME.jsonl and is never done again; a run that was
cut short continues from its last checkpoint. Smoke runs only show that everything works: their
caches and rows go to runs/experiments-smoke/. --list explains every experiment.
"""

import argparse
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from experiments import folders
from experiments.arithmetic import num_parameters, training_flops
from experiments.base import Experiment
from experiments.base_run import base_run
from experiments.budgets import BUDGETS
from experiments.jobs import Job
from experiments.old_names import experiment_name, variant_name
from experiments.queue import Queue
from experiments.registry import EXPERIMENTS
from experiments.rows import latest, read_rows
from experiments.stages.cache import Stage, check_disk_space, missing_stages, prepare
from experiments.watch import follow
from experiments.work import target_digest
from peagle_jax.atomic_write import DISK_IS_FULL
from peagle_jax.types import InputError

CONSOLE = Console(width=None if sys.stdout.isatty() else 140)
TRAIN_OVER_MEASURE = 6  # training the base takes so many times as long as measuring a head
STATE_COPIES = 7  # times its parameters that a head takes on disk: two training states, its folder
# of `stage_minutes`, measured with the budget sampled on two cores of an AMD EPYC
STAGE_SHARES = {"text": 0.04, "target": 0.85, "answers": 0.08, "hidden_states": 0.02}
STOPPED = 130  # exit code after Ctrl-C, as shells have it


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
      names: experiments, in their present names; "all" for every one.
      seeds: runs of each variant.
      only: variants; None for all.
      jobs: runs at a time.
      minutes: no run begins after so many; None for no limit.
    """

    names: tuple[str, ...]
    seeds: int
    budget: str
    only: tuple[str, ...] | None
    jobs: int
    minutes: float | None
    cache: Path
    results: Path
    list: bool
    dry_run: bool

    @property
    def command(self) -> str:
        """The command that a row records: what decides its numbers."""
        only = f" --only {shlex.join(self.only)}" if self.only else ""
        names = " ".join(self.names)
        return (
            f"python -m experiments.run {names} --seeds {self.seeds} --budget {self.budget}{only}"
        )


def parser() -> argparse.ArgumentParser:
    num_cores = _num_cores()
    out = argparse.ArgumentParser(
        prog="python -m experiments.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = out.add_argument
    add("names", nargs="*", metavar="NAME", help="experiments; all: every one")
    add("--seeds", type=int, default=3, help="runs of each variant (3)")
    add("--budget", choices=BUDGETS, default="small", help="how long heads train (small)")
    only_help = "these variants (and the heads that they start from)"
    add("--only", nargs="+", metavar="VARIANT", help=only_help)
    jobs_help = f"runs at a time ({num_cores}, the cores of this machine)"
    add("--jobs", type=int, default=num_cores, help=jobs_help)
    minutes_help = "begin no run after so many minutes; the same command continues later"
    add("--minutes", type=float, help=minutes_help)
    cache_help = f"targets, hidden states, heads ({folders.CACHE}; smoke: {folders.SMOKE_CACHE})"
    add("--cache", type=Path, help=cache_help)
    results_help = f"rows ({folders.RESULTS}; smoke: {folders.SMOKE_RESULTS})"
    add("--results", type=Path, help=results_help)
    add("--list", action="store_true", help="explain every experiment")
    add("--dry-run", action="store_true", help="say what would run, and for how long")
    return out


def _num_cores() -> int:
    """Runs at a time: one per CPU core. Runs would share an accelerator, so there only one."""
    if jax.default_backend() != "cpu":
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _options(argv: Sequence[str] | None) -> Options:
    args = vars(parser().parse_args(argv))
    names = tuple(dict.fromkeys(experiment_name(name) for name in args["names"]))
    cache = args["cache"] or folders.default_cache(args["budget"])
    return Options(
        **args
        | {
            "names": names,
            "only": _present_variants(names, args["only"]),
            "cache": cache.absolute(),  # heads know their files by their paths
            "results": args["results"] or folders.default_results(args["budget"]),
        }
    )


def _present_variants(
    experiments: Sequence[str], variants: Sequence[str] | None
) -> tuple[str, ...] | None:
    """Variants by their present names, where one of the experiments had renamed them."""
    if variants is None:
        return None
    present = []
    for variant in variants:
        candidates = [variant_name(experiment, variant) for experiment in experiments]
        present.append(next((name for name in candidates if name != variant), variant))
    return tuple(present)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return go(_options(argv))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:  # wherever it is noticed that a disk is full
        if error.errno not in DISK_IS_FULL:
            raise
        where, next_step = error.filename or "the disk", "make room, and run this again"
        print(InputError(where, "must have room", error.strerror, next_step), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        CONSOLE.print("stopped; the same command continues where it was")
        return STOPPED


def go(options: Options) -> int:
    """Does what the command line says, and returns the exit code."""
    if options.list or not options.names:
        CONSOLE.print(explain())
        return 0 if options.list else 2
    _check(options)
    jobs = plan(options.names, options.seeds, options.budget, options.only)
    todo = to_do(jobs, options.results, options.cache)
    stages = [stage for job in todo for stage in job.stages()]
    missing = missing_stages(stages, options.cache)
    heads = _heads_to_train(todo, options.cache)
    if options.dry_run:
        CONSOLE.print(_plan_table(jobs, todo, options.budget))
    for line in _without_reference(jobs, options.results):
        CONSOLE.print(line)
    CONSOLE.print(_estimate(jobs, todo, missing, heads, options))
    model = BUDGETS[options.budget].model
    head_bytes = sum(4 * STATE_COPIES * num_parameters(run, model) for run in heads.values())
    check_disk_space(missing, options.cache, head_bytes)
    if options.dry_run or not todo:
        return 0
    # The queue comes before the stages, which may take an hour: it refuses folders that cannot be
    # written, and its clock runs.
    queue = Queue(
        todo, options.cache, options.results, options.command, options.jobs, options.minutes
    )
    if not queue.is_late:
        prepare(stages, options.cache, CONSOLE.print)
        # only now is it known whether finished runs are of this target
        queue.waiting = to_do(jobs, options.results, options.cache)
        if more := len(queue.waiting) - len(todo):
            CONSOLE.print(f"{more} finished runs are of a target with other weights: made anew")
            prepare([s for job in queue.waiting for s in job.stages()], options.cache)
    return follow(queue, CONSOLE)


def _check(options: Options) -> None:
    """Raises InputError for options that contradict each other or make no sense."""
    if options.jobs < 1:
        rule = "at least one run at a time is needed"
        raise InputError("--jobs", rule, options.jobs, "use --jobs 1 or more")
    tracked = (folders.ROOT / folders.RESULTS).resolve()
    if options.budget == "smoke" and options.results.resolve().is_relative_to(tracked):
        rule = "smoke rows must not mix with the results that git tracks"
        next_step = f"leave --results out; smoke rows then go to {folders.SMOKE_RESULTS}"
        raise InputError("--results", rule, options.results, next_step)


def plan(names: Sequence[str], seeds: int, budget: str, only: Sequence[str] | None) -> list[Job]:
    """Every job, seeds outermost: a stop at any time leaves all variants run about equally often.

    Raises:
      InputError: an experiment or a variant is unknown.
    """
    if seeds < 1:
        raise InputError("--seeds", "at least one seed is needed", seeds, "use --seeds 3")
    unknown = [name for name in names if name not in EXPERIMENTS and name != "all"]
    if unknown:
        rule = f"must be one of all, {', '.join(EXPERIMENTS)}"
        raise InputError("NAME", rule, ", ".join(unknown), "choose one; --list explains them")
    if "all" in names:
        experiments = list(EXPERIMENTS.values())
    else:
        experiments = [EXPERIMENTS[name] for name in dict.fromkeys(names)]
    known = list(dict.fromkeys(variant for e in experiments for variant in e.variants))
    unknown = [name for name in only or () if name not in known]
    if unknown:
        rule = f"must be variants: {', '.join(known)}"
        raise InputError("--only", rule, ", ".join(unknown), "choose among them")
    jobs = [
        Job(experiment, name, seed, budget)
        for seed in range(seeds)
        for experiment in experiments
        for name in _chosen(experiment, only)
    ]
    for job in jobs:
        job.check()
    return jobs


def _chosen(experiment: Experiment, only: Sequence[str] | None) -> list[str]:
    return [name for name in experiment.variants if not only or name in only]


def to_do(jobs: Sequence[Job], results: Path, cache: Path) -> list[Job]:
    """The jobs without a row. A row of a target with other weights than the cache's is none."""
    done = finished(results)
    digest = target_digest(jobs[0], cache) if jobs else None  # jobs of one budget have one target
    rows = [(job, done.get(_identity(job))) for job in jobs]
    return [job for job, row in rows if row is None or not _is_of_target(row, digest)]


def _identity(job: Job) -> tuple:
    return job.experiment.name, job.name, job.seed, job.budget_name, job.key


def _is_of_target(row: Mapping, digest: str | None) -> bool:
    """Whether a row may be compared with what is measured on a target.

    Args:
      digest: of the target; None where it is not made yet.
    """
    return digest is None or row.get("target_digest", digest) == digest


def finished(results: Path) -> dict[tuple, Mapping]:
    """The rows that a report would show, by experiment, variant, seed, budget and key.

    Of several rows of one variant, seed and budget that is the last. Lines that cannot be used are
    passed over; the report names them.
    """
    rows, _ = read_rows(results)
    fields = ("experiment", "variant", "seed", "budget", "key")
    return {
        tuple(row[field] for field in fields): row
        for row in latest(rows)
        if isinstance(row.get("key"), str)
    }


# ---------------------------------------------------------------- what is said before


def _without_reference(jobs: Sequence[Job], results: Path) -> list[str]:
    """A line for each experiment whose reference neither has a row nor is among the jobs."""
    known = {(job.experiment.name, job.name, job.budget_name) for job in jobs}
    known |= {(name, variant, budget) for name, variant, _, budget, _ in finished(results)}
    wanted = {(job.experiment.name, job.experiment.reference, job.budget_name) for job in jobs}
    return [
        f"{name}: without {reference}, the reference, nothing is compared; add it to --only"
        for name, reference, _ in sorted(wanted - known)
    ]


def explain() -> Table:
    """The answer to --list."""
    variants_title = "variants (* the reference)"
    title = "question, and what is expected"
    table = Table("experiment", title, variants_title, show_lines=True)
    for name, experiment in EXPERIMENTS.items():
        variants = [
            f"{variant}*" if variant == experiment.reference else variant
            for variant in experiment.variants
        ]
        words = f"{experiment.question}\n{experiment.expects}"
        table.add_row(name, words, ", ".join(variants))
    return table


def _heads_to_train(todo: Sequence[Job], cache: Path) -> dict:
    """The training run of each head that is not trained yet, by the head's key."""
    heads = {}
    for job in todo:
        for one in (job, job.initial_job()):
            if one is not None and not (one.head_folder(cache) / "result.json").exists():
                heads[one.head_key] = one.plain_run()
    return heads


def _plan_table(jobs: Sequence[Job], todo: Sequence[Job], budget: str) -> Table:
    """Every variant, the seeds that it will run with, and what it changes."""
    table = Table("experiment", "variant", "seeds to run", "changes")
    for experiment, name in dict.fromkeys((job.experiment.name, job.name) for job in jobs):
        seeds = [
            str(job.seed) for job in todo if (job.experiment.name, job.name) == (experiment, name)
        ]
        changes = Job(EXPERIMENTS[experiment], name, 0, budget).changes()
        table.add_row(
            experiment, name, " ".join(seeds) or "done", "; ".join(changes) or "none: the base"
        )
    return table


def _estimate(
    jobs: Sequence[Job],
    todo: Sequence[Job],
    missing: Sequence[Stage],
    heads: dict,
    options: Options,
) -> str:
    """How much there is to do, and about how long it takes."""
    budget = BUDGETS[options.budget]
    base_flops = training_flops(base_run(budget, 0), budget.model)
    trainings = sum(training_flops(run, budget.model) for run in heads.values()) / base_flops
    minutes = budget.minutes * (trainings + len(todo) / TRAIN_OVER_MEASURE) / options.jobs
    minutes += sum(budget.stage_minutes * STAGE_SHARES.get(s.name, 0.01) for s in missing)
    names = [f"{stage.name} ({stage.num_bytes / 1e9:.2f} GB)" for stage in missing]
    each = f"the base about {budget.minutes:g} minutes each on {budget.measured_on}"
    return (
        f"{len(todo)} of {len(jobs)} runs to do; {len(heads)} heads to train, {each}: about "
        f"{minutes:.0f} minutes in all, {options.jobs} at a time. "
        f"To be made before: {', '.join(names) or 'nothing'}."
    )


if __name__ == "__main__":
    # like Ctrl-C: whoever ends this process ends its runs
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
