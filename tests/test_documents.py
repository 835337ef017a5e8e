"""Rows of data sets that people have, and rows that are none."""

import json

import pytest

from peagle_jax.document_rows import document_of_row
from peagle_jax.documents import BadRows
from peagle_jax.types import InputError


def read(row):
    return document_of_row(row, "rows.jsonl:3", "data/rows.jsonl:3")


def said(document):
    return [(message["role"], message["content"]) for message in document.messages]


TALK = [("user", "hi"), ("assistant", "yes")]
MESSAGES = [{"role": role, "content": content} for role, content in TALK]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES},
        {"prompt": "hi", "prompt_id": "7", "messages": MESSAGES},  # UltraChat
        {"conversations": MESSAGES},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"turns": MESSAGES},
        {"prompt": "hi", "response": "yes"},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        {"prompt": MESSAGES[:1], "response": "yes"},
        {"text": None, "messages": MESSAGES},  # a column that other rows have
    ],
)
def test_conversations(row):
    document = read(row)
    assert said(document) == TALK and document.text is None and not document.is_empty
    assert document.plain == "hi\nyes" and document.size == 6


def test_a_system_prompt_of_its_own():
    row = {"system": "be kind", "conversations": [{"from": "human", "value": "hi"}]}
    assert said(read(row)) == [("system", "be kind"), ("user", "hi")]


SYSTEM = [("system", "be kind")]


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"messages": MESSAGES}, TALK),
        ({"conversations": MESSAGES}, TALK),
        ({"turns": ["hi"]}, TALK[:1]),
        ({"prompt": "hi"}, TALK[:1]),
        ({"prompt": "hi", "response": "yes"}, TALK),
        ({"prompt": MESSAGES[:1], "completion": "yes"}, TALK),
        ({"messages": [{"role": "system", "content": "be kind"}, *MESSAGES]}, TALK),
        ({"messages": [{"role": "system", "content": "be kind", "name": None}, *MESSAGES]}, TALK),
    ],
)
def test_a_system_message_comes_first(row, expected):
    document = read({"system": "be kind", **row})
    assert said(document) == [*SYSTEM, *expected] and document.prompt is None
    for nothing in (None, ""):
        plain = read({"system": nothing, **row})
        assert [x for x in said(plain) or [("user", plain.prompt)] if x not in SYSTEM] == expected


def test_texts_and_answers_have_no_system_message():
    assert read({"system": "be kind", "text": "t"}) == read({"text": "t"})
    ids = {"prompt_token_ids": [1], "output_token_ids": [2]}
    assert read({"system": "linux", **ids}) == read(ids)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"system": 7, "messages": MESSAGES}, "content must be text"),
        ({"system": "x", "prompt": "a", "completion": "b"}, "has no place for system"),
        (
            {"system": "x", "messages": [{"role": "system", "content": "y"}, *MESSAGES]},
            "one system message",
        ),
    ],
)
def test_system_messages_that_are_refused(row, words):
    with pytest.raises(InputError, match=words) as error:
        read(row)
    assert str(error.value).count("\n") == 0


def test_roles_of_share_gpt():
    names = ["system", "human", "user", "gpt", "chatgpt", "model", "assistant", "tool"]
    turns = [{"from": name, "value": name} for name in [*names, "observation"]]
    roles = "system user user assistant assistant assistant assistant tool tool".split()
    assert [role for role, _ in said(read({"conversations": turns}))] == roles


def test_prompts_and_texts():
    prompt = read({"prompt": "def f", "completion": "(x):"})
    assert (prompt.prompt, prompt.completion, prompt.plain) == ("def f", "(x):", "def f(x):")
    assert prompt.messages == () and not prompt.is_empty and prompt.size == 9
    alone = read({"prompt": "def f"})
    assert (alone.prompt, alone.completion, alone.size) == ("def f", None, 5)
    assert read({"text": "t"}).text == "t" and read({"text": ""}).is_empty
    assert said(read({"turns": ["a", "b"]})) == [("user", "a"), ("user", "b")]


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools(tools):
    assert read({"messages": MESSAGES, "tools": tools}).tools == ({"name": "f"},)
    assert read({"messages": MESSAGES, "tools": ""}).tools == ()
    assert read({"prompt": "hi", "tools": tools}).tools == ({"name": "f"},)


def test_contents_are_parts_of_the_digest():
    rows = [
        {"text": "a"},
        {"prompt": "a"},
        {"prompt": "a", "completion": "b"},
        {"messages": MESSAGES},
        {"messages": MESSAGES, "tools": [{"name": "f"}]},
        {"prompt_token_ids": [1], "output_token_ids": [2]},
        {"prompt_token_ids": [1, 2], "output_token_ids": []},
    ]
    assert len({read(row).digest() for row in rows}) == len(rows)
    assert document_of_row(rows[0], "other", "other").digest() == read(rows[0]).digest()


CALL = {"function": {"name": "f", "arguments": "{}"}}


def test_an_answer_of_calls_needs_no_content():
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert read({"messages": [turn]}).messages == (turn,)


def message(**changes):
    return {"messages": [MESSAGES[0], {"role": "assistant", "content": "yes"} | changes]}


