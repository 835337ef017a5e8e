"""Draft heads' folders: every format read and written, bit for bit.

What cannot be expressed is refused by name.
"""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny
from checkpoints.folder_edits import edit, equal, files_equal

from peagle_jax import weights
from peagle_jax.checkpoints.config_writing import serving_flags
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import SERVED_FORMATS, save_drafter
from peagle_jax.checkpoints.inspect import describe
from peagle_jax.checkpoints.runs import load_drafter, read_run
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.layers import Rope
from peagle_jax.types import InputError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 555.0,
    "factor": 5.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 30,
}
HEADS = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "reduced": {"draft_vocab": 17},
    "bias": {"attention_bias": True},
    "before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "window": {"windows": (7, 7)},
    "llama3": {"rope": Rope.from_hf({"rope_parameters": LLAMA3}, 10, "")},
    "eagle3": {"mask_token": None, "layers": 1, "windows": (None,)},
    "fc_norm": {"fc_norm": True, "norm_output": True},
}
VLLM_ONLY = ("fc_norm",)


def make_head(name):
    changes = dict(HEADS[name])
    if changes.get("mask_token", 5) is None:
        changes["dim"] = 24  # speculators' loader wants the target's width
    return tiny.head(**changes)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("checkpoint_format", SERVED_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back(name, checkpoint_format, dtype, tmp_path):
    if checkpoint_format == "speculators" and name in VLLM_ONLY:
        with pytest.raises(InputError, match="ignores some options; got fc_norm, norm_output"):
            save_drafter(make_head(name), tmp_path / "a", checkpoint_format=checkpoint_format)
        assert not list(tmp_path.iterdir())
        return
    save_drafter(
        make_head(name),
        tmp_path / "a",
        checkpoint_format=checkpoint_format,
        dtype=dtype,
        target="TARGET",
    )
    head = load_drafter(tmp_path / "a")
    if dtype == "float32":
        equal(head, make_head(name))
    else:
        assert all(
            t.dtype in (ml_dtypes.bfloat16, np.int64, np.bool_)
            for t in weights.open_folder(tmp_path / "a").values()
        )
    save_drafter(head, tmp_path / "b", checkpoint_format=checkpoint_format, target="TARGET")
    files_equal(tmp_path / "a", tmp_path / "b")
    assert weights.read_json(tmp_path / "a/config.json") == weights.read_json(
        tmp_path / "b/config.json"
    )


@pytest.mark.parametrize("name", ["llama", "reduced", "bias"])
def test_vllm_speculators_orbax_vllm(name, tmp_path):
    save_drafter(make_head(name), tmp_path / "a", dtype="bfloat16")
    for source, to in (("a", "speculators"), ("speculators", "orbax"), ("orbax", "vllm")):
        convert(tmp_path / source, tmp_path / to, to=to)
    files_equal(tmp_path / "a", tmp_path / "vllm")
    equal(read_run(tmp_path / "orbax"), load_drafter(tmp_path / "a"))


def test_what_vllm_reads(tmp_path):
    """Names and keys that vLLM 0.32 looks for (checkpoints.md, A)."""
    save_drafter(tiny.head(draft_vocab=17, attention_bias=True), tmp_path / "a", k=9)
    tensors, raw = (
        weights.open_folder(tmp_path / "a"),
        weights.read_json(tmp_path / "a/config.json"),
    )
    assert (
        tensors["mask_hidden"].shape == (1, 1, 72)
        and tensors["d2t"].dtype == np.int64
        and tensors["t2d"].dtype == np.bool_
    )
    assert (
        tensors["midlayer.self_attn.q_proj.weight"].shape == (40, 40)
        and "midlayer.self_attn.o_proj.bias" in tensors
    )
    assert (
        raw["architectures"] == ["LlamaForCausalLMEagle3"]
        and raw["ptd_token_id"] == raw["mask_token_id"] == 5
    )
    assert (
        raw["eagle_aux_hidden_state_layer_ids"]
        == raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        == [1, 2, 3]
    )
    assert (raw["draft_vocab_size"], raw["target_hidden_size"], raw["num_depths"]) == (17, 24, 9)


def test_speculators_config_has_the_keys_of_speculators_own(tmp_path):
    """Key for key what speculators 0.9 itself saved (tests/golden).

    vLLM fails on a top-level model_type.
    """
    golden = json.loads(
        str(np.load(Path(__file__).parent.parent / "golden" / "peagle_llama.npz")["config"])
    )
    save_drafter(
        tiny.head(norm_before_fc=True),
        tmp_path / "a",
        checkpoint_format="speculators",
        target="TARGET",
    )
    ours = weights.read_json(tmp_path / "a/config.json")
    assert ours.keys() == golden.keys() - {"auto_map", "transformers_version"}
    assert ours["speculators_config"].keys() == golden["speculators_config"].keys()
    assert ours["speculators_config"]["verifier"]["name_or_path"] == "TARGET"


def test_other_spellings(tmp_path):
    """Automodel's `model.`, `layers.0.` for midlayer, each key of the mask token, ids at one place
    only, a d2t of zeros, no embedding.
    """
    want = tiny.head()
    save_drafter(want, tmp_path / "a")

    def prefixed(t):
        return {"model." + n.replace("midlayer", "layers.0"): x for n, x in t.items()} | {
            "d2t": np.zeros(41, np.int64)
        }

    for i, key in enumerate(("mask_token_id", "pard_token", "ptd_token_id")):
        where = {
            "mask_token_id": ...,
            "ptd_token_id": ...,
            key: 5,
            ("eagle_config" if i else "eagle_aux_hidden_state_layer_ids"): ...,
        }
        equal(load_drafter(edit(tmp_path / "a", tmp_path / key, prefixed, **where)), want)
    without = edit(
        tmp_path / "a",
        tmp_path / "shared",
        lambda t: {n: x for n, x in t.items() if n != "embed_tokens.weight"},
    )
    with pytest.raises(InputError, match="needs embed_tokens.weight, or the target's embedding"):
        load_drafter(without)
    equal(load_drafter(without, embedding=want.params["embed"]["table"]), want)


def test_sharing_the_targets_embedding(tmp_path):
    """Left out only where it is the target's to the bit, in the head's dtype.

    Any loader then finds the target's.
    """
    target = tiny.target()
    save_target(target, tmp_path / "target")
    head = tiny.head(**{**HEADS["eagle3"], "dim": 24})
    own = dataclasses.replace(
        head, params={**head.params, "embed": {"table": target.params["embed"]["table"]}}
    )
    save_drafter(own, tmp_path / "own")
    save_drafter(head, tmp_path / "other")
    convert(
        tmp_path / "own",
        tmp_path / "shared",
        to="vllm",
        target=tmp_path / "target",
        share_embedding=True,
    )
    left = (
        weights.open_folder(tmp_path / "own").keys()
        - weights.open_folder(tmp_path / "shared").keys()
    )
    assert left == {"embed_tokens.weight"} and describe(tmp_path / "shared")["shares_embedding"]
    equal(load_drafter(tmp_path / "shared", embedding=target.params["embed"]["table"]), own)
    for src, options, message in (
        ("other", {"to": "vllm", "target": tmp_path / "target"}, "one trained further"),
        ("own", {"to": "vllm"}, "needs the --target whose embedding is shared"),
    ):
        with pytest.raises(InputError, match=message):
            convert(tmp_path / src, tmp_path / "refused", share_embedding=True, **options)
    convert(tmp_path / "shared", tmp_path / "again", to="vllm")  # stays shared without being asked
    files_equal(tmp_path / "shared", tmp_path / "again")
    with pytest.raises(InputError, match="has its own embedding; got a shared one"):
        convert(tmp_path / "shared", tmp_path / "refused", to="speculators")
    convert(tmp_path / "shared", tmp_path / "filled", to="speculators", target=tmp_path / "target")
    equal(load_drafter(tmp_path / "filled"), own)
    with pytest.raises(
        InputError, match="--to speculators has no use for it.*; leave out --share-embedding"
    ):
        convert(
            tmp_path / "own",
            tmp_path / "refused",
            to="speculators",
            target=tmp_path / "target",
            share_embedding=True,
        )
    with pytest.raises(InputError, match="has its own embedding"):
        save_drafter(
            own, tmp_path / "refused", checkpoint_format="speculators", own_embedding=False
        )
    with pytest.raises(InputError, match="needs embed_tokens.weight, or the target's"):
        convert(tmp_path / "shared", tmp_path / "refused", to="orbax")
    convert(tmp_path / "shared", tmp_path / "run", to="orbax", target=tmp_path / "target")
    equal(read_run(tmp_path / "run"), own)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    "tensors, changes, words",
    [
        (
            None,
            {"mask_token_id": ..., "ptd_token_id": ...},
            "needs one of mask_token_id, pard_token, ptd_token_id",
        ),
        (None, {"mask_token_id": 41}, "must lie in 0..40; got 41"),
        (None, {"hidden_size": ...}, "needs the key 'hidden_size'"),
        (None, {"num_hidden_layers": 3}, "missing: layers.2"),
        (None, {"draft_vocab_size": 40}, "missing: d2t; wrong shape: lm_head.weight"),
        (
            lambda t: {n: x for n, x in t.items() if n != "fc.weight"},
            {},
            "needs the matrix fc.weight; got none; name a head's folder",
        ),
        (lambda t: t | {"extra.weight": np.zeros(3, np.float32)}, {}, "unknown: extra.weight"),
        (
            lambda t: t | {"mask_hidden": np.zeros((1, 1, 71), np.float32)},
            {},
            "wrong shape: mask_hidden",
        ),
        (lambda t: t | {"d2t": np.r_[1, -1, np.zeros(39, int)]}, {}, "identity"),
        (
            None,
            {"hidden_act": "gelu"},
            "hidden_act must be silu.*got gelu; choose a checkpoint with hidden_act: silu",
        ),
    ],
)
def test_bad_heads(tensors, changes, words, tmp_path):
    save_drafter(tiny.head(), tmp_path / "a")
    with pytest.raises(InputError, match=words):
        load_drafter(edit(tmp_path / "a", tmp_path / "b", tensors, **changes))


