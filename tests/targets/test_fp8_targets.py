"""Targets in FP8: against transformers with the same matrices and quantised inputs; every family's matrices; folders that are FP8 already."""

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

KEPT = ("lm_head", "router", "mlp.gate.", "embed", "norm", "per_layer")


def quantized_rows(x: torch.Tensor) -> torch.Tensor:
    """As torch's own float8 rounds."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma4"])
def test_logits_are_those_of_quantized_transformers(case):
    """Ties of rounding fall differently here and there: a few logits are off by a step, the middle one is not."""
    theirs = copy.deepcopy(make(case)[0])
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(k in name for k in KEPT):
            values, scale = quantize(module.weight.detach().numpy(), blocks=False)
            module.weight.data = torch.from_numpy(values.astype(np.float32) * scale[:, None])
            module.register_forward_pre_hook(lambda _, args: (quantized_rows(args[0]),))
    tokens, exact, _ = truth(case)
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)).compute_logits.numpy()
    target = load_target(make(case)[1], aux_hidden_state_layers=(0, 1, 4), fp8=True)
    got = np.asarray(
        run(
            target,
            jnp.asarray(tokens),
            jnp.broadcast_to(jnp.arange(T), (2, T)),
            target.config.empty_cache(2, T),
        )[0]
    )
    off = np.abs(got - want)
    assert (
        np.median(off) < 0.02 * np.median(np.abs(want - exact))
        and off.mean() < 0.3 * np.abs(want - exact).mean()
    )


@pytest.mark.parametrize("case", CASES)
def test_matrices_of_every_family(case):
    """Each is what `quantise` makes of it, wherever the checkpoint keeps it; and all others are untouched."""
    plain, fp8 = (
        dict(weights.flatten_params(ours(case).params)),
        dict(
            weights.flatten_params(
                load_target(make(case)[1], aux_hidden_state_layers=(0, 1, 4), fp8=True).params
            )
        ),
    )
    changed = plain.keys() - fp8.keys()
    assert changed and all(path.endswith(".kernel") for path in changed)
    assert (
        not any(word in path for path in changed for word in ("router", "embed"))
        and "lm_head.kernel" not in changed
    )
    for path in plain.keys() & fp8.keys():
        np.testing.assert_array_equal(plain[path], fp8[path])
    for path in changed:
        matrix = np.swapaxes(np.asarray(plain[path]), -1, -2)
        values, scale = quantize(matrix, blocks=False)
        np.testing.assert_array_equal(
            np.asarray(fp8[path.replace(".kernel", ".values")]).astype(np.float32),
            values.astype(np.float32),
        )
        np.testing.assert_array_equal(np.asarray(fp8[path.replace(".kernel", ".scale")]), scale)
    tokens, exact, _ = truth(case)
    target = load_target(make(case)[1], aux_hidden_state_layers=(0, 1, 4), fp8=True)
    got = np.asarray(
        run(
            target,
            jnp.asarray(tokens),
            jnp.broadcast_to(jnp.arange(T), (2, T)),
            target.config.empty_cache(2, T),
        )[0]
    )
    assert (
        1e-5 < np.abs(got - exact).mean() / np.abs(exact).std() < 0.4
    )  # a router that changes its mind moves much


def fp8_folder(tmp_path, case, scales):
    """A folder whose attention matrices are float8 with scales that no quantiser of ours would choose; `scales`: row, tensor."""
    src = make(case)[1]
    folder = tmp_path / scales
    shutil.copytree(src, folder)
    tensors, rng = dict(weights.open_folder(src)), np.random.default_rng(0)
    tensors = {name: np.array(t) for name, t in tensors.items()}
    for name in [n for n in tensors if "self_attn" in n and n.endswith("proj.weight")]:
        rows = len(tensors[name])
        scale = (rows, 1) if scales == "row" else ()
        scale = np.asarray(rng.uniform(1, 2, scale) * np.abs(tensors[name]).max() / 100, np.float32)
        tensors[name], tensors[name + "_scale"] = (
            (tensors[name] / scale).astype(ml_dtypes.float8_e4m3fn),
            scale,
        )
    config = json.loads((folder / "config.json").read_text())
    weights.write_folder(folder, config, tensors, {}, None)
    return folder, tensors


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_what_is_float8_already_is_taken_as_it_is(tmp_path, scales):
    folder, stored = fp8_folder(tmp_path, "qwen3", scales)
    params = dict(weights.flatten_params(load_target(folder, fp8=True).params))
    for p in "qkvo":
        name = f"model.layers.1.self_attn.{p}_proj.weight"
        np.testing.assert_array_equal(
            np.asarray(params[f"blocks.1.attn.{p}.values"]).view(np.uint8),
            stored[name].view(np.uint8),
        )
        scale = np.broadcast_to(stored[name + "_scale"].reshape(-1), len(stored[name]))
        np.testing.assert_array_equal(np.asarray(params[f"blocks.1.attn.{p}.scale"]), scale)
    assert params["blocks.1.mlp.up.values"].dtype == jnp.float8_e4m3fn


WIDE = dict(
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


def block_folder(tmp_path, expert_width):
    """Qwen3-MoE with every projection in blocks of 128 x 128, as released FP8 checkpoints have them; several blocks a matrix, uneven ends."""
    torch.manual_seed(1)
    theirs = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**WIDE | {"moe_intermediate_size": expert_width})
    ).eval()
    theirs.save_pretrained(tmp_path)
    tensors = {name: np.array(t) for name, t in weights.open_folder(tmp_path).items()}
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        values, scale = quantize(
            tensors[name].astype(np.float32)
            * np.random.default_rng(0).uniform(0.2, 3, tensors[name].shape),
            blocks=True,
        )
        tensors[name], tensors[name + "_scale_inv"] = values, scale.astype(np.float32)
    weights.write_folder(
        tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors, {}, None
    )


def test_blocks_of_a_released_checkpoint(tmp_path):
    """Kept bit for bit, experts of two tensors in one stack too: decoded they are what the plain loader reads."""
    block_folder(tmp_path, 128)
    plain, fp8 = (
        dict(weights.flatten_params(load_target(tmp_path, fp8=kept).params))
        for kept in (False, True)
    )
    changed = sorted(plain.keys() - fp8.keys())
    assert any("experts.gate_up" in path for path in changed) and any(
        ".mlp.down" in path for path in changed
    )
    for path in changed:
        values, scale = (
            np.asarray(fp8[path.replace(".kernel", part)]).astype(np.float32)
            for part in (".values", ".scale")
        )
        rows, columns = values.shape[-2:]
        spread = scale.repeat(128, axis=-2)[..., :rows, :].repeat(128, axis=-1)[..., :columns]
        assert scale.shape[-2:] == (-(-rows // 128), -(-columns // 128))
        np.testing.assert_array_equal(
            np.swapaxes(values * spread, -1, -2), np.asarray(plain[path]), err_msg=path
        )
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
    with pytest.raises(
        InputError,
        match="a model is written from weights in floating point; got FP8 matrices; load it without fp8",
    ):
        save_target(load_target(make("llama")[1], fp8=True), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_no_mesh(tmp_path):
    import jax

    with pytest.raises(InputError, match="one device holds the whole of an FP8 target"):
        load_target(make("llama")[1], fp8=True, mesh=jax.make_mesh((1,), ("model",)))
