"""Mixed requests for hours: whether speed and memory stay, and whether texts stay right.

    .venv/bin/python scripts/measure/long_load.py [--minutes 120] [-k 5 | -k auto] [--threads 2]
        [--record results/long_load.jsonl] [--picture docs/pictures/long_load.png]

Twelve clients share eight slots, of one engine or of several side by side, with the packaged target
and its P-EAGLE head, in float32. A client asks, waits for the answer, and asks again, for excerpts
of held-out Python source that it continues greedily or at drawn temperatures, with filters,
penalties, stop strings, streams and log-probabilities; of three that stream it leaves one after its
first tokens. One prompt in a hundred has a token for which the target's weights are NaN: it must
fail, and no other may but where it draws or drafts that token, which is counted. Every answer is
checked against its request. Once a minute the process is looked at: tokens written, its own memory,
memory mappings, open files, threads, arrays and compiled programs. At the end one greedy answer in
twenty is compared with plain decoding. With JAX's cache of compiled programs on the disk
(JAX_COMPILATION_CACHE_DIR), as servers should have it, those that the engine had to let go of come
back in a moment.

Ctrl-C ends the load and reports what there is. Exit code 1 if an answer is not its request's, or is
not what plain decoding writes, or if none was compared.
"""

import argparse
import asyncio
import dataclasses
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import (
    AsyncEngine,
    Generation,
    Model,
    Request,
    corpus,
    generate,
    load_pair,
    make_engine,
    text,
)
from peagle_jax.decode.base_engine import BaseEngine
from peagle_jax.decode.generate import MAX_ADAPTIVE_K, make_drafter
from peagle_jax.free_memory import num_mappings
from peagle_jax.pipelines.demo import ASSETS, HELD_OUT
from peagle_jax.pipelines.evaluate import held_out_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

SLOTS, CLIENTS = 8, 12
EXCERPTS, LONGEST_PROMPT, MOST_NEW_TOKENS = 256, 400, 200
LEAVE_EVERY, COMPARE_EVERY, FAIL_EVERY = 3, 20, 100
# A token that no excerpt has, and whose embedding is NaN here.
BAD_TOKEN = "<|im_start|>"
STOP_STRINGS = ("\n\n", "return", "):")
# What is seen once a minute: key of a row -> heading of the table and title of the picture.
WATCHED = {
    "tokens_per_second": "tokens/s",
    "own_memory_mb": "own memory, MB",
    "memory_mappings": "memory mappings",
    "open_files": "open files",
    "threads": "threads",
    "arrays": "arrays",
    "programs": "programs",
}


def draw_request(
    rng: np.random.Generator, excerpts: list[list[int]], vocab: int, bad_token: int
) -> Request:
    """A request of a kind that a server might see, or one that must fail."""
    prompt = excerpts[rng.integers(len(excerpts))]
    prompt = prompt[: rng.integers(1, len(prompt) + 1)]
    if rng.integers(FAIL_EVERY) == 0:
        prompt = [*prompt, bad_token, *prompt[:1]]
    options: dict = {
        "prompt": prompt,
        "max_new_tokens": int(rng.integers(1, MOST_NEW_TOKENS + 1)),
        "seed": int(rng.integers(2**31)),
        "stream": bool(rng.random() < 0.3),
    }
    if rng.random() < 0.5:
        options["temperature"] = float(rng.uniform(0.2, 1.2))
        filters = ("top_k", int(rng.integers(1, 50))), ("top_p", 0.9), ("min_p", 0.05), ("", 0)
        name, value = filters[rng.integers(len(filters))]
        options |= {name: value} if name else {}
    if rng.random() < 0.1:
        options |= {"repetition_penalty": 1.2, "logit_bias": {int(rng.integers(vocab)): -3.0}}
    if rng.random() < 0.1:
        options["stop"] = (STOP_STRINGS[rng.integers(len(STOP_STRINGS))],)
    if rng.random() < 0.1:
        options["logprobs"] = True
    return Request(**options)


