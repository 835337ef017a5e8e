"""Held-out prompts as token ids, for `peagle bench` and scripts/check_vllm.py.

.venv/bin/python scripts/make_prompts.py TARGET OUT.jsonl [COUNT]     (8 prompts of 48 tokens from held-out library source)
"""

import json
import sys
from pathlib import Path

from peagle_jax import text
from peagle_jax.pipelines.demo import HELD_OUT, PROMPT_TOKENS
from peagle_jax.pipelines.train_head import held_out_prompts


def main(target: str, out: str, count: str = "8") -> None:
    _, held_out = text.split(text.read_corpus(None), HELD_OUT)
    prompts = held_out_prompts(text.load_tokenizer(target), held_out, int(count), PROMPT_TOKENS)
    Path(out).write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in prompts), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
