"""Documents of the rows that people's data sets have.

Rows are told apart by their keys, in this order:

    output_token_ids       an answer in tokens, with prompt_token_ids: files of `peagle regenerate`
    messages               a conversation: role and content, as for OpenAI's chat completions
    conversations          a conversation in ShareGPT's keys, from and value, or as messages
    prompt and completion  a text and how it goes on, as for TRL; or two lists of messages
    prompt and response    a question and its answer: a conversation of two turns
    turns                  what a user says, turn by turn, or a conversation as messages
    text                   a text
    prompt                 a prompt that nobody has answered yet
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from peagle_jax.documents import REASONING, Document, content_text
from peagle_jax.types import InputError

KEYS = "messages, conversations, turns, prompt with response or completion, or text"
# ShareGPT's names of roles
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# Keys that a document's contents come from.
CONTENT_KEYS = ("output_token_ids", "messages", "conversations", "prompt", "turns", "text")
# Keys that a document is made of; all others are passed over.
ROW_KEYS = (
    *CONTENT_KEYS,
    "prompt_token_ids",
    "completion",
    "response",
    "tools",
    "chat_template_kwargs",
    "system",
    "source",
    "sample",
    "num_turns",
)
MAX_TOKEN_ID = 2**31 - 1
MAX_DEPTH = 100  # of lists and objects in a row; arguments of tools are some ten deep


def document_of_row(row: Mapping[str, Any], name: str, where: str) -> Document:
    """The document that a row of a data set is.

    Args:
      row: its columns.
      name: of the document.
      where: the row's place, for errors.

    Raises:
      InputError: the row is none of those above, or something in it has the wrong type.
    """
    check_unicode(row, where)
    # rows of `peagle regenerate`; elsewhere a column of this name may say which data set it is
    is_made = row.get("output_token_ids") is not None or all(
        isinstance(row.get(key), int) for key in ("sample", "num_turns")
    )
    source = row.get("source") if is_made else None
    document = _with_system(_document(row, name, where), row.get("system"), where)
    source = source if isinstance(source, str) else None
    options = _template_kwargs(row, where) if document.may_be_chat else {}
    return dataclasses.replace(document, source=source, chat_template_kwargs=options)


def _template_kwargs(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row's options of the chat template, under the name that vLLM and TRL give them.

    Raises:
      InputError: they are no object.
    """
    key = "chat_template_kwargs"
    value = row.get(key)
    if isinstance(value, str):
        value = _parsed(value)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        next_step = 'write them as {"enable_thinking": false}'
        raise InputError(where, f"{key} must be an object", _short(value), next_step)
    return dict(value)


def _document(row: Mapping[str, Any], name: str, where: str) -> Document:
    if row.get("output_token_ids") is not None:
        return _answer(row, name, where)
    tools = _tools(row.get("tools"), where)
    if row.get("messages") is not None:
        return Document(name, None, check_messages(row["messages"], "messages", where), tools=tools)
    if row.get("conversations") is not None:
        messages = _from_share_gpt(row["conversations"], where)
        return Document(name, None, messages, tools=tools)
    if row.get("prompt") is not None:
        return _prompt(row, name, where, tools)
    if row.get("turns") is not None:
        return Document(name, None, _turns(row["turns"], where), tools=tools)
    if row.get("text") is not None:
        return Document(name, _text(row["text"], "text", where))
    rule = f"a row needs {KEYS}"
    raise InputError(where, rule, sorted(map(str, row)), 'write it as {"messages": [..]}')


def _with_system(document: Document, system: object, where: str) -> Document:
    """The document with its row's system message in front of what is said.

    Texts, and rows of token ids, are no conversations: there the column is none of theirs.
    """
    is_prompt = document.prompt is not None
    if not system or not (document.messages or is_prompt):
        return document
    if document.completion is not None:
        rule = "a prompt and its completion are read without a chat template, which has no place "
        next_step = "name the completion response, or write the row as messages"
        raise InputError(where, rule + "for system", _short(system), next_step)
    messages = document.messages
    if is_prompt:
        messages = ({"role": "user", "content": document.prompt},)
    (first,) = check_messages([{"role": "system", "content": system}], "system", where)
    if messages[0]["role"] == "system":
        if content_text(messages[0]).strip() != content_text(first).strip():
            rule = "a conversation has one system message"
            next_step = "leave out system, or the message"
            raise InputError(where, rule, _short([system, messages[0]["content"]]), next_step)
        return document
    return dataclasses.replace(document, messages=(first, *messages), prompt=None)


