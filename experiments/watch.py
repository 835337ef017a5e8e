"""Watching a queue: a live table on a terminal, a line for every row elsewhere, and a summary."""

import time

from rich.console import Console
from rich.live import Live
from rich.table import Table

from experiments.queue import Queue

SHOWN_ROWS = 12  # finished jobs in the live table


def follow(queue: Queue, console: Console) -> int:
    """Works through a queue. Ctrl-C stops its jobs, which lose only the steps since a checkpoint.

    Returns:
      The exit code: 1 if a job failed.
    """
    live = Live(console=console, refresh_per_second=1) if console.is_terminal else None
    try:
        if live:
            live.start()
        while queue.step():
            if live:
                live.update(_live_table(queue))
            else:
                for line in queue.news():
                    console.print(line)
            time.sleep(1)
    finally:
        queue.stop()
        if live:
            live.update(_live_table(queue))
            live.stop()
    if queue.rows:
        console.print(_summary(queue))
    for job, log in queue.failed:
        words = f"failed: {job.experiment.name}, {job.name}, seed {job.seed}; its log: {log}"
        console.print(words, soft_wrap=True, markup=False)  # a path that can be copied
    if queue.code_has_changed:
        words = "the code has changed since this command began, and is that of other rows"
        console.print(f"stopped: {words}; change code in another checkout, and begin again")
    if queue.waiting:
        console.print(f"{len(queue.waiting)} runs are left; the same command continues with them")
    return 1 if queue.failed or queue.code_has_changed else 0


def _live_table(queue: Queue) -> Table:
    """The jobs that run, with their last logged step, and those that ended last."""
    title = f"{len(queue.rows)} done, {len(queue.waiting)} waiting"
    table = Table("experiment", "variant", "seed", "step", "loss", "minutes", title=title)
    for running in queue.running:
        job, last = running.job, running.last_logged()
        step = f"{last.get('step', 0)} / {job.plain_run().optimizer.steps}"
        loss = f"{last.get('loss', float('nan')):.3f}"
        minutes = f"{(time.monotonic() - running.started_at) / 60:.1f}"
        table.add_row(job.experiment.name, job.name, str(job.seed), step, loss, minutes)
    for row in queue.rows[-SHOWN_ROWS:]:
        length = f"length {row['measurements'][0]['acceptance_length']:.3f}"
        minutes = f"{row['train_seconds'] / 60:.1f}"
        identity = row["experiment"], row["variant"], str(row["seed"])
        table.add_row(*identity, "done", length, minutes)
    return table


def _summary(queue: Queue) -> Table:
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
        first, exact = row["measurements"][0], row["exact"]
        table.add_row(
            row["experiment"],
            row["variant"],
            str(row["seed"]),
            f"{first['acceptance_length']:.3f}",
            " ".join(f"{100 * share:.0f}" for share in first["accepted_per_position"]),
            f"{exact['same']} same, {exact['near_ties']} ties, {exact['different']} different",
            row["export"],
        )
    return table
