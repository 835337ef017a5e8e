"""Strings: corpora, tokenizer, chat template, prompts, loss masks. Other rooms see token ids only."""

import dataclasses
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle_jax.types import InputError

END, MASK, START_TURN, END_TURN = "<|endoftext|>", "<|draft_mask|>", "<|im_start|>", "<|im_end|>"
SUFFIXES = {".py", ".txt", ".md", ".rst", ".c", ".h", ".js", ".ts", ".java", ".go", ".rs", ".json", ".html", ".csv", ".tex"}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# ---------------------------------------------------------------- corpora


@dataclasses.dataclass(frozen=True)
class Document:
    """One text, or one conversation; `name` decides on which side of the held-out split it falls."""

    name: str
    text: str | None
    messages: tuple[dict, ...] = ()

    @property
    def plain(self) -> str:
        """The text, or what the conversation's messages say."""
        return self.text if self.text is not None else "\n".join(str(m.get("content") or "") for m in self.messages)


def read_corpus(source: str | Path | None) -> list[Document]:
    """Documents of a corpus, in a fixed order, without exact duplicates.

    Args:
      source: a folder of text files, a JSONL with `text`, `prompt`, `messages` or `turns` a line, or None for the source
        code of this machine's Python standard library, its tests included.

    Raises:
      InputError: nothing is there, or a file is not UTF-8, or a line is not what it must be.
    """
    if source is None:
        documents = _standard_library()
    elif Path(source).is_dir():
        documents = _folder(Path(source))
    else:
        documents = _jsonl(Path(source))
    seen: set[bytes] = set()
    kept = []
    for document in documents:
        digest = hashlib.sha256((document.text or json.dumps(document.messages)).encode()).digest()
        if digest not in seen and (document.text or document.messages):
            seen.add(digest)
            kept.append(document)
    if not kept:
        raise InputError(source, f"a corpus needs at least one document ({', '.join(sorted(SUFFIXES))})", "none", "name another corpus")
    return kept


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            yield Document(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # the library tests itself on files in other encodings


def _folder(root: Path) -> Iterator[Document]:
    for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
        yield Document(str(path.relative_to(root)), read_text(path))


def _jsonl(path: Path) -> Iterator[Document]:
    for number, row in read_jsonl(path):
        name = f"{path.name}:{number}"
        if isinstance(row.get("text") or row.get("prompt"), str):
            yield Document(name, row.get("text") or row["prompt"])
        elif isinstance(row.get("messages"), list):
            yield Document(name, None, tuple(row["messages"]))
        elif isinstance(row.get("turns"), list):
            yield Document(name, None, tuple({"role": "user", "content": turn} for turn in row["turns"]))
        else:
            raise InputError(f"{path}:{number}", "a line needs text, prompt, messages or turns", sorted(row), "mend the line")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(path, "this file must exist", "nothing", "check the name") from None
    except IsADirectoryError:
        raise InputError(path, "must be a file", "a folder", "name a file in it") from None
    except OSError as error:
        raise InputError(path, "this file must be readable", error.strerror, "check the name") from None
    except UnicodeDecodeError as error:
        raise InputError(
            path, "must be UTF-8 text", f"byte {error.object[error.start]:#04x} at {error.start}", "convert or remove it"
        ) from None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}", "each line must be a JSON object", error, "mend the line") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}", "each line must be a JSON object", type(row).__name__, "mend the line")
        yield number, row


def split(documents: Sequence[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """(train, held out), by a hash of each document's name: a file stays on its side whatever else is there."""
    place = [int.from_bytes(hashlib.sha256(d.name.encode()).digest()[:8], "big") / 2**64 for d in documents]
    train = [d for d, p in zip(documents, place, strict=True) if p >= held_out]
    return train, [d for d, p in zip(documents, place, strict=True) if p < held_out]


def limit(documents: Sequence[Document], characters: int | None, seed: int) -> list[Document]:
    """A random choice of documents of about that many characters in all."""
    if characters is None:
        return list(documents)
    kept, total = [], 0
    for i in np.random.default_rng(seed).permutation(len(documents)):
        if total >= characters:
            break
        kept.append(documents[i])
        total += len(documents[i].plain)
    return kept


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
        vocab_size=vocab, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, mask_token=MASK, clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, or None where it has none."""
    if not (Path(folder) / "tokenizer.json").exists() and not (Path(folder) / "tokenizer_config.json").exists():
        return None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (Path(folder) / name).exists():
            try:
                json.loads(read_text(Path(folder) / name))
            except json.JSONDecodeError as error:
                raise InputError(Path(folder) / name, "must be JSON", error, "restore the file") from None
    return AutoTokenizer.from_pretrained(str(folder))


def encode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token ids, supervised) of each document: text whole with an end token, conversations on the assistant's part."""
    plain = [d for d in documents if d.text is not None]
    if plain and tokenizer.eos_token_id is None:
        raise InputError("tokenizer", "needs an end-of-sequence token to separate texts", "none", "set eos_token in tokenizer_config.json")
    if len(plain) < len(documents) and not tokenizer.chat_template:
        raise InputError("tokenizer", "conversations need a chat template", "none", "add chat_template.jinja to the target's folder")
    ids = iter(tokenizer([d.text for d in plain], add_special_tokens=False)["input_ids"] if plain else [])
    encoded = []
    for document in documents:
        if document.text is not None:
            tokens = np.array([*next(ids), tokenizer.eos_token_id], np.int32)
            encoded.append((tokens, np.ones(len(tokens), bool)))
        else:
            encoded.append(_conversation(tokenizer, list(document.messages)))
    return encoded


def _conversation(tokenizer, messages: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a rendered chat; supervised where the assistant speaks, or everywhere if it never does."""
    ids = np.array(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"], np.int32)
    supervised = np.zeros(len(ids), bool)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":  # by prefix lengths: most published templates do not mark generations
            before = tokenizer.apply_chat_template(messages[:i], tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"]
            through = tokenizer.apply_chat_template(messages[: i + 1], tokenize=True, return_dict=True)["input_ids"]
            supervised[len(before) : len(through)] = True
    return ids, supervised if supervised.any() else np.ones(len(ids), bool)


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
            if not isinstance(ids, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in ids):
                raise InputError(
                    f"{path}:{number}", "prompt_token_ids must be a list of whole numbers", json.dumps(ids)[:60], "mend the line"
                )
            prompts.append(ids)
            continue
        turns = row.get("turns")
        text = row.get("prompt") or (turns[0] if isinstance(turns, list) and turns else None)
        if not isinstance(text, str):
            raise InputError(f"{path}:{number}", "a prompt needs prompt_token_ids, prompt or turns", sorted(row), "mend the line")
        prompts.append(encode_prompt(text, tokenizer, chat="turns" in row, where=f"{path}:{number}"))
    if not prompts:
        raise InputError(path, "at least one prompt is needed", "an empty file", 'add a line like {"prompt": "def main"}')
    return prompts


def encode_prompt(text: str, tokenizer: PreTrainedTokenizerBase | None, *, chat: bool, where) -> list[int]:
    if tokenizer is None:
        raise InputError(where, "text needs the target's tokenizer", "a target folder without tokenizer.json", "give prompt_token_ids")
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"])
    return list(tokenizer(text, add_special_tokens=True)["input_ids"])
