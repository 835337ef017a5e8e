"""A -> ours -> A, B -> ours -> B, A -> B -> A, where A is the vllm and B the speculators format.

Every tensor comes back bit for bit, for every option that both ends can express.
"""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors
import tiny
from checkpoints.folder_edits import edit, files_equal

from peagle_jax import weights
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.runs import read_run
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.layers import Rope
from peagle_jax.types import InputError

ROPES = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 555.0,
        "factor": 5.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 30,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 555.0,
        "factor": 4.0,
        "beta_fast": 20.0,
        "truncate": False,
        "original_max_position_embeddings": 30,
    },
    "linear": {"rope_type": "linear", "rope_theta": 555.0, "factor": 2.5},
}
HEADS = {
    "plain": {},
    "qwen3": {"qk_norm": True},
    "reduced": {"draft_vocab": 17},
    "bias": {"attention_bias": True},
    "norms": {"norm_before_fc": True, "norm_before_residual": True},
    "window": {"windows": (7, 7)},
    "width": {"dim": 28, "head_dim": 6, "kv_heads": 4},
    "two_aux_layers": {"aux_hidden_state_layers": (1, 4)},
    "eagle3": {"mask_token": None, "layers": 1, "windows": (None,)},
    "eagle3_options": {
        "mask_token": None,
        "layers": 1,
        "windows": (None,),
        "fc_norm": True,
        "norm_output": True,
        "draft_vocab": 23,
    },
    "fc_norm": {"fc_norm": True, "norm_output": True},
} | {
    name: {"rope": Rope.from_hf({"rope_parameters": spec, "max_position_embeddings": 96}, 10, "")}
    for name, spec in ROPES.items()
}
VLLM_ONLY = ("fc_norm",)
FORMS = (("float32", None), ("bfloat16", 9000), ("float16", 20_000))


def same(a, b):
    files_equal(a, b)
    x, y = (weights.read_json(folder / "config.json") for folder in (a, b))
    assert x == y


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("form", [0, 1, pytest.param(2, marks=pytest.mark.long)])
def test_round_trips(name, form, tmp_path):
    """Three dtypes, one file and shards; on the way back from B in shards of another size."""
    round_trip(name, *FORMS[form], tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "eagle3_options"])
def test_round_trips_in_float16(name, tmp_path):
    round_trip(name, *FORMS[2], tmp_path)


def round_trip(name, dtype, shards, root):
    save_drafter(tiny.head(**HEADS[name]), root / "A", dtype=dtype, k=9, max_shard_bytes=shards)
    convert(root / "A", root / "run", to="orbax")
    convert(root / "run", root / "A2", to="vllm")
    same(root / "A", root / "A2")
    assert (
        len(list((root / "A").glob("*.safetensors"))) > 1
        if shards
        else (root / "A2/model.safetensors").exists()
    )
    if name in VLLM_ONLY:
        with pytest.raises(InputError, match="ignores some options; got fc_norm, norm_output"):
            convert(root / "A", root / "B", to="speculators")
        return
    convert(root / "A", root / "B", to="speculators")
    shape = weights.read_json(root / "B/config.json")["transformer_layer_config"]
    num_aux_layers = len(tiny.head_config(**HEADS[name]).aux_hidden_state_layers)
    assert shape.get("num_aux_hidden_states", 3) == num_aux_layers  # vLLM assumes three
    convert(root / "B", root / "A3", to="vllm", max_shard_bytes=7000)
    same(root / "A", root / "A3")
    convert(root / "B", root / "run2", to="orbax")
    convert(root / "run2", root / "B2", to="speculators")
    same(root / "B", root / "B2")
    assert all(
        t.dtype == np.int64 for n, t in weights.open_folder(root / "B2").items() if n == "d2t"
    )


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float64", "half"])
def test_a_dtype_that_no_head_is_written_in(dtype, tmp_path):
    """Integers would cut weights, float8 needs scales that no format here has."""
    save_drafter(tiny.head(), tmp_path / "a")
    with pytest.raises(InputError, match="--dtype: must be one of float32, bfloat16, float16; got"):
        convert(tmp_path / "a", tmp_path / "b", to="vllm", dtype=dtype)
    assert not (tmp_path / "b").exists()


def test_what_float32_cannot_lose_another_dtype_may(tmp_path):
    """A cast rounds once, as NumPy does; there and back again is stable."""
    save_drafter(tiny.head(), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to="vllm", dtype="bfloat16")
    convert(tmp_path / "b", tmp_path / "c", to="vllm", dtype="float32")
    convert(tmp_path / "c", tmp_path / "d", to="speculators", dtype="bfloat16")
    a, b, d = (weights.open_folder(tmp_path / name) for name in "abd")
    assert all(np.array_equal(b[n], a[n].astype(ml_dtypes.bfloat16)) for n in a)
    assert all(np.array_equal(d[n.replace("midlayer", "layers.0")], b[n]) for n in b)


def test_mixed_dtypes_stay_as_they_are(tmp_path):
    save_drafter(tiny.head(), tmp_path / "f", dtype="bfloat16")

    def norms(t):
        return {n: x.astype(np.float32) if "norm" in n else x for n, x in t.items()}

    edit(tmp_path / "f", tmp_path / "a", norms)
    assert np.dtype(read_head(tmp_path / "a").config.dtype) == np.float32
    convert(tmp_path / "a", tmp_path / "b", to="speculators")
    convert(tmp_path / "b", tmp_path / "c", to="vllm")
    files_equal(tmp_path / "a", tmp_path / "c")


