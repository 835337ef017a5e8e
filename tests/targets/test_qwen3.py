"""Qwen3 against transformers, in both directions, on tiny random models.

Nothing is downloaded. Every architectural option is set to a value that is not its default.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle_jax import weights
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.target_io import load_target, save_target
from peagle_jax.layers import CachedAttention
from peagle_jax.targets import config, qwen3
from peagle_jax.types import InputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-5  # float32, on logits and hidden states of size 1 to 10
V, T = 97, 21
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 777.0},
    "linear": {"rope_type": "linear", "rope_theta": 777.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 777.0,
        "factor": 5.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 30,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 777.0,
        "factor": 3.0,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 40,
    },
}
CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "bias": {"attention_bias": True},
    "sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    **{name: {"rope_parameters": rope} for name, rope in ROPES.items() if name != "default"},
}


# in the long tier; families.py has another Qwen3 of every option
LONG = ("one_kv_head", "bias", "linear")


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=pytest.mark.long if case in LONG else []) for case in CASES],
)
def pair(request, tmp_path_factory):
    """(transformers' model, its folder)"""
    torch.manual_seed(0)
    config = dict(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        rms_norm_eps=3e-3,
        rope_parameters=ROPES["default"],
        eos_token_id=11,
    )
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**{**config, **CASES[request.param]})
    ).eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.uniform_(0.5, 1.5)
        else:
            p.data.normal_(0, 0.15)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def run(target, tokens, positions, cache):
    @jax.jit
    def forward(params, tokens, positions, cache):
        module = target.bind(params)
        out, cache = module(tokens, positions, CachedAttention(positions), cache)
        return module.compute_logits(out.hidden), out.aux_hidden_states, cache

    return forward(target.params, tokens, positions, cache)


def assert_equal(got, want):
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def test_logits_hidden_states_and_cache(pair):
    theirs, folder = pair
    aux_layers = (0, 1, 4)
    target = load_target(folder, aux_hidden_state_layers=aux_layers)
    assert target.config.stop_ids == (11,)
    tokens = np.random.default_rng(0).integers(0, V, (2, T))
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens), output_hidden_states=True)
    tokens, positions = jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(T), (2, T))
    cache = target.config.empty_cache(2, T)
    logits, aux_hidden_states, _ = run(target, tokens, positions, cache)
    assert_equal(logits, want.logits.numpy())
    aux_states = [want.hidden_states[i].numpy() for i in aux_layers]
    assert_equal(aux_hidden_states, np.concatenate(aux_states, axis=-1))

    # rows of different length, block by block, in a cache with room to spare
    cache, by_blocks = target.config.empty_cache(2, 40), []
    for start in range(0, T, 7):
        stop = start + 7
        logits, _, cache = run(target, tokens[:, start:stop], positions[:, start:stop], cache)
        by_blocks.append(logits)
    assert_equal(np.concatenate(by_blocks, 1), want.logits.numpy())


def test_exported_folder_is_what_transformers_wrote(pair, tmp_path):
    theirs, folder = pair
    save_target(load_target(folder), tmp_path / "out")
    ours, want = weights.open_folder(tmp_path / "out"), weights.open_folder(folder)
    assert ours.keys() == want.keys()
    assert all(np.array_equal(ours[n], want[n]) for n in want)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).eval()
    tokens = torch.arange(T)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_converted_folder_is_transformers_too(pair, tmp_path):
    """`--to hf`: other shards, another dtype; unknown keys of the config stay.

    Tied matrices that are stored twice are one again.
    """
    theirs, folder = pair
    source = tmp_path / "in"
    shutil.copytree(folder, source)
    raw = json.loads((source / "config.json").read_text()) | {
        "my_note": "kept",
        "torch_dtype": "float32",
    }
    (source / "config.json").write_text(json.dumps(raw))
    (source / "merges.txt").write_text("a b")
    convert(source, tmp_path / "same", to="hf", max_shard_bytes=30_000)
    convert(source, tmp_path / "half", to="hf", dtype="bfloat16")
    same, half, want = (weights.open_folder(tmp_path / name) for name in ("same", "half", "in"))
    assert same.keys() == half.keys() == want.keys()
    assert len(list((tmp_path / "same").glob("*.safetensors"))) > 1
    for name in want:
        assert np.array_equal(same[name], want[name])
        assert np.array_equal(half[name], want[name].astype(half[name].dtype))
    config = json.loads((tmp_path / "half/config.json").read_text())
    assert config["my_note"] == "kept" and config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config
    assert (tmp_path / "half/merges.txt").read_text() == "a b"
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "same", dtype=torch.float32
    ).eval()
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    tokens = torch.arange(T)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    assert all(
        torch.equal(p, q.to(torch.bfloat16))
        for p, q in zip(rounded.parameters(), theirs.parameters(), strict=True)
    )


