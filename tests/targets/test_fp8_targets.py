"""Targets in FP8, against transformers with the same matrices and quantized inputs.

Also the matrices of every family, and folders that are FP8 already.
"""

import copy
import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
import torch  # noqa: E402
import transformers  # noqa: E402
from families import CASES, T, make, ours, run, truth  # noqa: E402

from peagle_jax import weights  # noqa: E402
from peagle_jax.checkpoints.target_io import load_target, save_target  # noqa: E402
from peagle_jax.types import InputError  # noqa: E402
from peagle_jax.weights.fp8 import quantize  # noqa: E402

# parts of the names of transformers' modules that stay in floating point
NOT_QUANTIZED = ("lm_head", "router", "mlp.gate.", "embed", "norm", "per_layer")


def quantized_rows(x: torch.Tensor) -> torch.Tensor:
    """Each row rounded to float8 as torch rounds, and back."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def logits_of(target, case):
    """Logits [2, T, V] of a case's tokens."""
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    cache = target.config.empty_cache(2, T)
    return np.asarray(run(target, jnp.asarray(truth(case)[0]), positions, cache)[0])


def load_fp8(case):
    return load_target(make(case)[1], aux_hidden_state_layers=(0, 1, 4), fp8=True)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma4"])
def test_logits_are_those_of_quantized_transformers(case):
    """Where rounding ties, the two may differ by a step, so that a few logits are off.

    The median logit is not.
    """
    theirs = copy.deepcopy(make(case)[0])
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in NOT_QUANTIZED):
            values, scale = quantize(module.weight.detach().numpy(), blocks=False)
            module.weight.data = torch.from_numpy(values.astype(np.float32) * scale[:, None])
            module.register_forward_pre_hook(lambda _, args: (quantized_rows(args[0]),))
    tokens, exact, _ = truth(case)
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)).logits.numpy()
    error, error_of_fp8 = np.abs(logits_of(load_fp8(case), case) - want), np.abs(want - exact)
    assert np.median(error) < 0.02 * np.median(error_of_fp8)
    assert error.mean() < 0.3 * error_of_fp8.mean()


@pytest.mark.parametrize("case", CASES)
def test_matrices_of_every_family(case):
    """Each is what `quantize` makes of it, wherever the checkpoint stores it.

    All other parameters are untouched.
    """
    target = load_fp8(case)
    plain = dict(weights.flatten_params(ours(case).params))
    fp8 = dict(weights.flatten_params(target.params))
    changed = plain.keys() - fp8.keys()
    assert changed and all(path.endswith(".kernel") for path in changed)
    assert not any(word in path for path in changed for word in ("router", "embed"))
    assert "lm_head.kernel" not in changed
    for path in plain.keys() & fp8.keys():
        np.testing.assert_array_equal(plain[path], fp8[path])
    for path in changed:
        matrix = np.swapaxes(np.asarray(plain[path]), -1, -2)
        values, scale = quantize(matrix, blocks=False)
        got_values = np.asarray(fp8[path.replace(".kernel", ".values")])
        got_scale = np.asarray(fp8[path.replace(".kernel", ".scale")])
        np.testing.assert_array_equal(got_values.astype(np.float32), values.astype(np.float32))
        np.testing.assert_array_equal(got_scale, scale)
    _, exact, _ = truth(case)
    error = np.abs(logits_of(target, case) - exact).mean() / np.abs(exact).std()
    # the upper bound is wide, because a token that goes to another expert changes much
    assert 1e-5 < error < 0.4