def what_is_wrong(
    request: Request, answer: Generation, streamed: list[int], bad_token: int
) -> str | None:
    """Why an answer cannot be the request's; None if it can."""
    if answer.prompt_token_ids != list(request.prompt):
        return "another prompt"
    if bad_token in request.prompt:
        failed = answer.finish_reason == "error" and "NaN" in (answer.error or "")
        return None if failed and not streamed else "a prompt that gives NaN was answered"
    if answer.error is not None or answer.finish_reason not in ("stop", "length"):
        return f"ended by {answer.finish_reason}: {answer.error}"
    if answer.num_tokens > request.max_new_tokens:
        return "too long"
    if answer.finish_reason == "length" and answer.num_tokens < request.max_new_tokens:
        return "too short"
    if streamed != answer.output_token_ids:
        return "the stream and the answer differ"
    if request.logprobs != (answer.logprobs is not None):
        return "log-probabilities that nobody asked for, or none"
    if answer.text is None or any(stop in answer.text for stop in request.stop_strings):
        return "a stop string in the text, or no text"
    return None


class Load:
    """Clients, what they saw, and what the process looked like once a minute."""

    def __init__(
        self,
        engine: BaseEngine,
        excerpts: list[list[int]],
        vocab: int,
        bad_token: int,
        seconds: float,
    ) -> None:
        self.engine, self.excerpts, self.seconds = engine, excerpts, seconds
        self.vocab, self.bad_token = vocab, bad_token
        self.num_requests = self.num_left = self.num_tokens = 0
        self.num_failed = self.num_drew_it = 0
        self.kept: list[tuple[Request, list[int]]] = []
        self.wrong: list[str] = []
        self.minutes: list[dict[str, float]] = []

    async def run(self, report: ProgressReport) -> None:
        """Until the time is over. Cancelled, it stops where it is."""
        began = time.monotonic()
        async with AsyncEngine(self.engine) as server:
            clients = [
                asyncio.create_task(self._ask(server, np.random.default_rng(number), began))
                for number in range(CLIENTS)
            ]
            watcher = asyncio.create_task(self._watch(began, report))
            try:
                await asyncio.gather(*clients)
                if watcher.done():
                    await watcher  # it raises what ended it
            finally:
                for task in (*clients, watcher):
                    task.cancel()
                await asyncio.gather(*clients, watcher, return_exceptions=True)

    async def _ask(self, server: AsyncEngine, rng: np.random.Generator, began: float) -> None:
        while time.monotonic() < began + self.seconds:
            request = draw_request(rng, self.excerpts, self.vocab, self.bad_token)
            leaves = rng.integers(LEAVE_EVERY) == 0
            streamed: list[int] = []
            answer = None
            async for output in server.stream(request):
                streamed += output.new_token_ids
                self.num_tokens += len(output.new_token_ids)
                answer = output.answer
                if leaves and answer is None:
                    break
            self.num_requests += 1
            if answer is None:
                self.num_left += 1
                continue
            must_fail, gave_nan = self.bad_token in request.prompt, "NaN" in (answer.error or "")
            self.num_failed += must_fail and gave_nan
            if gave_nan and not must_fail:
                # the token was drawn, or drafted: rare, but what it must lead to
                self.num_drew_it += 1
                continue
            if problem := what_is_wrong(request, answer, streamed, self.bad_token):
                self.wrong.append(problem)
            is_plain = not (request.temperature or request.is_penalized or request.stop)
            if is_plain and not must_fail and rng.integers(COMPARE_EVERY) == 0:
                self.kept.append((request, answer.output_token_ids))

    async def _watch(self, began: float, report: ProgressReport) -> None:
        tokens, looked = 0, began
        while True:
            await asyncio.sleep(min(60, self.seconds / 8))
            now = time.monotonic()
            speed = (self.num_tokens - tokens) / (now - looked)
            tokens, looked = self.num_tokens, now
            programs = len(self.engine.stats.programs)
            seen = {"tokens_per_second": round(speed, 1), **look(), "programs": programs}
            seen["minutes"] = round((now - began) / 60, 2)
            self.minutes.append(seen)
            note = f"{self.num_requests:,} requests, {seen['own_memory_mb']:.0f} MB"
            report.update(min(int(now - began), int(self.seconds)), note=note)


def with_nan(target: Model, token: int) -> Model:
    """The target, for which one token's embedding is NaN."""
    table = target.params["embed"]["table"].at[token].set(np.nan)
    params = {**target.params, "embed": {**target.params["embed"], "table": table}}
    return dataclasses.replace(target, params=params)


