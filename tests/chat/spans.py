"""Messages for the tests of this folder, and what of them is trained."""

import itertools

import templates
from transformers.utils import chat_template_utils

from peagle_jax.chat.encoding import encode_conversation, encode_document
from peagle_jax.chat.pieces import Conversation
from peagle_jax.documents import Document

# contents that are easily taken for something else
CONTENTS = [
    "yes",
    "a",
    "",
    "assistant",
    "im_end",
    "user\nhi",
    "<b>bold</b> x",
    "no\n\nyes",
    "yes yes",
    "é漢🙂",
    "1 < 2 > 0",
    "[INST] x",
    "\U00100005 private",
]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **further):
    return {"role": "assistant", "content": content, **further}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def as_newer_versions_pass_it(message):
    """A message whose reasoning has all of its names; older transformers pass it as it is."""
    names = "reasoning_content", "reasoning", "thinking"
    found = [message[name] for name in names if name in message]
    if not found or hasattr(chat_template_utils, "_alias_reasoning_fields"):
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def trained(tokenizer, template, messages):
    """What is trained; its tokens spell the same."""
    tokenizer.chat_template = template
    encoded = encode_conversation(tokenizer, Conversation(tuple(messages)), "data.jsonl:7")
    spans = [encoded.text[start:end] for start, end in encoded.trained]
    ids = tokenizer.apply_chat_template(
        [
            as_newer_versions_pass_it({k: v for k, v in m.items() if v is not None})
            for m in messages
        ],
        tokenize=False,
    )
    assert encoded.text == ids
    assert encoded.tokens.tolist() == tokenizer(ids, add_special_tokens=False)["input_ids"]
    spelled = tokenizer.decode(encoded.tokens[encoded.loss_mask])
    if template == templates.COUNTS:  # a word's first token has the space before it
        assert spelled.replace(" ", "") == "".join(spans).replace(" ", "")
    else:
        assert spelled == "".join(spans)
    return spans


def dialogue(*contents, system=None):
    """A conversation with such answers, to questions that have the same words."""
    first = [{"role": "system", "content": system}] if system else []
    turns = [(user(f"{content} {content}"), assistant(content)) for content in contents]
    return [*first, *itertools.chain.from_iterable(turns)]


def trained_text(tokenizer, messages):
    encoded = encode_conversation(tokenizer, Conversation(tuple(messages)), "x:1")
    return [encoded.text[start:end] for start, end in encoded.trained]


# reasoning in both turns, and a call of a tool in the second
THOUGHTS = [
    user("a"),
    assistant("x", reasoning_content="y"),
    user("b"),
    assistant("", tool_calls=[call("now")], reasoning_content="z"),
    {"role": "tool", "content": "late"},
    assistant("no", reasoning_content="bar"),
]


def apart(tokenizer, template, messages):
    """What is trained of each answer's document, and its text."""
    tokenizer.chat_template = template
    whole = Document("d:1", None, tuple(messages))
    found = [encode_document(tokenizer, document) for document in whole.answers_apart()]
    return [([e.text[a:b] for a, b in e.trained], e.text) for e in found]
