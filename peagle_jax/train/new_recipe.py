"""Writes a recipe that fits a target and a corpus, for people to read and to change."""

import array
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import yaml
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from peagle_jax import corpus, text, weights
from peagle_jax.chat.apply_template import TEMPLATE_OPTION, check_template_kwargs
from peagle_jax.chat.encoding import Encoded
from peagle_jax.documents import BadRows, Document
from peagle_jax.targets import read_config
from peagle_jax.targets.config import TargetConfig
from peagle_jax.targets.llama import LlamaConfig
from peagle_jax.targets.qwen3 import Qwen3Config
from peagle_jax.targets.qwen3_moe import Qwen3MoeConfig
from peagle_jax.types import InputError

KINDS = {"peagle": "A P-EAGLE", "eagle3": "An EAGLE-3", "eagle": "An EAGLE-1"}
NUM_DEPTHS = {"peagle": 8, "eagle3": 6, "eagle": 6}
NUM_LAYERS = {"peagle": 4, "eagle3": 1, "eagle": 1}
STEP_TOKENS = 8192  # of a batch, about
ROW_MULTIPLE = 128  # tokens of which rows are multiples
MAX_ROW = 4096  # tokens of a row at most, unless somebody asks for longer ones
EPOCHS, MIN_STEPS, MAX_STEPS = 3, 200, 60_000
# Depths are added when so large a share of the steps is done.
STAGES = ((0.1, 1), (0.25, 2), (0.55, 4))
# Adam's two moments, the parameter and its gradient, in float32
TRAINED_BYTES = 16
LARGE_TARGET = 1 << 30  # parameters from which on bfloat16 is chosen
HELD_OUT, MAX_HELD_OUT = 0.05, 0.2  # shares of documents
UNUSED = re.compile(r"reserved|unused|placeholder", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class EncodedCorpus:
    """What a recipe depends on of a corpus, which is not held in memory.

    Attributes:
      lengths: tokens of each document.
      num_trained: tokens that a loss may read, in all.
      used: tokens that occur.
    """

    lengths: Int[np.ndarray, " n"]
    num_trained: int
    used: set[int]


def new_recipe(
    target: str,
    data: str,
    task: str = "peagle",
    out: str = "runs/head",
    say: Callable[[str], None] = print,
    chat_template_kwargs: dict[str, Any] | None = None,
    special_tokens: bool = False,
    split_turns: bool = False,
) -> str:
    """A recipe of `peagle train`, with comments that give the reasons.

    Only the target's configuration, its tokenizer and the headers of its weights are read, and all
    of the corpus.

    Args:
      target: folder or hub id.
      data: as `data.source` of a recipe.
      task: "peagle", "eagle3" or "eagle".
      out: the run's folder.
      say: is told what of the corpus cannot be used.
      chat_template_kwargs, special_tokens, split_turns: as these keys of a recipe's `data`.

    Raises:
      InputError: the target or the corpus cannot be read, the target has no tokenizer, or nothing
        of the corpus would be trained.
    """
    folder = weights.find_folder(target)
    tokenizer = text.load_tokenizer(folder)
    if tokenizer is None:
        rule, next_step = "needs a tokenizer", "copy tokenizer.json into the target's folder"
        raise InputError(folder, rule, "no tokenizer.json", next_step)
    where = folder / "config.json"
    _, config = read_config(weights.read_json(where), where=where)
    text.check_vocabulary(tokenizer, config.vocab, folder)
    bad_rows = BadRows("skip")
    if chat_template_kwargs:
        check_template_kwargs(tokenizer, chat_template_kwargs, TEMPLATE_OPTION)
    how = chat_template_kwargs, special_tokens, split_turns
    documents = corpus.stream_corpus(data, bad_rows, *how)
    encoded = _count(text.encode_stream(tokenizer, documents, bad_rows))
    bad_rows.report(say)
    if not encoded.num_trained:
        rule, next_step = "something must be trained on", "look at it with peagle show-data"
        raise InputError(data, rule, f"none of {len(encoded.lengths)} documents", next_step)

    num_params = sum(math.prod(tensor.shape) for tensor in weights.open_folder(folder).values())
    further = " --special-tokens" if special_tokens else ""
    further += " --split-turns" if split_turns else ""
    if chat_template_kwargs:
        further = f" {TEMPLATE_OPTION} '{json.dumps(chat_template_kwargs)}'{further}"
    lines = [
        f"# {KINDS[task]} head for {target}, written by",
        f"# `peagle init-config --target {target} --data {data}{further}`.",
        "# Keys that are left out have defaults: peagle_jax/train/config.py, recipe_sections.py.",
        f"task: {task}",
        f"target: {_quoted(target)}",
        f"out: {_quoted(out)}                # checkpoints, metrics.jsonl, and the head for vLLM",
    ]
    if num_params >= LARGE_TARGET:
        lines += [
            "target_dtype: bfloat16  # float32 would take twice the memory",
            "compute: {dtype: bfloat16}  # of the head's products; its weights stay float32",
        ]
    lines += _head_lines(task, config, tokenizer, encoded.used)
    lines += _data_lines(data, config, encoded)
    if bad_rows.count:
        lines.append(f"  bad_rows: skip  # {bad_rows.count:,} rows cannot be used")
    if chat_template_kwargs:
        lines.append(f"  chat_template_kwargs: {json.dumps(chat_template_kwargs)}")
    if special_tokens:
        lines.append("  special_tokens: true")
    if split_turns:
        lines.append("  split_turns: true")
    num_rows, batch_size = _rows_and_batch(config, encoded)
    lines += _schedule_lines(task, config, num_rows, batch_size)
    lines += _memory_lines(task, config, num_params)
    return "\n".join(lines) + "\n"


def _count(stream: Iterable[tuple[Document, Encoded]]) -> EncodedCorpus:
    lengths, num_trained = array.array("q"), 0
    used: set[int] = set()
    for _, encoded in stream:
        lengths.append(len(encoded.tokens))
        num_trained += int(encoded.loss_mask.sum())
        used.update(encoded.tokens.tolist())
    return EncodedCorpus(np.array(lengths, np.int64), num_trained, used)


def _head_lines(
    task: str,
    config: TargetConfig,
    tokenizer: PreTrainedTokenizerBase,
    used: set[int],
) -> list[str]:
    """The head: its layers, what it reads, its placeholder's token, and what it begins as."""
    begins_as_target = _layer_can_be_copied(config)
    lines = ["head:", f"  layers: {NUM_LAYERS[task]}"]
    if task == "peagle":
        lines[-1] += "  # more raise the acceptance of late drafts, and cost time (docs/ablate.md)"
    if not isinstance(config, LlamaConfig | Qwen3Config):
        lines.append(f"  mlp_dim: {3 * config.dim}  # the target's layers have other MLPs")
    if task != "eagle":
        layers = sorted(set(config.aux_hidden_state_layers))
        lines.append(f"  aux_hidden_state_layers: {layers}  # whose inputs are read: vLLM's choice")
    if isinstance(config, Qwen3Config | Qwen3MoeConfig):
        lines.append("  qk_norm: true  # as the target has")
        if task == "eagle":
            lines[-1] += "; vLLM then cannot serve the head"
    if task == "peagle":
        lines += _mask_token_lines(config.vocab, tokenizer, used)
        lines.append(f"cod: {{num_depths: {NUM_DEPTHS[task]}}}  # K: tokens drafted in one pass")
    elif task == "eagle":
        lines.append(f"num_speculative_tokens: {NUM_DEPTHS[task]}  # drafted in one step")
    else:
        lines.append(f"ttt: {{steps: {NUM_DEPTHS[task]}}}  # the head is unrolled so often")
    if begins_as_target:
        lines.append("init: target  # layers begin as copies of the target's last; learns sooner")
    return lines


def _layer_can_be_copied(config: TargetConfig) -> bool:
    """Whether `init: target` is possible (draft/init.py says when)."""
    return isinstance(config, LlamaConfig | Qwen3Config) and not config.attention_bias


def _mask_token_lines(vocab: int, tokenizer: PreTrainedTokenizerBase, used: set[int]) -> list[str]:
    """`mask_token`, where the tokenizer has none: an id that no text has."""
    if tokenizer.mask_token_id is not None:
        return [f"  # the placeholders' token is the tokenizer's own: {tokenizer.mask_token!r}"]
    names = {index: name for name, index in tokenizer.get_vocab().items()}
    free = [i for i in range(vocab) if i not in used]
    nameless = [i for i in free if i not in names]
    reserved = [i for i in free if UNUSED.search(names.get(i, ""))]
    if nameless:
        token, why = nameless[-1], "an id that the tokenizer does not use"
    elif reserved:
        token, why = reserved[-1], f"{names[reserved[-1]]!r}, which no text has"
    elif free:
        token, why = free[-1], f"{names[free[-1]]!r}: the corpus has none; better a reserved token"
    else:
        rule, next_step = "needs an id that no text has", "add a token to the tokenizer"
        raise InputError(tokenizer.name_or_path, rule, "a corpus with every token", next_step)
    return [f"  mask_token: {token}  # in a placeholder's place: {why}"]


def _row_length(config: TargetConfig, encoded: EncodedCorpus) -> int:
    """A row that holds 99 of 100 documents, if it need not be very long."""
    longest = float(np.quantile(encoded.lengths, 0.99, method="higher"))
    length = max(1, math.ceil(longest / ROW_MULTIPLE)) * ROW_MULTIPLE
    return min(length, MAX_ROW, config.context)


def _rows_and_batch(config: TargetConfig, encoded: EncodedCorpus) -> tuple[int, int]:
    """Packed rows, and how many of them a step reads."""
    length = _row_length(config, encoded)
    num_rows = max(1, int(encoded.lengths.sum()) // length)
    return num_rows, min(max(1, STEP_TOKENS // length), num_rows)


def _data_lines(data: str, config: TargetConfig, encoded: EncodedCorpus) -> list[str]:
    length, (_, batch_size) = _row_length(config, encoded), _rows_and_batch(config, encoded)
    num_tokens = int(encoded.lengths.sum())
    trained = encoded.num_trained / num_tokens
    inside = float(np.mean(encoded.lengths <= length))
    return [
        f"# {len(encoded.lengths):,} documents, {num_tokens:,} tokens, {trained:.0%} of them "
        "trained;",
        f"# {inside:.0%} fit into a row, longer ones are cut.",
        "data:",
        f"  source: {_quoted(data)}",
        f"  held_out: {_held_out(len(encoded.lengths))}  # share of documents that only measure "
        "the head",
        f"  seq_len: {length}  # tokens of a row; documents are packed",
        f"  batch_size: {batch_size}",
    ]


def _held_out(num_documents: int) -> float:
    """The usual share, or that of about ten documents; a fifth at most."""
    return max(HELD_OUT, min(MAX_HELD_OUT, round(10 / num_documents, 2)))


def _schedule_lines(task: str, config: TargetConfig, num_rows: int, batch_size: int) -> list[str]:
    steps = min(max(EPOCHS * num_rows // batch_size, MIN_STEPS), MAX_STEPS)
    rate = min(max(1e-4 * 4096 / config.dim, 1e-4), 3e-3)
    stages = [(round(share * steps), depths) for share, depths in STAGES]
    stages = [(until, depths) for until, depths in stages if depths < NUM_DEPTHS[task]]
    shown = ", ".join(f"{{until: {until}, num_depths: {depths}}}" for until, depths in stages)
    every = max(1, steps // 10)
    schedule = [
        "# Early drafts first: late ones are learned from a head that knows the early ones.",
        f"depth_schedule: [{shown}]",
    ]
    return [
        *(schedule if task != "eagle" else ()),
        f"# {steps * batch_size / num_rows:.1f} passes over the rows. The learning rate is a rule",
        "# of thumb for the target's width; name: muon is an alternative.",
        f"optimizer: {{steps: {steps}, peak_lr: {rate:.1e}, warmup: {max(10, steps // 50)}}}",
        "# Greedy decoding of held-out prompts; the head with the longest acceptance is exported.",
        f"eval: {{every: {every}, keep: best}}",
        f"save_every: {every}",
    ]


def _memory_lines(task: str, config: TargetConfig, num_params: int) -> list[str]:
    """What a device has to hold before the first activation, as a comment."""
    is_large = num_params >= LARGE_TARGET
    target_bytes = num_params * (2 if is_large else 4)
    head_bytes = _head_params(task, config) * TRAINED_BYTES
    return [
        f"# Memory: target {target_bytes / 1e9:.2f} GB, head and its optimizer "
        f"{head_bytes / 1e9:.2f} GB, and activations.",
        "# Less of each on a device: mesh: {fsdp: 8}; fewer activations: gradient_accumulation.",
    ]


def _head_params(task: str, config: TargetConfig) -> int:
    """Trained parameters of the head: matrices only."""
    is_dense = isinstance(config, LlamaConfig | Qwen3Config)
    mlp_dim = config.mlp_dim if is_dense else 3 * config.dim
    queries = config.heads * config.head_dim
    keys_and_values = 2 * config.kv_heads * config.head_dim
    attention = config.dim * (2 * queries + keys_and_values)
    layers = NUM_LAYERS[task] * (attention + 3 * config.dim * mlp_dim)
    if task == "eagle":
        return layers + 2 * config.dim**2
    first_layer = config.dim * (queries + keys_and_values)  # reads [embedding, hidden state]
    fusion = len(config.aux_hidden_state_layers) * config.dim**2
    embedding = config.vocab * config.dim if task == "peagle" else 0
    return layers + first_layer + fusion + embedding


def _quoted(value: str) -> str:
    """A text as YAML spells it, in quotes where it needs them."""
    is_plain = re.fullmatch(r"[A-Za-z0-9_./-]+", value) and yaml.safe_load(value) == value
    return value if is_plain else json.dumps(value, ensure_ascii=False)  # 2024 is a number, no name