@pytest.mark.parametrize(
    "row, where, words",
    [
        ({}, "", "a row needs messages, conversations"),
        ({"messages": []}, "", "messages must be a list of messages; got []"),
        ({"messages": "hi"}, "", 'messages must be a list of messages; got "hi"'),
        ({"messages": ["hi"]}, ", turn 1", 'a message must be an object; got "hi"'),
        (message(role=None), ", turn 2", "a message needs a role; got null"),
        ({"messages": [{"content": "hi"}]}, ", turn 1", "a message needs a role"),
        (message(content=5), ", turn 2", "content must be text, or a list"),
        (message(content=None), ", turn 2", "content must be text, or a list"),
        (message(content=[{"type": "image"}]), ", turn 2", "content must be text, or a list"),
        (message(tool_calls=[{"id": 1}]), ", turn 2", "tool_calls must name functions"),
        (message(tool_calls=5), ", turn 2", "tool_calls must name functions"),
        ({"messages": [{"from": "human", "value": "hi"}]}, ", turn 1", "key conversations"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, ", turn 1", "comes from one of"),
        ({"conversations": [{"from": "human", "value": 5}]}, ", turn 1", "content must be text"),
        ({"conversations": {}}, "", "conversations must be a list"),
        ({"conversations": ["hi"]}, ", turn 1", "comes from one of"),
        ({"turns": 5}, "", "turns must be a list of messages; got 5"),
        ({"prompt": 5}, "", "prompt must be a list of messages; got 5"),
        ({"prompt": "a", "completion": 5}, "", "completion must be text; got 5"),
        ({"prompt": MESSAGES, "completion": 5}, "", "completion must be a list of messages"),
        ({"text": ["a"]}, "", "text must be text"),
        ({"messages": MESSAGES, "tools": 5}, "", "tools must be a list of objects; got 5"),
        ({"messages": MESSAGES, "tools": "{"}, "", "tools must be a list of objects"),
        ({"messages": MESSAGES, "tools": "[" * 9999}, "", "tools must be a list of objects"),
        ({"text": "a", "x": json.loads("[" * 101 + "]" * 101)}, "", "must be nested 100 deep"),
        ({"text": "a\ud800b"}, "", "text must be Unicode; got \\ud800"),
        (message(content="\udfff"), "", "text must be Unicode; got \\udfff"),
        ({"output_token_ids": [1]}, "", "must be token ids"),
        ({"prompt_token_ids": [-1], "output_token_ids": [1]}, "", "must be token ids"),
        ({"prompt_token_ids": [1], "output_token_ids": [True]}, "", "must be token ids"),
        ({"prompt_token_ids": [1], "output_token_ids": [2**31]}, "", "0 to 2,147,483,647"),
    ],
)
def test_bad_rows(row, where, words):
    with pytest.raises(InputError) as caught:
        read(row)
    message = str(caught.value)
    assert message.startswith(f"data/rows.jsonl:3{where}: ") and words in message
    assert "\n" not in message


def test_the_largest_token_id():
    row = {"prompt_token_ids": [], "output_token_ids": [2**31 - 1]}
    assert read(row).output_ids == (2**31 - 1,)


@pytest.mark.parametrize("seed", range(20))
def test_any_json_is_a_document_or_one_line(seed):
    """Values of any kind under the keys that rows have."""
    import random

    rng = random.Random(seed)
    keys = "messages conversations turns prompt completion response text tools role content from "
    keys = (keys + "value tool_calls function name output_token_ids prompt_token_ids").split()

    def value(depth):
        leaves = [None, 1, -1.5, True, "", "human", "user", "assistant", "\ud800", 2**40]
        kinds = ["leaf"] if depth > 3 else ["leaf", "list", "list", "dict", "dict"]
        kind = rng.choice(kinds)
        if kind == "list":
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if kind == "dict":
            return {rng.choice(keys): value(depth + 1) for _ in range(rng.randrange(4))}
        return rng.choice(leaves)

    for _ in range(500):
        row = {rng.choice(keys): value(0) for _ in range(rng.randrange(1, 4))}
        try:
            document = read(row)
            document.digest(), document.plain, document.size
        except InputError as error:
            assert "\n" not in str(error), json.dumps(row)


def test_bad_rows_are_counted_and_the_first_ones_named():
    bad_rows, said = BadRows("skip"), []
    for number in range(7):
        bad_rows.take(InputError(f"x:{number}", "must be good", "bad", "mend it"))
    bad_rows.report(said.append)
    assert bad_rows.count == 7 and len(said) == 6
    assert said[4].startswith("skipped: x:4: must be good; got bad") and "2 rows more" in said[5]
    with pytest.raises(InputError, match="x:9"):
        BadRows().take(InputError("x:9", "must be good", "bad", "mend it"))


def test_columns_of_those_names_that_regenerate_did_not_write():
    """Else all rows of one data set would be held out together, or none."""
    row = {"messages": MESSAGES, "source": "gsm8k", "sample": 3}
    assert read(row).source is None
    assert read({**row, "num_turns": 1}).source == "gsm8k"
    assert read({**row, "num_turns": "1"}).source is None
    ids = {"prompt_token_ids": [1], "output_token_ids": [2], "source": "x"}
    assert read(ids).source == "x"
