"""Tokenizer, prompts, loss masks."""

import copy
import dataclasses
import json

import numpy as np
import pytest
from tokenizers import processors

from peagle_jax import corpus, text
from peagle_jax.chat import apply_template
from peagle_jax.chat.encoding import has_first_tokens
from peagle_jax.chat.pieces import Conversation
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


def test_a_conversation_as_a_prompt(tokenizer, tmp_path):
    path = tmp_path / "p.jsonl"
    said = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    path.write_text(json.dumps({"messages": said, "system": "be kind"}))
    (prompt,) = text.read_prompts(path, tokenizer)
    assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(
        [{"role": "system", "content": "be kind"}, *said],
        tokenize=False,
        add_generation_prompt=True,
    )
    # a text to continue comes first, as in rows that have both
    path.write_text(json.dumps({"messages": said[:2], "prompt": "def"}))
    (prompt,) = text.read_prompts(path, tokenizer)
    assert tokenizer.decode(prompt) == "def"
    path.write_text(json.dumps({"messages": None, "prompt": "def"}))
    assert text.read_prompts(path, tokenizer) == [prompt]
    for messages, words in [
        (said[:2], r"p.jsonl:1: messages of a prompt must end with what the assistant is to answ"),
        ([], "messages must be a list of messages"),
        (None, "a prompt needs prompt_token_ids, prompt, messages or turns"),
        ([{"role": "user"}], "turn 1: content must be text"),
    ]:
        path.write_text(json.dumps({"messages": messages}))
        with pytest.raises(InputError, match=words):
            text.read_prompts(path, tokenizer)


@pytest.mark.parametrize("where", ["x.jsonl:3", "--prompt"])
def test_half_of_a_surrogate_pair_in_a_prompt(tokenizer, where):
    for prompt in ("def \udc80", Conversation(({"role": "user", "content": "def \udc80"},))):
        with pytest.raises(InputError) as caught:
            text.encode_prompt(prompt, tokenizer, where)
        assert str(caught.value) == (
            f"{where}: text must be Unicode; got \\udc80; remove the character, or write the text "
            "anew as UTF-8"
        )


def test_half_of_a_surrogate_pair_in_a_file(tokenizer, tmp_path):
    for row in ('{"prompt": "a\\ud800"}', '{"turns": ["\\udfff", "b"]}'):
        (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + row)
        with pytest.raises(InputError, match=r"p.jsonl:2: text must be Unicode; got \\ud[8f]"):
            text.read_prompts(tmp_path / "p.jsonl", tokenizer)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("tokenizer.json", "[]", "tokenizer.json: must be a JSON object; got list; download"),
        ("tokenizer.json", "{", "tokenizer.json: must be JSON; got JSONDecodeError: "),
        ("tokenizer.json", "[" * 9999, "tokenizer.json: must be JSON; got RecursionError: "),
        ("tokenizer.json", "{}", "tokenizer.json and tokenizer_config.json must be those of a tok"),
        ("tokenizer.json", '{"model_type": "qwen3"}', "must be those of a tokenizer; got KeyError"),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "x"}}', "must be those of a to"),
        ("tokenizer_config.json", "null", "tokenizer_config.json: must be a JSON object; got None"),
        (
            "tokenizer_config.json",
            '{"eos_token": 5}',
            "must be those of a tokenizer; got Type",
        ),
    ],
)
def test_a_tokenizer_that_is_none(tokenizer, tmp_path, name, content, words):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as caught:
        text.load_tokenizer(tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and words in message and "\n" not in message


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert text.load_tokenizer(tmp_path) is None


def test_texts_begin_as_prompts_do(tmp_path):
    """With the begin-of-sequence token of such tokenizers (Llama, Gemma), which is not trained.

    Special tokens that a text spells are text.
    """
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n" * 50], 300)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    tokenizer.save_pretrained(tmp_path)
    tokenizer = text.load_tokenizer(tmp_path)
    prompt = text.encode_prompt("def f", tokenizer, "x")
    assert prompt[0] == bos
    spelled = "def f<|endoftext|>(x)<s>"
    documents = [
        corpus.Document("a", spelled),
        corpus.Document("b", None, prompt="def f", completion="(x)"),
    ]
    (tokens, mask), (tokens_b, mask_b) = text.encode(tokenizer, documents)
    assert tokens[0] == bos == tokens_b[0] and not mask[0] and mask[1:].all()
    assert (tokens == bos).sum() == 1 and (tokens == tokenizer.eos_token_id).sum() == 1
    assert tokens[-1] == tokenizer.eos_token_id and tokenizer.decode(tokens[1:-1]) == spelled
    # of a conversation that was rendered already they are tokens, and none comes twice
    rendered = [
        dataclasses.replace(documents[0], text=one, special_tokens=True)
        for one in (spelled, f"<s>{spelled}<|endoftext|>")
    ]
    for ids, of_tokens in text.encode(tokenizer, rendered):
        ids, begins = ids.tolist(), ids.tolist().index(bos)
        assert begins == 0 and ids.count(bos) == 2 and ids.count(tokenizer.eos_token_id) == 2
        assert ids[-1] == tokenizer.eos_token_id and of_tokens[1:].all()
        assert tokenizer.decode(ids) == f"<s>{spelled}<|endoftext|>"
    begun = dataclasses.replace(documents[1], prompt="<s>def f", special_tokens=True)
    assert has_first_tokens(tokenizer, begun) and not has_first_tokens(tokenizer, documents[1])
    ((ids, _),) = text.encode(tokenizer, [begun])
    assert ids.tolist() == tokens_b.tolist()
    assert tokens_b[: len(prompt)].tolist() == prompt
    assert mask_b.tolist() == [i >= len(prompt) for i in range(len(tokens_b))]


EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").write_text("yes")
class Tokenizer:
    pass
"""


def test_code_of_a_tokenizer_is_never_run(tokenizer, tmp_path, monkeypatch):
    """Not even where "y" waits on stdin, where transformers would ask for leave."""
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    raw = json.loads(path.read_text())
    raw |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    path.write_text(json.dumps(raw))
    (tmp_path / "own.py").write_text(EVIL)
    asked = []
    monkeypatch.setattr("builtins.input", lambda words="": asked.append(words) or "y")
    with pytest.raises(InputError, match="must need no Python code of its own") as error:
        text.load_tokenizer(tmp_path)
    assert not asked and not (tmp_path / "ran").exists()
    assert "\n" not in str(error.value)


def test_a_template_cannot_leave_its_sandbox(tokenizer):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    own = copy.deepcopy(tokenizer)
    own.chat_template = escape
    with pytest.raises(InputError, match="SecurityError"):
        text.encode_turns(own, text.Conversation(({"role": "user", "content": "hi"},)), "here")


def test_a_rendered_conversation_has_a_largest_size(tokenizer, monkeypatch):
    monkeypatch.setattr(apply_template, "MOST_CHARACTERS", 40)
    own = copy.deepcopy(tokenizer)
    chat = text.Conversation(({"role": "user", "content": "hi"},))
    own.chat_template = "{{ 'ab' * 20 }}"
    assert text.encode_turns(own, chat, "here")
    own.chat_template = "{{ 'ab' * 20 }}c"
    with pytest.raises(
        InputError, match="^here: .* at most 40 characters .*; got 41; leave the conv"
    ):
        text.encode_turns(own, chat, "here")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_pointer_in_the_place_of_a_tokenizer(name, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(InputError, match=f"{name}: .*git-lfs pointer.*git lfs pull"):
        text.load_tokenizer(tmp_path)
