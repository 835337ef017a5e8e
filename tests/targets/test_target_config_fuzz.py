"""Targets' config.json with any value in any place: a configuration or one line."""

import json
from pathlib import Path

import pytest
from fuzzing import cases, changed, only_input_errors, values
from hypothesis import given
from hypothesis import strategies as st

from peagle_jax.targets.config import read_stop_ids
from peagle_jax.targets.families import read_config
from peagle_jax.types import InputError

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "targets").glob("*.json"))
KEYS = ("text_config", "rope_scaling", "quantization_config", "layer_types", "hidden_act", "dtype")
KEYS += ("mlp_bias", "num_kv_shared_layers", "final_logit_softcapping", "partial_rotary_factor")
others = values | st.sampled_from(["sliding_attention", "yarn", "mxfp4", 10**400, [[]], {"": {}}])


@pytest.mark.parametrize("eos", ["x", [1, None], [True], 1.5, {}])
def test_ends_of_sequence_that_are_no_tokens(eos):
    for where in ("config.json", "generation_config.json"):
        with pytest.raises(
            InputError, match=f"{where}: eos_token_id must be a token id or a list of"
        ):
            read_stop_ids({"eos_token_id": eos}, where)
    assert read_stop_ids({"eos_token_id": [3, 2]}, where) == (3, 2)
    assert read_stop_ids({"eos_token_id": 3}, where) == (3,) and read_stop_ids({}, where) == ()


@pytest.mark.fuzz
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_any_value_anywhere(path):
    raw = json.loads(path.read_text())

    @cases(60, len(CONFIGS))
    @given(changed(raw, KEYS, others))
    def check(raw):
        # as a file has it: without what only Python can hold
        with only_input_errors():
            read_config(json.loads(json.dumps(raw)), where="config.json")

    check()
