"""Does a training run that is killed again and again end with the weights of one that is not?

    .venv/bin/python scripts/measure/kills.py [--kills 20] [--seed 0] [--work runs/kills]
        [--record results/kills.jsonl]

Two processes train a tiny head together (jax.distributed), with accumulated gradients, on hidden
states in shards on disk. All of them get SIGKILL at once, at a random moment: so many steps after
the moment before, and a random part of a second later; every fourth time while they start. Then the
same commands go on. The run must end with the bits of the weights, and with the metrics, of a run
that nobody disturbed. Exit code 1 if it does not.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import yaml

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
PROCESSES = 2
SHARDS_OF_ROWS = 8
# The run's shape: every third step is saved, so that many moments are within a save.
STEPS, SAVE_EVERY = 160, 3
MAX_SECONDS = 900  # in which a session must come to its moment, or to its end
DELAY = 0.4  # seconds after a step at most
TARGET = {
    "vocab": 320,
    "layers": 4,
    "dim": 32,
    "mlp_dim": 48,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
}


def recipe_of_head(target: Path, corpus: Path, hidden_states: Path, out: Path, steps: int) -> dict:
    """A recipe of two processes with shards, accumulation, and growing depths."""
    return {
        "task": "peagle",
        "target": str(target),
        "out": str(out),
        "hidden_states_dir": str(hidden_states),
        "data": {"source": str(corpus), "held_out": 0.1, "seq_len": 48, "batch_size": 8},
        "head": {"layers": 2},
        "cod": {"num_depths": 3},
        "depth_schedule": [{"until": max(1, steps // 4), "num_depths": 2}],
        "feature_noise": {"noise": 0.05, "dropout": 0.1},
        "optimizer": {"steps": steps, "peak_lr": 2e-3, "warmup": 2},
        "gradient_accumulation": 2,
        "mesh": {"data": PROCESSES},
        "eval": {"every": None},
        "log_every": 1,
        "save_every": SAVE_EVERY,
    }


def write_models(folder: Path) -> tuple[Path, Path, Path]:
    """(target, corpus, hidden states in shards) in a folder, made where they are not there."""
    from peagle_jax.cli import main

    corpus, target, states = folder / "corpus", folder / "lm" / "model", folder / "hidden_states"
    corpus.mkdir(parents=True, exist_ok=True)
    for i in range(40):
        lines = [f"def f{i * j}(x):\n    return x + {i * j}\n" for j in range(1, 13)]
        (corpus / f"m{i}.py").write_text("".join(lines), encoding="utf-8")
    recipe = {
        "task": "lm",
        "out": str(folder / "lm"),
        "model": TARGET,
        "data": {"source": str(corpus), "seq_len": 48, "batch_size": 4},
        "optimizer": {"steps": 20, "warmup": 2},
    }
    (folder / "lm.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    extract = f"extract --target {target} --data {corpus} --out {states} --seq-len 48 "
    extract += f"--held-out 0.1 --rows-per-shard {SHARDS_OF_ROWS} --dtype float32"
    for command in (f"train {folder / 'lm.yaml'}", extract):
        if code := main(command.split()):
            raise SystemExit(code)
    return target, corpus, states


def start(recipe: Path) -> list[subprocess.Popen]:
    """The processes of a session, each with one device of a CPU."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "peagle_jax.cli", "train", str(recipe)]
    return [
        subprocess.Popen(
            [*words, "--coordinator", address, "--process", f"{i}/{PROCESSES}"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(1, PROCESSES + 1)
    ]


def metrics(out: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl that are there, without their times."""
    path = out / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def last_step(out: Path) -> int:
    """The last step that was logged; 0 before the first."""
    return max((row["step"] for row in metrics(out)), default=0)


def kill(processes: list[subprocess.Popen]) -> None:
    """SIGKILL for all of them, in an order of chance as that of machines that lose power."""
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()


class SessionEndedError(Exception):
    """A process ended by itself: to the others, a machine that was paused looks like a dead one."""


def session(recipe: Path) -> float:
    """Trains to the end; returns the seconds until the first step that it logged.

    Raises:
      SessionEndedError: a process ended with an error.
    """
    out = out_of(recipe)
    began, before, first = time.monotonic(), modified(out), None
    processes = start(recipe)
    while any(process.poll() is None for process in processes):
        if first is None and modified(out) != before and last_step(out):
            first = time.monotonic() - began
        if time.monotonic() - began > MAX_SECONDS:
            kill(processes)
            raise SessionEndedError(f"{recipe}: did not end in {MAX_SECONDS} s")
        time.sleep(0.05)
    errors = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise SessionEndedError("\n".join(error[-3000:] for error in errors))
    return first or time.monotonic() - began


def kill_at(recipe: Path, step: int, delay: float) -> dict:
    """Goes on, and kills all processes `delay` seconds after a step was logged.

    Step 0 is the start of the processes.

    Returns:
      The moment: the step that was logged last, and what stood under `checkpoints`.

    Raises:
      SessionEndedError: a process ended before.
    """
    out = out_of(recipe)
    # rows behind the last checkpoint are dropped when the run goes on, and written again
    before = modified(out)
    processes = start(recipe)
    began = time.monotonic()
    while step and not (modified(out) != before and last_step(out) >= step):
        if time.monotonic() - began > MAX_SECONDS or has_ended(processes):
            break
        time.sleep(0.002)
    time.sleep(delay)
    if has_ended(processes) or (step and last_step(out) < step):
        kill(processes)
        raise SessionEndedError("a process ended before it could be killed")
    kill(processes)
    saved = sorted(path.name for path in (out / "checkpoints").glob("*"))
    return {"asked": step, "delay": round(delay, 3), "step": last_step(out), "checkpoints": saved}


def out_of(recipe: Path) -> Path:
    return Path(yaml.safe_load(recipe.read_text(encoding="utf-8"))["out"])


def modified(out: Path) -> int:
    """When metrics.jsonl was written last; 0 where there is none."""
    path = out / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def has_ended(processes: list[subprocess.Popen]) -> bool:
    return any(process.poll() is not None for process in processes)


def insisting(work: Callable[[], T], lost: list[str]) -> T:
    """What `work` returns, which begins again where a session ended by itself, three times."""
    for _ in range(3):
        try:
            return work()
        except SessionEndedError as error:
            lost.append(str(error))
    raise SystemExit("\n".join(lost))


def disturb(
    recipe: Path,
    steps: int,
    kills: int,
    seed: int,
    start_seconds: float,
    start_every: int,
    lost: list[str],
) -> list[dict]:
    """Kills a run at random moments, every `start_every`-th of them at a start; returns them."""
    rng = random.Random(seed)
    # the last quarter is left for the session that ends the run
    wanted = sorted(rng.randrange(1, max(2, 3 * steps // 4)) for _ in range(kills))
    moments = []
    for i, step in enumerate(wanted):
        at_start = (i + 1) % start_every == 0
        # a second start compiles less, and must not come to the end
        delay = rng.uniform(0, start_seconds / 2 if at_start else DELAY)
        moment = functools.partial(kill_at, recipe, 0 if at_start else step, delay)
        moments.append(insisting(moment, lost))
        print(moments[-1], flush=True)
    return moments


def same_weights(a: Path, b: Path) -> bool:
    """Whether two folders have the same tensors, bit for bit."""
    from peagle_jax import weights

    x, y = weights.open_folder(a), weights.open_folder(b)
    return x.keys() == y.keys() and all(
        np.asarray(x[name]).tobytes() == np.asarray(y[name]).tobytes() for name in x
    )


def compare(work: Path, kills: int, seed: int, steps: int = STEPS, start_every: int = 4) -> dict:
    """An undisturbed and a disturbed run in a folder, and whether they came to the same."""
    target, corpus, states = write_models(work)
    recipes = {}
    for name in ("whole", "killed"):
        raw = recipe_of_head(target, corpus, states, work / name, steps)
        recipes[name] = work / f"{name}.yaml"
        recipes[name].write_text(yaml.safe_dump(raw), encoding="utf-8")
    lost: list[str] = []
    start_seconds = insisting(functools.partial(session, recipes["whole"]), lost)
    disturbance = recipes["killed"], steps, kills, seed, start_seconds, start_every
    moments = disturb(*disturbance, lost)
    insisting(functools.partial(session, recipes["killed"]), lost)
    unfinished = [
        name
        for moment in moments
        for name in moment["checkpoints"]
        if not name.isdigit() and name[0].isdigit()
    ]
    return {
        "name": "kills",
        "kills": len(moments),
        "processes": PROCESSES,
        "shards": len(list(states.glob("shard-*"))),
        "gradient_accumulation": 2,
        "steps": steps,
        "save_every": SAVE_EVERY,
        "seed": seed,
        "moments": [{k: v for k, v in m.items() if k != "checkpoints"} for m in moments],
        "kills_within_a_save": len(unfinished),
        "sessions_that_ended_by_themselves": len(lost),
        "equal_weights": same_weights(work / "whole" / "head", work / "killed" / "head"),
        "equal_metrics": metrics(work / "whole") == metrics(work / "killed"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/kills"))
    parser.add_argument("--record", type=Path, default=Path("results/kills.jsonl"))
    args = parser.parse_args()
    from peagle_jax.atomic_write import append_line
    from peagle_jax.provenance import provenance

    shutil.rmtree(args.work, ignore_errors=True)
    command = " ".join(["python scripts/measure/kills.py", *sys.argv[1:]])
    row = provenance(command) | compare(args.work.absolute(), args.kills, args.seed)
    args.record.parent.mkdir(parents=True, exist_ok=True)
    append_line(args.record, json.dumps(row))
    is_equal = row["equal_weights"] and row["equal_metrics"]
    print(f"{row['kills']} kills, weights and metrics {'equal' if is_equal else 'DIFFER'}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
