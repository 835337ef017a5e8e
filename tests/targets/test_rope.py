"""Rotary embeddings read as transformers reads them, number by number."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
from transformers import (  # noqa: E402
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402

from peagle_jax.layers import Rope  # noqa: E402
from peagle_jax.targets import read_config  # noqa: E402
from peagle_jax.types import InputError  # noqa: E402

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SIZES = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "num_key_value_heads": 4}
# config.json's keys of a Llama, beside its sizes
CASES = {
    "plain": {"rope_theta": 1e6},
    "a theta that float32 does not have": {"rope_theta": 283461213.0},
    "no theta": {"rope_scaling": None},
    "llama3, a longer context": {
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32_768},
    },
    "linear": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
    },
    "yarn": {"rope_theta": 1e6, "rope_scaling": YARN | {"beta_fast": 20.0}},
    "yarn, truncate false": {"rope_theta": 1e6, "rope_scaling": YARN | {"truncate": False}},
    "yarn, truncate null": {"rope_theta": 1e6, "rope_scaling": YARN | {"truncate": None}},
    "yarn, a key that nobody reads": {
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True, "mrope": [1, 2]},
    },
    "the context before scaling at top level": {
        "rope_theta": 5e5,
        "original_max_position_embeddings": 8192,
        "rope_scaling": YARN | {"original_max_position_embeddings": 1024},
    },
}


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_frequencies_are_those_of_transformers(keys):
    """All but a few of 64 equal bit for bit; in float64 a third would not."""
    raw = SIZES | {"max_position_embeddings": 32_768} | keys
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw))
    ours = Rope.from_hf(raw, 128, "config.json")
    want = theirs.inv_freq.numpy()
    got = np.array(ours.frequencies, np.float32)
    assert (got == want).sum() >= 61
    np.testing.assert_array_max_ulp(got, want, 1)
    again = Rope.from_hf({"rope_parameters": json.loads(ours.source)}, 128, "an export")
    assert again.frequencies == ours.frequencies and again.scale == ours.scale
    assert ours.scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_gemma_has_rotations_of_its_own_where_none_is_named():
    raw = Gemma4TextConfig(num_hidden_layers=6).to_dict() | {"model_type": "gemma4_text"}
    said = raw.pop("rope_parameters")
    _, ours = read_config(raw, where="config.json")
    _, want = read_config(raw | {"rope_parameters": said}, where="config.json")
    assert ours.rope == want.rope and ours.full_rope == want.full_rope
    assert ours.full_rope.frequencies[-1] == 0 and ours.rope != ours.full_rope
    with pytest.raises(InputError, match="rope_theta must be given"):
        read_config(raw | {"rope_parameters": {"rope_theta": 1e4}}, where="config.json")


@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": None}])
def test_gpt_oss_has_a_rotation_of_its_own_where_none_is_named(scaling):
    config = GptOssConfig(**scaling)
    theirs = GptOssRotaryEmbedding(config)
    raw = config.to_dict() | {"model_type": "gpt_oss", "layer_types": None}
    raw.pop("rope_parameters")
    raw |= scaling
    _, ours = read_config(raw, where="config.json")
    np.testing.assert_allclose(ours.rope.frequencies, theirs.inv_freq.numpy(), rtol=3e-7)
    assert ours.rope.scale == pytest.approx(theirs.attention_scaling) and ours.rope.scale > 1.3


@pytest.mark.parametrize("absent, window", [(True, 4096), (False, None)])
def test_a_window_that_is_not_named(absent, window):
    raw = Qwen3Config(**SIZES, num_hidden_layers=2, max_window_layers=1).to_dict()
    raw |= {"model_type": "qwen3", "use_sliding_window": True, "layer_types": None}
    raw["sliding_window"] = None
    if absent:
        del raw["sliding_window"]
    _, config = read_config(raw, where="config.json")
    assert config.windows == (None, window)


@pytest.mark.parametrize("has_theta", ["rope_parameters", "rope_scaling"])
def test_theta_may_stand_in_one_of_two_spellings(has_theta):
    linear = {"rope_type": "linear", "factor": 2.0}
    both = {"rope_parameters": linear, "rope_scaling": linear}
    both[has_theta] = linear | {"rope_theta": 1e6}
    rope = Rope.from_hf(both, 64, "config.json")
    assert rope == Rope.from_hf({"rope_parameters": linear | {"rope_theta": 1e6}}, 64, "")


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rotations_by_kind_of_layer_are_refused(key):
    """They would be read as the default one with theta 10000."""
    nested = {"full_attention": YARN, "sliding_attention": {"rope_theta": 5e5}}
    with pytest.raises(InputError, match="one kind for all layers; got parameters of full_att"):
        Rope.from_hf({"rope_theta": 1e4, key: nested}, 64, "config.json")


def test_what_vllm_reads_besides_is_refused():
    with pytest.raises(InputError, match="use_fope and rope_dim, which vLLM reads"):
        Rope.from_hf({"rope_theta": 1e4, "rope_scaling": {"use_fope": True}}, 64, "config.json")


def test_numbers_that_are_read_must_be_numbers():
    scaling = YARN | {"factor": "4"}
    with pytest.raises(InputError, match="factor of the rotary embedding must be a number"):
        Rope.from_hf({"rope_theta": 1e4, "rope_scaling": scaling}, 64, "config.json")
