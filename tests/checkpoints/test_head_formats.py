"""Draft heads' folders as other projects write them: read exactly, and told apart by themselves."""

import numpy as np
import pytest
import tiny
from checkpoints.folder_edits import edit, equal

from peagle_jax import weights
from peagle_jax.checkpoints.checkpoint_format import detect_format
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.inspect import describe
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.layers import Rope
from peagle_jax.types import InputError

AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUTS = {
    AUX_LAYER_IDS: [0, 1, 2],
    "eagle_config": ...,
}  # layers (1, 2, 3), named as layers whose output is taken


@pytest.fixture
def folder(tmp_path):
    save_drafter(tiny.head(), tmp_path / "a", k=9)
    return tmp_path / "a"


def test_automodel(folder, tmp_path):
    """Format C: `model.` before everything but the top-level tensors; ids count outputs."""
    top = ("lm_head.weight", "mask_hidden")

    def prefixed(t):
        return {
            n if n in top else "model." + n.replace("midlayer", "layers.0"): x for n, x in t.items()
        }

    raw = {
        "architectures": ["LlamaEagle3DraftModel"],
        "parallel_drafting": True,
        "ptd_token_id": ...,
        **OUTPUTS,
    }
    head = read_head(edit(folder, tmp_path / "c", prefixed, **raw))
    assert head.checkpoint_format == "automodel"
    assert head.config.aux_hidden_state_layers == (1, 2, 3) and head.config.num_depths == 9
    equal(load_drafter(tmp_path / "c"), tiny.head(num_depths=9))


def test_automodels_config_is_its_targets(folder, tmp_path):
    """It has the target's number of layers and its windows; the head has neither."""
    raw = {
        "architectures": ["LlamaEagle3DraftModel"],
        "num_hidden_layers": 36,
        "layer_types": ["sliding_attention"] * 36,
        "sliding_window": 5,
    }
    config = read_head(edit(folder, tmp_path / "c", **raw, **OUTPUTS)).config
    assert config.layers == 2 and config.windows == (None, None)
    assert describe(tmp_path / "c")["problem"] is None


def test_specforge(folder, tmp_path):
    """Format D: `layers.N.`, both tables always, ids in eagle_config counting outputs."""

    def tables(t):
        return {n.replace("midlayer", "layers.0"): x for n, x in t.items()} | {
            "d2t": np.zeros(41, np.int64),
            "t2d": np.ones(41, bool),
        }

    raw = {
        "architectures": ["PEagleDraftModel"],
        "ptd_token_id": ...,
        AUX_LAYER_IDS: ...,
        "eagle_config": {AUX_LAYER_IDS: [0, 1, 2]},
        "num_depths": ...,
    }
    head = read_head(edit(folder, tmp_path / "d", tables, **raw))
    assert head.checkpoint_format == "specforge" and head.left_out == ("d2t", "t2d")
    assert head.config.aux_hidden_state_layers == (1, 2, 3)
    equal(load_drafter(tmp_path / "d"), tiny.head(num_depths=None))
    assert describe(tmp_path / "d")["aux_hidden_state_outputs"] == [0, 1, 2]


def test_numbering_is_the_formats_unless_given(folder):
    assert read_head(folder).config.aux_hidden_state_layers == (1, 2, 3)
    by_output = read_head(folder, aux_layer_numbering="output").config
    assert by_output.aux_hidden_state_layers == (2, 3, 4)


def test_aux_layers_that_are_not_named(folder, tmp_path):
    """vLLM's choice, (2, L//2, L-3), needs the target's number of layers."""
    edit(folder, tmp_path / "b", **{AUX_LAYER_IDS: ..., "eagle_config": ...})
    with pytest.raises(
        InputError, match=f"without {AUX_LAYER_IDS} needs its target.*give --target"
    ):
        load_drafter(tmp_path / "b")
    loaded = load_drafter(tmp_path / "b", target_layers=30)
    assert loaded.config.aux_hidden_state_layers == (2, 15, 27)
    facts = describe(tmp_path / "b")
    assert facts["aux_hidden_state_layers"] is None and facts["min_target_layers"] is None
    assert AUX_LAYER_IDS in facts["open_questions"][0]
    save_target(tiny.target(layers=9, windows=(None,) * 9), tmp_path / "target")
    facts = describe(tmp_path / "b", tmp_path / "target")
    assert facts["aux_hidden_state_layers"] == [2, 4, 6] and facts["open_questions"] == []
    convert(tmp_path / "b", tmp_path / "out", to="vllm", target=tmp_path / "target")
    assert weights.read_json(tmp_path / "out/config.json")[AUX_LAYER_IDS] == [2, 4, 6]


