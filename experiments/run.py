"""Runs experiments: `python -m experiments.run NAME [NAME ...] [--seeds 3] [--budget smoke|small|full]`; --list says what there is.

One process a run, as many at once as there are cores, each on its own. Finished runs are rows of results/experiments/NAME.jsonl and are
never done again; a run that was cut short goes on from its last checkpoint.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.live import Live
from rich.table import Table

from experiments.arithmetic import parameters, training_flops
from experiments.budgets import BUDGETS
from experiments.queue import Queue
from experiments.registry import EXPERIMENTS
from experiments.stages import check_room, missing, prepare
from experiments.work import Job, base
from peagle_jax.types import InputError

CACHE, RESULTS = Path("runs/experiments"), Path("results/experiments")
CONSOLE = Console(width=None if sys.stdout.isatty() else 140)
MEASURING = 6  # training the base takes so many times as long as measuring a head
STATES = 7  # times its parameters that a head takes on disk: two training states, and its folder
STOPPED = 130  # exit code after Ctrl-C, as shells have it


def parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores if jax.default_backend() == "cpu" else 1  # runs would share one accelerator
    plain = argparse.RawDescriptionHelpFormatter
    out = argparse.ArgumentParser(
        prog="python -m experiments.run", description=__doc__, formatter_class=plain
    )
    out.add_argument("names", nargs="*", metavar="NAME", help="experiments; all: every one")
    out.add_argument("--seeds", type=int, default=3, help="runs of each variant (3)")
    out.add_argument("--budget", choices=BUDGETS, default="small")
    out.add_argument(
        "--only", nargs="+", metavar="VARIANT", help="these variants (and what they need)"
    )
    out.add_argument(
        "--jobs",
        type=int,
        default=cores,
        help=f"runs at a time ({cores}, the cores of this machine)",
    )
    out.add_argument(
        "--minutes", type=float, help="begin no run after so many minutes; the next call goes on"
    )
    out.add_argument(
        "--cache", type=Path, default=CACHE, help=f"targets, features, heads ({CACHE})"
    )
    out.add_argument("--results", type=Path, default=RESULTS, help=f"rows ({RESULTS})")
    out.add_argument("--list", action="store_true", help="explain every experiment")
    out.add_argument("--dry-run", action="store_true", help="say what would run, and for how long")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return go(args)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        CONSOLE.print("stopped; the same command goes on where it was")
        return STOPPED


def go(args) -> int:
    if args.list or not args.names:
        CONSOLE.print(explain())
        return 0 if args.list else 2
    if args.jobs < 1:
        raise InputError("--jobs", "at least one run at a time is needed", args.jobs, "raise it")
    args.cache = args.cache.absolute()  # heads know their files by their paths
    jobs = plan(args.names, args.seeds, args.budget, args.only)
    done = finished(args.results)
    todo = [
        job
        for job in jobs
        if (job.experiment.name, job.name, job.seed, job.budget_name, job.key) not in done
    ]
    stages = missing([stage for job in todo for stage in job.stages()], args.cache)
    room = foretell(jobs, todo, stages, args)
    check_room(stages, args.cache, room)
    if args.dry_run or not todo:
        return 0
    only = f" --only {shlex.join(args.only)}" if args.only else ""
    command = f"python -m experiments.run {' '.join(args.names)} --seeds {args.seeds} --budget {args.budget}{only}"
    # before the stages, which may take an hour: it refuses folders that cannot be written, and its clock runs
    queue = Queue(todo, args.cache, args.results, command, args.jobs, args.minutes)
    if not queue.late:
        prepare([stage for job in todo for stage in job.stages()], args.cache, CONSOLE.print)
    return follow(queue)


def plan(names: Sequence[str], seeds: int, budget: str, only: Sequence[str] | None) -> list[Job]:
    """Every run, seeds outermost: whenever it is stopped, all variants have been run about equally often.

    Raises:
      InputError: an experiment or a variant is unknown.
    """
    if seeds < 1:
        raise InputError("--seeds", "at least one seed is needed", seeds, "raise it")
    if unknown := [name for name in names if name not in EXPERIMENTS and name != "all"]:
        raise InputError(
            "NAME",
            f"must be one of all, {', '.join(EXPERIMENTS)}",
            ", ".join(unknown),
            "choose one; --list explains them",
        )
    chosen = (
        list(EXPERIMENTS.values())
        if "all" in names
        else [EXPERIMENTS[name] for name in dict.fromkeys(names)]
    )
    known = [variant for experiment in chosen for variant in experiment.variants]
    if unknown := [name for name in only or () if name not in known]:
        raise InputError(
            "--only",
            f"must be variants: {', '.join(dict.fromkeys(known))}",
            ", ".join(unknown),
            "choose among them",
        )

    def pick(experiment):
        return [name for name in experiment.variants if not only or name in only]

    return [
        Job(experiment, name, seed, budget)
        for seed in range(seeds)
        for experiment in chosen
        for name in pick(experiment)
    ]


def finished(results: Path) -> set[tuple]:
    """Of rows that can be read; a damaged line is named by the report."""
    out = set()
    for path in sorted(results.glob("*.jsonl")):
        for line in _lines(path):
            try:
                row = json.loads(line)
                out.add((row["experiment"], row["variant"], row["seed"], row["budget"], row["key"]))
            except (ValueError, KeyError, TypeError):  # no JSON, no UTF-8, no row
                continue
    return out


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(
            path, "results must be readable", error.strerror, "mend the file, or move it away"
        ) from None


def explain() -> Table:
    table = Table(
        "experiment",
        "question, and what is expected",
        "variants (* the reference)",
        show_lines=True,
    )
    for name, e in EXPERIMENTS.items():
        table.add_row(
            name,
            f"{e.question}\n{e.expects}",
            ", ".join(f"{v}*" if v == e.reference else v for v in e.variants),
        )
    return table


def foretell(jobs: Sequence[Job], todo: Sequence[Job], stages, args) -> int:
    """Says what will run. Returns the bytes that its heads will take."""
    budget = BUDGETS[args.budget]
    trained = [one for job in todo for one in (job, job.warm()) if one is not None]
    heads = {
        job.head_key: job.plain_run()
        for job in trained
        if not (job.head_folder(args.cache) / "result.json").exists()
    }
    table = Table("experiment", "variant", "seeds to run", "changes")
    for experiment, name in dict.fromkeys((job.experiment.name, job.name) for job in jobs):
        mine = [job for job in todo if (job.experiment.name, job.name) == (experiment, name)]
        changes = Job(EXPERIMENTS[experiment], name, 0, args.budget).changes()
        table.add_row(
            experiment,
            name,
            " ".join(str(job.seed) for job in mine) or "done",
            "; ".join(changes) or "none: the base",
        )
    if args.dry_run:
        CONSOLE.print(table)
    usual = training_flops(base(budget, 0))
    minutes = (
        budget.minutes
        * (sum(training_flops(run) for run in heads.values()) / usual + len(todo) / MEASURING)
        / args.jobs
    )
    minutes += budget.stage_minutes if stages else 0
    names = ", ".join(f"{stage.name} ({stage.size / 1e9:.2f} GB)" for stage in stages) or "nothing"
    each = f"the base about {budget.minutes:g} minutes each on {budget.where}"
    CONSOLE.print(
        f"{len(todo)} of {len(jobs)} runs to do; {len(heads)} heads to train, {each}: about {minutes:.0f} minutes in all, "
        f"{args.jobs} at a time. To be made before: {names}."
    )
    return sum(4 * STATES * parameters(run) for run in heads.values())


# ---------------------------------------------------------------- watching


def follow(queue: Queue) -> int:
    """Until all is done. Ctrl-C stops the runs and loses nothing but the steps since their last checkpoints."""
    show = CONSOLE.is_terminal
    live = Live(console=CONSOLE, refresh_per_second=1, transient=False) if show else None
    try:
        if live:
            live.start()
        while queue.step():
            if live:
                live.update(picture(queue))
            else:
                for line in queue.news():
                    CONSOLE.print(line)
            time.sleep(1)
    finally:
        queue.stop()
        if live:
            live.update(picture(queue))
            live.stop()
    if queue.rows:
        CONSOLE.print(summary(queue))
    for job, log in queue.failed:
        said = f"failed: {job.experiment.name}, {job.name}, seed {job.seed}; what it said: {log}"
        CONSOLE.print(said, soft_wrap=True, markup=False)  # a path that can be copied
    if queue.waiting:
        CONSOLE.print(f"{len(queue.waiting)} runs are left; the same command goes on with them")
    return 1 if queue.failed else 0


def picture(queue: Queue) -> Table:
    table = Table(
        "experiment",
        "variant",
        "seed",
        "step",
        "loss",
        "minutes",
        title=f"{len(queue.rows)} done, {len(queue.waiting)} waiting",
    )
    for running in queue.running:
        last = running.last_logged()
        steps = f"{last.get('step', 0)} / {running.job.plain_run().optimizer.steps}"
        table.add_row(
            running.job.experiment.name,
            running.job.name,
            str(running.job.seed),
            steps,
            f"{last.get('loss', float('nan')):.3f}",
            f"{(time.time() - running.since) / 60:.1f}",
        )
    for row in queue.rows[-12:]:
        table.add_row(
            row["experiment"],
            row["variant"],
            str(row["seed"]),
            "done",
            f"length {row['measured'][0]['acceptance_length']:.3f}",
            f"{row['train_seconds'] / 60:.1f}",
        )
    return table


def summary(queue: Queue) -> Table:
    table = Table(
        "experiment",
        "variant",
        "seed",
        "acceptance length",
        "accepted per position, %",
        "exact",
        "export",
    )
    for row in queue.rows:
        first, exact = row["measured"][0], row["exact"]
        positions = " ".join(f"{100 * a:.0f}" for a in first["accepted_per_position"])
        said = f"{exact['same']} same, {exact['near_ties']} ties, {exact['different']} different"
        found = f"{first['acceptance_length']:.3f}", positions, said, row["export"]
        table.add_row(row["experiment"], row["variant"], str(row["seed"]), *found)
    return table


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # like Ctrl-C: whoever ends this process ends its runs
    sys.exit(main())
