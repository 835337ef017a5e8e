"""Documents as token ids, with the tokens that a loss reads."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from peagle_jax.chat.apply_template import render
from peagle_jax.chat.pieces import Conversation, Span, special_tokens_of
from peagle_jax.chat.rendering import limited, one_line
from peagle_jax.chat.trained_spans import trained_spans
from peagle_jax.documents import REASONING, Document, content_text
from peagle_jax.types import InputError


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A document for training.

    Attributes:
      tokens: its token ids.
      loss_mask: which of them a loss reads.
      text: what the tokens spell; of an answer in tokens, as the tokenizer decodes it.
      trained: (start, end) of the characters of `text` that trained tokens spell, in order.
    """

    tokens: Int[np.ndarray, " t"]
    loss_mask: Bool[np.ndarray, " t"]
    text: str
    trained: list[Span]


class NothingToTrainError(InputError):
    """A document without anything that a loss could read."""


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document]) -> None:
    """Checks that a tokenizer has what documents need.

    Raises:
      InputError: no chat template for conversations, no end-of-sequence token for texts, or no
        offsets.
    """
    kinds = {bool(document.messages) for document in documents if not document.output_ids}
    where = tokenizer.name_or_path or "tokenizer"
    if True in kinds:
        _check_template(tokenizer)
    if False in kinds and tokenizer.eos_token_id is None:
        rule = "needs an end-of-sequence token to separate texts"
        next_step = "set eos_token in its tokenizer_config.json"
        raise InputError(where, rule, "none", next_step)
    if kinds and not tokenizer.is_fast:
        rule = "a tokenizer must know which characters its tokens stand for"
        next_step = "save it as tokenizer.json (a fast tokenizer)"
        raise InputError(where, rule, type(tokenizer).__name__, next_step)


def encode_document(tokenizer: PreTrainedTokenizerBase, document: Document) -> Encoded:
    """Encodes a document.

    The loss reads all of a text, what the assistant says in a conversation, how a prompt goes on,
    and what the target wrote of an answer in tokens. Texts end with an end-of-sequence token. They
    begin as prompts do when they are decoded, with what the tokenizer puts before a text (Llama and
    Gemma: a begin-of-sequence token), which is not trained. Special tokens that texts spell are
    plain text, unless the document says otherwise.

    Raises:
      InputError: nothing in it is to be trained, an answer of a conversation cannot be located, or
        the tokenizer lacks something (`check_tokenizer`).
    """
    check_tokenizer(tokenizer, [document])
    if document.output_ids:
        encoded = _encode_answer(tokenizer, document)
    elif document.messages:
        conversation = conversation_of(document)
        encoded = encode_conversation(
            tokenizer, conversation, document.name, only_last=document.only_last
        )
    else:
        encoded = _encode_text(tokenizer, document)
    if not encoded.loss_mask.any():
        rule, got = "a document must have something to train", "no answer"
        next_step = "add the assistant's turns, or let the target write them: peagle regenerate"
        raise NothingToTrainError(document.name, rule, got, next_step)
    return encoded


def conversation_of(
    document: Document, messages: Sequence[Mapping[str, Any]] | None = None
) -> Conversation:
    """A document's conversation, or others of its messages, as its template is to show them."""
    said = document.messages if messages is None else tuple(messages)
    return Conversation(said, document.tools, document.chat_template_kwargs)


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before every prompt: a begin-of-sequence token, or nothing."""
    ids = list(tokenizer("")["input_ids"])
    return ids[: -1 if ids[-1:] == [tokenizer.eos_token_id] else None]


def has_first_tokens(tokenizer: PreTrainedTokenizerBase, document: Document) -> bool:
    """Whether a text that was rendered begins with what the tokenizer puts before texts."""
    if not document.special_tokens:
        return False
    spelled = str(tokenizer.decode(first_tokens(tokenizer)))
    return bool(spelled) and document.plain.startswith(spelled)


def special_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Finds special tokens that a text spells; None where the tokenizer has none."""
    names = [re.escape(name) for name in special_tokens_of(tokenizer) if name]
    return re.compile("|".join(names)) if names else None


def spelled_special_token(pattern: re.Pattern[str], document: Document) -> str | None:
    """The first special token that a document's own words spell; None where they spell none."""
    texts = [document.plain] if document.is_plain else []
    for message in document.messages:
        texts += _texts_of(message)
    return next((found[0] for found in map(pattern.search, texts) if found), None)


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    where: str,
    *,
    only_last: bool = False,
) -> Encoded:
    """Encodes a conversation. The loss reads what the assistant wrote.

    A token is trained if it begins within what is trained, or in the space right before it, as
    words do in "[/INST] yes".

    Args:
      tokenizer: with a chat template.
      conversation: what is said.
      where: its place, for errors.
      only_last: whether of the answers only that of the last message is trained.

    Raises:
      InputError: as for `encode_document`.
    """
    _check_template(tokenizer)
    _check_end_of_turn(tokenizer, conversation, where)
    text, spans = trained_spans(tokenizer, conversation, where, only_last=only_last)
    return _with_offsets(tokenizer, text, spans, where, add_special_tokens=False)


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, where: str
) -> list[int]:
    """Token ids of a conversation that the assistant is to answer, through the chat template."""
    _check_template(tokenizer)
    with limited(where):
        _, text = render(tokenizer, conversation, where, add_generation_prompt=True)
    return list(tokenize(tokenizer, text, where, add_special_tokens=False)["input_ids"])


def tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, where: str, **options: Any
) -> Mapping[str, Any]:
    """What a tokenizer makes of a text: `input_ids`, and what the options ask for.

    Raises:
      InputError: it raises, as one does that was damaged.
    """
    try:
        with panics_as_errors():
            return tokenizer(text, **options)
    except Exception as error:  # tokenizers raises a bare Exception
        rule = "the tokenizer must encode the text"
        next_step = "leave that text out, or download the target's tokenizer again"
        raise InputError(where, rule, one_line(error), next_step) from None


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Makes an Exception of a panic in the library tokenizers, which is none for Python."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which cannot be imported
            raise
        raise RuntimeError(f"tokenizers: {error}") from None


def _check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        where = tokenizer.name_or_path or "tokenizer"
        next_step = "add the target's chat_template.jinja to this folder"
        raise InputError(where, "conversations need a chat template", "none", next_step)


def _check_end_of_turn(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, where: str
) -> None:
    """Raises InputError where a message spells the token that ends a text.

    It would be encoded as that token, as in every text that goes through a template.
    """
    end = str(tokenizer.eos_token or "")
    for number, message in enumerate(conversation.messages, start=1):
        if end and any(end in part for part in _texts_of(message)):
            rule = "a message may not contain the end-of-sequence token"
            next_step = "remove it from the message, or leave the conversation out"
            raise InputError(f"{where}, turn {number}", rule, end, next_step)


def _texts_of(message: Mapping[str, Any]) -> list[str]:
    """What a message says, and thinks."""
    return [content_text(message), *(str(message.get(key) or "") for key in REASONING)]


def _encode_text(tokenizer: PreTrainedTokenizerBase, document: Document) -> Encoded:
    """A text, or a prompt and its completion."""
    text, start = document.plain, 0
    if document.prompt is not None:
        start = len(document.prompt) if document.completion else len(text)
    spans = [(start, len(text))]
    encoded = _with_offsets(
        tokenizer,
        text,
        spans,
        document.name,
        add_special_tokens=not has_first_tokens(tokenizer, document),
        split_special_tokens=not document.special_tokens,
    )
    if encoded.tokens[-1:].tolist() == [tokenizer.eos_token_id]:
        return dataclasses.replace(
            encoded, loss_mask=np.append(encoded.loss_mask[:-1], bool(encoded.trained))
        )
    return dataclasses.replace(
        encoded,
        tokens=np.append(encoded.tokens, np.int32(cast(int, tokenizer.eos_token_id))),
        loss_mask=np.append(encoded.loss_mask, bool(encoded.trained)),
    )


def _encode_answer(tokenizer: PreTrainedTokenizerBase, document: Document) -> Encoded:
    tokens = np.array([*document.prompt_ids, *document.output_ids], np.int32)
    if (largest := int(tokens.max())) >= len(tokenizer):
        rule = f"token ids must lie in 0..{len(tokenizer) - 1}"
        raise InputError(document.name, rule, largest, "use answers that this target wrote")
    loss_mask = np.arange(len(tokens)) >= len(document.prompt_ids)
    prompt, text = (str(tokenizer.decode(ids)) for ids in (list(document.prompt_ids), tokens))
    return Encoded(tokens, loss_mask, text, [(len(prompt), len(text))])


def _with_offsets(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    spans: Sequence[Span],
    where: str,
    **options: Any,
) -> Encoded:
    """The tokens of a text, of which those are trained that spell `spans`."""
    out = tokenize(tokenizer, text, where, return_offsets_mapping=True, **options)
    tokens = np.array(out["input_ids"], np.int32)
    offsets = np.array(out["offset_mapping"], np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0], offsets[:, 1]
    loss_mask, trained = np.zeros(len(tokens), bool), []
    for start, end in spans:
        space = start - len(text[:start].rstrip(" "))
        inside = (starts >= start - space) & (starts < end) & (ends > np.maximum(start, starts))
        if inside.any():
            # some tokenizers give space no width
            first, last = np.flatnonzero(inside)[[0, -1]]
            inside[first:last] |= ends[first:last] == starts[first:last]
        loss_mask |= inside
        if inside.any():
            first = max(start, int(starts[inside].min()))
            trained.append((first, min(end, int(ends[inside].max()))))
    return Encoded(tokens, loss_mask, text, trained)
