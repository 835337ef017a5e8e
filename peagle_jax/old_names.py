"""Former names of keys in files: recipes, checkpoints and stored hidden states written before the
names were those of docs/glossary.md are still read. New files have the new names only.
"""

import json
from collections.abc import Mapping

from peagle_jax.types import InputError

# By the class of peagle_jax/train/config.py that a mapping of a recipe becomes.
RECIPE_KEYS: dict[str, dict[str, str]] = {
    "HeadRun": {
        "features": "hidden_states_dir",
        "start": "init",
        "start_from": "init_from",
        "grow": "depth_schedule",
        "blur": "feature_noise",
        "measure": "eval",
    },
    "HeadShape": {"taps": "aux_hidden_state_layers"},
    "Llama3Rope": {
        "theta": "rope_theta",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "original": "original_max_position_embeddings",
    },
    "CodConfig": {
        "depths": "num_depths",
        "ratio": "down_sample_ratio",
        "floor": "down_sample_ratio_min",
        "anchors": "max_anchors",
    },
    "DepthStage": {"depths": "num_depths"},
    "FeatureNoise": {"feature_noise": "noise", "feature_dropout": "dropout"},
    "OptimizerConfig": {"clip": "max_grad_norm"},
    "EvalConfig": {"count": "num_prompts", "new_tokens": "max_new_tokens"},
    "DataConfig": {"length": "seq_len", "batch": "batch_size"},
}
# Keys whose values have other names as well: former key -> present key, value -> present value.
FormerValues = Mapping[str, tuple[str, Mapping]]
MARKOV_KINDS = {False: "vanilla", True: "gated"}
RECIPE_VALUES: dict[str, FormerValues] = {"MarkovConfig": {"gated": ("kind", MARKOV_KINDS)}}
HEAD_JSON_VALUES: FormerValues = {"markov_gated": ("markov_kind", MARKOV_KINDS)}
HEAD_JSON_KEYS = {"taps": "aux_hidden_state_layers", "depths": "num_depths"}
# parameters of a target that `peagle train` (task: lm) saved, in its Orbax checkpoints
TRAINING_STATE_KEYS = {"head": "lm_head"}
# keyword arguments of `peagle_jax.convert`
CONVERSION_OPTIONS = {"tap_numbering": "aux_layer_numbering"}
# index.json of `peagle extract`, format_version 1, and the tensors of its shards
HIDDEN_STATE_INDEX_KEYS = {
    "taps": "aux_hidden_state_layers",
    "tap_width": "aux_width",
    "supervised": "num_loss_tokens",
    "length": "seq_len",
    "batch": "batch_size",
}
HIDDEN_STATE_TENSORS = {
    "document": "segment_ids",
    "supervised": "loss_mask",
    "taps": "aux_hidden_states",
}
# Result rows of `peagle bench` and `peagle demo`; the rows in results/ are read, not rewritten.
RESULT_ROW_KEYS = {
    "batch": "batch_size",
    "prompts": "num_prompts",
    "new_tokens": "max_new_tokens",
}
# Result rows of scripts/peers/check_vllm.py, check_targets.py and check_matrix.py, and the counters
# `ours` and `vllm` in them. Here `accepted_per_position` are counts; in the rows of `peagle bench`
# they are shares, and keep that name.
AGREEMENT_ROW_KEYS = {
    "prompts": "num_prompts",
    "new_tokens": "max_new_tokens",
    "drafts": "num_drafts",
    "drafted": "num_draft_tokens",
    "accepted": "num_accepted_tokens",
    "accepted_per_position": "num_accepted_per_pos",
    "per_position": "num_accepted_per_pos",
    "layout": "checkpoint_format",
}


def with_new_names(raw: Mapping, new_names: Mapping[str, str], where: str) -> dict:
    """A copy of `raw` whose keys have their new names.

    Args:
      raw: as it was read.
      new_names: old key -> new key.
      where: the file, for the error.

    Raises:
      InputError: a key stands there under both of its names.
    """
    for old, new in new_names.items():
        if old in raw and new in raw:
            rule = f"{new} was formerly called {old}: only one of the two may be given"
            raise InputError(where, rule, "both", f"remove {old}")
    return {new_names.get(key, key): value for key, value in raw.items()}


def with_new_values(raw: Mapping, former: FormerValues, where: str, next_step: str | None) -> dict:
    """A copy of `raw` in which former keys and their values have their new names.

    Args:
      raw: as it was read.
      former: old key -> new key, and old value -> new value.
      where: the file, for the error.
      next_step: what to do about a value that the key never had; None to name the present key.

    Raises:
      InputError: a key stands there under both of its names, or has a value that it never had.
    """
    for old, (new, values) in former.items():
        if old not in raw:
            continue
        value = raw[old]
        if not any(value is known for known in values):
            rule = f"{old} must be one of {', '.join(map(_as_json, values))}"
            present = f"write {new}, one of {', '.join(values.values())}, in its place"
            raise InputError(where, rule, _as_json(value), next_step or present)
        raw = with_new_names({**raw, old: values[value]}, {old: new}, where)
    return dict(raw)


def _as_json(value: object) -> str:
    return json.dumps(value, default=str)
