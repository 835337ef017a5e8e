"""Training beside speculators: tokens per second, and what is learned in the same seconds.

    scripts/peers/install_speculators.sh .venv-speculators
    .venv/bin/python scripts/peers/compare_training.py --speculators .venv-speculators \\
        [--record results/training_peers.jsonl] [--picture docs/pictures/training.png]

Both train the same P-EAGLE head from the same numbers: the packaged target's hidden states of the
same packed rows in the same order, given to both as arrays; the same COD settings, loss, AdamW,
clipping and schedule, dtype and number of threads. First they take turns: a round trains some steps
with each, and the median over rounds is the speed. Then each trains every seed for as many steps as
it takes in --seconds at that speed, so that its schedule fits them. What they saved is converted by
`peagle convert`, and decoded greedily by the same engine on the same held-out prompts.

Not the same: each draws its own COD samples (and its own random numbers). speculators runs eagerly,
as it does without a CUDA device; its attention is PyTorch's `sdpa` (or `eager`), the only ones with
a backward pass on a CPU. Compilation, loading and saving count for nobody.

Exit code 0: done. 2: bad arguments, or a trainer failed.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from line_process import LineProcess
from rich.console import Console
from rich.table import Table

from peagle_jax import allocator
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.pair import load_pair
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.pipelines.evaluate import acceptance
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows
from peagle_jax.report.plots import STYLE
from peagle_jax.text import load_tokenizer
from peagle_jax.train.config import PeagleRun, load_run
from peagle_jax.train.corpus_store import open_corpus
from peagle_jax.train.data import PackedRows
from peagle_jax.train.hidden_states import compute_hidden_states
from peagle_jax.train.new_head import new_head
from peagle_jax.train.settings import plain
from peagle_jax.train.train_head import choice_of
from peagle_jax.types import InputError

HERE = Path(__file__).parent
RECIPE = HERE.parents[1] / "configs/train/demo_peagle.yaml"
TRAINERS = {
    "peagle_jax": ("training_ours.py", None),
    "speculators": ("training_speculators.py", "sdpa"),
    "speculators, eager attention": ("training_speculators.py", "eager"),
}
WARMUP_SHARE = 0.05  # of the steps, for recipes have thousands of them
CHARS_OF_TOKEN = 8  # at most; the packaged tokenizer has 3 to 4 in source code
COLORS = {"peagle_jax": "#0b6e4f", "speculators": "#8d99ae"}


@dataclasses.dataclass
class Trainer:
    """One trainer in a process of its own.

    Attributes:
      name: a key of TRAINERS.
      worker: its process.
      tokens_per_second: of each timed round.
      cpu_seconds: of a step in each timed round, of all threads together.
      round_answer: the last round's.
    """

    name: str
    worker: LineProcess
    tokens_per_second: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    round_answer: dict = dataclasses.field(default_factory=dict)

    def train(
        self, head: Path, order: Sequence[int], steps: int, schedule_steps: int, out: Path | None
    ) -> dict:
        """Trains a head from its beginning.

        Args:
          head: its folder in speculators' format.
          order: row numbers, step by step.
          steps: how many are taken.
          schedule_steps: for how many the schedule is laid out.
          out: where the trained head is saved; None: nowhere.

        Returns:
          "training_seconds", "cpu_seconds" of all threads together, "losses" of the steps and
          "trained_parameters".
        """
        request = {
            "head": str(head),
            "order": [int(row) for row in order],
            "steps": steps,
            "schedule_steps": schedule_steps,
            "warmup": max(1, int(WARMUP_SHARE * schedule_steps)),
            "out": None if out is None else str(out),
            "attention": TRAINERS[self.name][1],
        }
        return self.worker.ask(request)

    @property
    def speed(self) -> float:
        """Tokens per second, the median over rounds."""
        return statistics.median(self.tokens_per_second)


def start(name: str, job: dict, args: argparse.Namespace) -> Trainer:
    """Starts a trainer, and waits until it is ready."""
    script, attention = TRAINERS[name]
    command: list[str | Path] = [args.speculators / "bin/python", HERE / script]
    if attention is None:
        settings = [f"{key}={value}" for key, value in allocator.environment().items()]
        command = ["env", *settings, sys.executable, HERE / script]  # as `peagle train`
    worker = LineProcess(
        name,
        command,
        job,
        rule="the trainer must train",
        next_step="run again with --verbose",
        verbose=args.verbose,
    )
    return Trainer(name, worker)


def write_inputs(run: PeagleRun, args: argparse.Namespace, folder: Path) -> list[Path]:
    """Writes rows, hidden states and, for every seed, the head that training begins with.

    Returns:
      The heads' folders, in speculators' format.
    """
    target = load_target(run.target, aux_hidden_state_layers=run.aux_hidden_state_layers)
    tokenizer = load_tokenizer(args.target)
    assert tokenizer is not None, "a target that has prompts has a tokenizer"
    store = open_corpus(folder / "corpus", choice_of(run), tokenizer)
    rows = store.pack(run.data.seq_len, run.data.packing)
    if len(rows) < args.rows:
        rule, next_step = f"the data must fill {args.rows} rows", f"give --rows {len(rows)}"
        raise InputError(args.data or "the standard library", rule, f"{len(rows)} rows", next_step)
    write_rows(run, rows, args.rows, folder)
    heads = []
    for seed in range(args.seeds):
        head = new_head(dataclasses.replace(run, seed=seed), target, rows, tokenizer)
        heads.append(folder / f"head_{seed}")
        save_drafter(head, heads[-1], "speculators", target=str(args.target.resolve()))
    return heads


def write_rows(run: PeagleRun, rows: PackedRows, count: int, folder: Path) -> None:
    """Writes the first rows of an epoch, and the target's hidden states of them, in float32.

    The final hidden state is written before the target's norm, as speculators reads it, and after
    it, as peagle_jax does.
    """
    layers = load_target(run.target).config.layers
    assert run.aux_hidden_state_layers is not None, "the recipe names them"
    read = (*run.aux_hidden_state_layers, layers)
    target = load_target(run.target, aux_hidden_state_layers=read)
    hidden_states = jax.jit(lambda p, batch: compute_hidden_states(target.bind(p), batch))
    batch = rows.take(rows.indices_at(count, run.seed, 0))
    arrays = {name: np.asarray(getattr(batch, name)) for name in ("tokens", "segment_ids")}
    loss_mask = np.array(batch.loss_mask)
    # speculators 0.9 gives the first position of a row the anchor -1 (LOG.md)
    loss_mask[:, 1] = False
    np.savez(folder / "rows.npz", loss_mask=loss_mask, **arrays)
    width, shape = target.config.dim, (count, run.data.seq_len)
    widths = {
        "aux_hidden_states": width * len(run.aux_hidden_state_layers),
        "before_norm": width,
        "hidden": width,
    }
    files = {
        name: np.lib.format.open_memmap(
            folder / f"{name}.npy", "w+", dtype=np.float32, shape=(*shape, w)
        )
        for name, w in widths.items()
    }
    for at in range(0, count, 8):
        part = jax.tree.map(lambda x, at=at: np.asarray(x)[at : at + 8], batch)
        aux, hidden = hidden_states(target.params, part)
        aux = np.asarray(aux)
        files["aux_hidden_states"][at : at + 8] = aux[..., : widths["aux_hidden_states"]]
        files["before_norm"][at : at + 8] = aux[..., widths["aux_hidden_states"] :]
        files["hidden"][at : at + 8] = np.asarray(hidden)
    for file in files.values():
        file.flush()


def measure_speed(
    trainers: Sequence[Trainer], head: Path, run: PeagleRun, args: argparse.Namespace
) -> None:
    """Rounds in turns, after one that compiles."""
    order = row_order(0, args)
    with ProgressReport("speed", (args.rounds + 1) * len(trainers), unit="turns") as report:
        for number in range(args.rounds + 1):
            for i, trainer in enumerate(trainers):
                answer = trainer.train(head, order, args.round_steps, args.round_steps, None)
                if number:
                    tokens = args.round_steps * (run.data.seq_len - 1)
                    trainer.tokens_per_second.append(tokens / answer["training_seconds"])
                    trainer.cpu_seconds.append(answer["cpu_seconds"] / args.round_steps)
                trainer.round_answer = answer
                report.update(number * len(trainers) + i + 1, note=trainer.name)


def row_order(seed: int, args: argparse.Namespace) -> np.ndarray:
    """The rows of an epoch in the order of a seed."""
    return np.random.default_rng(seed).permutation(args.rows)


def learn(
    trainers: Sequence[Trainer],
    heads: Sequence[Path],
    run: PeagleRun,
    args: argparse.Namespace,
    folder: Path,
) -> list[dict]:
    """For every trainer and seed: what a head is after the same seconds of training."""
    prompts = standard_prompts(load_tokenizer(args.target), args.num_prompts)
    results = []
    with ProgressReport("learn", len(trainers) * len(heads), unit="heads") as report:
        for seed, head in enumerate(heads):
            for trainer in trainers:
                steps = max(1, int(args.seconds * trainer.speed / (run.data.seq_len - 1)))
                out = folder / f"{len(results)}"
                out.mkdir()
                answer = trainer.train(head, row_order(seed, args), steps, steps, out / "saved")
                convert(out / "saved", out / "head", to="vllm", target=args.target)
                target, trained = load_pair(args.target, out / "head")
                decoded = acceptance(target, trained, prompts, run.num_depths, args.max_new_tokens)
                losses = answer["losses"]
                results.append(
                    {
                        "trainer": trainer.name,
                        "seed": seed,
                        "steps": steps,
                        "training_seconds": answer["training_seconds"],
                        "first_loss": losses[0],
                        "last_loss": float(np.mean(losses[-20:])),
                        **decoded,
                    }
                )
                note = f"{trainer.name}, seed {seed}: {decoded['acceptance_length']:.3f}"
                report.update(len(results), note=note)
    return results


def rows_of(
    trainers: Sequence[Trainer], results: Sequence[dict], run: PeagleRun, args: argparse.Namespace
) -> list[dict]:
    """A result row for each trainer, without provenance."""
    recipe = plain(run)
    sections = ("head", "cod", "data", "optimizer", "compute", "init", "loss", "train_embedding")
    rows = []
    for trainer in trainers:
        learned = [r for r in results if r["trainer"] == trainer.name]
        rows.append(
            {
                "name": "training_peers",
                "trainer": trainer.name,
                "trainer_version": trainer.worker.version,
                "dtype": run.compute.dtype,
                "threads": args.threads,
                "target": args.target.name,
                "recipe": {key: recipe[key] for key in sections},
                "rows": args.rows,
                "round_steps": args.round_steps,
                "tokens_per_second_of_rounds": trainer.tokens_per_second,
                "tokens_per_second": trainer.speed,
                "cpu_seconds_of_a_step": statistics.median(trainer.cpu_seconds),
                "losses_of_a_round": trainer.round_answer["losses"],
                "trained_parameters": trainer.round_answer["trained_parameters"],
                "seconds": args.seconds,
                "heads": learned,
                "acceptance_length": (
                    statistics.median(r["acceptance_length"] for r in learned) if learned else None
                ),
            }
        )
    return rows


def table_of(rows: Sequence[dict]) -> Table:
    """Speeds and acceptance lengths; ratios are to speculators with the faster attention."""
    table = Table(
        "trainer",
        "dtype",
        "tokens/s",
        "ratio",
        "CPU s a step",
        "steps",
        "length of each seed",
        "median",
    )
    theirs = max(r["tokens_per_second"] for r in rows if r["trainer"] != "peagle_jax")
    for row in rows:
        lengths = [f"{head['acceptance_length']:.3f}" for head in row["heads"]]
        median = row["acceptance_length"]
        table.add_row(
            f"{row['trainer']} {row['trainer_version']}",
            row["dtype"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / theirs:.2f}",
            f"{row['cpu_seconds_of_a_step']:.2f}",
            str(row["heads"][0]["steps"]) if lengths else "",
            ", ".join(lengths),
            f"{median:.3f}" if lengths else "",
        )
    return table


def draw(rows: Sequence[dict], path: Path) -> None:
    """Speeds as bars, and the acceptance length of every seed as a point."""
    rows = [row for row in rows if row["heads"]]
    with plt.rc_context(STYLE):
        figure, (speeds, lengths) = plt.subplots(1, 2, figsize=(9, 3.2))
        for i, row in enumerate(rows):
            color = COLORS[row["trainer"].split(",")[0]]
            bar = speeds.bar([i], [row["tokens_per_second"]], 0.6, color=color)
            speeds.bar_label(bar, [f"{row['tokens_per_second']:,.0f}"], fontsize=8)
            points = [head["acceptance_length"] for head in row["heads"]]
            lengths.plot([i] * len(points), points, "o", color=color, alpha=0.8)
            lengths.plot([i - 0.2, i + 0.2], [row["acceptance_length"]] * 2, color=color)
        seconds = rows[0]["seconds"]
        speeds.set_title("training tokens/s")
        lengths.set_title(f"acceptance length after {seconds:g} s, by seed")
        for axis in (speeds, lengths):
            names = [row["trainer"].replace(", ", ",\n") for row in rows]
            axis.set_xticks(range(len(rows)), names)
            axis.set_xlim(-0.6, len(rows) - 0.4)
            axis.grid(axis="x", visible=False)
        figure.savefig(path, bbox_inches="tight")
        plt.close(figure)


def compare(args: argparse.Namespace, folder: Path) -> list[dict]:
    """All result rows, without provenance."""
    run = load_run(args.recipe)
    if not isinstance(run, PeagleRun):
        next_step = "give a recipe with task: peagle"
        raise InputError(args.recipe, "must be of a P-EAGLE head", run.task, next_step)
    seq_len = args.seq_len or run.data.seq_len
    run = dataclasses.replace(
        run,
        target=str(args.target.resolve()),
        # no more of a corpus is encoded than the rows need
        data=dataclasses.replace(
            run.data,
            source=args.data,
            batch_size=1,
            seq_len=seq_len,
            max_chars=args.rows * seq_len * CHARS_OF_TOKEN,
        ),
        compute=dataclasses.replace(run.compute, dtype=args.dtype),
        depth_schedule=(),
    )
    heads = write_inputs(run, args, folder)
    job = {
        "folder": str(folder),
        "recipe": plain(run),
        "heads": [str(head) for head in heads],
        "threads": args.threads,
    }
    trainers: list[Trainer] = []
    try:
        for name in TRAINERS:
            trainers.append(start(name, job, args))
        measure_speed(trainers, heads[0], run, args)
        ours, *theirs = trainers
        learning = [ours, max(theirs, key=lambda trainer: trainer.speed)]
        results = learn(learning, heads, run, args, folder) if args.seconds > 0 else []
        return rows_of(trainers, results, run, args)
    finally:
        for trainer in trainers:
            trainer.worker.close()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--speculators", type=Path, required=True, help="made by install_speculators.sh"
    )
    packaged = "default: the package's"
    parser.add_argument("--target", type=Path, default=ASSETS / "target", help=packaged)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help=f"default: {RECIPE.name}")
    parser.add_argument("--data", help="JSONL (default: the Python standard library)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=512, help="packed rows (default: 512)")
    parser.add_argument("--seq-len", type=int, help="tokens of a row (default: the recipe's)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--round-steps", type=int, default=12, help="steps of each (default: 12)")
    parser.add_argument(
        "--seconds", type=float, default=120, help="training of a head; 0: speed only (default 120)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--num-prompts", type=int, default=16, help="default: 16")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="default: 96")
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--threads", type=int, default=threads, help="of torch (default: all)")
    parser.add_argument("--verbose", action="store_true", help="show what trainers print")
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    parser.add_argument("--picture", type=Path, help="draw them to this PNG")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args: Any = options().parse_args(argv)
    try:
        if not (args.speculators / "bin/python").exists():
            rule = "must be speculators' environment"
            next_step = f"make it: scripts/peers/install_speculators.sh {args.speculators}"
            raise InputError(args.speculators, rule, "no bin/python", next_step)
        for key in ("rows", "rounds", "round_steps", "seeds", "num_prompts", "threads"):
            value, option = getattr(args, key), f"--{key.replace('_', '-')}"
            if value < 1:
                raise InputError(option, "must be 1 or more", value, f"give {option} 1 or more")
        with tempfile.TemporaryDirectory() as folder:
            rows = compare(args, Path(folder))
    except InputError as error:
        print(f"compare_training: {error}", file=sys.stderr)
        return 2
    Console(width=120).print(table_of(rows))
    if args.picture and args.seconds > 0:
        draw(rows, args.picture)
    if args.record:
        append_rows(args.record, rows, "scripts/peers/compare_training.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
