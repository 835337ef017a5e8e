"""What a recipe for a head will take, from shapes alone: `peagle train --dry-run`.

Nothing but the target's config.json is read. Bytes of weights and of the optimizer are exact. Those
of activations are counted by `activation_bytes`, which tests hold against XLA's own count.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import hf_hub_download
from jax.sharding import AbstractMesh, AxisType

from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.repeated_rows import are_alike_by_depth
from peagle_jax.kernels import packed_attention
from peagle_jax.layers import activation_dtype
from peagle_jax.pipelines.devices import DEVICES
from peagle_jax.pipelines.model_costs import experts_of, matrix_sizes
from peagle_jax.pipelines.tracing import abstract_head, abstract_target
from peagle_jax.targets import sharding
from peagle_jax.targets.config import TargetConfig
from peagle_jax.targets.sharding import DATA, FSDP, MODEL
from peagle_jax.train import loss
from peagle_jax.train.config import HeadRun, PeagleRun
from peagle_jax.train.head_config import head_config
from peagle_jax.train.recipe_sections import MeshConfig
from peagle_jax.train.train_head import check_row_length, split_params
from peagle_jax.train.update import make_optimizer
from peagle_jax.types import InputError, Model, Params
from peagle_jax.weights import flatten_params
from peagle_jax.weights.hub import failures, split_revision

H200 = DEVICES["h200"]
assert H200.memory is not None  # a data sheet has it
H200_BYTES = H200.memory
# Copies of the logits of a chunk in float32 at one time: both, their softmaxes, the gradient.
LOGIT_COPIES = 5
SCORE_COPIES = 4  # of the scores of a chunk in attention without a kernel, likewise
# a link to configs/targets, which an installed package has as a folder
TARGET_CONFIGS = Path(__file__).parents[1] / "assets" / "target_configs"


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """What one device holds and one step computes.

    Attributes:
      devices: how many there are.
      mesh: data x fsdp x model.
      tokens_per_step: of the packed rows of a batch.
      rows_at_once: packed rows that a device computes at one time.
      row_length: tokens of a packed row.
      packed_length: elements of all depths of a row, at most.
      elements_at_once: of a row in memory: those of depth 0 and of one partition.
      target_bytes: of the target's weights.
      head_bytes: of the head's float32 parameters.
      optimizer_bytes: of what the optimizer keeps.
      gradient_bytes: of gradients and of copies of parameters, while a step is computed.
      activation_bytes: of everything else in a step.
      step_flops: of all devices.
      step_floor: seconds of a step, at least, if the devices are H200s.
    """

    devices: int
    mesh: str
    tokens_per_step: int
    rows_at_once: int
    row_length: int
    packed_length: int
    elements_at_once: int
    target_bytes: int
    head_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    step_flops: float
    step_floor: float

    @property
    def total_bytes(self) -> int:
        """Bytes of a device."""
        parts = self.target_bytes, self.head_bytes, self.optimizer_bytes
        return sum(parts) + self.gradient_bytes + self.activation_bytes

    def facts(self) -> dict[str, str]:
        """Names and values for people."""
        facts = {}
        for name, value in dataclasses.asdict(self).items():
            if name.endswith("_bytes"):
                facts[name.removesuffix("_bytes") + ", a device"] = f"{value / 1e9:.2f} GB"
            elif name == "step_flops":
                facts["step"] = f"{value / 1e12:,.0f} TFLOP on all devices"
            elif name == "step_floor":
                facts["step takes at least"] = f"{value:.2f} s on H200s"
            else:
                facts[name] = f"{value:,}" if isinstance(value, int) else value
        fits = "fits" if self.total_bytes <= H200_BYTES else "does not fit"
        total = f"{self.total_bytes / 1e9:.1f} GB: {fits} an H200 ({H200_BYTES / 1e9:.0f} GB)"
        return {**facts, "in all, a device": total}


def training_plan(
    run: HeadRun, devices: int | None = None, targets: Path = TARGET_CONFIGS
) -> TrainingPlan:
    """What a run will take.

    Args:
      run: a recipe of a head.
      devices: how many; the mesh of the recipe is made to fit. None: those of its mesh.
      targets: a folder with config.json files by hub names in lower case, for targets that are on
        no disk.

    Raises:
      InputError: there is no config.json, the head does not fit the target, or the rows of a batch
        cannot be divided among so many devices.
    """
    run = run if devices is None else on_devices(run, devices)
    target = abstract_target(
        find_config(run.target, targets),
        dtype=jnp.dtype(run.target_dtype),
        aux_hidden_state_layers=run.aux_hidden_state_layers,
    )
    check_row_length(run, target)
    head = abstract_head(head_config(run, target, _any_mask_token(run)))
    return plan_of(run, target, head)


def plan_of(run: HeadRun, target: Model, head: Model) -> TrainingPlan:
    """As `training_plan`, of models with shapes as their parameters."""
    sizes = run.mesh.data, run.mesh.fsdp, run.mesh.model
    mesh = AbstractMesh(sizes, (DATA, FSDP, MODEL), axis_types=(AxisType.Auto,) * 3)
    gathered = AbstractMesh(
        (run.mesh.data, 1, run.mesh.model), (DATA, FSDP, MODEL), axis_types=(AxisType.Auto,) * 3
    )
    trained, _ = split_params(run, head)
    whole, divided = (bytes_on(trained, head.config, m) for m in (gathered, mesh))
    optimizer = sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(jax.eval_shape(make_optimizer(run.optimizer).init, trained))
    )
    num_devices = math.prod(sizes)
    rows = run.data.batch_size // (run.gradient_accumulation * run.mesh.data * run.mesh.fsdp)
    n = run.data.seq_len - 1
    packed, at_once = element_counts(run, n)
    is_16bit = run.compute.dtype == "bfloat16"
    # sums of gradients over parts, and over partitions, stand beside the summands
    gradients = whole * (1 + int(packed > at_once)) + divided * (run.gradient_accumulation > 1)
    copies = bytes_on(head.params, head.config, gathered) // 2 if is_16bit else 0
    if run.mesh.fsdp > 1:  # matrices are put together to compute with them
        copies += bytes_on(head.params, head.config, gathered)
        copies += bytes_on(target.params, target.config, gathered)
    target_bytes = bytes_on(target.params, target.config, mesh)
    head_bytes = bytes_on(head.params, head.config, mesh)
    all_parameters = sum(math.prod(x.shape) * 4 for _, x in flatten_params(trained))
    optimizer_bytes = round(optimizer * divided / all_parameters)
    of_target, of_head = target_flops(run, target), head_flops(run, target, head, packed)
    read_of_target = target_bytes
    if run.hidden_states_dir is not None:  # of the target the output matrix alone is read
        output = "lm_head" if "lm_head" in target.params else "embed"  # tied
        read_of_target = bytes_on({output: target.params[output]}, target.config, mesh)
    reads = run.gradient_accumulation * (read_of_target + 3 * head_bytes) + 2 * optimizer_bytes
    target_rate, rate = (
        H200.rates[jnp.dtype(dtype).itemsize] for dtype in (run.target_dtype, run.compute.dtype)
    )
    multiplying = (of_target / target_rate + of_head / rate) / num_devices
    return TrainingPlan(
        devices=num_devices,
        mesh=" x ".join(map(str, sizes)),
        tokens_per_step=run.data.batch_size * run.data.seq_len,
        rows_at_once=rows,
        row_length=run.data.seq_len,
        packed_length=packed,
        elements_at_once=at_once,
        target_bytes=target_bytes,
        head_bytes=head_bytes,
        optimizer_bytes=optimizer_bytes,
        gradient_bytes=gradients + copies,
        activation_bytes=activation_bytes(run, target.config, head.config, rows),
        step_flops=of_target + of_head,
        step_floor=max(multiplying, reads / H200.bandwidth),
    )


def on_devices(run: HeadRun, devices: int) -> HeadRun:
    """The run on so many devices, with as many rows at one time on each as its mesh gives.

    Raises:
      InputError: the rows of a batch cannot be divided so.
    """
    mesh = run.mesh
    if devices == mesh.data * mesh.fsdp * mesh.model:
        return run
    rows = run.data.batch_size // (run.gradient_accumulation * mesh.data * mesh.fsdp)
    model = math.gcd(mesh.model, devices)
    shares = devices // model
    if devices >= 1:
        rows = max(1, min(rows, run.data.batch_size // shares))
    if devices < 1 or run.data.batch_size % (shares * rows):
        rule = f"{run.data.batch_size} rows, data.batch_size, must divide among them evenly"
        raise InputError("--devices", rule, devices, "use 1, or set mesh and data.batch_size")
    is_divided = mesh.fsdp > 1
    new_mesh = MeshConfig(
        data=1 if is_divided else shares, fsdp=shares if is_divided else 1, model=model
    )
    parts = run.data.batch_size // (shares * rows)
    return dataclasses.replace(run, mesh=new_mesh, gradient_accumulation=parts)


def find_config(target: str, targets: Path) -> Path:
    """The config.json of a folder or a hub id; for the latter one of `targets` comes first.

    A file is taken as it is.
    """
    if Path(target).is_file():
        return Path(target)
    name, revision = split_revision(target)
    known = targets / f"{name.split('/')[-1].lower()}.json"
    for path in (Path(target) / "config.json", known):
        if path.is_file():
            return path
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except failures() as error:
        rule = "must be a folder with config.json, or a hub id that is online or cached"
        got = f"{type(error).__name__} from the hub"
        raise InputError(target, rule, got, "check the name and the network") from None


def _any_mask_token(run: HeadRun) -> int:
    """A token id for placeholders: shapes do not depend on it, and no tokenizer is read."""
    return 0 if run.head.mask_token is None else run.head.mask_token


def bytes_on(params: Params, config: Any, mesh: AbstractMesh) -> int:
    """Bytes of parameters on one device of a mesh."""
    place = sharding.placement(config, mesh)
    return sum(
        math.prod(place(path, x).shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
        for path, x in flatten_params(params)
    )


def element_counts(run: HeadRun, n: int) -> tuple[int, int]:
    """(elements of a row over all depths, those in memory at one time), at most."""
    if not isinstance(run, PeagleRun):
        unrolled = n * run.num_depths_at(run.optimizer.steps)
        return unrolled, unrolled
    packed = n + run.cod.capacity(n)
    if run.cod.partitions == 1:
        return packed, packed
    return packed, min(packed, n + run.cod.partition_width(n))


def activation_bytes(run: HeadRun, target: TargetConfig, head: HeadConfig, rows: int) -> int:
    """Bytes of activations on a device, at most: the target's forward, or the head's training.

    Of the head, the backward pass keeps for each layer and element what it reads again: with
    `compute.recompute` the layer's input, and everything of one layer. Depth-0 elements are kept
    of all layers; with partitions those of one partition are there for a time. Beside them are the
    rows of the target, the scores of a chunk of attention where no kernel runs, and the logits of
    a chunk.

    Args:
      rows: packed rows at one time.
    """
    n, share = run.data.seq_len - 1, run.mesh.model
    target_size = activation_dtype(run.target_dtype).itemsize
    size = activation_dtype(run.compute.dtype).itemsize
    E, A = target.dim, target.dim * len(target.aux_hidden_state_layers)
    experts = getattr(target, "experts_per_token", None) or 0
    inner = experts * getattr(target, "expert_dim", target.mlp_dim) if experts else target.mlp_dim
    projections = (2 * target.heads + 2 * target.kv_heads) * target.head_dim
    width = 4 * E + (projections + 3 * inner + experts * 2 * E) // share
    inputs = rows * n * (A + E) * target_size
    of_target = rows * n * width * target_size + _scores(run, rows, n, target)

    packed, at_once = element_counts(run, n)
    D = head.dim
    of_layer = 7 * D + (3 * head.heads + 2 * head.kv_heads) * head.head_dim // share
    of_layer = (of_layer + 4 * head.mlp_dim // share) * size

    def kept(elements: int) -> int:
        """Of all layers, in a backward pass."""
        if run.compute.recompute == "none":
            return elements * of_layer * head.layers
        return elements * (head.layers * D * size + 2 * of_layer)

    states = (2 * D + 2 * head.layers * head.kv_heads * head.head_dim) * 4
    of_head = kept(packed)
    if packed > at_once:
        # gradients of what placeholders read of depth-0 rows are added up in float32
        of_head = kept(n) + kept(at_once - n) + 2 * n * states
    chunk = min(loss.CHUNK, rows * at_once)
    logits = chunk * (head.draft_vocab // share) * 4 * LOGIT_COPIES
    training = rows * of_head + max(logits, _scores(run, rows, n, head))
    return inputs + max(of_target, training)


def _scores(run: HeadRun, rows: int, n: int, config: HeadConfig | TargetConfig) -> int:
    """Bytes of the scores that exist at one time, where a GPU's attention has no kernel."""
    is_head = isinstance(config, HeadConfig)
    dtype = run.compute.dtype if is_head else run.target_dtype
    is_masked = isinstance(config, HeadConfig) and config.placeholder_attention == "bidirectional"
    if _runs_kernels(run, dtype) and config.head_dim <= 128 and not is_masked:
        return 0
    heads = rows * max(1, config.heads // run.mesh.model)
    queries, keys = packed_attention.accelerator_blocks(heads)
    at_once = max(packed_attention.MAX_SCORES, heads * queries * min(n, keys))
    return at_once * 4 * SCORE_COPIES


def _runs_kernels(run: HeadRun, dtype: str) -> bool:
    """Whether a GPU computes attention with kernels: in 16 bits, on one device."""
    return dtype == "bfloat16" and run.mesh.data * run.mesh.fsdp * run.mesh.model == 1


def target_flops(run: HeadRun, target: Model) -> float:
    """Multiplications and additions of the target's forward in a step; none with hidden states."""
    n, rows, t = run.data.seq_len - 1, run.data.batch_size, cast(TargetConfig, target.config)
    if run.hidden_states_dir is not None:
        return 0.0
    experts, per_token = experts_of(t)
    used = per_token / experts if experts else 1
    dense = matrix_sizes(target.params, ("blocks",), experts=False)
    active = dense + used * matrix_sizes(target.params, ("blocks",), experts=True)
    scores = 0.0  # numbers that queries and keys have in common, over all layers that read a cache
    for shape in t.cache_shapes():
        readers = sum(window == shape.window for window in t.windows)
        scores += readers * t.heads * shape.head_dim * mean_keys(n, shape.window)
    return 2.0 * rows * n * active + 4.0 * rows * n * scores


def mean_keys(n: int, window: int | None) -> float:
    """Keys that a query sees, at the mean over `n` positions of one document."""
    if window is None or window >= n:
        return n / 2
    return window * (1 - window / (2 * n))


def head_flops(run: HeadRun, target: Model, head: Model, packed: int) -> float:
    """Multiplications and additions of the head in a step: with matrices, and in attention.

    A product costs 2 for each weight and element forward, and twice that backward. What is computed
    again costs its forward once more. Placeholders that are the same are multiplied once. Logits
    and their gradients are computed once, and the teacher's once for every position where these are
    no more than a chunk.
    """
    n, rows = run.data.seq_len - 1, run.data.batch_size
    c, t = head.config, cast(TargetConfig, target.config)
    again = 1 + (run.compute.recompute == "layers")
    layers = matrix_sizes(head.params, ("layers",))
    output = matrix_sizes(head.params, ("lm_head",))
    fusion = matrix_sizes(head.params, ("fusion", "fc"))
    teacher = t.dim * c.draft_vocab
    elements = rows * packed
    flops = 2.0 * elements * layers * (2 + again)
    if isinstance(run, PeagleRun) and not run.placeholder.true_tokens and are_alike_by_depth(c):
        # queries, keys and values of the first layer, whose rows are 2 D wide
        projections = 2 * c.dim * (c.heads + 2 * c.kv_heads) * c.head_dim
        repeated = rows * max(0, packed - n - (run.num_depths - 1))
        flops -= 2.0 * repeated * projections * (2 + again)
    learned_from = rows * n if rows * n <= loss.CHUNK else elements
    flops += 2.0 * (elements * output * (2 + run.train_lm_head) + learned_from * teacher)
    flops += 6.0 * rows * n * fusion
    # twice 2 for scores and values, and 2.5 times that backward
    keys = sum(mean_keys(n, window) for window in c.windows)
    flops += elements * keys * 4 * c.heads * c.head_dim * (2.5 + again)
    return flops
