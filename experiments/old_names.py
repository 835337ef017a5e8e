"""Former names in rows: what was written before the words of docs/glossary.md is read in them.

Names in rows are not rewritten. Rows of before have former names of experiments, variants, keys
and settings, and get the present ones when they are read.
"""

import ast
import re
from collections.abc import Mapping
from typing import Any

from experiments.base_run import readable
from peagle_jax import old_names

EXPERIMENT_NAMES = {"taps": "aux_layers", "regularisation": "regularization"}
VARIANT_NAMES = {  # by the experiment's present name
    "aux_layers": {"a norm per tap": "a norm per aux layer"},
    "cod_sampling": {
        "r 0.8 floor 0.1": "ratio 0.8 min 0.1",
        "r 0.5 floor 0.1": "ratio 0.5 min 0.1",
        "r 0.5 floor 0": "ratio 0.5 min 0",
        "r 0.8 floor 0.5": "ratio 0.8 min 0.5",
        "r 1": "ratio 1",
    },
}
ROW_KEYS = {"head": "head_key", "parameters": "num_parameters", "measured": "measurements"}
MEASUREMENT_KEYS = {"new_tokens": "max_new_tokens"}
PROMPT_KEYS = {"drafts": "num_drafts", "accepted": "num_accepted_per_pos"}
STAGE_KEYS = {"depths": "num_depths"}  # of a depth schedule
STAGE_NAMES = {"features": "hidden_states"}
# Settings, as a row's config nests them and its changes write them: "data.batch", "cod.floor".
SETTINGS = {
    "features": "hidden_states_dir",
    "start": "init",
    "start_from": "init_from",
    "grow": "depth_schedule",
    "blur": "feature_noise",
    "blur.feature_noise": "feature_noise.noise",
    "blur.feature_dropout": "feature_noise.dropout",
    "measure": "eval",
    "measure.count": "eval.num_prompts",
    "measure.new_tokens": "eval.max_new_tokens",
    "head.taps": "head.aux_hidden_state_layers",
    "cod.depths": "cod.num_depths",
    "cod.ratio": "cod.down_sample_ratio",
    "cod.floor": "cod.down_sample_ratio_min",
    "cod.anchors": "cod.max_anchors",
    "data.length": "data.seq_len",
    "data.batch": "data.batch_size",
    "optimizer.clip": "optimizer.max_grad_norm",
    "answers.count": "answers.num_samples",
    "answers.new_tokens": "answers.max_new_tokens",
    "decoding.new_tokens": "decoding.max_new_tokens",
    "markov.gated": "markov.kind",
}
# values of "markov.gated", as changes write them
MARKOV_KINDS = {str(old): new for old, new in old_names.MARKOV_KINDS.items()}


def experiment_name(name: str) -> str:
    """An experiment's present name."""
    return EXPERIMENT_NAMES.get(name, name)


def variant_name(experiment: str, name: str) -> str:
    """A variant's present name, where `experiment` is the present name of its experiment."""
    return VARIANT_NAMES.get(experiment, {}).get(name, name)


def with_present_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a row in today's words. A row that is damaged is given back as far as it goes."""
    row = _renamed(row, ROW_KEYS)
    if isinstance(row.get("experiment"), str):
        row["experiment"] = experiment_name(row["experiment"])
        if isinstance(row.get("variant"), str):
            row["variant"] = variant_name(row["experiment"], row["variant"])
    if isinstance(row.get("stages"), dict):
        row["stages"] = _renamed(row["stages"], STAGE_NAMES)
    if isinstance(row.get("changes"), list):
        row["changes"] = [_renamed_change(str(change)) for change in row["changes"]]
    if isinstance(row.get("config"), dict):
        row["config"] = _renamed_config(row["config"])
    if isinstance(row.get("measurements"), list):
        row["measurements"] = [_renamed_measurement(one) for one in row["measurements"]]
    return row


def _renamed(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in raw.items()}


def _renamed_measurement(measurement: Any) -> Any:
    if not isinstance(measurement, dict):
        return measurement
    measurement = _renamed(measurement, MEASUREMENT_KEYS)
    if isinstance(measurement.get("prompts"), list):
        measurement["prompts"] = [
            _renamed(prompt, PROMPT_KEYS) if isinstance(prompt, dict) else prompt
            for prompt in measurement["prompts"]
        ]
    return measurement


def _renamed_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    renamed = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            value = _renamed_config(value, f"{path}.")
        elif path == "grow" and isinstance(value, list):
            value = [
                _renamed(stage, STAGE_KEYS) if isinstance(stage, dict) else stage for stage in value
            ]
        elif path == "markov.gated":
            value = MARKOV_KINDS.get(str(value), value)
        renamed[SETTINGS.get(path, path).rpartition(".")[2]] = value
    return renamed


# two tuples of depth stages, as Python wrote them: ({'until': 480, 'depths': 1},) -> ()
STAGES = r"\((?:\{'until': \d+, 'depths': \d+\},? ?)*\)"
SCHEDULES = re.compile(f"({STAGES}) -> ({STAGES})")


def _renamed_change(change: str) -> str:
    """For example "cod.depths: 5 -> 1" becomes "cod.num_depths: 5 -> 1"."""
    key, colon, values = change.partition(": ")
    if key == "grow" and (stages := SCHEDULES.fullmatch(values)):
        values = " -> ".join(readable(ast.literal_eval(text)) for text in stages.groups())
    if key == "markov.gated":
        values = " -> ".join(MARKOV_KINDS.get(text, text) for text in values.split(" -> "))
    return f"{SETTINGS.get(key, key)}{colon}{values}"
