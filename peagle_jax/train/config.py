"""Training recipes: what a run is told, as frozen dataclasses, and their YAML.

A recipe needs few keys: `task`, `target`, `out` and `data` for a draft head, `task`, `out` and
`model` for a small target. Every other key has the default that stands here. Unknown keys are
errors. configs/train/ has the recipes of the packaged models and of published heads.
"""

import abc
import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path

import yaml

from peagle_jax.layers import FINAL_HIDDEN_STATE
from peagle_jax.train.cod import CodConfig
from peagle_jax.train.eagle_loss import RegressionConfig
from peagle_jax.train.loss import LOSSES
from peagle_jax.train.peagle_loss import FeatureNoise
from peagle_jax.train.recipe_sections import (
    ComputeConfig,
    ConfidenceConfig,
    DataConfig,
    EvalConfig,
    MarkovConfig,
    MeshConfig,
    OptimizerConfig,
    PlaceholderConfig,
    TttConfig,
)
from peagle_jax.train.settings import build, check, plain
from peagle_jax.train.trackers import TRACKERS
from peagle_jax.types import InputError


def _check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    check(kv_heads >= 1, "kv_heads", "must be 1 or more", kv_heads, "use a divisor of heads")
    is_multiple = heads >= 1 and heads % kv_heads == 0
    rule = f"must be a multiple of kv_heads, {kv_heads}"
    check(is_multiple, "heads", rule, heads, f"use {max(heads // kv_heads, 1) * kv_heads}")
    is_even = head_dim >= 2 and head_dim % 2 == 0
    check(is_even, "head_dim", "must be even and 2 or more", head_dim, "use 64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmShape:
    """The Qwen3 target that an `lm` run trains."""

    vocab: int  # of the tokenizer, which is trained on the same corpus
    layers: int
    dim: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    context: int = 4096

    def __post_init__(self) -> None:
        _check_heads(self.heads, self.kv_heads, self.head_dim)
        rule = "must be 260 or more: 256 bytes and 4 special tokens"
        check(self.vocab >= 260, "vocab", rule, self.vocab, "use 2048")
        for key, example in (("layers", 8), ("dim", 512), ("mlp_dim", 1536), ("context", 4096)):
            size = getattr(self, key)
            check(size >= 1, key, "must be 1 or more", size, f"use {example}")
        positive = self.rope_theta > 0
        check(positive, "rope_theta", "must be above 0", self.rope_theta, "use 10000.0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What every run is told."""

    task: str
    out: str  # the run's folder: recipe, checkpoints, metrics.jsonl, result
    seed: int = 0
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    # Parts of a batch that are computed one after another, to save memory; their gradients add up.
    gradient_accumulation: int = 1
    mesh: MeshConfig = MeshConfig()
    log_every: int = 50  # steps between two rows of metrics.jsonl
    save_every: int = 1000  # steps between two checkpoints
    keep_checkpoints: int | None = 2  # the newest; null: all
    trackers: tuple[str, ...] = ()  # where metrics go besides metrics.jsonl (train/trackers.py)
    max_seconds: float | None = None  # stop after so long even if steps remain; null: never

    def __post_init__(self) -> None:
        check(self.log_every >= 1, "log_every", "must be 1 or more", self.log_every, "use 50")
        check(self.save_every >= 1, "save_every", "must be 1 or more", self.save_every, "use 1000")
        keep = self.keep_checkpoints
        positive = keep is None or keep >= 1
        check(positive, "keep_checkpoints", "must be 1 or more, or null", keep, "use 2")
        for name in self.trackers:
            rule = f"must be of {', '.join(TRACKERS)}"
            check(name in TRACKERS, "trackers", rule, name, "use [tensorboard]")
        check(self.seed >= 0, "seed", "must be 0 or more", self.seed, "use 0")
        key, parts = "gradient_accumulation", self.gradient_accumulation
        check(parts >= 1, key, "must be 1 or more", parts, "use 1")
        shares = parts * self.mesh.data * self.mesh.fsdp
        rule = f"must be a multiple of gradient_accumulation x mesh.data x mesh.fsdp, {shares}"
        rows = self.data.batch_size
        next_step = f"use {-(-rows // shares) * shares}"
        check(rows % shares == 0, "data.batch_size", rule, rows, next_step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmRun(Run):
    """Trains a small Qwen3 target from scratch, tokenizer included."""

    task: typing.Literal["lm"] = "lm"
    model: LmShape
    data: DataConfig = DataConfig(source=None, seq_len=256)
    optimizer: OptimizerConfig = OptimizerConfig(
        steps=4000, peak_lr=2e-3, warmup=200, weight_decay=0.1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3's rotary embedding, in transformers' words; the defaults are Llama 3.2's."""

    rope_theta: float = 500_000.0
    factor: float = 32.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check(self.rope_theta > 0, "rope_theta", "must be above 0", self.rope_theta, "use 500000.0")
        check(self.factor > 0, "factor", "must be above 0", self.factor, "use 32.0")
        low, high = self.low_freq_factor, self.high_freq_factor
        rule = f"must be below high_freq_factor, {high}"
        check(low < high, "low_freq_factor", rule, low, "use 1.0, and 4.0 for the other")
        key, original = "original_max_position_embeddings", self.original_max_position_embeddings
        check(original >= 1, key, "must be 1 or more", original, "use 8192")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A draft head. Null takes the target's value."""

    layers: int
    dim: int | None = None
    mlp_dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    draft_vocab: int | None = (
        None  # the most frequent tokens of the data; null: the whole vocabulary
    )
    # The target's layers whose inputs the head reads (vLLM: eagle_aux_hidden_state_layer_ids);
    # null: those that vLLM chooses for the target.
    aux_hidden_state_layers: tuple[int, ...] | None = None
    qk_norm: bool = False  # RMSNorm of queries and keys, as Qwen3 has; needed to begin as its layer
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token: int | None = None  # the placeholders' token; null: the tokenizer's mask token
    rope: Llama3Rope | None = None
    # Of every layer, in tokens: a row attends to the positions p - window + 1 .. p; null: to all.
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.heads is not None and self.kv_heads is not None:
            _check_heads(self.heads, self.kv_heads, self.head_dim or 2)
        for key in ("layers", "dim", "mlp_dim"):
            size = getattr(self, key)
            positive = size is None or size >= 1
            next_step = "use 1" if key == "layers" else "use null for the target's"
            check(positive, key, "must be 1 or more", size, next_step)
        window = self.sliding_window
        positive = window is None or window >= 1
        next_step = "use null for full attention"
        check(positive, "sliding_window", "must be 1 or more", window, next_step)
        both = self.norm_before_fc and self.fc_norm
        rule = "excludes norm_before_fc: a head has one of the two"
        check(not both, "fc_norm", rule, "both", "set one of them to false")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthStage:
    """Until step `until`, train only so many depths (P-EAGLE) or unrolled steps (EAGLE-3)."""

    until: int
    num_depths: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRun(Run, abc.ABC):
    """What runs of every kind of head are told."""

    target: str  # folder or hub id
    target_dtype: typing.Literal["float32", "bfloat16"] = "float32"
    # A folder of `peagle extract` with hidden states of these very rows; null: the target runs.
    hidden_states_dir: str | None = None
    head: HeadShape
    loss: str = "forward_kl"  # a name of train/loss.py
    # The head's layers begin as random numbers, or as the target's last layer (draft/init.py).
    init: typing.Literal["random", "target"] = "random"
    # A trained head, whose parameters then replace those of the same name and shape.
    init_from: str | None = None
    # Fewer depths at first: placeholders learn little before depth 0 has. Empty: all at once.
    depth_schedule: tuple[DepthStage, ...] = ()
    train_embedding: bool
    train_lm_head: bool = False
    compute: ComputeConfig = ComputeConfig()
    eval: EvalConfig = EvalConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.head.aux_hidden_state_layers or ()
        rule = "must be layers of the target, 0 or more"
        next_step = "use task: eagle for a head that reads the final hidden state"
        check(min(layers, default=0) >= 0, "head.aux_hidden_state_layers", rule, layers, next_step)
        rule = f"must be one of {', '.join(LOSSES)}"
        check(self.loss in LOSSES, "loss", rule, self.loss, "use forward_kl")
        stages = [(stage.until, stage.num_depths) for stage in self.depth_schedule]
        untils = [0, *(until for until, _ in stages)]
        depths = [0, *(num_depths for _, num_depths in stages), self.num_depths]
        ascends = untils == sorted(set(untils)) and depths == sorted(set(depths))
        check(
            ascends,
            "depth_schedule",
            f"must ascend in until and in num_depths, and stay below {self.num_depths} depths",
            f"stages (until, num_depths) of {stages}",
            "reorder its stages, or use [] to train all depths from the first step on",
        )
        check(
            untils[-1] < self.optimizer.steps,
            "depth_schedule",
            f"must end before the last of {self.optimizer.steps} steps (optimizer.steps), or the "
            f"head is never trained for all its {self.num_depths} depths",
            f"a stage until step {untils[-1]}",
            f"set optimizer.steps above {untils[-1]}, or depth_schedule to earlier stages or []",
        )

    @property
    @abc.abstractmethod
    def num_depths(self) -> int:
        """K of the finished head: depths of P-EAGLE, unrolled steps of EAGLE-3.

        An EAGLE-1 head is trained for one step, and is evaluated with this many.
        """

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...] | None:
        """Which hidden states of the target the head reads; None: those that vLLM chooses."""
        return self.head.aux_hidden_state_layers

    def num_depths_at(self, step: int) -> int:
        """How many depths the step trains, by the depth schedule."""
        for stage in self.depth_schedule:
            if step < stage.until:
                return stage.num_depths
        return self.num_depths


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeagleRun(HeadRun):
    """Trains a P-EAGLE head (arXiv:2602.01469), which drafts all K tokens in one forward."""

    task: typing.Literal["peagle"] = "peagle"
    head: HeadShape = HeadShape(layers=4)
    train_embedding: bool = True
    cod: CodConfig = CodConfig()
    placeholder: PlaceholderConfig = PlaceholderConfig()
    markov: MarkovConfig | None = None  # null: no Markov head
    confidence: ConfidenceConfig | None = None  # null: no confidence head
    feature_noise: FeatureNoise = FeatureNoise()
    # Of each depth's elements in the loss, num_depths of them; null: 1 for all.
    depth_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_depth_weights()
        self._check_placeholder()
        for part in self.trained_alone:
            key, rule = f"{part}.train_alone", "needs a trained head, which it leaves as it is"
            next_step = f"set init_from to that head's folder, or {key}: false"
            check(self.init_from is not None, key, rule, "init_from: null", next_step)

    def _check_depth_weights(self) -> None:
        weights, key = self.depth_weights, "depth_weights"
        if weights is None:
            return
        count, next_step = self.cod.num_depths, "use null for 1 at every depth"
        rule = f"must be {count} numbers, one for each depth (cod.num_depths)"
        check(len(weights) == count, key, rule, f"{len(weights)} of them", next_step)
        valid = all(0 <= w < float("inf") for w in weights) and weights[0] > 0
        check(valid, key, "must be finite, 0 or more, the first above 0", list(weights), next_step)

    def _check_placeholder(self) -> None:
        design, layers = self.placeholder, self.head.layers
        fits = design.context == "layers" or layers > 1
        rule, got = "needs a head of two layers or more", f"{design.context} with {layers}"
        check(fits, "placeholder.context", rule, got, "set head.layers: 2, or context: layers")
        fits = not design.true_tokens or (self.confidence is None and not self.trained_alone)
        rule = "must be 0 with a confidence head, or with a part trained alone"
        next_step = "leave out true_tokens"
        check(fits, "placeholder.true_tokens", rule, design.true_tokens, next_step)

    @property
    def trained_alone(self) -> tuple[str, ...]:
        """The parts that are trained on top of a head which stays as it is, by their sections.

        A confidence head is trained beside them in any case, as nothing else depends on it.
        """
        parts = {"markov": self.markov, "confidence": self.confidence}
        return tuple(name for name, part in parts.items() if part and part.train_alone)

    @property
    def num_depths(self) -> int:
        return self.cod.num_depths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Run(HeadRun):
    """Trains an EAGLE-3 head (arXiv:2503.01840), which drafts token by token."""

    task: typing.Literal["eagle3"] = "eagle3"
    head: HeadShape = HeadShape(layers=1)
    train_embedding: bool = False
    ttt: TttConfig = TttConfig()

    @property
    def num_depths(self) -> int:
        return self.ttt.steps


# Keys of `HeadShape` for which an EAGLE-1 head has no place: it reads and predicts what the
# target's output matrix reads.
NOT_IN_EAGLE = (
    "dim",
    "draft_vocab",
    "aux_hidden_state_layers",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "mask_token",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleRun(HeadRun):
    """Trains an EAGLE-1 head (arXiv:2401.15077), which predicts hidden states one by one.

    Its embedding and output matrix are the target's, and stay so.
    """

    task: typing.Literal["eagle"] = "eagle"
    head: HeadShape = HeadShape(layers=1)
    train_embedding: bool = False
    regression: RegressionConfig = RegressionConfig()
    # K: tokens drafted in one step when the head is evaluated. Training has one step.
    num_speculative_tokens: int = 6

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        check(k >= 1, "num_speculative_tokens", "must be 1 or more", k, "use 6")
        super().__post_init__()
        rule, window = "vLLM's EAGLE-1 heads have none", self.head.sliding_window
        check(window is None, "head.sliding_window", rule, window, "leave the key out")
        for key in NOT_IN_EAGLE:
            value, default = getattr(self.head, key), getattr(HeadShape(layers=1), key)
            rule = "an EAGLE-1 head reads and predicts the target's final hidden state as it is"
            next_step = "leave the key out, or use task: eagle3"
            check(value == default, f"head.{key}", rule, value, next_step)
        for key in ("train_embedding", "train_lm_head"):
            value, rule = getattr(self, key), "an EAGLE-1 head has its target's"
            check(not value, key, rule, value, f"set {key}: false")
        stages = len(self.depth_schedule)
        rule = "must be empty: an EAGLE-1 head trains one step only"
        check(stages == 0, "depth_schedule", rule, f"{stages} stages", "leave the key out")

    @property
    def num_depths(self) -> int:
        return self.num_speculative_tokens

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return (FINAL_HIDDEN_STATE,)

    def num_depths_at(self, step: int) -> int:
        """One, at every step."""
        return 1


TASKS: dict[str, type[Run]] = {
    "lm": LmRun,
    "peagle": PeagleRun,
    "eagle3": Eagle3Run,
    "eagle": EagleRun,
}


def load_run(path: str | Path) -> Run:
    """Reads a recipe.

    Args:
      path: a YAML file with `task: peagle`, `eagle3`, `eagle` or `lm`. Keys left out take their
        defaults; former names of keys are understood.

    Returns:
      A PeagleRun, Eagle3Run, EagleRun or LmRun.

    Raises:
      InputError: the file is not YAML, or has an unknown key, lacks one that has no default, or has
        a value of the wrong type or against a rule.
    """
    raw = _read_yaml(Path(path))
    task = raw.get("task") if isinstance(raw, Mapping) else type(raw).__name__
    if not isinstance(task, str) or task not in TASKS:
        rule = f"the key task must be one of {', '.join(TASKS)}"
        raise InputError(path, rule, task, "write task: peagle for a P-EAGLE head")
    return build(TASKS[task], raw, str(path))


def _read_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        next_step = "check the name; configs/train/ has examples"
        raise InputError(path, "this file must exist", "nothing", next_step) from None
    except OSError as error:
        next_step = "name a file that you may read"
        raise InputError(path, "this file must be readable", error.strerror, next_step) from None
    except UnicodeDecodeError as error:
        raise InputError(path, "must be UTF-8 YAML", error, "save the file as UTF-8") from None
    # the last two are PyYAML's for a date that is none, and for lists that are too deep
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        if mark is not None:
            next_step = f"correct line {mark.line + 1}"
        elif (position := getattr(error, "position", None)) is not None:
            next_step = f"remove the character at position {position}"
        else:
            next_step = "correct the value that the error names; configs/train/ has examples"
        got = " ".join(str(error).split())
        raise InputError(path, "must be UTF-8 YAML", got, next_step) from None


def dump(run: Run) -> str:
    """The run as YAML, every key with its value: what `out`/config.yaml stores."""
    return yaml.safe_dump(plain(run), sort_keys=False)
