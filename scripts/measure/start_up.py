"""Seconds until `peagle generate` has answered, in its first process and in later ones.

    .venv/bin/python scripts/measure/start_up.py [--rounds 3] [--code FOLDER ...]
        [--vllm .venv-vllm] [--record results/start_up.jsonl]

In every round each folder of code answers one prompt of the packaged models three times, in a
process each: with an empty cache of compiled programs, and twice with what the first has left in
it. The second and third differ from the first by what is compiled.

`--code` names folders with a `peagle_jax` in them, this repository where none is named; another
state of it, in a worktree, is measured in the same rounds. `--vllm` is an environment of
scripts/peers/install_vllm.sh: a process of vLLM's answers the same prompt in each round, without
its compiler, which makes its start shorter and its steps longer, and without a tokenizer.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from peagle_jax import text
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import sys; from peagle_jax.cli import main; sys.exit(main())"
RUNS = "empty cache", "second run", "third run"
K, NEW_TOKENS, PROMPT = 5, 64, "def f(x):"
VLLM = "vLLM"


def seconds(words: list, places: dict[str, str], folder: Path) -> float:
    """Of a process, with environment variables and in a folder."""
    start = time.perf_counter()
    words, env = [str(word) for word in words], os.environ | places
    subprocess.run(words, env=env, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start


def our_seconds(code: Path, cache: Path) -> float:
    """Of `peagle generate`."""
    assets = code / "peagle_jax" / "assets"
    words = ["generate", "--target", assets / "target", "--drafter", assets / "peagle"]
    words += ["-k", K, "--max-new-tokens", NEW_TOKENS, "--prompt", PROMPT, "--ignore-eos"]
    places = {"PYTHONPATH": str(code), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    return seconds([sys.executable, "-c", PROGRAM, *words], places, code)


def vllm_seconds(environment: Path, folder: Path) -> tuple[float, str]:
    """Of vLLM, with files of its own in a folder; and its version."""
    assets = ROOT / "peagle_jax" / "assets"
    prompt = text.load_tokenizer(assets / "target").encode(PROMPT)
    job = {"target": str(assets / "target"), "drafter": str(assets / "peagle"), "k": K}
    job |= {"parallel": True, "prompts": [prompt], "max_new_tokens": NEW_TOKENS}
    (folder / "jobs.json").write_text(json.dumps([job]))
    script = ROOT / "scripts" / "peers" / "vllm_generate.py"
    words = [environment / "bin" / "python", script, folder / "jobs.json", folder / "out.jsonl"]
    taken = seconds(words, {}, folder)
    answer = json.loads((folder / "out.jsonl").read_text())
    if "outputs" not in answer:
        raise SystemExit(f"vLLM: {answer['error']}")
    return taken, answer["version"]


def commit(code: Path) -> str:
    """Of a folder of code."""
    words = ["git", "-C", str(code), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--code", type=Path, nargs="+", default=[ROOT], metavar="FOLDER")
    parser.add_argument("--vllm", type=Path, metavar="ENV")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    commits = {code: commit(code) for code in args.code}
    if len(set(commits.values())) < len(commits):
        parser.error(f"--code names one commit twice: {', '.join(commits.values())}")
    total = args.rounds * (len(RUNS) * len(args.code) + bool(args.vllm))
    measured: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    with ProgressReport("start-up", total, unit="processes") as report:
        for _ in range(args.rounds):
            for code in args.code:
                with tempfile.TemporaryDirectory() as cache:
                    for run in RUNS:
                        taken = our_seconds(code.resolve(), Path(cache))
                        measured[commits[code], run].append(taken)
                        report.update(report.completed + 1, note=run)
            if args.vllm:
                with tempfile.TemporaryDirectory() as folder:
                    taken, version = vllm_seconds(args.vllm.absolute(), Path(folder))
                measured[f"{VLLM} {version}", "a process"].append(taken)
                report.update(report.completed + 1, note=VLLM)
    rows = [
        {
            "name": "start_up",
            "code": code,
            "run": run,
            "seconds": statistics.median(times),
            "rounds": times,
        }
        for (code, run), times in measured.items()
    ]
    table = Table(title=f"Seconds of a process that writes {NEW_TOKENS} tokens")
    for column in ("code", "run", "median", "rounds"):
        table.add_column(column)
    for row in rows:
        rounds = "  ".join(f"{x:.1f}" for x in row["rounds"])
        table.add_row(row["code"], row["run"], f"{row['seconds']:.1f}", rounds)
    Console().print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/measure/start_up.py")


if __name__ == "__main__":
    main()
