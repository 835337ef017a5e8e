"""Strings to token ids: tokenizers, chat templates, prompts, loss masks.

The rest of the package works with token ids only.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle_jax.corpus import Document, read_jsonl, read_text
from peagle_jax.types import InputError

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
      InputError: one of its files is not JSON.
    """
    paths = [Path(folder) / name for name in ("tokenizer.json", "tokenizer_config.json")]
    paths = [path for path in paths if path.exists()]
    if not paths:
        return None
    for path in paths:
        try:
            json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise InputError(path, "must be JSON", error, "download the file again") from None
    return AutoTokenizer.from_pretrained(str(folder))


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
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encodes documents for training.

    Returns:
      (token ids, loss mask) of each document. Texts end with an end-of-sequence token, and the loss
      reads all of them; of conversations it reads what the assistant says, and of answers in tokens
      what the target wrote.

    Raises:
      InputError: texts without an end-of-sequence token, conversations without a chat template, or
        an answer with token ids that the tokenizer does not have.
    """
    texts = [document.text for document in documents if document.text is not None]
    if texts and tokenizer.eos_token_id is None:
        rule = "needs an end-of-sequence token to separate texts"
        where = tokenizer.name_or_path or "tokenizer"
        raise InputError(where, rule, "none", "set eos_token in its tokenizer_config.json")
    if any(document.messages for document in documents) and not tokenizer.chat_template:
        where = tokenizer.name_or_path or "tokenizer"
        next_step = "add the target's chat_template.jinja to this folder"
        raise InputError(where, "conversations need a chat template", "none", next_step)
    all_ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    ids_of_texts = iter(cast(list[list[int]], all_ids))
    encoded = []
    for document in documents:
        if document.text is not None:
            tokens = np.array([*next(ids_of_texts), tokenizer.eos_token_id], np.int32)
            encoded.append((tokens, np.ones(len(tokens), bool)))
        elif document.messages:
            encoded.append(_encode_conversation(tokenizer, list(document.messages)))
        else:
            encoded.append(_encode_answer(tokenizer, document))
    return encoded


def _encode_answer(
    tokenizer: PreTrainedTokenizerBase, document: Document
) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([*document.prompt_ids, *document.output_ids], np.int32)
    if (largest := int(tokens.max())) >= len(tokenizer):
        rule = f"token ids must lie in 0..{len(tokenizer) - 1}"
        raise InputError(document.name, rule, largest, "use answers that this target wrote")
    return tokens, np.arange(len(tokens)) >= len(document.prompt_ids)


def _encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a rendered chat. The loss reads the assistant's turns, or all if there are none.

    A turn is found as the tokens by which the chat grows when it is rendered with it: most
    published templates do not mark generations.
    """
    tokens = np.array(_chat_ids(tokenizer, messages), np.int32)
    loss_mask = np.zeros(len(tokens), bool)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = len(_chat_ids(tokenizer, messages[:i], add_generation_prompt=True))
            end = len(_chat_ids(tokenizer, messages[: i + 1]))
            loss_mask[begin:end] = True
    return tokens, loss_mask if loss_mask.any() else np.ones(len(tokens), bool)


def _chat_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], *, add_generation_prompt: bool = False
) -> list[int]:
    """Token ids of a conversation, through the chat template."""
    rendered = tokenizer.apply_chat_template(
        messages,
        tokenize=True,
        add_generation_prompt=add_generation_prompt,
        return_dict=True,
    )
    return list(cast(dict, rendered)["input_ids"])


# ---------------------------------------------------------------- prompts


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Reads the prompts of a JSONL file as token ids.

    Args:
      path: its lines have `prompt_token_ids`, `prompt`, or `turns`; of turns the first one is
        taken, through the chat template.
      tokenizer: the target's; None if it has none.

    Raises:
      InputError: there are no lines, or a line is none of the above, or has text for a target
        without a tokenizer.
    """
    prompts = []
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        if "prompt_token_ids" in row:
            ids = row["prompt_token_ids"]
            if not isinstance(ids, list) or not all(type(token) is int for token in ids):
                rule = "prompt_token_ids must be a list of whole numbers"
                raise InputError(where, rule, json.dumps(ids)[:60], "write it as [1, 2, 3]")
            prompts.append(ids)
            continue
        turns = row.get("turns")
        first_turn = turns[0] if isinstance(turns, list) and turns else None
        text = row.get("prompt") or first_turn
        if not isinstance(text, str):
            rule = "a prompt needs prompt_token_ids, prompt or turns"
            raise InputError(where, rule, sorted(row), 'write it as {"prompt": "def main"}')
        prompts.append(encode_prompt(text, tokenizer, chat="turns" in row, where=where))
    if not prompts:
        next_step = 'add a line like {"prompt": "def main"}'
        raise InputError(path, "at least one prompt is needed", "an empty file", next_step)
    return prompts


def encode_prompt(
    text: str, tokenizer: PreTrainedTokenizerBase | None, *, chat: bool, where: str | Path
) -> list[int]:
    """Token ids of a prompt.

    Args:
      text: the prompt.
      tokenizer: the target's; None if it has none.
      chat: whether the prompt is a user's turn, which goes through the chat template if there is
        one.
      where: the prompt's place, for errors.

    Raises:
      InputError: there is no tokenizer.
    """
    if tokenizer is None:
        rule, got = "text needs the target's tokenizer", "a target folder without tokenizer.json"
        raise InputError(where, rule, got, "give prompt_token_ids")
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        return _chat_ids(tokenizer, messages, add_generation_prompt=True)
    return list(cast(list[int], tokenizer(text, add_special_tokens=True)["input_ids"]))
