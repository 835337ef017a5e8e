"""A corpus, targets and their stored hidden states, for the tests of `peagle extract`."""

import json

import numpy as np
import pytest
import tiny

from peagle_jax import corpus, text
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.pipelines import extract as room
from peagle_jax.pipelines.extract import extract_hidden_states
from peagle_jax.pipelines.extraction_options import ExtractionOptions
from peagle_jax.train.data import pack
from peagle_jax.types import InputError

TEXTS = [f"def f{i}(x):\n    return x + {i * 37}\n" * (1 + i % 4) for i in range(22)]
CHAT = [{"role": "user", "content": "say f"}, {"role": "assistant", "content": "return f"}]
OPTIONS = dict(
    aux_hidden_state_layers=(1, 3),
    seq_len=12,
    batch_size=3,
    rows_per_shard=10,
    dtype="float32",
    compute_dtype="float32",
    max_chars=None,
    held_out=0.2,
    seed=4,
)
FLAGS = {
    "aux-hidden-state-layers": "1,3",
    "seq-len": 12,
    "batch-size": 3,
    "rows-per-shard": 10,
    "dtype": "float32",
    "compute-dtype": "float32",
    "held-out": 0.2,
    "seed": 4,
}


def write_corpus(path, texts=TEXTS, answer=(3, 4, 5)):
    rows = [
        *({"text": t} for t in texts),
        {"messages": CHAT},
        {"prompt_token_ids": [7, 8], "output_token_ids": list(answer)},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_target(folder, tokenizer, seed=0, **changes):
    save_target(tiny.target(seed, **{"vocab": len(tokenizer), **changes}), folder)
    tokenizer.save_pretrained(folder)
    return folder


def options(place, **changes):
    return ExtractionOptions(**{**OPTIONS, "source": str(place / "corpus.jsonl"), **changes})


def go(place, out, target=None, **changes):
    """Extracts; returns the lines that were said."""
    lines = []
    extract_hidden_states(
        target or place / "target",
        options(place, **changes),
        out,
        lines.append,
        command="peagle extract",
    )
    return lines


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def rows_of(place, tokenizer, seq_len=12, held_out=0.2):
    return pack(
        text.encode(
            tokenizer, corpus.split(corpus.read_corpus(place / "corpus.jsonl"), held_out)[0]
        ),
        seq_len,
    )


def close(got, want):
    """Equal up to rounding: a program of another batch size sums in another order."""
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), rtol=0)


def refuse(place, out, words, target=None, **changes):
    before = contents(out) if out.is_dir() else None
    with pytest.raises(InputError) as error:
        go(place, out, target, **changes)
    assert words in str(error.value) and "\n" not in str(error.value), str(error.value)
    assert (contents(out) if out.is_dir() else None) == before


def extract(place, out, **changes):
    """Extracts; returns the result."""
    return extract_hidden_states(
        place / "target",
        options(place, **changes),
        out,
        lambda line: None,
        command="peagle extract",
    )


def watch(monkeypatch, stop_at=None, error=None):
    """Replaces progress reports. Returns the list of (rows done, rows in all, note) reported.

    `error` is raised once `stop_at` rows are done.
    """
    reports = []

    class Report(room.ProgressReport):
        def update(self, completed, *, total=None, note=""):
            assert 0 < completed <= self.total
            reports.append((completed, self.total, note))
            if stop_at is not None and completed >= stop_at:
                raise error

    monkeypatch.setattr(room, "ProgressReport", Report)
    return reports