@pytest.mark.parametrize("pair", ["plain"], indirect=True)
def test_a_link_is_not_copied(pair, tmp_path):
    """What somebody's folder links to would be published with the output."""
    source = shutil.copytree(pair[1], tmp_path / "in")
    (tmp_path / "secret").write_text("mine")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=r"in: what is copied must lie in the folder itself; got"):
        convert(source, tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_an_fp8_target(pair, tmp_path):
    """`weight_scale_inv` by blocks, as Qwen3's FP8 releases have it, is read as the product."""
    _, folder = pair
    tensors, want = dict(weights.open_folder(folder)), {}
    for name in [n for n in tensors if "_proj.weight" in n]:
        matrix = np.clip(np.asarray(tensors[name]) * 200, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        rows, columns = matrix.shape
        grid = (-(-rows // 24), -(-columns // 24))
        scale = np.random.default_rng(1).uniform(0.004, 0.006, grid).astype(np.float32)
        repeated = np.kron(scale, np.ones((24, 24), np.float32))[:rows, :columns]
        want[name] = matrix.astype(np.float32) * repeated
        tensors |= {name: matrix, name + "_scale_inv": scale}
    raw = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [24, 24]}
    }
    (tmp_path / "fp8").mkdir()
    weights.write_folder(tmp_path / "fp8", raw, tensors, {})
    with pytest.raises(InputError, match="FP8 target is written in a dtype of your choice"):
        convert(tmp_path / "fp8", tmp_path / "x", to="hf")
    convert(tmp_path / "fp8", tmp_path / "out", to="hf", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    got = weights.open_folder(tmp_path / "out")
    assert all(np.array_equal(got[name], value) for name, value in want.items())
    kernel = load_target(tmp_path / "fp8").params["blocks"][1]["mlp"]["up"]["kernel"]
    assert np.array_equal(kernel, want["model.layers.1.mlp.up_proj.weight"].T)


def test_reads_the_old_rope_spelling(pair, tmp_path):
    _, folder = pair
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None
    if rope["rope_type"] != "default":
        raw["rope_scaling"] = {**rope, "type": rope.pop("rope_type")}
    old = qwen3.Qwen3Config.from_hf(raw, aux_hidden_state_layers=(), dtype=jnp.float32, where="old")
    new = load_target(folder, aux_hidden_state_layers=()).config
    assert old.rope.frequencies == new.rope.frequencies


@pytest.mark.parametrize(
    "layers, aux_layers",
    [(3, (1, 2)), (4, (1, 2, 3)), (6, (1, 3, 5)), (7, (2, 3, 4)), (36, (2, 18, 33))],
)
def test_default_aux_layers_ascend(layers, aux_layers):
    assert config.default_aux_layers(layers) == aux_layers


def test_every_misfit_is_named_at_once(pair, tmp_path):
    _, folder = pair
    tensors = dict(weights.open_folder(folder))
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 4), np.float32)
    weights.write_folder(tmp_path, json.loads((folder / "config.json").read_text()), tensors, {})
    message = (
        "missing: model.norm.weight; unknown: model.norm.bias; "
        "wrong shape: model.layers.0.mlp.up_proj"
    )
    with pytest.raises(InputError, match=message):
        load_target(tmp_path)


@pytest.mark.parametrize(
    "key, value, words",
    [
        (
            "model_type",
            "bert",
            "model_type must be one of llama, qwen3, qwen3_moe, gpt_oss, gemma4, gemma4_text; "
            "got bert",
        ),
        ("head_dim", ..., "needs the key 'head_dim'"),
        ("rope_parameters", {"rope_type": "magic", "rope_theta": 1.0}, "got magic"),
        ("hidden_act", "gelu", "got gelu"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1.0}, "needs the key 'factor'"),
        ("num_key_value_heads", 3, "multiple"),
    ],
)
def test_bad_configs(pair, tmp_path, key, value, words):
    _, folder = pair
    raw = json.loads((folder / "config.json").read_text())
    raw[key] = value
    if value is ...:
        del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=words):
        load_target(tmp_path)
