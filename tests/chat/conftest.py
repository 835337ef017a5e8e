"""A tokenizer with the marks of several templates."""

import pytest

from peagle_jax import text

SPECIAL = ["<|im_start|>", "<|eot|>", "<|return|>", "<turn|>", "</s>"]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = text.train_tokenizer(["<|im_start|>assistant\nyes no\n" * 40], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "bos_token": "<s>"})
    return tokenizer