def check_messages(value: object, key: str, where: str) -> tuple[dict[str, Any], ...]:
    """Messages whose roles and contents are what templates can read.

    Args:
      value: what a row has.
      key: under which key, for errors.
      where: the row's place, for errors.

    Raises:
      InputError: it is no list of messages, or one has no role, or contents that are no text.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        rule, next_step = f"{key} must be a list of messages", "write each with role and content"
        raise InputError(where, rule, _short(value), next_step)
    messages = []
    for number, message in enumerate(value, start=1):
        place = f"{where}, turn {number}"
        if not isinstance(message, Mapping):
            next_step = 'write it as {"role": "user", "content": ".."}'
            raise InputError(place, "a message must be an object", _short(message), next_step)
        if "from" in message and "role" not in message:
            rule = "a message has role and content"
            next_step = "name the row's key conversations, which has from and value"
            raise InputError(place, rule, sorted(map(str, message)), next_step)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            next_step = "give it the role user, assistant, system or tool"
            raise InputError(place, "a message needs a role", _short(role), next_step)
        calls = message.get("tool_calls")
        if calls:
            _check_calls(calls, place)
        _check_content(message.get("content"), "content", place, may_be_none=bool(calls))
        for name in REASONING:
            _check_content(message.get(name), name, place, may_be_none=True)
        messages.append(dict(message))
    return tuple(messages)


def _check_content(content: object, key: str, place: str, *, may_be_none: bool) -> None:
    if isinstance(content, str) or (content is None and may_be_none):
        return
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return
    rule = f"{key} must be text, or a list of parts of text"
    raise InputError(place, rule, _short(content), "write it as a string")


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _check_calls(calls: object, place: str) -> None:
    is_right = isinstance(calls, Sequence) and all(
        isinstance(call, Mapping)
        and isinstance(function := call.get("function", call), Mapping)
        and isinstance(function.get("name"), str)
        for call in calls
    )
    if not is_right:
        next_step = 'write it as [{"function": {"name": "..", "arguments": {}}}]'
        raise InputError(place, "tool_calls must name functions", _short(calls), next_step)


def _from_share_gpt(value: object, where: str) -> tuple[dict[str, Any], ...]:
    """Messages of ShareGPT's rows; a row that has role and content is taken as it is."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        rule, next_step = "conversations must be a list", "write each turn with from and value"
        raise InputError(where, rule, _short(value), next_step)
    if all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return check_messages(value, "conversations", where)
    messages = []
    for number, turn in enumerate(value, start=1):
        place = f"{where}, turn {number}"
        role = turn.get("from") if isinstance(turn, Mapping) else None
        if not isinstance(role, str) or role not in ROLES:
            rule = f"a turn comes from one of {', '.join(ROLES)}"
            got = _short(turn if role is None else role)
            raise InputError(place, rule, got, "rename it, or write the row as messages")
        messages.append({"role": ROLES[role], "content": turn.get("value")})
    return check_messages(messages, "conversations", where)


def _turns(value: object, where: str) -> tuple[dict[str, Any], ...]:
    if isinstance(value, Sequence) and value and all(isinstance(turn, str) for turn in value):
        return tuple({"role": "user", "content": turn} for turn in value)
    return check_messages(value, "turns", where)


def _prompt(
    row: Mapping[str, Any], name: str, where: str, tools: tuple[Mapping[str, Any], ...]
) -> Document:
    """A prompt, with what answers it, if the row has that."""
    prompt = row["prompt"]
    key = next((key for key in ("completion", "response") if row.get(key) is not None), None)
    answer = None if key is None else row[key]
    if not isinstance(prompt, str):
        messages = check_messages(prompt, "prompt", where)
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if answer is not None:
            messages += check_messages(answer, str(key), where)
        return Document(name, None, messages, tools=tools)
    if answer is None:
        return Document(name, None, prompt=prompt, tools=tools)
    answer = _text(answer, str(key), where)
    if key == "completion":
        return Document(name, None, prompt=prompt, completion=answer)
    turns = ("user", prompt), ("assistant", answer)
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Document(name, None, messages, tools=tools)


def _answer(row: Mapping[str, Any], name: str, where: str) -> Document:
    prompt_ids, output_ids = row.get("prompt_token_ids"), row["output_token_ids"]
    if not (_is_token_ids(prompt_ids) and _is_token_ids(output_ids)):
        rule = f"prompt_token_ids and output_token_ids must be token ids, 0 to {MAX_TOKEN_ID:,}"
        got = _short([prompt_ids, output_ids])
        raise InputError(where, rule, got, "write both as lists like [1, 2]")
    return Document(name, None, (), tuple(prompt_ids or ()), tuple(output_ids))


def _tools(value: object, where: str) -> tuple[Mapping[str, Any], ...]:
    """A row's tools, which some data sets have as JSON in a string."""
    if isinstance(value, str):
        value = _parsed(value)
    if value is None:
        return ()
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        rule, next_step = "tools must be a list of objects", "write them as functions with a name"
        raise InputError(where, rule, _short(value), next_step)
    return tuple(value)


def _parsed(value: str) -> Any:
    """JSON in a string; None of an empty one, and the string itself where it is no JSON."""
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(
        type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in value
    )


def _text(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(where, f"{key} must be text", _short(value), "write it as a string")
    return value


def check_unicode(value: object, where: str, depth: int = 0) -> None:
    """Checks the strings of a row or a prompt.

    Args:
      value: as JSON has it.
      where: its place, for errors.
      depth: how many lists and objects it is in.

    Raises:
      InputError: a string has half of a surrogate pair, which no tokenizer takes; or lists and
        objects are so deep in each other that templates could not write them.
    """
    if depth > MAX_DEPTH:
        rule, next_step = f"must be nested {MAX_DEPTH} deep at most", "leave out the inner parts"
        raise InputError(where, rule, "more", next_step)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            next_step = "remove the character, or write the text anew as UTF-8"
            raise InputError(where, "text must be Unicode", half, next_step) from None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_unicode(key, where, depth + 1)
            check_unicode(item, where, depth + 1)
    elif isinstance(value, list | tuple) and not (value and type(value[0]) is int):
        for item in value:
            check_unicode(item, where, depth + 1)


def _short(value: object) -> str:
    """A value in a message, cut to a readable length."""
    try:
        return json.dumps(value)[:60]
    except (TypeError, RecursionError):
        return str(type(value).__name__)