@pytest.mark.parametrize(
    "raw, rule",
    [
        (
            {AUX_LAYER_IDS: [1, 2, 3], "eagle_config": {AUX_LAYER_IDS: [1, 2, 4]}},
            "the same at top level and in eagle_config",
        ),
        ({AUX_LAYER_IDS: [1, 2], "eagle_config": ...}, "must read all aux hidden states"),
        ({"target_hidden_size": 23}, "must read all aux hidden states"),
        ({"num_aux_hidden_states": 2}, "must read all aux hidden states"),
        ({AUX_LAYER_IDS: [1, 2.5, 3]}, "list of whole numbers"),
        (
            {"eagle_config": {"use_aux_hidden_state": False, AUX_LAYER_IDS: [1, 2, 3]}},
            "use_aux_hidden_state must be true",
        ),
        ({"mlp_bias": True}, "mlp_bias must be false.*; choose a checkpoint with mlp_bias: false"),
        ({"logit_scale": 0.5}, "logit_scale must be 1.0"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation must be silu"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false"),
        ({"num_depths": 0}, "set num_depths, for example to 32, or download config.json again"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be what the weights hold"),
        ({"hidden_size": 20.0}, "hidden_size must be a whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": None},
            "needs the key 'sliding_window'",
        ),
        ({"rope_parameters": [1]}, "must be objects"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta": 1e4},
            "rope_type must be one of",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "type": "llama3",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                }
            },
            "got linear and llama3",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 1e-323,
                }
            },
            "must be a number of 0 or more",
        ),
        ({"head_dim": 2_000_000_000}, "head_dim even"),
        ({"head_dim": None, "hidden_size": 2}, "head_dim even"),
        ({"speculators_config": {"verifier": {"name_or_path": "\ud800"}}}, "printable"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "2", "rope_theta": 1e4}},
            "factor of the rotary embedding must be a number",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1e4,
                }
            },
            "partial_rotary_factor must be 1",
        ),
    ],
)
def test_keys_that_change_the_model(raw, rule, folder, tmp_path):
    with pytest.raises(InputError, match=rule) as error:
        read_head(edit(folder, tmp_path / "b", **raw))
    assert "config.json" in str(error.value)


def test_the_mask_tokens_spellings(folder, tmp_path):
    none = {"mask_token_id": ..., "ptd_token_id": ...}
    for i, raw in enumerate(
        (
            {"mask_token_id": 7},
            {"pard_token": 7},
            {"ptd_token_id": 7},
            {"dflash_config": {"mask_token_id": 7}},
            {"mask_token_id": 7, "pard_token": 8, "ptd_token_id": 9},
            {"pard_token": 7, "ptd_token_id": 9},
            {"dflash_config": {"mask_token_id": 7}, "mask_token_id": 8},
        )
    ):
        assert read_head(edit(folder, tmp_path / str(i), **{**none, **raw})).config.mask_token == 7
    bare = edit(folder, tmp_path / "bare", **none)
    assert "mask token's id" in describe(bare)["open_questions"][0]
    assert describe(bare)["mask_token_id"] is None
    convert(bare, tmp_path / "named", to="vllm", mask_token=0)
    assert weights.read_json(tmp_path / "named/config.json")["ptd_token_id"] == 0
    assert load_drafter(tmp_path / "named").config.mask_token == 0


