"""Targets' config.json with any value in any place: a configuration or one line."""

import json
from pathlib import Path

import pytest
from fuzzing import cases, changed, only_input_errors, values
from hypothesis import given
from hypothesis import strategies as st

from peagle_jax.targets.families import read_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "targets").glob("*.json"))
KEYS = ("text_config", "rope_scaling", "quantization_config", "layer_types", "hidden_act", "dtype")
KEYS += ("mlp_bias", "num_kv_shared_layers", "final_logit_softcapping", "partial_rotary_factor")
others = values | st.sampled_from(["sliding_attention", "yarn", "mxfp4", 10**400, [[]], {"": {}}])


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
