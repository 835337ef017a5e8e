"""Is anything lost when a command that writes is killed at a random moment?

    .venv/bin/python scripts/measure/faults.py [--kills 100] [--seed 0] [--only COMMAND ...]
        [--work runs/faults] [--record results/faults.jsonl]

Each command is run once to the end on tiny models, and once more in another folder, where it gets
SIGKILL at random moments of the time that it takes; the last time it is left alone. What it has
written must then be what the undisturbed run has written, and no other file may be there. Two of
each command at once are refused, or end as one does. The demo and experiments, which take a minute
or more, are killed a few times; the others share the rest. Exit code 1 if anything differs.

Runs of two processes: scripts/measure/kills.py.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "measure"))

from kills import metrics, same_weights, write_models  # noqa: E402

MAX_SECONDS = 900  # of one command
LONG_KILLS = 2  # of commands that take a minute or more
LOCKED = " at a time"  # in each refusal by a lock
# files whose bytes differ between two runs that are alike, because they hold times or random names
TIMES = ("result.json", "origin.json", "lock", "metrics.jsonl", "checksums.json", "head.json")


@dataclasses.dataclass(frozen=True)
class Case:
    """One command that writes.

    Attributes:
      words: after `peagle`; they are run in a folder with the models as ../models.
      out: the file or folder that it writes, there.
      same: (out of the undisturbed run, out of the other) -> whether they are equal.
      module: what is run with the words.
      is_long: it takes a minute or more, and so is killed LONG_KILLS times.
    """

    words: tuple[str, ...]
    out: str
    same: Callable[[Path, Path], bool]
    module: str = "peagle_jax.cli"
    is_long: bool = False


def same_bytes(a: Path, b: Path) -> bool:
    """Whether two files, or all files of two folders, are equal."""
    return contents(a) == contents(b)


def contents(path: Path) -> dict[str, str]:
    """Name -> hash of every file; of those that have times, only the name."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {str(p.relative_to(path)): "" if p.name in TIMES else sha256(p) for p in files}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same_run(a: Path, b: Path) -> bool:
    """Whether two training runs have the same names, exported weights and metrics."""
    names = [sorted(p.name for p in run.iterdir()) for run in (a, b)]
    states = [sorted(p.name for p in (run / "checkpoints").iterdir()) for run in (a, b)]
    is_equal = names[0] == names[1] and states[0] == states[1] and metrics(a) == metrics(b)
    heads = [sorted(contents(run / "head")) for run in (a, b)]
    return is_equal and heads[0] == heads[1] and same_weights(a / "head", b / "head")


def same_state(a: Path, b: Path) -> bool:
    """Whether two converted training runs are of the same head; Orbax's own names are random."""
    from peagle_jax.checkpoints.runs import open_run

    names = [sorted(p.name for p in run.iterdir()) for run in (a, b)]
    x, y = open_run(a).tensors, open_run(b).tensors
    is_equal = names[0] == names[1] and x.keys() == y.keys()
    return is_equal and all(read(x[name]) == read(y[name]) for name in x)


def read(tensor: object) -> bytes:
    import numpy as np

    return np.asarray(tensor).tobytes()


def same_benchmark(a: Path, b: Path) -> bool:
    """Whether two benchmarks have the same files and accepted the same drafts.

    Rows are appended to those of benchmarks before, also of killed ones.
    """
    names = [sorted(p.name for p in folder.iterdir()) for folder in (a, b)]
    keys = ("method", "k", "batch_size", "num_drafts", "num_accepted_per_pos", "acceptance_length")
    rows = [
        {json.dumps([row.get(key) for key in keys]) for row in json_lines(folder)}
        for folder in (a, b)
    ]
    return names[0] == names[1] and rows[0] == rows[1]


