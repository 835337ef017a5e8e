"""Head configurations with any value in any place: an InputError or a head, never anything else."""

import json
import shutil

import pytest
import tiny
from fuzzing import cases, changed, only_input_errors, values
from hypothesis import given
from hypothesis import strategies as st

from peagle_jax import weights
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.inspect import describe
from peagle_jax.layers import Rope

YARN = {
    "rope_type": "yarn",
    "rope_theta": 555.0,
    "factor": 4.0,
    "beta_fast": 20.0,
    "original_max_position_embeddings": 30,
}
others = values | st.just("sliding_attention")
KEYS = (
    "eagle_config",
    "dflash_config",
    "quantization_config",
    "speculators_model_type",
    "transformer_layer_config",
    "rope_scaling",
    "mlp_bias",
    "logit_scale",
    "num_aux_hidden_states",
    "partial_rotary_factor",
    "pard_token",
    "text_config",
    "architectures",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    head = tiny.head(
        draft_vocab=17,
        windows=(9, 9),
        norm_before_fc=True,
        rope=Rope.from_hf({"rope_parameters": YARN}, 10, ""),
    )
    for checkpoint_format in ("vllm", "speculators"):
        save_drafter(
            head, root / checkpoint_format, checkpoint_format=checkpoint_format, target="TARGET"
        )
    for name, architecture in (
        ("automodel", "LlamaEagle3DraftModel"),
        ("specforge", "PEagleDraftModel"),
    ):
        shutil.copytree(root / "vllm", root / name)
        raw = weights.read_json(root / name / "config.json") | {"architectures": [architecture]}
        (root / name / "config.json").write_text(json.dumps(raw))
    return root, {p.name: weights.read_json(p / "config.json") for p in root.iterdir()}


def check(root, checkpoint_format: str, raw: dict) -> None:
    folder = root / checkpoint_format
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with only_input_errors():
        read_head(folder).check()
    with only_input_errors():
        describe(folder)


@pytest.mark.fuzz
@cases(120)
@given(data=st.data())
def test_any_value_anywhere(folders, data):
    root, raws = folders
    checkpoint_format = data.draw(st.sampled_from(sorted(raws)))
    check(root, checkpoint_format, data.draw(changed(raws[checkpoint_format], KEYS, others)))
