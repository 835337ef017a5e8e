"""Run configurations: YAML into frozen dataclasses. An unknown or missing key is an error, never a default."""

import dataclasses
import types
import typing
from pathlib import Path

import yaml

from peagle_jax.draft import placeholders
from peagle_jax.old_names import RECIPE_KEYS, with_new_names
from peagle_jax.train.cod import CodConfig
from peagle_jax.train.loss import LOSSES
from peagle_jax.train.peagle_loss import FeatureNoise
from peagle_jax.types import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: (
        str | None
    )  # folder or JSONL; "installed"; null: this machine's Python standard library (corpus.read_corpus)
    max_chars: int | None  # a random choice of about so many characters; null: all
    held_out: float  # share of documents never trained on
    seq_len: int  # tokens a row
    batch_size: int  # rows a step

    def __post_init__(self):
        if (
            self.seq_len < 4
            or self.batch_size < 1
            or not 0 <= self.held_out < 1
            or (self.max_chars is not None and self.max_chars < 1)
        ):
            raise ValueError(
                f"data needs seq_len >= 4, batch_size >= 1, 0 <= held_out < 1, max_chars >= 1; got {self}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to a tenth."""

    steps: int
    peak_lr: float
    warmup: int  # steps
    weight_decay: float
    max_grad_norm: float  # global gradient norm

    def __post_init__(self):
        if self.steps < 1 or self.warmup < 0 or self.peak_lr <= 0 or self.max_grad_norm <= 0:
            raise ValueError(
                f"optimizer needs steps >= 1, warmup >= 0, peak_lr > 0, max_grad_norm > 0; got {self}"
            )


def _check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    if kv_heads < 1 or heads < 1 or heads % kv_heads or head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"heads must be a multiple of kv_heads, head_dim even; got {heads}, {kv_heads}, {head_dim}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmShape:
    vocab: int
    layers: int
    dim: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    context: int

    def __post_init__(self):
        _check_heads(self.heads, self.kv_heads, self.head_dim)
        if (
            min(self.vocab - 259, self.layers, self.dim, self.mlp_dim, self.context) < 1
            or self.rope_theta <= 0
        ):
            raise ValueError(
                f"model needs vocab >= 260 (bytes and special tokens) and positive sizes; got {self}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What every run says."""

    out: str
    seed: int
    data: DataConfig
    optimizer: OptimizerConfig
    log_every: int
    save_every: int
    max_seconds: float | None  # stop after so long even if steps remain

    def __post_init__(self):
        if self.log_every < 1 or self.save_every < 1:
            raise ValueError(
                f"log_every and save_every must be 1 or more; got {self.log_every} and {self.save_every}"
            )
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more; got {self.seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmRun(Run):
    """Trains a Qwen3 target from scratch, tokenizer included."""

    task: typing.Literal["lm"]
    model: LmShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """The rotary embedding that P-EAGLE heads are published with (layers/rope.py has the formula)."""

    theta: float
    factor: float
    low: float  # low_freq_factor
    high: float  # high_freq_factor
    original: int  # original_max_position_embeddings

    def __post_init__(self):
        if self.theta <= 0 or self.factor <= 0 or self.low >= self.high or self.original < 1:
            raise ValueError(
                f"rope needs theta and factor above 0, low below high, original of 1 or more; got {self}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A draft head. Null takes the target's value."""

    layers: int
    dim: int | None
    mlp_dim: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    draft_vocab: int | None  # null: the whole vocabulary
    aux_hidden_state_layers: tuple[int, ...] | None
    qk_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    mask_token: int | None  # null: the tokenizer's mask token
    rope: Llama3Rope | None

    def __post_init__(self):
        if self.heads is not None and self.kv_heads is not None:
            _check_heads(self.heads, self.kv_heads, self.head_dim or 2)
        if min(size for size in (self.layers, self.dim, self.mlp_dim, 1) if size is not None) < 1:
            raise ValueError(f"head needs positive sizes; got {self}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TttConfig:
    steps: int
    decay: float

    def __post_init__(self):
        if self.steps < 1 or self.decay <= 0:
            raise ValueError(f"ttt needs steps >= 1 and decay > 0; got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceholderConfig:
    """What a placeholder row sees: names of draft/placeholders.py, which says what they are."""

    hidden: str
    token: str

    def __post_init__(self):
        for side, known in (
            ("hidden", placeholders.HIDDEN_DESIGNS),
            ("token", placeholders.TOKEN_DESIGNS),
        ):
            if getattr(self, side) not in known:
                raise ValueError(
                    f"placeholder.{side} must be one of {', '.join(known)}; got {getattr(self, side)}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthStage:
    """Until step `until`, train only this many depths (P-EAGLE) or unrolled steps (EAGLE-3)."""

    until: int
    num_depths: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Greedy decoding with the head as it is: what `metrics.jsonl` and the closing table say about acceptance."""

    every: (
        int | None
    )  # steps; null: only when training is done. Its seconds do not count as training
    prompts: (
        str | None
    )  # JSONL; null: excerpts of held-out documents, or the prompts of held-out answers
    num_prompts: int  # prompts, decoded as one batch
    max_new_tokens: int

    def __post_init__(self):
        if min(self.every or 1, self.num_prompts, self.max_new_tokens) < 1:
            raise ValueError(
                f"eval needs every, num_prompts and max_new_tokens of 1 or more; got {self}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRun(Run):
    """What runs of both kinds of head say."""

    target: str
    target_dtype: typing.Literal["float32", "bfloat16"]
    hidden_states_dir: (
        str | None
    )  # folder of `peagle extract` of these very rows, read instead of running the target; null: run it
    head: HeadShape
    loss: str  # of train/loss.py
    init: typing.Literal[
        "random", "target"
    ]  # layers at random, or the target's last one (draft/init.py)
    init_from: (
        str | None
    )  # folder of a trained head, whose parameters then replace those of the same name and shape
    depth_schedule: tuple[
        DepthStage, ...
    ]  # depths one after the other: placeholders learn little before depth 0 has (LOG.md); empty: all at once
    train_embedding: bool
    train_lm_head: bool
    eval: EvalConfig

    def __post_init__(self):
        super().__post_init__()
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}; got {self.loss}")
        untils, num_depths = (
            [0, *(g.until for g in self.depth_schedule)],
            [0, *(g.num_depths for g in self.depth_schedule), self.num_depths],
        )
        if untils != sorted(set(untils)) or num_depths != sorted(set(num_depths)):
            raise ValueError(
                f"grow must ascend in until and in depths, and end below {self.num_depths} depths; got {self.depth_schedule}"
            )
        if untils[-1] >= self.optimizer.steps:
            raise ValueError(
                f"grow must end before the last of {self.optimizer.steps} steps, or the head is never trained for its K"
            )

    @property
    def num_depths(self) -> int:
        """K: the depths, or unrolled steps, of the finished head."""
        return self.cod.num_depths if isinstance(self, PeagleRun) else self.ttt.steps

    def num_depths_at(self, step: int) -> int:
        """How many depths the step trains."""
        return next((g.num_depths for g in self.depth_schedule if step < g.until), self.num_depths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeagleRun(HeadRun):
    task: typing.Literal["peagle"]
    cod: CodConfig
    placeholder: PlaceholderConfig
    feature_noise: FeatureNoise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Run(HeadRun):
    task: typing.Literal["eagle3"]
    ttt: TttConfig


TASKS = {"lm": LmRun, "peagle": PeagleRun, "eagle3": Eagle3Run}


def load_run(path: Path) -> Run:
    """Reads a run's YAML.

    Raises:
      InputError: not YAML, an unknown or missing key, or a value of the wrong kind.
    """
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            path, "this file must exist", "nothing", "check the name; configs/train/ has examples"
        ) from None
    except OSError as error:
        raise InputError(
            path, "this file must be readable", error.strerror, "check the name"
        ) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(
            path, "must be UTF-8 YAML", " ".join(str(error).split()), "mend the file"
        ) from None
    if not isinstance(raw, dict) or raw.get("task") not in TASKS:
        got = raw.get("task") if isinstance(raw, dict) else type(raw).__name__
        raise InputError(path, f"the key task must be one of {', '.join(TASKS)}", got, "set it")
    return build(TASKS[raw["task"]], raw, str(path))


def build(cls: type, raw: typing.Any, where: str):
    """A dataclass from a mapping, strictly."""
    if not isinstance(raw, dict):
        raise InputError(
            where,
            "must be a mapping of keys",
            type(raw).__name__,
            f"give {', '.join(f.name for f in dataclasses.fields(cls))}",
        )
    for owner in cls.__mro__:
        raw = with_new_names(raw, RECIPE_KEYS.get(owner.__name__, {}), where)
    hints = typing.get_type_hints(cls)
    if unknown := sorted(map(str, raw.keys() - hints.keys())):
        raise InputError(
            where,
            f"known keys are {', '.join(hints)}",
            f"unknown {', '.join(unknown)}",
            "remove or rename it",
        )
    if missing := [name for name in hints if name not in raw]:
        raise InputError(where, "every key must be given", f"no {', '.join(missing)}", "add it")
    try:
        return cls(**{name: _value(hints[name], raw[name], f"{where}: {name}") for name in hints})
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(where, "the values must make sense together", error, "mend them") from None


def _value(hint, raw, where: str):
    if dataclasses.is_dataclass(hint):
        return build(hint, raw, where)
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return (
            None
            if raw is None
            else _value(next(o for o in options if o is not type(None)), raw, where)
        )
    if origin is typing.Literal:
        fits = raw in options
    elif origin is tuple and dataclasses.is_dataclass(options[0]) and isinstance(raw, list):
        return tuple(build(options[0], item, f"{where}[{i}]") for i, item in enumerate(raw))
    elif origin is tuple:
        fits = isinstance(raw, list) and all(isinstance(x, options[0]) for x in raw)
        raw = tuple(raw) if fits else raw
    elif hint is float:
        fits = isinstance(raw, int | float) and not isinstance(raw, bool)
        raw = float(raw) if fits else raw
    else:
        fits = isinstance(raw, hint) and (hint is bool or not isinstance(raw, bool))
    if not fits:
        kind = (
            f"one of {', '.join(map(str, options))}"
            if origin is typing.Literal
            else getattr(hint, "__name__", hint)
        )
        raise InputError(
            where, f"must be {kind}", repr(raw), "mend the value (write 1e-3 as 1.0e-3)"
        )
    return raw


def dump(run) -> str:
    return yaml.safe_dump(_plain(dataclasses.asdict(run)), sort_keys=False)


def _plain(value):
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