def json_lines(folder: Path) -> list[dict]:
    lines = [line for p in sorted(folder.glob("*.jsonl")) for line in p.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def same_demo(a: Path, b: Path) -> bool:
    """Whether two demos have the same files, weights and accepted drafts."""
    weights = [
        {p.relative_to(out): sha256(p) for p in out.rglob("*.safetensors")} for out in (a, b)
    ]
    return names_of(a) == names_of(b) and weights[0] == weights[1] and same_benchmark(a, b)


def names_of(folder: Path) -> list[str]:
    """Of all files but those of Orbax's folders, whose names are random."""
    names = (p.relative_to(folder) for p in folder.rglob("*"))
    return sorted(str(n) for n in names if not {"checkpoints", "frozen"} & {*n.parts[:-2]})


def same_experiments(a: Path, b: Path) -> bool:
    """Whether two runs of experiments have the same rows, but for times, and names in the cache."""
    of_run = ("experiment", "variant", "seed", "stages", "head_key", "steps", "measurements")
    rows = [
        [{key: row[key] for key in of_run} for row in json_lines(out / "rows")] for out in (a, b)
    ]
    names = [
        [sorted(p.name for p in folder.iterdir()) for folder in (out, out / "cache", out / "rows")]
        for out in (a, b)
    ]
    return rows[0] == rows[1] and names[0] == names[1]


def cases(models: Path) -> dict[str, Case]:
    """Every command that writes, on the models of `make_models`."""
    target, head, eagle3 = (
        f"../models/{name}" for name in ("lm/model", "head/head", "eagle3/head")
    )
    corpus, prompts = "../models/corpus", "../models/prompts.jsonl"
    text = ("--target", target, "--data", corpus, "--held-out", "0.1")
    return {
        "train": Case(("train", "../models/head.yaml", "--out", "out"), "out", same_run),
        "extract": Case(
            ("extract", *text, "--out", "out", "--seq-len", "48", "--rows-per-shard", "8"),
            "out",
            same_bytes,
        ),
        "regenerate": Case(
            ("regenerate", *text, "--out", "out.jsonl", "--num-samples", "40")
            + ("--max-new-tokens", "12", "--batch-size", "4"),
            "out.jsonl",
            same_bytes,
        ),
        "generate": Case(
            ("generate", "--target", target, "--drafter", head, "--prompts", prompts)
            + ("--max-new-tokens", "16", "--out", "out.jsonl"),
            "out.jsonl",
            same_bytes,
        ),
        "convert to vllm": Case(("convert", head, "out", "--to", "vllm"), "out", same_bytes),
        "convert to orbax": Case(("convert", head, "out", "--to", "orbax"), "out", same_state),
        "convert to gguf": Case(
            ("convert", eagle3, "out.gguf", "--to", "gguf", "--target", target),
            "out.gguf",
            same_bytes,
        ),
        "bench": Case(
            ("bench", "--target", target, "--drafter", head, "--prompts", prompts, "-k", "2")
            + ("--max-new-tokens", "8", "--repeats", "1", "--out", "out"),
            "out",
            same_benchmark,
        ),
        "demo": Case(("demo", "--budget", "smoke", "--out", "out"), "out", same_demo, is_long=True),
        "experiments": Case(
            ("hidden_designs", "--only", "shared", "--seeds", "1", "--budget", "smoke")
            + ("--cache", "out/cache", "--results", "out/rows"),
            "out",
            same_experiments,
            module="experiments.run",
            is_long=True,
        ),
    }


def make_models(folder: Path) -> None:
    """A target, trained heads, a corpus and prompts."""
    from peagle_jax.cli import main

    target, corpus, _ = write_models(folder)
    recipe = {
        "task": "peagle",
        "target": str(target),
        "out": str(folder / "head"),
        "data": {"source": str(corpus), "held_out": 0.1, "seq_len": 48, "batch_size": 4},
        "head": {"layers": 2},
        "cod": {"num_depths": 3},
        "optimizer": {"steps": 60, "peak_lr": 2e-3, "warmup": 2},
        "eval": {"every": None},
        "log_every": 1,
        "save_every": 5,
    }
    # llama.cpp has no norms of queries and keys
    eagle3 = {"task": "eagle3", "out": str(folder / "eagle3"), "head": {"qk_norm": False}}
    eagle3 = {key: value for key, value in recipe.items() if key != "cod"} | eagle3
    for name, run in (("head", recipe), ("eagle3", eagle3)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
        if code := main(["train", str(folder / f"{name}.yaml")]):
            raise SystemExit(code)
    lines = [json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def start(case: Case, folder: Path) -> subprocess.Popen:
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment["TMPDIR"] = str(temporary)
    return subprocess.Popen(
        [sys.executable, "-m", case.module, *case.words],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_to_end(case: Case, folder: Path) -> tuple[float, int, str]:
    """(seconds, exit code, what it said on stderr)."""
    began = time.monotonic()
    process = start(case, folder)
    _, error = process.communicate(timeout=MAX_SECONDS)
    return time.monotonic() - began, process.returncode, error


def kill_at_random(case: Case, folder: Path, seconds: float, rng: random.Random) -> float | None:
    """SIGKILL at a moment of the time that the command takes; when, or None if it had ended.

    Raises:
      RuntimeError: it had ended with an error.
    """
    moment = rng.uniform(0.02, 1) * seconds
    process = start(case, folder)
    try:
        _, error = process.communicate(timeout=moment)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return round(moment, 2)
    if process.returncode:
        raise RuntimeError(error[-600:])
    return None


def kill_often(
    case: Case, folder: Path, seconds: float, kills: int, rng: random.Random
) -> tuple[list[float], int]:
    """Kills a command so many times; the moments, and how often it had ended before.

    Then it has nothing left to do, and begins anew in an empty folder.
    """
    moments: list[float] = []
    num_ended = 0
    while len(moments) < kills and num_ended < 2 * kills + 6:
        moment = kill_at_random(case, folder, seconds, rng)
        if moment is not None:
            moments.append(moment)
        else:
            num_ended += 1
            shutil.rmtree(folder)
            folder.mkdir()
    return moments, num_ended


def two_at_once(case: Case, folder: Path) -> str | None:
    """Starts a command twice in one folder: one ends well; what is wrong with the other, if so."""
    processes = [start(case, folder) for _ in range(2)]
    said = [process.communicate(timeout=MAX_SECONDS)[1] for process in processes]
    codes = [process.returncode for process in processes]
    if 0 not in codes:
        return f"both failed: {said}"
    for code, error in zip(codes, said, strict=True):
        if code not in (0, 2) or (code == 2 and (error.count("\n") != 1 or LOCKED not in error)):
            return f"exit code {code}: {error[-600:]}"
    return None


def judge(name: str, case: Case, work: Path, kills: int, seed: int) -> dict:
    """Runs a command undisturbed, killed, and twice at once; what differs."""
    rng, began = random.Random(f"{name} {seed}"), time.monotonic()
    folders = {kind: work / name.replace(" ", "_") / kind for kind in ("whole", "killed", "twice")}
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder.parent / "models").unlink(missing_ok=True)
        (folder.parent / "models").symlink_to(work / "models")
    if not case.is_long:
        run_to_end(case, folders["twice"])  # compiles
        shutil.rmtree(folders["twice"])
        folders["twice"].mkdir()
    seconds, code, error = run_to_end(case, folders["whole"])
    problems = [] if code == 0 else [f"undisturbed: {error[-600:]}"]
    moments: list[float] = []
    num_ended = 0
    try:
        moments, num_ended = kill_often(case, folders["killed"], seconds, kills, rng)
    except RuntimeError as error:
        problems.append(f"between kills: {error}")
    else:
        if len(moments) < kills:
            problems.append(f"{kills - len(moments)} kills did not come in time")
    _, code, error = run_to_end(case, folders["killed"])
    if code:
        problems.append(f"after kills: {error[-600:]}")
    elif not case.same(folders["whole"] / case.out, folders["killed"] / case.out):
        problems.append("after kills: another result")
    if problem := two_at_once(case, folders["twice"]):
        problems.append(f"twice at once: {problem}")
    elif not case.same(folders["whole"] / case.out, folders["twice"] / case.out):
        problems.append("twice at once: another result")
    names = {kind: names_beside(folder) for kind, folder in folders.items()}
    for kind in ("killed", "twice"):
        if names[kind] != names["whole"]:
            problems.append(f"{kind}: files {names[kind]}, not {names['whole']}")
    return {
        "fault": name,
        "seconds": round(seconds, 1),
        "moments": moments,
        "ended_before": num_ended,
        "seconds_in_all": round(time.monotonic() - began, 1),
        "problems": problems,
    }


def names_beside(folder: Path) -> list[str]:
    """What is in a folder after a command, and in that for temporary files."""
    return sorted(p.name for p in [*folder.iterdir(), *(folder / "tmp").iterdir()])


def shares(kills: int, judged: dict[str, Case]) -> dict[str, int]:
    """How often each command is killed; where it does not come out even, the first ones more."""
    short = [name for name, case in judged.items() if not case.is_long]
    if not short:
        short = list(judged)
    few = min(LONG_KILLS, kills // len(judged))
    of = {name: few for name in judged if name not in short}
    rest = kills - sum(of.values())
    return of | {name: rest // len(short) + (i < rest % len(short)) for i, name in enumerate(short)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="over all commands (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--only", nargs="+", metavar="COMMAND", help="as the rows name them")
    parser.add_argument("--work", type=Path, default=Path("runs/faults"))
    parser.add_argument("--record", type=Path, help="JSONL to append to (default: print only)")
    args = parser.parse_args()
    from peagle_jax.atomic_write import append_line
    from peagle_jax.provenance import provenance

    work = args.work.absolute()
    shutil.rmtree(work, ignore_errors=True)
    make_models(work / "models")
    judged = cases(work / "models")
    if unknown := [name for name in args.only or () if name not in judged]:
        parser.error(f"--only {unknown[0]!r}: use {', '.join(judged)}")
    if args.only:
        judged = {name: judged[name] for name in args.only}
    of_this = provenance(" ".join(["python scripts/measure/faults.py", *sys.argv[1:]]))
    failed = 0
    kills_of = shares(args.kills, judged)
    for name, case in judged.items():
        kills = kills_of[name]
        row = {"name": "faults"} | of_this | judge(name, case, work, kills, args.seed)
        failed += bool(row["problems"])
        say = "; ".join(row["problems"]) or "the same result"
        print(f"{name}: {len(row['moments'])} kills in {row['seconds']} s: {say}", flush=True)
        if args.record is not None:
            append_line(args.record, json.dumps(row))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
