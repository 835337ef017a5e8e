"""The head that a training run begins with: its parameters before step 1."""

import dataclasses
import json
import warnings
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from transformers import PreTrainedTokenizerBase

from peagle_jax.checkpoints import head_reading
from peagle_jax.checkpoints.runs import open_head
from peagle_jax.draft import draft_vocab
from peagle_jax.draft.head import HeadConfig, random_head
from peagle_jax.draft.init import init_from_head, init_from_target, init_placeholders
from peagle_jax.draft.placeholders import FIXED_DESIGNS
from peagle_jax.layers import Decoder, Rope
from peagle_jax.targets import sharding
from peagle_jax.train.config import HeadRun, HeadShape, PeagleRun
from peagle_jax.train.data import PackedRows
from peagle_jax.train.head_config import head_config
from peagle_jax.train.hidden_states import compute_hidden_states
from peagle_jax.train.mesh import put, to_host
from peagle_jax.types import Batch, InputError, Model, Params, WeightsWarning
from peagle_jax.weights import flatten_params

MEAN_TOKENS = 8192  # over which the mean aux hidden states are taken
# May differ from those of a head that stays as it is: they are no part of its layers.
NOT_OF_ITS_LAYERS = (
    "confidence",
    "confidence_calibration",
    "dtype",
    "num_depths",
    "context",
)
# With others the weights of a trained head compute something else.
MEANING_OF_WEIGHTS = (
    "heads",
    "kv_heads",
    "head_dim",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "rope",
)
MARKOV_FIELDS = ("markov_rank", "markov_kind")
# Parameters that are the target's where the head is as wide, by the key that trains them.
TRAINED_BY = {"embed": "train_embedding", "lm_head": "train_lm_head"}


def new_head(
    run: HeadRun,
    target: Model,
    rows: PackedRows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    resumes: bool = False,
) -> Model:
    """The head to train, before its first step.

    Its layers begin as random numbers, as the target's last layer (`run.init`), or as those of a
    trained head (`run.init_from`). Placeholders begin alike: as small random numbers, as the mean
    aux hidden states, or as those of the trained head; what the latter's design does not have
    begins as without it.

    Args:
      run: the training run.
      target: its target.
      rows: its packed rows, which decide a reduced draft vocabulary.
      tokenizer: the target's.
      resumes: whether all parameters will be replaced by those of an earlier session, so that what
        they begin from is not read.

    Raises:
      InputError: the run's head does not fit the target, or the trained head cannot be read; or it
        is to stay as it is (`run.trained_alone`), and the run's head is another one.
    """
    config = head_config(run, target, cast(int | None, tokenizer.mask_token_id))
    cap = getattr(target.config, "logit_cap", None)
    if config.predicts_features and cap is not None:
        # a perfect prediction would have a loss: the head's logits have no cap, as in vLLM
        rule = "an EAGLE-1 head needs a target whose logits have no soft cap"
        raise InputError("task", rule, f"a cap of {cap:g}", "use task: eagle3")
    ids = None
    if config.draft_vocab != config.vocab:
        counts = rows.token_counts(config.vocab)
        ids = draft_vocab.choose(counts, config.draft_vocab)
    # what a head begins from is small, and may be spread over devices
    begins_from = _last_parts(target)
    module = cast(Decoder, begins_from.bind(begins_from.params))
    embedding, output = module.embed.table[...], module.lm_head_weight()
    head = random_head(config, seed=run.seed, embedding=embedding, output=output, ids=ids)

    if resumes:
        return init_placeholders(head, None, seed=run.seed) if config.parallel else head
    mean_aux_hidden_states = None
    is_fixed = config.parallel and config.placeholder_hidden in FIXED_DESIGNS
    if run.init == "target" or is_fixed:
        mean_aux_hidden_states = _mean_aux_hidden_states(target, rows)
    if run.init == "target":
        head = init_from_target(head, begins_from)
    trained = None
    if run.init_from is not None:
        trained = head_reading.to_model(
            open_head(run.init_from, target.config.layers),
            dtype=config.dtype,
            embedding=embedding,
            lm_head=output.T,
        )
        if trained.config.confidence and not config.confidence:
            raise InputError(
                run.init_from,
                rule="its confidence head must not be lost unseen",
                got="a recipe without confidence",
                next_step="set confidence: {train_alone: false}, or leave it out of the folder by "
                "peagle convert --to peagle_jax --drop-confidence",
            )
        if isinstance(run, PeagleRun) and run.trained_alone:
            _check_stays_whole(head, trained, run.init_from, run.trained_alone)
        else:
            _warn_of_other_meanings(config, trained.config, run.init_from)
        head = init_from_head(head, trained, run.init_from)
    if embedding.shape[1] != config.dim:
        _check_no_random_part_stays(run, head, trained, embedding.shape[1])
    if config.parallel:
        # last, because placeholders begin from the head's embedding and fusion
        head = init_placeholders(
            head,
            mean_aux_hidden_states,
            seed=run.seed,
            starts_at_mean=run.init == "target",
        )
    if config.parallel and trained is not None and trained.config.parallel:
        params = dict(trained.params)
        if is_fixed and trained.config.placeholder_hidden != config.placeholder_hidden:
            params.pop("mask_hidden", None)  # what was learned is no mean
        if trained.config.placeholder_token != config.placeholder_token:
            del params[
                "embed"
            ]  # its mask token's row stood for nothing; all others are here already
        trained = dataclasses.replace(trained, params=params)
        head = init_from_head(head, trained, str(run.init_from))
    return head


