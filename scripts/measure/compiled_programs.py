"""How many programs mixed requests compile in a new process, and for how long.

    .venv/bin/python scripts/measure/compiled_programs.py [--requests 120] [--threads 1]
        [--record results/compiled_programs.jsonl]

One engine, or several side by side, of eight rows with the packaged target and its P-EAGLE head in
float32 answer the requests of long_load.py, which are of many lengths and kinds. JAX's cache on the
disk is not used. JAX says how long XLA compiled each program, and by what name.
"""

import argparse
import collections
import logging
import re
import time
from pathlib import Path

import jax
import numpy as np
from long_load import EXCERPTS, LONGEST_PROMPT, SLOTS, draw_request
from rich.console import Console
from rich.table import Table

from peagle_jax import corpus, load_pair, make_engine, text
from peagle_jax.decode.generate import make_drafter
from peagle_jax.pipelines.demo import ASSETS, HELD_OUT
from peagle_jax.pipelines.evaluate import held_out_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import append_rows

K = 5
# The first says how long a compilation took, the second what is compiled. Neither is printed.
LOGGERS = "jax._src.dispatch", "jax._src.interpreters.pxla"
COMPILED = re.compile(r"Finished XLA compilation of jit\((.+?)\) in ([\d.]+) sec")


class Compilations(logging.Handler):
    """Counts what JAX logs of compilations."""

    def __init__(self) -> None:
        super().__init__()
        self.count: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if found := COMPILED.search(record.getMessage()):
            self.count[found[1]] += 1
            self.seconds[found[1]] += float(found[2])


def watch_compilations() -> Compilations:
    """Counts from now on what JAX compiles."""
    compilations = Compilations()
    jax.config.update("jax_log_compiles", True)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(compilations)
    return compilations


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1, help="engines that share the rows")
    parser.add_argument("--record", type=Path, help="append a row to this JSONL")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # which the first compilation settles
    tokenizer = text.load_tokenizer(ASSETS / "target")
    assert tokenizer is not None
    target, head = load_pair(ASSETS / "target", ASSETS / "peagle")
    engine = make_engine(
        target,
        make_drafter(head, K),
        head.params,
        max_batch=SLOTS,
        num_threads=args.threads,
        tokenizer=tokenizer,
    )
    _, held_out = corpus.split(corpus.read_corpus(None), HELD_OUT)
    excerpts = held_out_prompts(tokenizer, held_out, EXCERPTS, LONGEST_PROMPT)
    rng, vocab = np.random.default_rng(0), target.config.vocab
    # a token that prompts may have, because nothing is NaN here
    requests = [draw_request(rng, excerpts, vocab, bad_token=0) for _ in range(args.requests)]
    compilations, num_tokens, begin = watch_compilations(), 0, time.perf_counter()
    with ProgressReport("answers", len(requests), unit="requests") as progress:
        for _, answer in engine.run(requests):
            num_tokens += answer.num_tokens
            progress.update(progress.completed + 1)
    row = {
        "name": "compiled_programs",
        "requests": len(requests),
        "tokens": num_tokens,
        "threads": args.threads,
        "k": K,
        "seconds": time.perf_counter() - begin,
        "programs": compilations.count.total(),
        "compile_seconds": sum(compilations.seconds.values()),
        "by_function": {
            name: {"programs": compilations.count[name], "seconds": seconds}
            for name, seconds in compilations.seconds.most_common()
        },
    }
    if args.record:
        append_rows(args.record, [row], "scripts/measure/compiled_programs.py")
    table = Table("function", "programs", "seconds")
    for name, of_name in row["by_function"].items():
        table.add_row(name, str(of_name["programs"]), f"{of_name['seconds']:.1f}")
    Console().print(table)
    print(
        f"{len(requests)} requests, {num_tokens:,} tokens in {row['seconds']:.0f} s; "
        f"{row['programs']} programs, {row['compile_seconds']:.0f} s of compiling"
    )


if __name__ == "__main__":
    main()
