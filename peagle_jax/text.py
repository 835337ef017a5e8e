"""Strings to token ids: tokenizer, chat template, prompts, loss masks. Other rooms see token ids only."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle_jax.corpus import Document, read_jsonl, read_text
from peagle_jax.types import InputError

END, MASK, START_TURN, END_TURN = "<|endoftext|>", "<|draft_mask|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# ---------------------------------------------------------------- tokenizer


def train_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in Hugging Face form: every byte has a token, so nothing is unknown.

    `<|draft_mask|>` never occurs in text: P-EAGLE's placeholder token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, MASK, START_TURN, END_TURN]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
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
    """The folder's tokenizer, or None where it has none."""
    if (
        not (Path(folder) / "tokenizer.json").exists()
        and not (Path(folder) / "tokenizer_config.json").exists()
    ):
        return None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (Path(folder) / name).exists():
            try:
                json.loads(read_text(Path(folder) / name))
            except json.JSONDecodeError as error:
                raise InputError(
                    Path(folder) / name, "must be JSON", error, "restore the file"
                ) from None
    return AutoTokenizer.from_pretrained(str(folder))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab: int, where) -> None:
    """Whether an embedding of `vocab` rows has one for every token; what lies outside of an array, JAX reads without a word.

    Raises:
      InputError: it has not; `where` names the target.
    """
    needed = (
        max(tokenizer.get_vocab().values(), default=-1) + 1
    )  # more than len(tokenizer) where ids have holes
    if needed > vocab:
        next_step = "take tokenizer and weights from one checkpoint"
        raise InputError(
            where,
            f"the target's embedding has {vocab} rows",
            f"a tokenizer that needs {needed}",
            next_step,
        )


def encode(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token ids, supervised) of each document: text whole with an end token, conversations and answers on what the model says."""
    plain = [d for d in documents if d.text is not None]
    if plain and tokenizer.eos_token_id is None:
        raise InputError(
            "tokenizer",
            "needs an end-of-sequence token to separate texts",
            "none",
            "set eos_token in tokenizer_config.json",
        )
    if any(d.messages for d in documents) and not tokenizer.chat_template:
        raise InputError(
            "tokenizer",
            "conversations need a chat template",
            "none",
            "add chat_template.jinja to the target's folder",
        )
    ids = iter(
        tokenizer([d.text for d in plain], add_special_tokens=False)["input_ids"] if plain else []
    )
    encoded = []
    for document in documents:
        if document.text is not None:
            tokens = np.array([*next(ids), tokenizer.eos_token_id], np.int32)
            encoded.append((tokens, np.ones(len(tokens), bool)))
        elif document.messages:
            encoded.append(_conversation(tokenizer, list(document.messages)))
        else:
            encoded.append(_answer(tokenizer, document))
    return encoded


def _answer(tokenizer, document: Document) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([*document.prompt_ids, *document.output_ids], np.int32)
    if (most := int(tokens.max())) >= len(tokenizer):
        raise InputError(
            document.name,
            f"token ids must lie in 0..{len(tokenizer) - 1}",
            most,
            "use answers of this very target",
        )
    return tokens, np.arange(len(tokens)) >= len(document.prompt_ids)


def _conversation(tokenizer, messages: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a rendered chat; supervised where the assistant speaks, or everywhere if it never does."""
    ids = np.array(
        tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"],
        np.int32,
    )
    loss_mask = np.zeros(len(ids), bool)
    for i, message in enumerate(messages):
        if (
            message["role"] == "assistant"
        ):  # by prefix lengths: most published templates do not mark generations
            before = tokenizer.apply_chat_template(
                messages[:i], tokenize=True, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            through = tokenizer.apply_chat_template(
                messages[: i + 1], tokenize=True, return_dict=True
            )["input_ids"]
            loss_mask[len(before) : len(through)] = True
    return ids, loss_mask if loss_mask.any() else np.ones(len(ids), bool)


# ---------------------------------------------------------------- prompts


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Token ids of each line: `prompt_token_ids`, `prompt`, or `turns` (the first turn, through the chat template).

    Raises:
      InputError: no line, an unknown line, or text for a target without a tokenizer.
    """
    prompts = []
    for number, row in read_jsonl(path):
        if "prompt_token_ids" in row:
            ids = row["prompt_token_ids"]
            if not isinstance(ids, list) or not all(
                isinstance(t, int) and not isinstance(t, bool) for t in ids
            ):
                raise InputError(
                    f"{path}:{number}",
                    "prompt_token_ids must be a list of whole numbers",
                    json.dumps(ids)[:60],
                    "mend the line",
                )
            prompts.append(ids)
            continue
        turns = row.get("turns")
        text = row.get("prompt") or (turns[0] if isinstance(turns, list) and turns else None)
        if not isinstance(text, str):
            raise InputError(
                f"{path}:{number}",
                "a prompt needs prompt_token_ids, prompt or turns",
                sorted(row),
                "mend the line",
            )
        prompts.append(
            encode_prompt(text, tokenizer, chat="turns" in row, where=f"{path}:{number}")
        )
    if not prompts:
        raise InputError(
            path,
            "at least one prompt is needed",
            "an empty file",
            'add a line like {"prompt": "def main"}',
        )
    return prompts


def encode_prompt(
    text: str, tokenizer: PreTrainedTokenizerBase | None, *, chat: bool, where
) -> list[int]:
    if tokenizer is None:
        raise InputError(
            where,
            "text needs the target's tokenizer",
            "a target folder without tokenizer.json",
            "give prompt_token_ids",
        )
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        return list(
            tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
    return list(tokenizer(text, add_special_tokens=True)["input_ids"])
