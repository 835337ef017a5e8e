"""Tokenizer, prompts, loss masks."""

import numpy as np
import pytest

from peagle_jax import corpus, text
from peagle_jax.train.data import pack
from peagle_jax.types import InputError


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(["def f(x):\n    return x\n" * 50, "äöü ß 漢字" * 20], 300)


def test_bytes_survive(tokenizer):
    strange = "tab\t é 漢 🙂 \x00 end"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange
    assert tokenizer.mask_token == text.MASK and tokenizer.eos_token == text.END


def test_loss_masks(tokenizer):
    messages = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "no"},
    )
    plain, chat = text.encode(
        tokenizer, [corpus.Document("a", "def f"), corpus.Document("b", None, messages)]
    )
    assert plain[1].all() and plain[0][-1] == tokenizer.eos_token_id
    spoken = tokenizer.decode(chat[0][chat[1]])
    assert spoken.replace("\n", "") == "yes<|im_end|>no<|im_end|>"


def test_pack():
    documents = [
        (np.array([1, 2, 3], np.int32), np.array([True, True, False])),
        (np.array([4, 5], np.int32), np.ones(2, bool)),
    ]
    rows = pack(documents, 4)
    everything = rows.take(slice(None))
    assert everything.tokens.tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert everything.segment_ids.tolist() == [[0, 0, 0, 1], [1, -1, -1, -1]]
    assert everything.loss_mask.tolist() == [[True, True, False, True], [True, False, False, False]]
    seen = [tuple(rows.batch(1, 3, step).tokens[0]) for step in range(6)]
    assert all(
        set(seen[i : i + 2]) == {(1, 2, 3, 4), (5, 0, 0, 0)} for i in (0, 2, 4)
    )  # each epoch has each row once
    assert [tuple(rows.batch(1, 3, step).tokens[0]) for step in (4, 1)] == [seen[4], seen[1]]


def test_prompts(tokenizer, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt_token_ids": [1, 2]}\n\n{"prompt": "def"}\n{"turns": ["hello", "more"]}\n'
    )
    ids, plain, chat = text.read_prompts(path, tokenizer)
    assert ids == [1, 2] and tokenizer.decode(plain) == "def"
    assert tokenizer.decode(chat) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(InputError, match="text needs the target's tokenizer"):
        text.read_prompts(path, None)