def test_d2t_outside_the_vocabulary(tmp_path):
    save_drafter(tiny.head(draft_vocab=17), tmp_path / "a")
    with pytest.raises(InputError, match="must name 17 different ids in 0..40"):
        load_drafter(
            edit(tmp_path / "a", tmp_path / "b", lambda t: t | {"d2t": np.full(17, 30, np.int64)})
        )


@pytest.mark.parametrize("windows", [(None, 7), (7, None), (7, 8)])
def test_windows_that_vllm_cannot_draft_with(windows, tmp_path):
    with pytest.raises(InputError, match="/a: vLLM drafts with one cache: all layers have one"):
        save_drafter(tiny.head(windows=windows), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_some_layers_that_slide_are_read(tmp_path):
    save_drafter(tiny.head(windows=(7, 7)), tmp_path / "a")
    mixed = edit(
        tmp_path / "a", tmp_path / "b", layer_types=["full_attention", "sliding_attention"]
    )
    assert load_drafter(mixed).config.windows == (None, 7)


def test_aux_layers_that_vllm_would_reorder(tmp_path):
    with pytest.raises(InputError, match=r"must ascend; got \[2, 2, 1\]"):
        save_drafter(tiny.head(aux_hidden_state_layers=(2, 2, 1)), tmp_path / "a")


def test_serving_flags_are_json():
    flags = json.loads(serving_flags(tiny.head_config(), "my head", 7))
    assert flags == {
        "method": "eagle3",
        "model": "my head",
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    assert "parallel_drafting" not in json.loads(
        serving_flags(tiny.head_config(mask_token=None), "h", 7)
    )
