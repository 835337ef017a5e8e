"""Head configurations with any value in any place: an InputError or a head, never anything else."""

import copy
import json
import shutil

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle_jax import weights
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.inspect import describe
from peagle_jax.layers import Rope
from peagle_jax.types import InputError

YARN = {
    "rope_type": "yarn",
    "rope_theta": 555.0,
    "factor": 4.0,
    "beta_fast": 20.0,
    "original_max_position_embeddings": 30,
}
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 50),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=4),
    st.just("sliding_attention"),
    st.lists(st.integers(-1, 50) | st.text(max_size=3), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
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


def places(value, path=()):
    yield path
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from places(inner, (*path, key))


@st.composite
def changed(draw, raws) -> tuple[str, dict]:
    checkpoint_format = draw(st.sampled_from(sorted(raws)))
    raw = copy.deepcopy(raws[checkpoint_format])
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from([p for p in places(raw) if p] + [(key,) for key in KEYS]))
        node = raw
        for key in path[:-1]:
            node = node[key]
        if draw(st.booleans()) or not isinstance(node, dict):
            node[path[-1]] = draw(values)
        else:
            node.pop(path[-1], None)
    return checkpoint_format, raw


def check(root, checkpoint_format: str, raw: dict) -> None:
    folder = root / checkpoint_format
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for use in (lambda: read_head(folder).check(), lambda: describe(folder)):
        try:
            use()
        except InputError as error:
            assert str(error).isprintable() and len(str(error)) < 2000


ORDINARY = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(ORDINARY, max_examples=4000)


@ORDINARY
@given(data=st.data())
def test_any_value_anywhere(folders, data):
    check(folders[0], *data.draw(changed(folders[1])))


@pytest.mark.long
@LONG
@given(data=st.data())
def test_any_value_anywhere_at_length(folders, data):
    check(folders[0], *data.draw(changed(folders[1])))
