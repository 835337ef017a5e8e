"""Memory, seconds and disk of a corpus of synthetic conversations, up to its first batch.

    .venv/bin/python scripts/measure/corpus_memory.py [--conversations 10000,100000,1000000]
        [--format jsonl] [--packing cut] [--seq-len 512] [--work runs/corpus_memory]
        [--record results/corpus_memory.jsonl]

The conversations have two turns of about 12 and 30 words, and all differ; the packaged target's
tokenizer and chat template encode them. Each size is a process of its own, which does what training
does: it reads, drops duplicates, encodes into the run's folder, packs, computes the digest of all
rows, and cuts a batch of 8 rows; then all of it again, as a run that goes on. Memory is the peak
beyond what the imports and the tokenizer take, from /proc: the process's own (anonymous), and all
that is resident, mapped files included, which the system may drop at any time.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

TARGET = "peagle_jax/assets/target"
WORDS = "def return x value for in range list print class self import open file line name".split()
# arguments: corpus, folder of the store, packing, tokens of a row
CHILD = """
import json, sys, time
from pathlib import Path
from peagle_jax import text
from peagle_jax.train.corpus_store import CorpusChoice, open_corpus
from scripts.measure.peak_memory import PeakMemory

tokenizer = text.load_tokenizer(sys.argv[1])
tokenizer("a first text", return_offsets_mapping=True)
if sys.argv[2].endswith(".parquet"):
    import datasets
    import pyarrow.parquet
choice = CorpusChoice(sys.argv[2], held_out=0.05)

peak = PeakMemory(seconds=0.02)

def first_batch():
    start = time.perf_counter()
    store = open_corpus(Path(sys.argv[3]), choice, tokenizer)
    rows = store.pack(int(sys.argv[5]), sys.argv[4])
    rows.digest()
    batch = rows.batch(8, 0, 0)
    return time.perf_counter() - start, store, rows, batch

seconds, store, rows, batch = first_batch()
start = time.perf_counter()
for step in range(1, 101):
    rows.batch(8, 0, step)
batch_seconds = (time.perf_counter() - start) / 100
again, _, _, batch_again = first_batch()
assert (batch.tokens == batch_again.tokens).all()
own, resident = peak.stop()
print(json.dumps({
    "documents": len(store.order),
    "documents_held_out": len(store.held_out),
    "tokens": rows.num_tokens,
    "rows": len(rows),
    "padding": rows.padding,
    "seconds": seconds,
    "seconds_of_going_on": again,
    "seconds_of_a_batch": batch_seconds,
    "peak_own_bytes": own,
    "peak_resident_bytes": resident,
}))
"""


def conversations(count: int) -> Iterator[dict]:
    """Rows with `messages`, no two alike."""
    rng = np.random.default_rng(0)
    for i in range(count):
        picks = [WORDS[k] for k in rng.integers(len(WORDS), size=int(rng.integers(30, 55)))]
        question, answer = " ".join([str(i), *picks[:12]]), " ".join(picks[12:])
        turns = ("user", question), ("assistant", answer)
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_corpus(path: Path, count: int) -> None:
    """The conversations as JSONL or, by the name's ending, as Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for row in conversations(count):
                file.write(json.dumps(row) + "\n")
        return
    import pyarrow
    from pyarrow import parquet

    turn = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})
    schema = pyarrow.schema({"messages": pyarrow.list_(turn)})
    rows: list[dict] = []
    with parquet.ParquetWriter(path, schema) as writer:
        for row in conversations(count):
            rows.append(row)
            if len(rows) == 1000:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows.clear()
        if rows:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def measure(corpus: Path, store: Path, packing: str, seq_len: int) -> dict:
    """What CHILD prints, and the bytes of corpus and store."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, TARGET, corpus, store, packing, str(seq_len)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return {
        "corpus_bytes": corpus.stat().st_size,
        "store_bytes": sum(path.stat().st_size for path in store.iterdir()),
        **json.loads(done.stdout.splitlines()[-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", default="10000,100000,1000000")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--packing", choices=("cut", "whole"), default="cut")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--work", type=Path, default=Path("runs/corpus_memory"))
    parser.add_argument("--record", type=Path, default=Path("results/corpus_memory.jsonl"))
    args = parser.parse_args()
    from peagle_jax.atomic_write import append_line
    from peagle_jax.provenance import provenance

    command = "python scripts/measure/corpus_memory.py " + " ".join(sys.argv[1:])
    for count in map(int, args.conversations.split(",")):
        corpus, store = args.work / f"{count}.{args.format}", args.work / "store"
        shutil.rmtree(store, ignore_errors=True)
        write_corpus(corpus, count)
        row = provenance(command) | {
            "name": "corpus_memory",
            "format": args.format,
            "packing": args.packing,
            "seq_len": args.seq_len,
            "conversations": count,
            **measure(corpus, store, args.packing, args.seq_len),
        }
        args.record.parent.mkdir(parents=True, exist_ok=True)
        append_line(args.record, json.dumps(row))
        print(describe(row), flush=True)
        shutil.rmtree(args.work)


def describe(row: dict) -> str:
    """A line for the terminal."""
    own, resident = row["peak_own_bytes"] / 1e6, row["peak_resident_bytes"] / 1e6
    return (
        f"{row['conversations']:9,} conversations, {row['tokens']:11,} tokens: "
        f"{row['seconds']:6.1f} s, again {row['seconds_of_going_on']:5.1f} s; "
        f"peak {own:6.1f} MB own, {resident:6.1f} MB resident; "
        f"{row['store_bytes'] / 1e6:6.1f} MB on disk; padding {row['padding']:.2%}"
    )


if __name__ == "__main__":
    main()
