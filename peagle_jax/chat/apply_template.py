"""What transformers makes of conversations with a target's chat template."""

import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from peagle_jax.chat.pieces import (
    Conversation,
    for_templates,
    is_list_of_parts,
    with_joined_parts,
)
from peagle_jax.chat.rendering import MOST_CHARACTERS, one_line
from peagle_jax.types import InputError

# What transformers passes to templates, or takes itself: none of `chat_template_kwargs`.
OWN_NAMES = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *("messages", "self", "kwargs"),
}
# what they are on the command line
TEMPLATE_OPTION = "--chat-template-kwargs"
# a template that goes through the parts of a content
GOES_THROUGH_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+[\w.\[\]'\"]*content\b")


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    where: str,
    *,
    add_generation_prompt: bool = False,
) -> tuple[list[dict[str, Any]], str]:
    """A conversation's messages as its template takes them, and what transformers makes of them.

    Some templates join the content of every message to something: where a message that only calls
    tools has none, it is then empty, as vLLM passes it. Most templates know contents of text alone:
    of parts they raise, write what Python shows of a list, or nothing. Then parts are joined.

    Raises:
      InputError: the chat template is none, it refuses the messages, or makes too much of them.
    """
    messages = [for_templates(message) for message in conversation.messages]
    _check_names(conversation.chat_template_kwargs, where)
    options = conversation, where, add_generation_prompt
    joined = [with_joined_parts(message) for message in messages]
    if joined != messages and _goes_through_parts(tokenizer, conversation):
        try:
            text = _apply_template(tokenizer, messages, *options)
        except InputError:
            text = ""
        if _has_all_parts(text, messages):
            return messages, text
    try:
        return joined, _apply_template(tokenizer, joined, *options)
    except InputError:
        if all("content" in message for message in joined):
            raise
    joined = [{"content": "", **message} for message in joined]
    return joined, _apply_template(tokenizer, joined, *options)


def _goes_through_parts(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> bool:
    tools = [dict(tool) for tool in conversation.tools] or None
    return GOES_THROUGH_PARTS.search(tokenizer.get_chat_template(tools=tools)) is not None


def _has_all_parts(text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rendered conversation has what all parts of contents say, and no list as code."""
    lists = [value for message in messages for value in message.values() if is_list_of_parts(value)]
    said = [part["text"].strip() for parts in lists for part in parts]
    as_code = {str(parts) for parts in lists} | {json.dumps(p, ensure_ascii=False) for p in lists}
    return all(part in text for part in said) and not any(code in text for code in as_code)


def _apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    conversation: Conversation,
    where: str,
    add_generation_prompt: bool,
) -> str:
    """What transformers makes of messages, with the tools and options of their conversation.

    Raises:
      InputError: the chat template is none, it refuses the messages, or makes too much of them.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in conversation.tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **conversation.chat_template_kwargs,
        )
    except MemoryError:
        raise  # what `limited` makes one line of
    except Exception as error:  # a template raises what it likes
        rule = "the target's chat template must render these messages"
        next_step = "correct the roles and contents, or leave the conversation out"
        raise InputError(where, rule, one_line(error), next_step) from None
    assert isinstance(rendered, str)
    if len(rendered) > MOST_CHARACTERS:
        rule = f"a conversation must be at most {MOST_CHARACTERS:,} characters when it is rendered"
        next_step = "leave the conversation out, or correct what the template repeats"
        raise InputError(where, rule, f"{len(rendered):,}", next_step)
    return rendered


# ---------------------------------------------------------------- options of a template


def check_template_kwargs(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], where: str
) -> None:
    """Checks that a chat template reads all the options that somebody set for it.

    Rows of data may have options of other templates, as they do for vLLM and TRL.

    Raises:
      InputError: it does not read one, or there is no template.
    """
    _check_names(options, where)
    known: set[str] = set()
    templates = tokenizer.chat_template or ""
    for source in templates.values() if isinstance(templates, dict) else [templates]:
        known |= _names_read(source)
    known -= {*tokenizer.special_tokens_map, *OWN_NAMES}
    for name in options:
        if name not in known:
            rule = f"the target's chat template reads {', '.join(sorted(known)) or 'no option'}"
            raise InputError(where, rule, name, f"leave out {name}, or spell it so")


def _check_names(options: Mapping[str, Any], where: str) -> None:
    for name in options:
        if name in OWN_NAMES or not (isinstance(name, str) and name.isidentifier()):
            rule = "chat_template_kwargs are options of the template's own"
            raise InputError(where, rule, name, f"leave out {name}")


@functools.lru_cache(maxsize=16)
def _names_read(source: str) -> frozenset[str]:
    """The variables that a template reads and does not set itself; none where it is no template."""
    environment = chat_template_utils._compile_jinja_template("").environment
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateError:
        return frozenset()
    return frozenset(names - set(environment.globals))
