"""`peagle regenerate` with its own engine, and with a real vLLM server as the writer.

    scripts/peers/install_vllm.sh .venv-vllm
    .venv/bin/python scripts/peers/check_regenerate.py --vllm .venv-vllm \\
        [--num-conversations 200] [--max-new-tokens 48] [--record results/regeneration.jsonl]

Both write the assistant's turns of the same conversations, two in each, greedily and in float32,
and the messages are compared, conversation by conversation. The target is the packaged one, whose
answers end at a line's end here: it is no chat model, and would seldom end a turn. Conversations
whose first answer is too long are left out by both. A row also has conversations per hour and core,
starting and compiling of the command included, that of the server not.

Exit code 0: all messages are the same. 1: some differ. 2: bad arguments, or a writer failed.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from peagle_jax import text
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows
from peagle_jax.types import InputError

START_SECONDS = 300.0  # that a server has to answer
CONTEXT, PROMPT_TOKENS = 1024, 24


def ending_target(folder: Path) -> Path:
    """A copy of the packaged target whose answers end with a line."""
    shutil.copytree(ASSETS / "target", folder)
    tokenizer = text.load_tokenizer(folder)
    assert tokenizer is not None
    ends = sorted(i for name, i in tokenizer.get_vocab().items() if name.startswith("Ċ"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ends = [config["eos_token_id"], *ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    return folder


def write_conversations(path: Path, target: Path, count: int) -> None:
    """Conversations of two turns, whose questions are excerpts of held-out source."""
    tokenizer = text.load_tokenizer(target)
    assert tokenizer is not None
    excerpts = standard_prompts(tokenizer, count)
    asked = [str(tokenizer.decode(list(ids)[:PROMPT_TOKENS])) for ids in excerpts]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            said = [asked[number % len(asked)], f"{asked[(number + 7) % len(asked)]} # {number}"]
            messages = []
            for content in said:
                messages.append({"role": "user", "content": content})
                messages.append({"role": "assistant", "content": "to be written"})
            file.write(json.dumps({"messages": messages}) + "\n")


@contextmanager
def serving(vllm: Path, target: Path, log: Path) -> Iterator[str]:
    """A server of the target; its URL.

    Raises:
      InputError: it does not answer in time.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # not bin/vllm, which looks for a package of that name: that of the CPU wheel has another
    words = [vllm / "bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    options = f"--port {port} --dtype float32 --max-model-len {CONTEXT} --max-num-seqs 32"
    words += [*options.split(), "--enforce-eager"]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    url = f"http://localhost:{port}"
    with log.open("w") as file:
        server = subprocess.Popen(
            words, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not answers(url):
            if server.poll() is not None or time.monotonic() > until:
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                got = lines[-1] if lines else "nothing printed"
                next_step = "make the environment anew with scripts/peers/install_vllm.sh"
                raise InputError(vllm, "its server must answer", got, next_step)
            time.sleep(1)
        yield url
    finally:
        # with its engine's process
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(url: str) -> bool:
    """Whether a server is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def regenerate(target: Path, data: Path, out: Path, limit: int, *options: str) -> float:
    """Runs the command; its seconds.

    Raises:
      InputError: it fails.
    """
    words = [sys.executable, "-m", "peagle_jax.cli", "regenerate", "--target", str(target)]
    words += ["--data", str(data), "--temperature", "0", "--batch-size", "32", "--out", str(out)]
    words += ["--max-new-tokens", str(limit), *options]
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        lines = done.stderr.strip().splitlines()
        got = lines[-1] if lines else f"exit code {done.returncode}"
        raise InputError("peagle regenerate", "must write all turns", got, "see what it says above")
    return time.perf_counter() - began


def messages_of(path: Path) -> dict[int, list]:
    """The messages of every conversation that has some, by its number."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["sample"]: row["messages"] for row in rows if "messages" in row}


def compare(args: argparse.Namespace, work: Path) -> list[dict]:
    """A row for each writer."""
    target = ending_target(work / "target")
    data = work / "conversations.jsonl"
    write_conversations(data, target, args.num_conversations)
    written, seconds = {}, {}
    limit = args.max_new_tokens
    with ProgressReport("regenerate", 3, unit="parts") as progress:
        ours = work / "ours.jsonl"
        seconds["peagle_jax"] = regenerate(target, data, ours, limit)
        written["peagle_jax"] = messages_of(ours)
        progress.update(1, note="our engine has written; vLLM's server starts")
        with serving(args.vllm, target, work / "server.log") as url:
            progress.update(2, note="the server writes")
            theirs = work / "theirs.jsonl"
            seconds["vllm"] = regenerate(target, data, theirs, limit, "--server", url)
        written["vllm"] = messages_of(theirs)
        progress.update(3, note="done")
    same = sum(written["vllm"].get(i) == said for i, said in written["peagle_jax"].items())
    return [
        {
            "name": "regeneration",
            "writer": writer,
            "target": "packaged, answers end with a line",
            "num_conversations": args.num_conversations,
            "written": len(written[writer]),
            "same": same,
            "turns": sum(
                m["role"] == "assistant" for said in written[writer].values() for m in said
            ),
            "max_new_tokens": limit,
            "seconds": seconds[writer],
            "conversations_per_hour_and_core": (
                3600 * len(written[writer]) / seconds[writer] / len(os.sched_getaffinity(0))
            ),
        }
        for writer in written
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="made by install_vllm.sh")
    parser.add_argument("--num-conversations", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    try:
        if not (args.vllm / "bin/python").exists():
            next_step = f"make it: scripts/peers/install_vllm.sh {args.vllm}"
            raise InputError(args.vllm, "must be vLLM's environment", "no bin/python", next_step)
        with tempfile.TemporaryDirectory() as folder:
            rows = compare(args, Path(folder))
    except InputError as error:
        print(f"check_regenerate: {error}", file=sys.stderr)
        return 2
    table = Table("writer", "conversations", "turns", "same", "seconds", "an hour and core")
    for row in rows:
        numbers = (f"{row['seconds']:.0f}", f"{row['conversations_per_hour_and_core']:,.0f}")
        counts = (str(row[key]) for key in ("written", "turns", "same"))
        table.add_row(row["writer"], *counts, *numbers)
    Console(width=100).print(table)
    if args.record:
        append_rows(args.record, rows, "scripts/peers/check_regenerate.py")
    return 0 if all(row["written"] == row["same"] > 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
