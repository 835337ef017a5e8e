"""Any row, any chat template and any tokenizer's files: an encoded document, or one line."""

import copy
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import templates
from fuzzing import cases, only_input_errors
from hypothesis import given
from hypothesis import strategies as st

from peagle_jax import free_memory, text
from peagle_jax.chat import rendering
from peagle_jax.chat.encoding import encode_document, panics_as_errors
from peagle_jax.chat.pieces import Conversation
from peagle_jax.document_rows import document_of_row
from peagle_jax.types import InputError

QUESTION = Conversation(({"role": "user", "content": "hi"},))
CHAT = {
    "messages": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nfoo\n</think>\n\nyes"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "no"},
    ]
}


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(["<|im_start|>assistant\nyes no\n" * 40], 300)


def check_encoded(tokenizer, row) -> None:
    """Reads and encodes a row; what is trained stands in order in the text."""
    with only_input_errors(1000):
        encoded = encode_document(tokenizer, document_of_row(row, "d.jsonl:1", "d.jsonl:1"))
        assert encoded.loss_mask.any() and len(encoded.loss_mask) == len(encoded.tokens)
        ends = [place for span in encoded.trained for place in span]
        assert ends == sorted(ends) and 0 <= ends[0] and ends[-1] <= len(encoded.text)


# ---------------------------------------------------------------- rows

words = st.sampled_from(["", "hi", "user", "assistant", "<think>", "</think>\n", "<|im_end|>"])
strings = words | st.text(max_size=6) | st.sampled_from(["\ud800", "\U00100000", "\x00", "{{ x }}"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | strings
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "function", "name"]), inner)
    ),
    max_leaves=8,
)
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": strings, "arguments": values})}
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "assistant", "system", "tool", "x"])},
    optional={
        "content": strings | st.lists(st.fixed_dictionaries({"text": strings})) | values,
        "reasoning_content": strings | values,
        "tool_calls": st.lists(calls, max_size=2) | values,
    },
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(messages, min_size=1, max_size=4) | values,
        "conversations": st.lists(
            st.fixed_dictionaries({"from": words | values, "value": strings | values}), max_size=3
        ),
        "prompt": strings | st.lists(messages, max_size=2),
        "response": strings,
        "completion": strings | values,
        "turns": st.lists(strings, max_size=3) | values,
        "text": strings | values,
        "tools": st.lists(values, max_size=2) | strings,
        "system": strings | values,
        "output_token_ids": st.lists(st.integers(0, 400), max_size=4) | values,
        "prompt_token_ids": st.lists(st.integers(0, 400), max_size=4) | values,
    },
)


IN_ROWS = ["PLAIN", "DROPS_REASONING", "ONE_TURN", "MARKED"]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", IN_ROWS)
def test_rows(tokenizer, name):
    tokenizer.chat_template = getattr(templates, name)

    @cases(60, len(IN_ROWS))
    @given(rows)
    def check(row):
        check_encoded(tokenizer, row)

    check()


# ---------------------------------------------------------------- templates

FRAGMENTS = [
    "{% for message in messages %}",
    "{%- for m in messages[::-1] -%}",
    "{% endfor %}",
    "{% if message['role'] == 'assistant' %}",
    "{% else %}",
    "{% endif %}",
    "{{ message['content'] }}",
    "{{ message.content.split('</think>')[-1] }}",
    "{{ messages[3]['content'] | trim }}",
    "{{ message }}",
    "{{ loop.index0 }}",
    "{% set ns = namespace(x=0) %}",
    "{% set message = messages[0] %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ raise_exception('roles\nmust alternate') }}",
    "{{ strftime_now('%Y') }}",
    "{{ nothing.at.all }}",
    "{{ 1 / 0 }}",
    "{% break %}",
    "{% macro f(x) %}",
    "{% endmacro %}",
    "{{ f(message) }}",
    "{{ tools | tojson }}",
    "{# a comment",
    "<|im_start|>",
    "<|im_end|>\n",
    "}}",
]
WHOLE = ["PLAIN", "DROPS_REASONING", "TRIMS", "CHANNELS", "ONE_TURN", "COUNTS", "GOES_ON", "MARKED"]


@st.composite
def any_template(draw) -> str:
    """Fragments, or a template with one of them somewhere in it and something left out."""
    fragments = "".join(draw(st.lists(st.sampled_from(FRAGMENTS), max_size=7)))
    if draw(st.booleans()):
        return fragments
    template = getattr(templates, draw(st.sampled_from(WHOLE)))
    at, gap = draw(st.integers(0, len(template))), draw(st.sampled_from([0, 0, 1, 9]))
    return template[:at] + draw(st.sampled_from(["", *FRAGMENTS])) + template[at + gap :]


@pytest.mark.fuzz
def test_templates(tokenizer):
    @cases(300)
    @given(any_template())
    def check(template):
        tokenizer.chat_template = template
        check_encoded(tokenizer, CHAT)
        with only_input_errors(1000):
            text.encode_prompt(QUESTION, tokenizer, "p.jsonl:1")

    check()


class PanicException(BaseException):
    """As pyo3 raises it where a library in Rust panics, and no `except Exception` catches."""