def fp8_folder(tmp_path, case, scales):
    """A folder whose attention matrices are float8, with scales that `quantize` would not choose.

    Args:
      scales: "row" or "tensor": what one scale is for.
    """
    source, folder = make(case)[1], tmp_path / scales
    shutil.copytree(source, folder)
    rng = np.random.default_rng(0)
    tensors = {name: np.array(t) for name, t in weights.open_folder(source).items()}
    for name in [n for n in tensors if "self_attn" in n and n.endswith("proj.weight")]:
        matrix = tensors[name]
        shape = (len(matrix), 1) if scales == "row" else ()
        scale = np.asarray(rng.uniform(1, 2, shape) * np.abs(matrix).max() / 100, np.float32)
        tensors[name] = (matrix / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[name + "_scale"] = scale
    config = json.loads((folder / "config.json").read_text())
    weights.write_folder(folder, config, tensors, {}, None)
    return folder, tensors


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_what_is_float8_already_is_taken_as_it_is(tmp_path, scales):
    folder, stored = fp8_folder(tmp_path, "qwen3", scales)
    params, plain = (
        dict(weights.flatten_params(load_target(folder, fp8=fp8).params)) for fp8 in (True, False)
    )
    for p in "qkvo":
        name = f"model.layers.1.self_attn.{p}_proj.weight"
        values = np.asarray(params[f"blocks.1.attn.{p}.values"])
        np.testing.assert_array_equal(values.view(np.uint8), stored[name].view(np.uint8))
        scale = np.broadcast_to(stored[name + "_scale"].reshape(-1), len(stored[name]))
        np.testing.assert_array_equal(np.asarray(params[f"blocks.1.attn.{p}.scale"]), scale)
    # what whoever quantized it left as it was stays so
    np.testing.assert_array_equal(params["blocks.1.mlp.up.kernel"], plain["blocks.1.mlp.up.kernel"])
    assert params.keys() - plain.keys() == {
        f"blocks.{i}.attn.{p}.{part}"
        for i in range(sum(name.endswith("q_proj.weight") for name in stored))
        for p in "qkvo"
        for part in ("values", "scale")
    }


SEVERAL_BLOCKS = dict(
    vocab_size=97,
    hidden_size=160,
    moe_intermediate_size=128,
    intermediate_size=200,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=48,
    max_position_embeddings=64,
    num_experts=3,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    tie_word_embeddings=False,
    mlp_only_layers=[1],
)


def block_folder(tmp_path, expert_width, suffix="_scale_inv"):
    """Qwen3-MoE with every projection in blocks of 128 x 128, as in released FP8 checkpoints.

    A matrix has several blocks, and the last of them are cut off.
    """
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(**SEVERAL_BLOCKS | {"moe_intermediate_size": expert_width})
    transformers.Qwen3MoeForCausalLM(config).eval().save_pretrained(tmp_path)
    tensors = {name: np.array(t) for name, t in weights.open_folder(tmp_path).items()}
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        factors = np.random.default_rng(0).uniform(0.2, 3, tensors[name].shape)
        values, scale = quantize(tensors[name].astype(np.float32) * factors, blocks=True)
        tensors[name], tensors[name + suffix] = values, scale.astype(np.float32)
    raw_config = json.loads((tmp_path / "config.json").read_text())
    weights.write_folder(tmp_path, raw_config, tensors, {}, None)


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_blocks_of_a_released_checkpoint(suffix, tmp_path):
    """They stay bit for bit as they are, also where two tensors become one expert's matrix.

    Decoded, they are what the plain loader reads. Scales have the name of transformers' or of
    compressed-tensors.
    """
    block_folder(tmp_path, 128, suffix)
    plain, fp8 = (
        dict(weights.flatten_params(load_target(tmp_path, fp8=fp8).params)) for fp8 in (False, True)
    )
    changed = sorted(plain.keys() - fp8.keys())
    assert any("experts.gate_up" in path for path in changed)
    assert any(".mlp.down" in path for path in changed)
    for path in changed:
        values, scale = (
            np.asarray(fp8[path.replace(".kernel", part)]).astype(np.float32)
            for part in (".values", ".scale")
        )
        rows, columns = values.shape[-2:]
        repeated = scale.repeat(128, axis=-2)[..., :rows, :].repeat(128, axis=-1)[..., :columns]
        assert scale.shape[-2:] == (-(-rows // 128), -(-columns // 128))
        decoded = np.swapaxes(values * repeated, -1, -2)
        np.testing.assert_array_equal(decoded, np.asarray(plain[path]), err_msg=path)
    target = load_target(tmp_path, aux_hidden_state_layers=(0, 1), fp8=True)
    exact = load_target(tmp_path, aux_hidden_state_layers=(0, 1))
    tokens, positions = jnp.arange(12)[None] * 7 % 97, jnp.arange(12)[None]
    got, want = (
        np.asarray(run(t, tokens, positions, t.config.empty_cache(1, 12))[0])
        for t in (target, exact)
    )
    assert 1e-5 < np.abs(got - want).mean() / want.std() < 0.2


def test_blocks_that_two_tensors_would_share_are_refused(tmp_path):
    block_folder(tmp_path, 96)
    with pytest.raises(
        InputError, match="must end at a block of 128 .* load the target in bfloat16"
    ):
        load_target(tmp_path, fp8=True)


def test_fp8_is_not_written(tmp_path):
    message = (
        "a model is written from weights in floating point; got FP8 matrices; load it without fp8"
    )
    with pytest.raises(InputError, match=message):
        save_target(load_target(make("llama")[1], fp8=True), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_no_mesh(tmp_path):
    import jax

    with pytest.raises(InputError, match="one device holds the whole of an FP8 target"):
        load_target(make("llama")[1], fp8=True, mesh=jax.make_mesh((1,), ("model",)))