def look() -> dict[str, float]:
    """What this process holds."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "own_memory_mb": round(int(status["RssAnon"].split()[0]) / 1000, 1),
        "memory_mappings": num_mappings(),
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "arrays": len(jax.live_arrays()),
    }


def count_different(target: Model, kept: list[tuple[Request, list[int]]]) -> int:
    """Of the answers that were kept, those that plain decoding does not write."""
    different = 0
    for start in range(0, len(kept), SLOTS):
        group = kept[start : start + SLOTS]
        prompts = [request.prompt for request, _ in group]
        longest = max(request.max_new_tokens for request, _ in group)
        answers = generate(target, None, prompts, max_new_tokens=longest)
        for (request, tokens), answer in zip(group, answers, strict=True):
            different += tokens != answer.output_token_ids[: request.max_new_tokens]
    return different


def quarters(minutes: list[dict[str, float]]) -> dict[str, list[float]]:
    """What was watched -> its medians over four equal parts of the time."""
    parts = np.array_split(np.arange(len(minutes)), 4)
    return {
        key: [statistics.median(minutes[i][key] for i in part) for part in parts if len(part)]
        for key in WATCHED
    }


def draw(minutes: list[dict[str, float]], path: Path) -> None:
    """A panel for each of what was watched, against minutes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(10, 4.6), sharex=True, layout="constrained")
    keys = [key for key in WATCHED if key != "threads"]
    for axis, key in zip(axes.flat, keys, strict=True):
        at = [seen["minutes"] for seen in minutes]
        axis.plot(at, [seen[key] for seen in minutes], color="#0b6e4f")
        axis.set_ylim(bottom=0)
        axis.set_title(WATCHED[key], fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("minutes")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("-k", default="5", help="tokens drafted per step, or auto")
    parser.add_argument("--threads", type=int, default=1, help="engines that share the slots")
    parser.add_argument("--record", type=Path, help="append a row to this JSONL")
    parser.add_argument("--picture", type=Path, help="draw what was watched to this PNG")
    args = parser.parse_args()
    tokenizer = text.load_tokenizer(ASSETS / "target")
    assert tokenizer is not None
    target, head = load_pair(ASSETS / "target", ASSETS / "peagle")
    is_auto, bad_token = args.k == "auto", tokenizer.convert_tokens_to_ids(BAD_TOKEN)
    assert isinstance(bad_token, int)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(
            with_nan(target, bad_token),
            make_drafter(head, MAX_ADAPTIVE_K if is_auto else int(args.k)),
            head.params,
            adaptive_k=is_auto,
            step_times=Path(folder),
            max_batch=SLOTS,
            num_threads=args.threads,
            tokenizer=tokenizer,
        )
        _, held_out = corpus.split(corpus.read_corpus(None), HELD_OUT)
        excerpts = held_out_prompts(tokenizer, held_out, EXCERPTS, LONGEST_PROMPT)
        vocab = target.config.vocab
        load = Load(engine, excerpts, vocab, bad_token, 60 * args.minutes)
        with ProgressReport("load", int(load.seconds), unit="seconds") as report:
            try:
                asyncio.run(load.run(report))
            except KeyboardInterrupt:
                print("ended early", file=sys.stderr)
    different = count_different(target, load.kept)
    of_quarters = quarters(load.minutes)
    row = {
        "name": "long_load",
        "k": args.k,
        "slots": SLOTS,
        "threads": args.threads,
        "compile_cache": jax.config.jax_compilation_cache_dir is not None,
        "clients": CLIENTS,
        "minutes": load.minutes[-1]["minutes"] if load.minutes else 0,
        "requests": load.num_requests,
        "left_in_the_middle": load.num_left,
        "failed_by_nan": load.num_failed,
        "drew_the_bad_token": load.num_drew_it,
        "tokens": load.num_tokens,
        "wrong": load.wrong[:20],
        "compared": len(load.kept),
        "different": different,
        "quarters": of_quarters,
        "by_minute": {key: [seen[key] for seen in load.minutes] for key in WATCHED},
    }
    if args.record:
        append_rows(args.record, [row], "scripts/measure/long_load.py")
    if args.picture:
        draw(load.minutes, args.picture)
    table = Table("median of each quarter", "1", "2", "3", "4")
    for key, values in of_quarters.items():
        table.add_row(WATCHED[key], *(f"{value:,.0f}" for value in values))
    Console().print(table)
    print(
        f"{load.num_requests:,} requests, {load.num_left:,} of them left in the middle and "
        f"{load.num_failed:,} failed as they had to; {load.num_tokens:,} tokens; "
        f"{len(load.wrong)} answers wrong; {different} of {len(load.kept)} greedy ones that were "
        "compared differ from plain decoding's"
    )
    return 1 if load.wrong or different or not load.kept else 0


if __name__ == "__main__":
    sys.exit(main())
