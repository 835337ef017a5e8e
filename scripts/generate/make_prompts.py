"""Held-out prompts as token ids, for scripts/peers/check_vllm.py.

.venv/bin/python scripts/generate/make_prompts.py TARGET OUT.jsonl [COUNT]

COUNT (8) prompts of 48 tokens are excerpts of held-out files of the Python standard library.
"""

import json
import sys
from pathlib import Path

from peagle_jax import text
from peagle_jax.pipelines.demo import standard_prompts


def main(target: str, out: str, count: str = "8") -> None:
    prompts = standard_prompts(text.load_tokenizer(target), int(count))
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts]
    Path(out).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