def test_rope_in_the_old_spelling(folder, tmp_path):
    """`rope_theta` and `rope_scaling` with `type`, as transformers 4 wrote them."""
    for i, (spec, theta) in enumerate(
        (
            ({"type": "linear", "factor": 3.0}, 777.0),
            ({"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 24}, 5e5),
            (
                {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 24,
                },
                5e5,
            ),
        )
    ):
        old = load_drafter(
            edit(
                folder,
                tmp_path / f"old{i}",
                rope_parameters=...,
                rope_theta=theta,
                rope_scaling=spec,
            )
        ).config.rope
        new = {
            "rope_type": spec.get("type", spec.get("rope_type")),
            "rope_theta": theta,
            **{k: v for k, v in spec.items() if k != "type"},
        }
        assert (
            old.frequencies
            == Rope.from_hf(
                {"rope_parameters": new, "max_position_embeddings": 96}, 10, ""
            ).frequencies
        )
        assert old.frequencies != Rope.from_hf({"rope_theta": theta}, 10, "").frequencies
        save_drafter(load_drafter(tmp_path / f"old{i}"), tmp_path / f"new{i}")
        assert load_drafter(tmp_path / f"new{i}").config.rope == old


def test_biases_without_the_outputs(tmp_path):
    """vLLM builds all four from attention_bias, and would leave the missing one uninitialized.

    So zeros are written.
    """
    save_drafter(tiny.head(attention_bias=True), tmp_path / "a")
    less = edit(
        tmp_path / "a",
        tmp_path / "b",
        lambda t: {n: x for n, x in t.items() if "o_proj.bias" not in n},
    )
    assert describe(less)["missing_tensors"] == []
    convert(less, tmp_path / "c", to="vllm")
    tensors = weights.open_folder(tmp_path / "c")
    assert all(not tensors[f"{p}.self_attn.o_proj.bias"].any() for p in ("midlayer", "layers.1"))
    assert tensors["midlayer.self_attn.q_proj.bias"].any()


def test_an_absent_head_dim_is_that_of_transformers(tmp_path):
    for qk_norm, head_dim in ((True, 128), (False, 10)):
        folder = tmp_path / f"head{head_dim}"
        save_drafter(tiny.head(qk_norm=qk_norm, heads=2, kv_heads=1, head_dim=head_dim), folder)
        less = edit(folder, tmp_path / f"less{head_dim}", head_dim=...)
        assert read_head(less).config.head_dim == head_dim
        read_head(less).check()


def test_a_scale_of_logits_in_the_speculators_format(tmp_path):
    """vLLM reads it from the configuration of the layers."""
    save_drafter(tiny.head(), tmp_path / "a", "speculators", k=3, target="x/y")
    raw = weights.read_json(tmp_path / "a" / "config.json")["transformer_layer_config"]
    scaled = edit(
        tmp_path / "a", tmp_path / "b", transformer_layer_config=raw | {"logit_scale": 0.5}
    )
    with pytest.raises(InputError, match="logit_scale must be 1.0"):
        read_head(scaled)


def test_mask_hidden_in_other_shapes(folder, tmp_path):
    """[1, A] and [A] are read; [1, 1, A] is written, the only shape that speculators loads."""
    want = weights.open_folder(folder)["mask_hidden"]
    for shape in ((72,), (1, 72)):
        source = edit(
            folder,
            tmp_path / f"m{len(shape)}",
            lambda t, shape=shape: t | {"mask_hidden": t["mask_hidden"].reshape(shape)},
        )
        for to in ("vllm", "speculators"):
            convert(source, tmp_path / f"{to}{len(shape)}", to=to)
            got = weights.open_folder(tmp_path / f"{to}{len(shape)}")["mask_hidden"]
            assert got.shape == (1, 1, 72) and np.array_equal(got, want)


@pytest.mark.parametrize(
    "raw, windows",
    [
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 1,
            },
            (None, 9),
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": False,
                "sliding_window": 9,
                "layer_types": ["sliding_attention"] * 2,
            },
            (None, None),
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention"] * 2,
            },
            (9, 9),
        ),
        (
            {"model_type": "llama", "sliding_window": 9, "layer_types": ["sliding_attention"] * 2},
            (9, 9),
        ),
        ({"model_type": "llama", "sliding_window": 9}, (None, None)),
    ],
)
def test_windows_are_vllms(raw, windows, folder, tmp_path):
    assert read_head(edit(folder, tmp_path / "b", **raw)).config.windows == windows


@pytest.mark.parametrize(
    "options, changes, message",
    [
        (
            {"mask_token": 3},
            {},
            "--mask-token: the config names the mask token itself.*; leave out --mask-token",
        ),
        (
            {"aux_layer_numbering": "output"},
            {AUX_LAYER_IDS: ..., "eagle_config": ...},
            "--aux-layer-numbering: needs layer ids, .*; leave out --aux-layer-numbering",
        ),
    ],
)
def test_flags_that_would_say_nothing(options, changes, message, folder, tmp_path):
    source = edit(folder, tmp_path / "b", **changes)
    with pytest.raises(InputError, match=message):
        convert(source, tmp_path / "c", to="vllm", **options)


def test_what_a_peer_refuses_is_not_written(tmp_path):
    with pytest.raises(InputError, match="norm_before_fc or fc_norm, not both"):
        save_drafter(
            tiny.head(mask_token=None, norm_before_fc=True, fc_norm=True),
            tmp_path / "a",
            checkpoint_format="speculators",
        )
    for checkpoint_format in ("vllm", "speculators"):
        with pytest.raises(
            InputError, match="LlamaConfig wants a width that its heads divide; got 22 and 4"
        ):
            save_drafter(tiny.head(dim=22), tmp_path / "a", checkpoint_format=checkpoint_format)
    save_drafter(tiny.head(dim=22, qk_norm=True), tmp_path / "a")


def test_whole_numbers_are_no_weights(folder, tmp_path):
    """A quantized matrix without its scales must not be read as if its numbers were the weights."""
    source = edit(
        folder, tmp_path / "b", lambda t: t | {"fc.weight": np.ones(t["fc.weight"].shape, np.int8)}
    )
    with pytest.raises(InputError, match="wrong dtype: fc.weight int8 instead of float32"):
        load_drafter(source)


def test_one_tensor_under_two_spellings(folder, tmp_path):
    with pytest.raises(InputError, match="every tensor must have one name"):
        read_head(
            edit(
                folder,
                tmp_path / "b",
                lambda t: t | {"layers.0.hidden_norm.weight": np.ones(20, np.float32)},
            )
        )


@pytest.mark.parametrize(
    "raw, checkpoint_format",
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "vllm"),
        ({}, "vllm"),
        ({"architectures": None}, "vllm"),
        ({"architectures": [3]}, "vllm"),
        (
            {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"},
            "speculators",
        ),
        ({"architectures": ["PEagleDraftModel"]}, "specforge"),
        ({"architectures": ["LlamaEagle3DraftModel"]}, "automodel"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "vllm"),
    ],
)
def test_detection(raw, checkpoint_format):
    assert detect_format(raw) == checkpoint_format