def test_a_tokenizer_that_panics(tokenizer, tmp_path, monkeypatch):
    def panic(*_, **__):
        raise PanicException("index out of bounds")

    tokenizer.save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "__call__", panic)
        with pytest.raises(InputError, match="p:1: the tokenizer must encode.*index out of bounds"):
            text.tokenize(tokenizer, "hi", "p:1")
    monkeypatch.setattr(text.AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(InputError, match="must be those of a tokenizer.*index out of bounds"):
        text.load_tokenizer(tmp_path)
    with pytest.raises(KeyboardInterrupt), panics_as_errors():
        raise KeyboardInterrupt


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end(tokenizer, monkeypatch):
    monkeypatch.setattr(rendering, "RENDER_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    within = "must render a conversation within 0.2 seconds; got more"
    prompt_only = "{% if add_generation_prompt %}" + ENDLESS + "{% endif %}"
    for template in (ENDLESS, templates.PLAIN + prompt_only):
        tokenizer.chat_template = template
        with pytest.raises(InputError, match=f"d.jsonl:1: .*{within}"):
            encode_document(tokenizer, document_of_row(CHAT, "d.jsonl:1", "d.jsonl:1"))
        with pytest.raises(InputError, match=f"p.jsonl:1: .*{within}"):
            text.encode_prompt(QUESTION, tokenizer, "p.jsonl:1")
    tokenizer.chat_template = templates.PLAIN
    encode_document(tokenizer, document_of_row(CHAT, "d.jsonl:1", "d.jsonl:1"))
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == before


DOUBLED = (
    "{% set ns = namespace(s='x') %}"
    "{% for i in range(29) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}"
)
# only at the marks, which transformers' own rendering does not have
OF_MARKS = (
    "{% for m in messages %}{% if m.content | length > 3 %}{{ 'x' * 2**29 }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.skipif(sys.platform != "linux", reason="others do not limit a process's memory")
def test_a_template_that_takes_all_memory(tokenizer, monkeypatch):
    import resource

    monkeypatch.setattr(rendering, "RENDER_BYTES", 2**27)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    within = "must render a conversation in free memory, within 0.125 GiB; got more"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    of_prompts = "{% if add_generation_prompt %}{{ 'x' * 2**29 }}{% endif %}"
    of_all = "{{ 'x' * 2**29 }}", "{{ 'x'.center(2**29) }}", DOUBLED
    for template in (*of_all, OF_MARKS, templates.PLAIN + of_prompts):
        tokenizer.chat_template = template
        with pytest.raises(InputError, match=f"d.jsonl:1: .*{within}"):
            encode_document(tokenizer, document_of_row(row, "d.jsonl:1", "d.jsonl:1"))
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    tokenizer.chat_template = DOUBLED
    with pytest.raises(InputError, match=f"p.jsonl:1: .*{within}"):
        text.encode_prompt(QUESTION, tokenizer, "p.jsonl:1")
    # a lower limit that there was holds, and stays
    lower, set_limits = (2**40, before[1]), []
    monkeypatch.setattr(rendering, "RENDER_BYTES", 2**45)
    resource.setrlimit(resource.RLIMIT_DATA, lower)
    set_limit = resource.setrlimit
    monkeypatch.setattr(
        resource, "setrlimit", lambda *words: (set_limits.append(words[1]), set_limit(*words))
    )
    try:
        tokenizer.chat_template = templates.PLAIN
        encode_document(tokenizer, document_of_row(CHAT, "d.jsonl:1", "d.jsonl:1"))
        assert set_limits == [lower, lower]
    finally:
        set_limit(resource.RLIMIT_DATA, before)


def test_memory_where_nothing_limits_it(tokenizer, monkeypatch, tmp_path):
    """In another thread, and where Linux does not say what a process has."""
    tokenizer.chat_template = "{{ 'x' * 2**50 }}"

    def encode():
        encode_document(tokenizer, document_of_row(CHAT, "d.jsonl:1", "d.jsonl:1"))

    with ThreadPoolExecutor(1) as thread, pytest.raises(InputError, match="in free memory"):
        thread.submit(encode).result()
    for path in (tmp_path / "none", tmp_path / "status"):
        (tmp_path / "status").write_text("Name: python\n")
        monkeypatch.setattr(free_memory, "STATUS", path)
        with pytest.raises(InputError, match="in free memory"):
            encode()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


# ---------------------------------------------------------------- tokenizers


@st.composite
def changes(draw) -> tuple[str, list[int], object]:
    """(file, the way to a place in it, what comes there)."""
    name = draw(st.sampled_from(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]))
    way = draw(st.lists(st.integers(0, 9), max_size=3))
    others = st.sampled_from([[], {}, "x", 0, -1, 2**40, None, True, "DELETE"])
    return name, way, draw(others | values.filter(lambda x: x == x))


def changed(content: object, way: list[int], value: object) -> object:
    """JSON with another value at a place, of which each number chooses a key or an element."""
    if not way or not isinstance(content, dict | list) or not content:
        return value
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[way[0] % len(keys)]
    if len(way) == 1 and value == "DELETE":
        del content[key]
    else:
        content[key] = changed(content[key], way[1:], value)
    return content


@pytest.mark.fuzz
def test_tokenizers(tokenizer, tmp_path):
    tokenizer.chat_template = templates.PLAIN
    tokenizer.save_pretrained(tmp_path)
    files = [path for path in Path(tmp_path).iterdir() if path.suffix == ".json"]
    contents = {path.name: json.loads(path.read_text()) for path in files}

    @cases(120)
    @given(changes())
    def check(change):
        name, way, value = change
        content = changed(copy.deepcopy(contents[name]), way, value)
        (tmp_path / name).write_text(json.dumps(content))
        try:
            with only_input_errors(1000):
                loaded = text.load_tokenizer(tmp_path)
                check_encoded(loaded, CHAT)
                check_encoded(loaded, {"prompt": "yes", "completion": " no é"})
                text.encode_prompt(QUESTION, loaded, "p.jsonl:1")
        finally:
            (tmp_path / name).write_text(json.dumps(contents[name]))

    check()
