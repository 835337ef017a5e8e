"""Strings to token ids: tokenizers, chat templates, prompts, loss masks.

The rest of the package works with token ids only.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle_jax.chat.encoding import (
    Encoded,
    NothingToTrainError,
    check_tokenizer,
    conversation_of,
    encode_document,
    encode_turns,
    panics_as_errors,
    tokenize,
)
from peagle_jax.chat.pieces import Conversation
from peagle_jax.chat.rendering import one_line
from peagle_jax.document_rows import check_unicode, document_of_row
from peagle_jax.documents import BadRows, Document, content_text
from peagle_jax.json_files import read_jsonl, read_text
from peagle_jax.types import InputError
from peagle_jax.weights.reading import GIT_LFS_POINTER, git_lfs_pointer

END, MASK, START_TURN, END_TURN = "<|endoftext|>", "<|draft_mask|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# ---------------------------------------------------------------- tokenizer


def train_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer, in Hugging Face's format.

    Every byte has a token, so that every text can be encoded. `<|draft_mask|>` is P-EAGLE's mask
    token; it occurs in no text.

    Args:
      texts: to train on.
      vocab: tokens at most, special ones included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END, MASK, START_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer of a folder; None if it has none.

    Raises:
      InputError: one of its files is not JSON, or not that of a tokenizer, or asks for code of its
        own to be run.
    """
    paths = [Path(folder) / name for name in ("tokenizer.json", "tokenizer_config.json")]
    paths = [path for path in paths if path.exists()]
    if not paths:
        return None
    for path in paths:
        _check_json_object(path)
    try:
        with panics_as_errors():
            # without this, transformers asks on stdin whether to run what the folder names
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise errors of any kind
        if "trust_remote_code" in str(error):
            rule = "a tokenizer must need no Python code of its own, which is never run here"
            next_step = "save it with transformers as a fast tokenizer, which is tokenizer.json"
            got = "one whose tokenizer_config.json names such code (auto_map)"
            raise InputError(folder, rule, got, next_step) from None
        rule = f"{' and '.join(path.name for path in paths)} must be those of a tokenizer"
        next_step = "download them again from where the weights came from"
        raise InputError(folder, rule, one_line(error), next_step) from None


def _check_json_object(path: Path) -> None:
    text, next_step = read_text(path), "download the file again"
    if text.encode().startswith(GIT_LFS_POINTER):
        raise git_lfs_pointer(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(path, "must be JSON", one_line(error), next_step) from None
    if not isinstance(content, dict):
        raise InputError(path, "must be a JSON object", type(content).__name__, next_step)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab: int, where: str | Path) -> None:
    """Checks that an embedding has a row for every token.

    JAX reads outside of an array without an error, so nothing later would notice.

    Args:
      tokenizer: the target's.
      vocab: rows of the target's embedding.
      where: the target, for errors.

    Raises:
      InputError: a token has no row.
    """
    # more than len(tokenizer) if some ids are not in use
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    if needed > vocab:
        rule = f"the target's embedding has {vocab} rows"
        next_step = "take tokenizer and weights from one checkpoint"
        raise InputError(where, rule, f"a tokenizer that needs {needed}", next_step)


# ---------------------------------------------------------------- documents