def _check_no_random_part_stays(
    run: HeadRun, head: Model, trained: Model | None, target_dim: int
) -> None:
    """Checks that embedding and output matrix of a head of another width are not random for ever.

    Raises:
      InputError: one is neither trained nor that of the trained head.
    """
    shapes = {} if trained is None else {p: x.shape for p, x in flatten_params(trained.params)}
    for path, x in flatten_params(head.params):
        key = TRAINED_BY.get(path.split(".")[0])
        if key is not None and not getattr(run, key) and shapes.get(path) != x.shape:
            rule = (
                f"a head that is not as wide as its target, {target_dim}, has none of its matrices"
            )
            next_step = f"set {key}: true, head.dim: null, or init_from to a trained head"
            raise InputError("head.dim", rule, head.config.dim, next_step)


def _warn_of_other_meanings(new: HeadConfig, trained: HeadConfig, where: str) -> None:
    """Warns where a trained head's weights would compute something else in the new one.

    Trained as a whole a head may differ; but it does not begin as the trained one.
    """
    for name in MEANING_OF_WEIGHTS:
        wanted, value = getattr(trained, name), getattr(new, name)
        if _meaning(wanted) != _meaning(value):
            key = _key_of(name) or f"head.{name}"
            warnings.warn(
                f"{where}: the head to start from has {key}: {_shown(name, wanted)}, the new one "
                f"{_shown(name, value)}; it does not begin with the same drafts",
                WeightsWarning,
                stacklevel=2,
            )


def _check_stays_whole(head: Model, trained: Model, where: str, parts: tuple[str, ...]) -> None:
    """Checks that the head with parts to train alone is the trained head in all else.

    `init_from_head` takes over what fits, and the rest would be random and never trained.

    Args:
      head: the new head.
      trained: the head that stays as it is.
      where: its folder, for errors.
      parts: what is trained, "markov", "confidence" or both.

    Raises:
      InputError: the trained head does not draft in parallel, has another configuration, or lacks
        a parameter of the new head's shape.
    """
    alone = f"{parts[0]}.train_alone"
    not_alone = ", ".join(f"{part}.train_alone: false" for part in parts)
    may_differ = (*NOT_OF_ITS_LAYERS, *(MARKOV_FIELDS if "markov" in parts else ()))
    if not trained.config.parallel:
        raise InputError(
            alone,
            rule=f"the head in {where} must be a P-EAGLE head",
            got=f"one of task {trained.config.method}",
            next_step="set init_from to a P-EAGLE head",
        )
    for field in dataclasses.fields(HeadConfig):
        name = field.name
        wanted, value = getattr(trained.config, name), getattr(head.config, name)
        if name in may_differ or _meaning(wanted) == _meaning(value):
            continue
        key, as_wanted = _key_of(name), _shown(name, wanted)
        raise InputError(
            key or name,
            rule=f"with {alone}: true it must be that of the head in {where}, {as_wanted}",
            got=_shown(name, value),
            next_step=f"set {key}: {as_wanted}, or {not_alone}" if key else f"set {not_alone}",
        )
    old = {path: x.shape for path, x in flatten_params(trained.params)}
    for path, x in flatten_params(head.params):
        if path.split(".")[0] not in (*parts, "confidence") and old.get(path) != x.shape:
            raise InputError(
                alone,
                rule=f"the head in {where} must have the parameter {path} of shape {x.shape}",
                got=old.get(path, "none"),
                next_step=f"set cod.num_depths: {trained.config.num_depths}, or {not_alone}",
            )


def _meaning(value: Any) -> Any:
    """What two values of a configuration are compared by."""
    # `source` may spell the same frequencies in two ways
    return (value.frequencies, value.scale) if isinstance(value, Rope) else value


def _key_of(field: str) -> str | None:
    """The recipe's key that decides a field of HeadConfig; None where no single one does."""
    if field.startswith(("placeholder_", "markov_")):
        return field.replace("_", ".", 1)
    if field == "windows":
        return "head.sliding_window"
    has_key = field != "rope" and field in {f.name for f in dataclasses.fields(HeadShape)}
    return f"head.{field}" if has_key else None


def _shown(field: str, value: Any) -> str:
    """A value of HeadConfig as a recipe has it."""
    if isinstance(value, Rope):
        return value.source
    if field == "windows" and len(set(value)) == 1:
        value = value[0]
    return value if isinstance(value, str) else json.dumps(value)


def _last_parts(target: Model) -> Model:
    """The target with its embedding, last layer, final norm and output matrix on one device.

    On a mesh the other parameters stay where they are.
    """
    if sharding.mesh_of(target.params) is None:
        return target
    last = max(target.params["blocks"])

    def fetched(path: tuple, x: Array) -> Array:
        keys = [key.key for key in path]
        is_needed = keys[0] != "blocks" or keys[1] == last
        return jnp.asarray(to_host(x)) if is_needed else x

    return dataclasses.replace(target, params=jax.tree.map_with_path(fetched, target.params))


def _mean_aux_hidden_states(target: Model, rows: PackedRows) -> Float[Array, " A"]:
    """Mean aux hidden states over the first rows of the corpus."""
    num_rows = min(-(-MEAN_TOKENS // rows.seq_len), len(rows))
    mesh = sharding.mesh_of(target.params)

    def mean(params: Params, batch: Batch) -> Float[Array, " A"]:
        aux_hidden_states, _ = compute_hidden_states(cast(Decoder, target.bind(params)), batch)
        is_token = (batch.segment_ids >= 0)[..., None]
        return jnp.mean(aux_hidden_states, axis=(0, 1), where=is_token)

    batch = rows.take(range(num_rows))
    if mesh is None:
        return mean(target.params, jax.tree.map(jnp.asarray, batch))
    everywhere = NamedSharding(mesh, PartitionSpec())
    batch = jax.tree.map(lambda x: put(x, everywhere), batch)
    return jnp.asarray(to_host(jax.jit(mean, out_shardings=everywhere)(target.params, batch)))
