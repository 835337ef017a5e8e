"""Sections that the recipes of all tasks share: data, optimizer, devices, evaluation."""

import dataclasses
import json
import typing

from peagle_jax.documents import BAD_ROWS
from peagle_jax.draft import placeholders
from peagle_jax.draft.markov import KINDS
from peagle_jax.train.settings import check


def is_json(value: object) -> bool:
    """Whether a value that YAML has can be written as JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus, and how it is packed into rows."""

    # A JSONL, a Parquet file, a folder, or hf:NAME:SPLIT (corpus.stream_corpus); "installed": all
    # Python source of this environment; null: the Python standard library.
    source: str | None
    max_chars: int | None = None  # a random choice of about so many characters; null: all
    held_out: float = 0.05  # share of documents, by name, that are never trained on
    seq_len: int = 2048  # tokens of a packed row
    # Documents one after another and cut where a row ends, or whole ones, with padding
    # (train/data.py)
    packing: typing.Literal["cut", "whole"] = "cut"
    batch_size: int = 8  # packed rows of a step
    bad_rows: str = "refuse"  # lines that cannot be used: refuse the first, or skip and count them
    # options of the target's chat template, such as {enable_thinking: false}; those of rows win
    chat_template_kwargs: dict | None = None
    # Special tokens that texts spell: these tokens, as in rendered conversations, or plain text
    special_tokens: bool = False
    # Each answer of a conversation apart, after the turns before it, as the target saw them when it
    # wrote it: with its reasoning, which many templates drop from earlier turns. Turns that several
    # answers follow are read as often. False: all answers of a conversation at once.
    split_turns: bool = False

    def __post_init__(self) -> None:
        known = self.bad_rows in BAD_ROWS
        check(known, "bad_rows", "must be refuse or skip", self.bad_rows, "use refuse")
        check(self.seq_len >= 4, "seq_len", "must be 4 or more", self.seq_len, "use 2048")
        check(self.batch_size >= 1, "batch_size", "must be 1 or more", self.batch_size, "use 8")
        in_range = 0 <= self.held_out < 1
        check(in_range, "held_out", "must lie in 0..1, below 1", self.held_out, "use 0.05")
        positive = self.max_chars is None or self.max_chars >= 1
        check(positive, "max_chars", "must be 1 or more", self.max_chars, "use null for all")
        options = self.chat_template_kwargs or {}
        as_json = is_json(options) and all(isinstance(key, str) for key in options)
        rule = "must be what JSON has: names, text, numbers, true or false"
        next_step = 'write names and dates in quotes: {"date_string": "2024-07-26"}'
        check(as_json, "chat_template_kwargs", rule, options, next_step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What makes steps of gradients: linear warm-up, and cosine decay to a tenth of the peak."""

    # adamw, or muon (arXiv:2502.16982): orthogonalized momentum for matrices, except embeddings,
    # the output matrix and placeholders; these and all vectors take AdamW's steps. The steps are as
    # large as AdamW's, so a peak_lr for one suits the other.
    name: typing.Literal["adamw", "muon"] = "adamw"
    steps: int = 10_000
    peak_lr: float = 1e-4  # heads of large targets; 3e-3 suits the packaged target's
    warmup: int = 300  # steps
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm

    def __post_init__(self) -> None:
        check(self.steps >= 1, "steps", "must be 1 or more", self.steps, "use 10000")
        check(self.peak_lr > 0, "peak_lr", "must be above 0", self.peak_lr, "use 1e-4")
        check(self.warmup >= 0, "warmup", "must be 0 or more", self.warmup, "use 300")
        decay = self.weight_decay
        check(decay >= 0, "weight_decay", "must be 0 or more", decay, "use 0.01")
        positive = self.max_grad_norm > 0
        check(positive, "max_grad_norm", "must be above 0", self.max_grad_norm, "use 1.0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The devices that a run trains on, in three directions (train/mesh.py). Their product counts.

    A run may be resumed on another mesh.
    """

    data: int = 1  # devices that share the rows of a batch
    fsdp: int = 1  # devices that share the rows, and the matrices and what the optimizer keeps
    model: int = 1  # devices that share heads, MLPs, experts and vocabulary (tensor parallelism)

    def __post_init__(self) -> None:
        for key in ("data", "fsdp", "model"):
            size = getattr(self, key)
            check(size >= 1, key, "must be 1 or more", size, "use 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How a head's forward and backward are computed."""

    # Of the copies of the parameters and of the activations that a step computes with. Parameters,
    # what the optimizer keeps, and sums of gradients are float32 whatever this is.
    dtype: typing.Literal["float32", "bfloat16"] = "float32"
    # What the backward pass computes again instead of keeping it: nothing, or each layer's
    # activations from the layer's input.
    recompute: typing.Literal["none", "layers"] = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Greedy decoding with the head while it trains, and at the end: its acceptance length."""

    every: int | None = 1000  # steps; null: only at the end. Its time does not count as training
    # A JSONL of prompts; null: the prompts of held-out answers, or excerpts of held-out documents.
    prompts: str | None = None
    num_prompts: int = 16  # decoded as one batch
    max_new_tokens: int = 96
    ignore_eos: bool = False  # decode on through end-of-sequence tokens, as no user does
    # The parameters that become the head: of the last step, or of the evaluation with the longest
    # acceptance length.
    keep: typing.Literal["last", "best"] = "last"
    # Stop after so many evaluations without a longer one, with all depths in training; null: never.
    patience: int | None = None

    def __post_init__(self) -> None:
        positive = self.every is None or self.every >= 1
        check(positive, "every", "must be 1 or more, or null", self.every, "use 1000")
        check(self.num_prompts >= 1, "num_prompts", "must be 1 or more", self.num_prompts, "use 16")
        tokens = self.max_new_tokens
        check(tokens >= 1, "max_new_tokens", "must be 1 or more", tokens, "use 96")
        positive = self.patience is None or self.patience >= 1
        check(positive, "patience", "must be 1 or more, or null", self.patience, "use 5")
        measures = self.every is not None
        rule = "must be last where every is null: nothing is measured while the head trains"
        check(measures or self.keep == "last", "keep", rule, self.keep, "set every, or keep: last")
        rule = "must be null where every is null: nothing is measured while the head trains"
        next_step = "set every, or patience: null"
        check(measures or self.patience is None, "patience", rule, self.patience, next_step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TttConfig:
    """Test-time training of EAGLE-3 heads (arXiv:2503.01840)."""

    steps: int = 6  # the head is unrolled so often; K in training
    decay: float = 1.0  # unrolled step j counts decay**j in the loss

    def __post_init__(self) -> None:
        check(self.steps >= 1, "steps", "must be 1 or more", self.steps, "use 6")
        check(self.decay > 0, "decay", "must be above 0", self.decay, "use 1.0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceholderConfig:
    """What a placeholder row contains (draft/placeholders.py), and what it attends to.

    The defaults are the paper's: one learned vector for all positions, the mask token, and
    attention to the committed tokens and the placeholders before it.
    """

    hidden: str = "shared"
    token: str = "mask"
    attention: str = "causal"  # draft/placeholder_attention.py
    # Keys and values of committed tokens in layers behind the first: of what the layer before gave,
    # or injected (likewise).
    context: str = "layers"
    # Of training alone: the share of anchors whose placeholders read the text's own tokens, as if
    # these had been drafted already. When decoding, no placeholder knows a token: a head of share 1
    # is of use as a bound only (experiments). The accuracies of the log count such placeholders.
    true_tokens: float = 0.0

    def __post_init__(self) -> None:
        for name, designs in placeholders.DESIGNS.items():
            side = name.removeprefix("placeholder_")
            value = getattr(self, side)
            rule = f"must be one of {', '.join(designs)}"
            check(value in designs, side, rule, value, f"use {next(iter(designs))}")
        in_range, rule = 0 <= self.true_tokens <= 1, "must lie in 0..1"
        check(in_range, "true_tokens", rule, self.true_tokens, "use 0.0 for none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkovConfig:
    """A Markov head (draft/markov.py): the tokens before a draft give its logits a bias."""

    rank: int  # of the bias; DSpark's heads have 256
    # vanilla; gated: the bias depends on the hidden state, too; rnn: and on all drafts before
    kind: str = "vanilla"
    # Of the head in `init_from`, which stays as it is: only the Markov head is trained.
    train_alone: bool = False

    def __post_init__(self) -> None:
        check(self.rank >= 1, "rank", "must be 1 or more", self.rank, "use 256")
        rule = f"must be one of {', '.join(KINDS)}"
        check(self.kind in KINDS, "kind", rule, self.kind, f"use {KINDS[0]}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfidenceConfig:
    """A confidence head (draft/confidence.py): how likely a draft is accepted.

    No gradient of it reaches other parameters. Before it can choose how many tokens to draft it
    needs `peagle calibrate`.
    """

    # Of the head in `init_from`, which stays as it is: only the confidence head is trained.
    train_alone: bool = False