def encode(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    bad_rows: BadRows | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token ids, loss mask) of each document that `encode_stream` does not leave out."""
    return [
        (encoded.tokens, encoded.loss_mask)
        for _, encoded in encode_stream(tokenizer, documents, bad_rows)
    ]


def encode_stream(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    bad_rows: BadRows | None = None,
) -> Iterator[tuple[Document, Encoded]]:
    """Encodes documents for training, as `chat.encoding.encode_document` says, one at a time.

    Args:
      tokenizer: of the target.
      documents: to encode.
      bad_rows: takes documents that cannot be trained on; None: the first is an error.

    Raises:
      InputError: one of them cannot be trained on, or the tokenizer lacks what it needs.
    """
    bad_rows = bad_rows or BadRows()
    for document in documents:
        # no row's fault
        check_tokenizer(tokenizer, [document])
        if (encoded := encode_or_take(tokenizer, document, bad_rows)) is not None:
            yield document, encoded


def encode_or_take(
    tokenizer: PreTrainedTokenizerBase, document: Document, bad_rows: BadRows
) -> Encoded | None:
    """A document for training; None of one that `bad_rows` took, or of an empty answer apart."""
    try:
        return encode_document(tokenizer, document)
    except InputError as error:
        if not (document.only_last and isinstance(error, NothingToTrainError)):
            bad_rows.take(error)
        return None


# ---------------------------------------------------------------- prompts


# token ids, text, or a chat that the assistant is to answer
Prompt = list[int] | str | Conversation


def read_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """`read_named_prompts` without the names."""
    return [ids for _, ids in read_named_prompts(path, tokenizer, chat_template_kwargs)]


def read_named_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[tuple[str, list[int]]]:
    """Reads the prompts of a JSONL file as token ids, each with its line as `FILE:NUMBER`.

    Args:
      path: as of `read_plain_prompts`; chats go through the chat template.
      tokenizer: the target's; None if it has none.
      chat_template_kwargs: as of `read_plain_prompts`.

    Raises:
      InputError: there are no lines, or a line is no prompt, or has text for a target without a
        tokenizer.
    """
    return [
        (where, prompt if isinstance(prompt, list) else encode_prompt(prompt, tokenizer, where))
        for where, prompt in read_plain_prompts(path, chat_template_kwargs)
    ]


def read_plain_prompts(
    path: Path, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[tuple[str, Prompt]]:
    """Reads the prompts of a JSONL file as they stand there, each with its place.

    Args:
      path: its lines have, and are read by the first of these: `prompt_token_ids`; `prompt`, a text
        to continue; `messages`, a conversation whose last turn is to be answered, with `tools` if
        it has any; or `turns`, of which the first one is asked.
      chat_template_kwargs: options of the chat template, where a line does not set them.

    Raises:
      InputError: there are no lines, or a line is no prompt.
    """
    prompts = []
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        prompt = _prompt_of_row(row, where)
        if isinstance(prompt, Conversation):
            options = {**(chat_template_kwargs or {}), **prompt.chat_template_kwargs}
            prompt = dataclasses.replace(prompt, chat_template_kwargs=options)
        prompts.append((where, prompt))
    if not prompts:
        next_step = 'add a line like {"prompt": "def main"}'
        raise InputError(path, "at least one prompt is needed", "an empty file", next_step)
    return prompts


def _prompt_of_row(row: Mapping[str, Any], where: str) -> Prompt:
    if "prompt_token_ids" in row:
        ids = row["prompt_token_ids"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            rule = "prompt_token_ids must be a list of whole numbers"
            raise InputError(where, rule, json.dumps(ids)[:60], "write it as [1, 2, 3]")
        return ids
    if row.get("messages") is not None and row.get("prompt") is None:
        return _conversation_of_row(row, where)
    turns = row.get("turns")
    first_turn = turns[0] if isinstance(turns, list) and turns else None
    text = first_turn if row.get("prompt") is None else row["prompt"]
    if not isinstance(text, str):
        rule = "a prompt needs prompt_token_ids, prompt, messages or turns"
        raise InputError(where, rule, sorted(row), 'write it as {"prompt": "def main"}')
    if "turns" not in row:
        return text
    return conversation_of(document_of_row({**row, "turns": [text], "prompt": None}, where, where))


def _conversation_of_row(row: Mapping[str, Any], where: str) -> Conversation:
    conversation = conversation_of(document_of_row(row, where, where))
    if conversation.messages[-1]["role"] == "assistant":
        rule = "messages of a prompt must end with what the assistant is to answer"
        raise InputError(where, rule, "an answer", "leave out the last answer")
    return conversation


def encode_prompt(
    prompt: str | Conversation,
    tokenizer: PreTrainedTokenizerBase | None,
    where: str,
    add_special_tokens: bool = True,
) -> list[int]:
    """Token ids of a prompt.

    Args:
      prompt: a text to continue, or a chat, which goes through the chat template; without one, a
        chat of one turn is its text.
      tokenizer: the target's; None if it has none.
      where: the prompt's place, for errors.
      add_special_tokens: whether a text gets what the tokenizer puts before texts.

    Raises:
      InputError: there is no tokenizer, the text is not Unicode, or a chat has no template that can
        render it.
    """
    if tokenizer is None:
        rule, got = "text needs the target's tokenizer", "a target folder without tokenizer.json"
        raise InputError(where, rule, got, "give prompt_token_ids")
    if isinstance(prompt, Conversation):
        check_unicode(prompt.messages, where)
        if tokenizer.chat_template or len(prompt.messages) > 1:
            return encode_turns(tokenizer, prompt, where)
        prompt = "".join(map(content_text, prompt.messages))
    check_unicode(prompt, where)
    encoded = tokenize(tokenizer, prompt, where, add_special_tokens=add_special_tokens)
    return list(encoded["input_ids"])
