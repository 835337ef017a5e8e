"""Options of a chat template, such as enable_thinking: of a row, or of all rows."""

import dataclasses
import json

import pytest
from spans import assistant, user

from peagle_jax import corpus, text
from peagle_jax.chat.apply_template import check_template_kwargs
from peagle_jax.chat.encoding import conversation_of, encode_document, encode_turns
from peagle_jax.chat.pieces import Conversation, chat_body
from peagle_jax.document_rows import document_of_row
from peagle_jax.train.document_file import DocumentFile, DocumentWriter
from peagle_jax.types import InputError

# as Qwen3's: where nothing is to be thought, the prompt has thoughts that are empty already
THINKS = (
    "{{ '[' ~ effort | default('low') ~ ']' }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
OFF = {"enable_thinking": False}
MESSAGES = [user("hi"), assistant("yes")]


@pytest.fixture
def thinks(tokenizer):
    tokenizer.chat_template = THINKS
    return tokenizer


def document(**columns):
    return document_of_row({"messages": MESSAGES, **columns}, "d:1", "d:1")


def test_they_reach_the_template(thinks):
    plain = encode_document(thinks, document())
    quiet = encode_document(thinks, document(chat_template_kwargs={**OFF, "effort": "high"}))
    assert plain.text.startswith("[low]") and "<think>" not in plain.text
    assert quiet.text.startswith("[high]") and "<think>\n\n</think>\n\nyes" in quiet.text
    for encoded in (plain, quiet):  # what stands in the prompt is not trained
        assert [encoded.text[a:b] for a, b in encoded.trained] == ["yes<|im_end|>"]


def test_what_the_options_write_before_an_answer_is_its_header(tokenizer):
    """Reasoning is trained with the tag that opens it, and not with what the prompt has."""
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<' ~ message.role ~ '>' }}"
        "{% if message.role == 'assistant' %}{% if quiet %}{{ '<quiet>' }}{% endif %}"
        "{{ '<think>' ~ message.reasoning_content ~ '</think>' }}{% endif %}"
        "{{ message.content ~ '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if quiet %}<quiet>{% endif %}{% endif %}"
    )
    answer = assistant("yes", reasoning_content="hm")
    for quiet in (True, False):
        said = document(messages=[user("hi"), answer], chat_template_kwargs={"quiet": quiet})
        encoded = encode_document(tokenizer, said)
        want = "<think>hm</think>yes<|eot|>"
        assert encoded.text.endswith(f"<assistant>{'<quiet>' * quiet}{want}")
        assert [encoded.text[a:b] for a, b in encoded.trained] == [want]


def test_a_prompt_is_how_the_trained_text_begins(thinks):
    row = document(chat_template_kwargs=OFF)
    prompt = encode_turns(thinks, conversation_of(row, MESSAGES[:1]), "d:1")
    encoded = encode_document(thinks, row)
    assert encoded.tokens[: len(prompt)].tolist() == prompt
    assert encoded.loss_mask.argmax() == len(prompt)


@pytest.mark.parametrize("value", [OFF, json.dumps(OFF)])
def test_a_row_says_them(value):
    assert document(chat_template_kwargs=value).chat_template_kwargs == OFF


@pytest.mark.parametrize("value", [None, "", {}])
def test_a_row_says_none(value):
    assert document(chat_template_kwargs=value) == document()


@pytest.mark.parametrize("value", ["{", [1], 7, "true"])
def test_a_row_that_is_refused(value):
    with pytest.raises(InputError, match="d:1: chat_template_kwargs must be an object; got"):
        document(chat_template_kwargs=value)


def test_texts_and_answers_have_none():
    rows = {"text": "t"}, {"prompt_token_ids": [1], "output_token_ids": [2]}
    for row in rows:
        found = document_of_row({**row, "chat_template_kwargs": OFF}, "d:1", "d:1")
        assert found.chat_template_kwargs == {}
    asked = document_of_row({"prompt": "hi", "chat_template_kwargs": OFF}, "d:1", "d:1")
    assert asked.chat_template_kwargs == OFF


def test_rows_win_over_what_is_set_for_all(tmp_path):
    path = tmp_path / "data.jsonl"
    of_row = {"effort": "high"}
    rows = [
        {"messages": MESSAGES},
        {"messages": [user("b")], "chat_template_kwargs": of_row},
        {"text": "t"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    usual = {"effort": "some", **OFF}
    found = corpus.read_corpus(path, chat_template_kwargs=usual)
    assert [d.chat_template_kwargs for d in found] == [usual, {**OFF, **of_row}, {}]


def test_a_document_keeps_them_in_a_file(tmp_path):
    documents = [document(), document(chat_template_kwargs=OFF)]
    with DocumentWriter(tmp_path / "d") as writer:
        for one in documents:
            writer.add(one)
    read = DocumentFile(tmp_path / "d")
    assert [d.chat_template_kwargs for d in read] == [{}, OFF]
    assert [d.digest() for d in read] == [d.digest() for d in documents]
    assert documents[0].digest() != documents[1].digest()
    other = dataclasses.replace(documents[1], chat_template_kwargs={"enable_thinking": True})
    assert other.digest() != documents[1].digest()


def test_a_digest_is_that_of_runs_before_there_were_any():
    digest = "eaf6d67b6726dd50"
    assert document().digest().hex().startswith(digest)


@pytest.mark.parametrize("name", ["tools", "messages", "tokenize", "add_generation_prompt", "a b"])
def test_names_that_transformers_has_itself(thinks, name):
    words = f"options of the template's own; got {name}; leave out"
    with pytest.raises(InputError, match=words):
        encode_document(thinks, document(chat_template_kwargs={name: 1}))
    with pytest.raises(InputError, match=words):
        check_template_kwargs(thinks, {name: 1}, "--chat-template-kwargs")


def test_what_the_template_does_not_read(thinks):
    check_template_kwargs(thinks, {**OFF, "effort": "high"}, "--x")
    with pytest.raises(InputError) as caught:
        check_template_kwargs(thinks, {"enable_thinkin": False}, "--x")
    assert str(caught.value) == (
        "--x: the target's chat template reads effort, enable_thinking; got enable_thinkin; "
        "leave out enable_thinkin, or spell it so"
    )
    # a row of another target's data may have it all the same
    assert encode_document(thinks, document(chat_template_kwargs={"other": 1})).loss_mask.any()


@pytest.mark.parametrize("template", [None, "{{ messages }}", "{% if %}"])
def test_a_template_without_options(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="template reads no option; got enable_thinking"):
        check_template_kwargs(tokenizer, OFF, "--x")


def test_prompts_of_a_file(thinks, tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {"turns": ["hi", "more"], "chat_template_kwargs": {"effort": "high"}},
        {"messages": [user("a"), assistant("x"), user("b")]},
        {"prompt": "def"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second, third = map(thinks.decode, text.read_prompts(path, thinks, OFF))
    end = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert first == f"[high]<|im_start|>user\nhi<|im_end|>\n{end}"
    assert second.startswith("[low]<|im_start|>user\na<|im_end|>") and second.endswith(
        f"b<|im_end|>\n{end}"
    )
    assert third == "def"


def test_what_a_server_is_sent():
    tools = ({"name": "f"},)
    assert chat_body(Conversation((user("a"),))) == {"messages": [user("a")]}
    assert chat_body(Conversation((user("a"),), tools, OFF)) == {
        "messages": [user("a")],
        "tools": list(tools),
        "chat_template_kwargs": OFF,
    }
