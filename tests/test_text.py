"""Corpora, tokenizer, prompts."""

import json

import numpy as np
import pytest

from peagle_jax import text
from peagle_jax.train.data import pack
from peagle_jax.types import InputError


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(["def f(x):\n    return x\n" * 50, "äöü ß 漢字" * 20], 300)


def test_standard_library_is_the_default_corpus():
    documents = text.read_corpus(None)
    names = {d.name for d in documents}
    assert len(documents) > 500 and "json/decoder.py" in names and not any("site-packages" in n for n in names)


def test_a_folder_and_each_kind_of_line(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.md").write_text("x = 1\n")  # the same text twice
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert [d.name for d in text.read_corpus(tmp_path)] == ["a.py"]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    lines = [{"text": "t"}, {"prompt": "p"}, {"messages": messages}, {"turns": ["one", "two"]}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    got = text.read_corpus(tmp_path / "d.jsonl")
    assert [d.text for d in got] == ["t", "p", None, None] and got[2].messages == tuple(messages) and got[3].messages[1]["content"] == "two"


@pytest.mark.parametrize("name, content, words", [
    ("x.jsonl", b"{\"text\": 1}", "needs text, prompt, messages or turns"), ("x.jsonl", b"not json", "x.jsonl:1"), ("x.jsonl", b"[1]", "JSON object"),
    ("x.jsonl", b"\xff", "UTF-8"), ("x.jsonl", b"", "at least one document"), ("folder", None, "at least one document"),
])  # fmt: skip
def test_bad_corpora(name, content, words, tmp_path):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        text.read_corpus(path)


def test_the_split_is_by_name_and_stable():
    documents = [text.Document(f"file{i}", "x") for i in range(1000)]
    train, held_out = text.split(documents, 0.1)
    assert 60 < len(held_out) < 140 and {d.name for d in train} | {d.name for d in held_out} == {d.name for d in documents}
    assert [d.name for d in text.split(documents[:500], 0.1)[1]] == [d.name for d in held_out if int(d.name[4:]) < 500]


def test_bytes_survive(tokenizer):
    strange = "tab\t é 漢 🙂 \x00 end"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange
    assert tokenizer.mask_token == text.MASK and tokenizer.eos_token == text.END


def test_loss_masks(tokenizer):
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and"},
                {"role": "assistant", "content": "no"})  # fmt: skip
    plain, chat = text.encode(tokenizer, [text.Document("a", "def f"), text.Document("b", None, messages)])
    assert plain[1].all() and plain[0][-1] == tokenizer.eos_token_id
    spoken = tokenizer.decode(chat[0][chat[1]])
    assert spoken.replace("\n", "") == "yes<|im_end|>no<|im_end|>"


def test_pack():
    documents = [(np.array([1, 2, 3], np.int32), np.array([True, True, False])), (np.array([4, 5], np.int32), np.ones(2, bool))]
    rows = pack(documents, 4)
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]] and rows.document.tolist() == [[0, 0, 0, 1], [1, -1, -1, -1]]
    assert rows.supervised.tolist() == [[True, True, False, True], [True, False, False, False]]
    seen = [tuple(rows.batch(1, 3, step).tokens[0]) for step in range(6)]
    assert all(set(seen[i : i + 2]) == {(1, 2, 3, 4), (5, 0, 0, 0)} for i in (0, 2, 4))  # each epoch has each row once
    assert [tuple(rows.batch(1, 3, step).tokens[0]) for step in (4, 1)] == [seen[4], seen[1]]


def test_prompts(tokenizer, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2]}\n\n{"prompt": "def"}\n{"turns": ["hello", "more"]}\n')
    ids, plain, chat = text.read_prompts(path, tokenizer)
    assert ids == [1, 2] and tokenizer.decode(plain) == "def"
    assert tokenizer.decode(chat) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(InputError, match="text needs the target's tokenizer"):
        text.read_prompts(path, None)