def test_an_identity_map_is_left_out_and_comes_back(tmp_path):
    """vLLM 0.32 refuses d2t at full vocabulary; the metadata of every form remembers it."""
    save_drafter(tiny.head(), tmp_path / "plain")

    def tables(t):
        return t | {"d2t": np.zeros(41, np.int64), "t2d": np.ones(41, bool)}

    edit(tmp_path / "plain", tmp_path / "published", tables)
    source = tmp_path / "published"
    for to, out in (("vllm", "A"), ("speculators", "B"), ("orbax", "run"), ("vllm", "A2")):
        convert(source, tmp_path / out, to=to)
        source = tmp_path / out
        if to != "orbax":
            assert (
                not {"d2t", "t2d"} & weights.open_folder(source).keys()
                and weights.read_metadata(source)["left_out"] == "d2t t2d"
            )
    for out in ("published", "A", "run", "A2"):
        convert(tmp_path / out, tmp_path / "back", to="vllm", identity_d2t=True)
        files_equal(tmp_path / "published", tmp_path / "back")
    with pytest.raises(
        InputError, match="the source must have had d2t.*; leave out --identity-d2t"
    ):
        convert(tmp_path / "plain", tmp_path / "refused", to="vllm", identity_d2t=True)
    save_drafter(tiny.head(draft_vocab=17), tmp_path / "reduced")
    with pytest.raises(
        InputError, match="only a head of the full vocabulary.*; leave out --identity-d2t"
    ):
        convert(tmp_path / "reduced", tmp_path / "refused", to="vllm", identity_d2t=True)
    assert not (tmp_path / "refused").exists()


def test_what_speculators_saved_and_is_not_the_heads(tmp_path):
    save_drafter(tiny.head(dim=24), tmp_path / "a", checkpoint_format="speculators")
    verifier = {
        "verifier_norm.weight": np.ones(24, np.float32),
        "verifier_lm_head.weight": np.ones((41, 24), np.float32),
    }
    edit(tmp_path / "a", tmp_path / "b", lambda t: t | verifier)
    convert(tmp_path / "b", tmp_path / "c", to="speculators")
    files_equal(tmp_path / "a", tmp_path / "c")
    assert (
        weights.read_metadata(tmp_path / "c")["left_out"]
        == "verifier_norm.weight verifier_lm_head.weight"
    )


def test_provenance_and_card(tmp_path):
    """Where a head comes from and how to serve it: in the metadata and on the card."""
    save_target(tiny.target(), tmp_path / "target")
    save_drafter(tiny.head(), tmp_path / "my head", k=9)
    convert(tmp_path / "my head", tmp_path / "run", to="orbax", target=tmp_path / "target")
    convert(
        tmp_path / "run", tmp_path / "out", to="speculators", k=5, command="peagle convert this"
    )
    with safetensors.safe_open(tmp_path / "out/model.safetensors", "numpy") as file:
        facts = file.metadata()
    assert (
        facts["format"] == "pt"
        and facts["source"] == "my head"
        and facts["source_format"] == "orbax"
        and facts["command"] == "peagle convert this"
    )
    assert facts["writer"].startswith("peagle_jax ") and ", jax " in facts["writer"]
    assert (
        facts["target"] == str((tmp_path / "target").resolve())
        and facts["target_architecture"] == "Qwen3ForCausalLM"
    )  # through the run
    card = (tmp_path / "out/README.md").read_text()
    flags = (
        '{"method": "eagle3", "model": "out", "num_speculative_tokens": 5, '
        '"parallel_drafting": true}'
    )
    assert (
        f"--speculative-config '{flags}'" in card
        and f"SM_VLLM_SPECULATIVE_CONFIG='{flags}'" in card
        and "vllm serve out\n" in card
    )
    assert (
        "| converted from | `my head` |" in card
        and "| mask token | 5 |" in card
        and "`peagle convert this`" in card
    )
    raw = weights.read_json(tmp_path / "out/config.json")
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert json.loads((tmp_path / "run/head.json").read_text())["origin"]["source"] == "my head"


def test_the_run_of_a_head_is_read_parameter_by_parameter(tmp_path):
    """An export from a run opens no more than it writes: the optimizer's state stays on disk."""
    save_drafter(tiny.head(), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "run", to="orbax", dtype="bfloat16")
    assert np.dtype(read_run(tmp_path / "run").config.dtype) == ml_dtypes.bfloat16
    with pytest.raises(InputError, match="a training run says it itself.*; leave out --mask-token"):
        convert(tmp_path / "run", tmp_path / "x", to="vllm", mask_token=3)
    (tmp_path / "run/head.json").write_text(
        (tmp_path / "run/head.json")
        .read_text()
        .replace('"norm_before_fc": false', '"norm_before_fc": true')
    )
    with pytest.raises(
        InputError,
        match="must hold the parameters of head.json; got a difference at fusion.input_norm.scale",
    ):
        convert(tmp_path / "run", tmp_path / "x", to="vllm")
    assert not (tmp_path / "x").exists()


def test_what_to_do_about_a_damaged_run(tmp_path):
    save_drafter(tiny.head(), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "run", to="orbax")
    step = tmp_path / "run/checkpoints/0"
    (step / "default/_METADATA").unlink()
    with pytest.raises(InputError, match=f"_METADATA must have .* got nothing; copy {step} from"):
        read_run(tmp_path / "run")
    (step / "default/checksums.json").unlink()  # of a former version
    with pytest.raises(InputError, match=f"continue it with peagle train; otherwise delete {step}"):
        read_run(tmp_path / "run")
    shutil.rmtree(step)
    with pytest.raises(InputError, match="must hold a finished.*; continue the run with peagle"):
        read_run(tmp_path / "run")
    (tmp_path / "run/head.json").write_text("{")
    with pytest.raises(InputError, match="head.json: .*; copy head.json from a backup"):
        read_run(tmp_path / "run")
