"""Held-out prompts as token ids, for scripts/peers/check_vllm.py.

.venv/bin/python scripts/generate/make_prompts.py TARGET OUT.jsonl [COUNT [LENGTH]]

COUNT (8) prompts of 48 tokens are excerpts of held-out files of the Python standard library. With
LENGTH they have so many tokens, and are of the first files that are four times as long.
"""

import json
import sys
from pathlib import Path

from peagle_jax import corpus, text
from peagle_jax.pipelines.demo import HELD_OUT, standard_prompts
from peagle_jax.pipelines.evaluate import held_out_prompts

ALL = 10**6  # more than there are


def main(target: str, out: str, count: str = "8", length: str | None = None) -> None:
    tokenizer = text.load_tokenizer(target)
    if length is None:
        prompts = standard_prompts(tokenizer, int(count))
    else:
        assert tokenizer is not None
        _, held_out = corpus.split(corpus.read_corpus(None), HELD_OUT)
        prompts = held_out_prompts(tokenizer, held_out, ALL, int(length))[: int(count)]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts]
    Path(out).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
