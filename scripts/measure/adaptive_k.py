"""`-k auto` beside plain decoding and every fixed K, in turns; and how well it knows its drafts.

    .venv/bin/python scripts/measure/adaptive_k.py [--ks 1 3 5 7] [--batch-sizes 1 8] \\
        [--texts random] [--rounds 5] [--record results/adaptive_k.jsonl]
        [--picture docs/pictures/adaptive_k.png]

Three texts: Python source that the packaged models were not trained on, decoded greedily; the same
at temperature 1, where drafting does not pay; and random tokens at temperature 2. Every decoder
decodes all prompts in each round, with a new engine: 8 prompts one by one, 48 in a batch of 8.
Decoders take turns at every prompt, or every 24 of a batch, and each turn begins with another one:
a machine that others use, too, has another speed some seconds later. Answers have drawn lengths,
half of `--max-new-tokens` to one and a half, the same for all: of equal lengths plain decoding
would keep all rows of a batch as long as each other, and so its caches small, as no server's
requests do.

Speeds are compared within a round (`over_plain`, the median), and over all (`total_over_plain`).
Before, every program is compiled, and an adaptive engine decodes other prompts of the kind, twice,
so that step times are known, changes of K compiled and something is known of the drafts, as in
every run but a user's first.

The expected calibration error compares, for every K drafts between two choices, the chance that was
estimated before for the first 1, 2, ..., K drafts to be accepted with the share that was.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import Engine, Request, load_pair, make_engine, text
from peagle_jax.decode.adaptive_k import LAST_STEPS, KChooser, candidates
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.parallel_engine import ParallelEngine
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

PROMPT_TOKENS = 48  # of a random prompt
TURN = 24  # prompts of a batch that are decoded in a turn
BINS = 10  # of the calibration error


def prompts_and_temperatures(target, num_prompts: int) -> dict[str, tuple[list, float]]:
    """The texts by name: so many prompts, and the temperature that they are continued at."""
    code = standard_prompts(text.load_tokenizer(ASSETS / "target"), num_prompts)
    rng = np.random.default_rng(20261123)
    random = rng.integers(0, target.config.vocab, (num_prompts, PROMPT_TOKENS)).tolist()
    return {
        "source code, greedy": (code, 0.0),
        "source code, temperature 1": (code, 1.0),
        "random tokens, temperature 2": (random, 2.0),
    }


def answer_lengths(count: int, mean: int) -> list[int]:
    """New tokens of each request, drawn from mean / 2 to 3 mean / 2, the same in every run."""
    rng = np.random.default_rng(20261125)
    return rng.integers(mean // 2, 3 * mean // 2 + 1, count).tolist()


class Always(KChooser):
    """A chooser that is not interested."""

    def choose(self, seconds):
        self.steps_left = LAST_STEPS
        return self.k

    def observe(self, *_):
        pass


class Decoder:
    """Decodes the prompts of a text with one K, a part of them in each turn."""

    def __init__(self, args, models, k: int | str, batch_size: int, step_times: Path) -> None:
        self.args, self.models, self.k = args, models, k
        self.batch_size, self.step_times = batch_size, step_times
        self.rounds: list[tuple[float, int]] = []  # seconds and tokens of each
        # (chance estimated, share accepted, steps) of every position between two choices
        self.judged: list[tuple[float, float, int]] = []
        self.steps_by_k: dict[int, int] = {}

    def warm_up(self, prompts: list, others: list, temperature: float) -> None:
        """Compiles every program, and decodes other prompts."""
        if self.k == "auto":
            for k in candidates(max(self.args.ks)):
                self.decode(self.engine(k), list(enumerate(prompts)), temperature)
        for _ in range(2 if self.k == "auto" else 1):
            self.decode(self.engine(), list(enumerate(others)), temperature)

    def begin(self) -> None:
        """A round, with a new engine."""
        self.rounds.append((0.0, 0))
        self.of_round = self.engine()
        for one in self.engines_of(self.of_round):
            if self.k == "auto":
                self._watch(one)

    def turn(self, prompts: list, temperature: float) -> None:
        """A part of a round.

        Args:
          prompts: with their numbers.
        """
        seconds, tokens = self.decode(self.of_round, prompts, temperature)
        before = self.rounds[-1]
        self.rounds[-1] = before[0] + seconds, before[1] + tokens

    def end(self) -> None:
        """The round is over."""
        for k, steps in self.of_round.stats.steps_by_k.items():
            self.steps_by_k[k] = self.steps_by_k.get(k, 0) + steps

    @property
    def seconds(self) -> list[float]:
        """Of a token, by rounds."""
        return [seconds / tokens for seconds, tokens in self.rounds]

    def engine(self, always: int | None = None):
        """A new engine; an adaptive one can be made to draft `always` as many tokens."""
        target, head = self.models
        engine = make_engine(
            target,
            make_drafter(head, max(self.args.ks) if self.k == "auto" else self.k, self.args.method)
            if self.k
            else None,
            head.params,
            adaptive_k=self.k == "auto",
            step_times=self.step_times,
            max_batch=self.batch_size,
        )
        for one in self.engines_of(engine):
            if always is not None:
                one.chooser = Always(max(self.args.ks), always)
        return engine

    def engines_of(self, engine) -> list[Engine]:
        """Those that share the requests."""
        return engine.engines if isinstance(engine, ParallelEngine) else [engine]

    def decode(self, engine, prompts: list, temperature: float) -> tuple[float, int]:
        """Seconds and new tokens of prompts, given with their numbers."""
        lengths = answer_lengths(num_prompts(self.args, self.batch_size), self.args.max_new_tokens)
        requests = [
            Request(
                prompt=prompt,
                max_new_tokens=lengths[number],
                temperature=temperature,
                seed=number,
                stop_ids=(),
            )
            for number, prompt in prompts
        ]
        start = time.perf_counter()
        num_tokens = sum(len(answer.output_token_ids) for _, answer in engine.run(requests))
        return time.perf_counter() - start, num_tokens

    def _watch(self, engine: Engine) -> None:
        """Keeps what the engine expected of its drafts, and what became of them."""
        chooser = engine.chooser
        observe = chooser.observe

        def watched(num_steps, num_drafts, accepted, *expected):
            if chooser.k and num_drafts:
                chances = chooser.survival.chances(chooser.k)
                shares = accepted[: chooser.k] / num_drafts
                steps = [num_drafts] * chooser.k
                self.judged += zip(chances.tolist(), shares.tolist(), steps, strict=True)
            observe(num_steps, num_drafts, accepted, *expected)

        chooser.observe = watched

    def calibration_error(self) -> float | None:
        """The expected calibration error; None without drafts."""
        if not self.judged:
            return None
        return calibration_error(*map(np.array, zip(*self.judged, strict=True)))


def calibration_error(chances: np.ndarray, shares: np.ndarray, steps: np.ndarray) -> float:
    """Mean distance of estimated chances and shares of `steps` over ten bins of chance."""
    which, error = np.minimum((chances * BINS).astype(int), BINS - 1), 0.0
    for i in range(BINS):
        here = which == i
        weights = steps[here] / steps.sum()
        error += abs(float((weights * (chances[here] - shares[here])).sum()))
    return error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 3, 5, 7])
    parser.add_argument("--method", choices=("peagle", "eagle3"), default="peagle")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", nargs="+", help="those whose names have one of these in them")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="mean of the drawn limits")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    parser.add_argument("--picture", type=Path, help="draw speeds over plain decoding to this PNG")
    args = parser.parse_args()
    if args.texts and args.picture:
        parser.error("--picture shows all texts; leave out --texts")
    models = load_pair(ASSETS / "target", ASSETS / args.method, dtype=jnp.dtype(args.dtype))
    most = max(num_prompts(args, batch_size) for batch_size in args.batch_sizes)
    all_texts = prompts_and_temperatures(models[0], 2 * most)
    wanted = args.texts or [""]
    texts = {name: x for name, x in all_texts.items() if any(part in name for part in wanted)}
    if not texts:
        parser.error(f"--texts must name some of {', '.join(all_texts)}")
    decoders = [0, *args.ks, "auto"]
    num_runs = len(texts) * len(args.batch_sizes) * len(decoders) * (1 + args.rounds)
    rows = []
    with (
        ProgressReport("adaptive K", num_runs, unit="runs") as progress,
        tempfile.TemporaryDirectory() as folder,
    ):
        for name, (prompts, temperature) in texts.items():
            for batch_size in args.batch_sizes:
                group = [Decoder(args, models, k, batch_size, Path(folder)) for k in decoders]
                count = num_prompts(args, batch_size)
                own, others = prompts[:count], prompts[most : most + min(count, 8)]
                for decoder in group:
                    decoder.warm_up(own, others, temperature)
                    note = f"{name}, batch {batch_size}, K = {decoder.k}"
                    progress.update(progress.completed + 1, note=note)
                for number in range(args.rounds):
                    one_round(group, list(enumerate(own)), temperature, number)
                    note = f"{name}, batch {batch_size}, round {number + 1}"
                    progress.update(progress.completed + len(group), note=note)
                rows += rows_of(args, name, group)
                if args.record:
                    append_rows(args.record, rows[-len(group) :], "scripts/measure/adaptive_k.py")
    Console(width=120).print(table_of(rows))
    if args.picture:
        draw(rows, args.picture)


def one_round(group: list[Decoder], prompts: list, temperature: float, number: int) -> None:
    """All decoders decode all prompts, in turns."""
    size = TURN if group[0].batch_size > 1 else 1
    for decoder in group:
        decoder.begin()
    for i in range(0, len(prompts), size):
        first = (number * -(-len(prompts) // size) + i // size) % len(group)
        for decoder in group[first:] + group[:first]:
            decoder.turn(prompts[i : i + size], temperature)
    for decoder in group:
        decoder.end()


def num_prompts(args, batch_size: int) -> int:
    """How many prompts are decoded: each row of a batch has six, three in a turn, so that most of
    the time all rows are in use.
    """
    return max(args.num_prompts, 6 * batch_size if batch_size > 1 else 1)


def rows_of(args, name: str, group: list[Decoder]) -> list[dict]:
    """Result rows; `over_best_fixed` compares with the fastest fixed K, plain decoding included."""
    plain, auto = group[0], group[-1]
    best = min(group[:-1], key=lambda decoder: statistics.median(decoder.seconds))

    def ratios(decoder: Decoder, other: Decoder) -> list[float]:
        pairs = zip(other.seconds, decoder.seconds, strict=True)
        return [theirs / ours for theirs, ours in pairs]

    def total(decoder: Decoder, other: Decoder) -> float:
        return sum(other.seconds) / sum(decoder.seconds)

    return [
        {
            "name": "adaptive_k",
            "text": name,
            "method": args.method,
            "dtype": args.dtype,
            "batch_size": decoder.batch_size,
            "k": decoder.k,
            "num_prompts": num_prompts(args, decoder.batch_size),
            "max_new_tokens": args.max_new_tokens,
            "lengths_are_drawn": True,
            "tokens_per_second": 1 / statistics.median(decoder.seconds),
            "over_plain": statistics.median(ratios(decoder, plain)),
            "over_plain_quartiles": quartiles(ratios(decoder, plain)),
            "over_best_fixed": statistics.median(ratios(decoder, best)),
            "over_best_fixed_quartiles": quartiles(ratios(decoder, best)),
            "total_over_plain": total(decoder, plain),
            "total_over_best_fixed": total(decoder, best),
            "rounds": len(decoder.seconds),
            "in_turns_of_prompts": TURN if decoder.batch_size > 1 else 1,
            "best_fixed_k": best.k,
            "calibration_error": decoder.calibration_error() if decoder is auto else None,
            "steps_by_k": {str(k): n for k, n in sorted(decoder.steps_by_k.items())},
        }
        for decoder in group
    ]


def quartiles(ratios: list[float]) -> list[float]:
    """The first and the third: half of the rounds lie between them."""
    return np.quantile(ratios, [0.25, 0.75]).tolist()


def spread(row: dict) -> list[tuple[str, list[float]]]:
    """Both ratios of a row, by name, with their quartiles."""
    return [(name, row[f"{name}_quartiles"]) for name in ("over_plain", "over_best_fixed")]


def table_of(rows: list[dict]) -> Table:
    """A line for each text and batch size."""
    table = Table("text", "batch", "K", "tokens/s", "over plain", "over best fixed", "steps by K")
    for row in rows:
        error = row["calibration_error"]
        note = "" if row["k"] != "auto" else json.dumps(row["steps_by_k"]).replace('"', "")
        note += "" if error is None else f", calibration error {error:.1%}"
        table.add_row(
            row["text"],
            str(row["batch_size"]),
            str(row["k"]),
            f"{row['tokens_per_second']:.0f}",
            *(f"{row[name]:.2f} ({low:.2f} to {high:.2f})" for name, (low, high) in spread(row)),
            note,
        )
    return table


def draw(rows: list[dict], path: Path) -> None:
    """Speeds over plain decoding: a panel for each batch size, a group of bars for each text."""
    import matplotlib.pyplot as plt

    batch_sizes = sorted({row["batch_size"] for row in rows})
    texts = list(dict.fromkeys(row["text"] for row in rows))
    ks = list(dict.fromkeys(row["k"] for row in rows if row["k"]))
    figure, axes = plt.subplots(
        1, len(batch_sizes), figsize=(10, 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, batch_size in zip(axes[0], batch_sizes, strict=True):
        for i, k in enumerate(ks):
            here = [r for r in rows if r["k"] == k and r["batch_size"] == batch_size]
            places = [texts.index(r["text"]) + (i - len(ks) / 2) * 0.16 for r in here]
            color = "#0b6e4f" if k == "auto" else plt.get_cmap("Greys")(0.25 + 0.12 * i)
            speeds = [r["over_plain"] for r in here]
            axis.bar(places, speeds, 0.15, color=color, label=f"K = {k}")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(texts)), [t.replace(", ", ",\n") for t in texts], fontsize=8)
        axis.set_title(f"batch {batch_size}: speed over plain decoding", fontsize=10)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
