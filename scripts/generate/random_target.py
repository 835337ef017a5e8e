"""Writes a target with random weights, of which speed can be measured, and nothing else.

    .venv/bin/python scripts/generate/random_target.py runs/random
    .venv/bin/python scripts/peers/compare_speed.py --target runs/random --methods plain \\
        --vllm .venv-vllm --max-new-tokens 64

Its sizes are those of Qwen3-0.6B, but for the vocabulary, which is the packaged target's, as its
tokenizer is. Others by options, which are keys of transformers' `Qwen3Config`. It takes torch and
transformers (`make test` installs them).
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from peagle_jax.pipelines.demo import ASSETS

# of Qwen3-0.6B's config.json
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    for key, size in SIZES.items():
        option = "--" + key.replace("_", "-")
        parser.add_argument(option, type=int, default=size, help=f"default: {size}")
    args = vars(parser.parse_args())
    out = args.pop("out")
    packaged = Qwen3Config.from_pretrained(ASSETS / "target")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=packaged.vocab_size,
        eos_token_id=packaged.eos_token_id,
        max_position_embeddings=packaged.max_position_embeddings,
        tie_word_embeddings=True,
        **args,
    )
    target = Qwen3ForCausalLM(config).to(torch.bfloat16)
    target.save_pretrained(out)
    for name in TOKENIZER:
        shutil.copyfile(ASSETS / "target" / name, out / name)
    print(f"{out}: {target.num_parameters() / 1e6:.0f} million random weights in bfloat16")


if __name__ == "__main__":
    main()
