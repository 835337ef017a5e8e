"""Heads of every option, made from the packaged, trained ones so that their drafts are accepted: what check_matrix.py shows to peers.

Most changes keep the function of the head (doubled heads, padded widths, a tap that nothing reads); the others disturb it mildly.
All of them get some noise, so that no two heads are alike.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from peagle_jax import weights
from peagle_jax.checkpoints import param_mapping
from peagle_jax.checkpoints.head_io import load_drafter
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.layers import Rope
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.train.hidden_states import compute_hidden_states
from peagle_jax.types import Batch, Model

ROPE = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 3.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 96,
    },
    "yarn": {"rope_type": "yarn", "factor": 1.25, "original_max_position_embeddings": 512},
    "linear": {"rope_type": "linear", "factor": 1.06},
}


@dataclasses.dataclass
class Draft:
    """A head under construction: NumPy tensors by our paths, in our layout ([in, out])."""

    config: HeadConfig
    params: dict[str, np.ndarray]
    rms: np.ndarray  # typical size of the target's taps, one a tap

    def set(self, **changes):
        self.config = dataclasses.replace(self.config, **changes)

    def layers(self):
        return [f"layers.{i}" for i in range(self.config.layers)]


Change = Callable[[Draft, np.random.Generator], None]


def bias(d: Draft, rng):
    d.set(attention_bias=True)
    for p in d.layers():
        for q in "qkvo":
            d.params[f"{p}.attn.{q}.bias"] = 0.03 * rng.normal(
                size=d.params[f"{p}.attn.{q}.kernel"].shape[1]
            )


def llama(d: Draft, rng):
    """Without the norms of q and k: their typical effect, made milder (scores of 100 are ill-conditioned), moves into the matrices."""
    d.set(qk_norm=False)
    for p in d.layers():
        scale = d.params[f"{p}.input_norm.scale"]
        if p == "layers.0":
            scale = np.concatenate([scale, d.params[f"{p}.hidden_norm.scale"]])
        for q in "qk":
            kernel, norm = (
                d.params[f"{p}.attn.{q}.kernel"],
                d.params.pop(f"{p}.attn.{q}_norm.scale"),
            )
            typical = np.sqrt(
                ((kernel * scale[:, None]) ** 2).sum(0).reshape(-1, len(norm)).mean(1)
            )
            d.params[f"{p}.attn.{q}.kernel"] = (
                kernel * (0.65 * norm[None] / typical[:, None]).reshape(-1)[None]
            )


def reduced(d: Draft, rng):
    ids = np.sort(rng.permutation(d.config.vocab)[: d.config.vocab * 4 // 5])
    d.set(draft_vocab=len(ids))
    d.params["lm_head.kernel"] = d.params["lm_head.kernel"][:, ids]
    d.params["d2t"] = ids - np.arange(len(ids))


def norm_before_residual(d: Draft, rng):
    """The residual becomes the normed feature, whose scale is drawn to what a feature has."""
    d.set(norm_before_residual=True)
    d.params["layers.0.hidden_norm.scale"] = d.params["layers.0.hidden_norm.scale"] * 1.02


def norm_before_fc(d: Draft, rng):
    d.set(norm_before_fc=True)
    d.params["fusion.input_norm.scale"] = np.full(
        len(d.config.aux_hidden_state_layers) * d.config.target_dim, np.sqrt((d.rms**2).mean())
    )


def fc_norm(d: Draft, rng):
    d.set(fc_norm=True)
    for i, rms in enumerate(d.rms):
        d.params[f"fusion.fc_norm.{i}.scale"] = np.full(d.config.target_dim, rms)


def norm_output(d: Draft, rng):
    d.set(norm_output=True)


def window(d: Draft, rng):
    """All layers slide: vLLM keeps the drafting layers in one cache group."""
    d.set(windows=(24,) * d.config.layers)


def rope(kind: str, d: Draft, rng):
    theta = json.loads(d.config.rope.source)["rope_theta"]
    raw = {
        "rope_parameters": ROPE[kind] | {"rope_theta": theta},
        "max_position_embeddings": d.config.context,
    }
    d.set(rope=Rope.from_hf(raw, d.config.head_dim, kind))


def more_heads(d: Draft, rng):
    """Every query head twice, each with half of the output: heads x head_dim is no longer the width."""
    h = d.config.head_dim
    d.set(heads=2 * d.config.heads)
    for p in d.layers():
        q, o = d.params[f"{p}.attn.q.kernel"], d.params[f"{p}.attn.o.kernel"]
        d.params[f"{p}.attn.q.kernel"] = np.repeat(q.reshape(len(q), -1, h), 2, axis=1).reshape(
            len(q), -1
        )
        d.params[f"{p}.attn.o.kernel"] = (
            np.repeat(o.reshape(-1, h, o.shape[1]), 2, axis=0).reshape(-1, o.shape[1]) / 2
        )


def own_kv_heads(d: Draft, rng):
    """No grouping: every query head has its own copy of its group's keys and values."""
    h, times = d.config.head_dim, d.config.heads // d.config.kv_heads
    d.set(kv_heads=d.config.heads)
    for p in d.layers():
        for q in "kv":
            kernel = d.params[f"{p}.attn.{q}.kernel"]
            d.params[f"{p}.attn.{q}.kernel"] = np.repeat(
                kernel.reshape(len(kernel), -1, h), times, axis=1
            ).reshape(len(kernel), -1)


def wide(d: Draft, rng):
    """A head wider than its target: zeros, and norms whose scale undoes what zeros do to a mean."""
    old, new = d.config.dim, d.config.dim + 64
    d.set(dim=new)

    def depth_schedule(x, *axes):
        return np.pad(x, [(0, new - old if a in axes else 0) for a in range(x.ndim)])

    shrink = np.sqrt(old / new)
    for name, x in list(d.params.items()):
        last = name.split(".")[-2] if name.endswith(".kernel") else name
        if (
            name.endswith("_norm.scale")
            and "attn" not in name
            and "fusion" not in name
            or name == "norm.scale"
        ):
            d.params[name] = np.pad(x * shrink, (0, new - old), constant_values=0.7)
        elif name == "embed.table" or last in ("fc", "o", "down"):
            d.params[name] = depth_schedule(x, 1)
        elif name == "lm_head.kernel" or last in ("gate", "up"):
            d.params[name] = depth_schedule(x, 0)
        elif last in "qkv" and name.startswith("layers.0."):
            d.params[name] = np.concatenate(
                [depth_schedule(x[:old], 0), depth_schedule(x[old:], 0)]
            )
        elif last in "qkv" and name.endswith(".kernel"):
            d.params[name] = depth_schedule(x, 0)


def four_taps(d: Draft, rng):
    """One more tap, which `fc` hardly reads."""
    low, middle, high = d.config.aux_hidden_state_layers
    d.set(aux_hidden_state_layers=(low, middle - 1, middle, high))
    width = d.config.target_dim

    def insert(x):
        return np.concatenate([x[:width], 1e-3 * rng.normal(size=(width, *x.shape[1:])), x[width:]])

    d.params["fusion.fc.kernel"] = insert(d.params["fusion.fc.kernel"])
    if d.config.parallel:
        d.params["mask_hidden"] = insert(d.params["mask_hidden"])


def two_layers(d: Draft, rng):
    d.set(layers=2, windows=(None, None))
    d.params = {
        name: x for name, x in d.params.items() if not name.startswith(("layers.2", "layers.3"))
    }


def shared(d: Draft, rng):
    """The target's own embedding, which a folder may leave out."""


# name -> (packaged head, changes)
HEADS: dict[str, tuple[str, tuple[Change, ...]]] = {
    "plain": ("peagle", ()),
    "llama": ("peagle", (llama,)),
    "reduced": ("peagle", (reduced,)),
    "bias": ("peagle", (bias,)),
    "llama_bias": ("peagle", (llama, bias)),
    "norm_before_residual": ("peagle", (norm_before_residual,)),
    "norm_before_fc": ("peagle", (norm_before_fc,)),
    "fc_norm_output": ("peagle", (fc_norm, norm_output)),
    "window": ("peagle", (window,)),
    "llama_window": ("peagle", (llama, window)),
    "llama3": ("peagle", (functools.partial(rope, "llama3"),)),
    "yarn": ("peagle", (functools.partial(rope, "yarn"),)),
    "linear": ("peagle", (functools.partial(rope, "linear"),)),
    "more_heads": ("peagle", (more_heads,)),
    "own_kv_heads": ("peagle", (own_kv_heads, reduced)),
    "wide": ("peagle", (wide,)),
    "four_taps": ("peagle", (four_taps,)),
    "two_layers": ("peagle", (two_layers,)),
    "eagle3": ("eagle3", ()),
    "eagle3_shared": ("eagle3", (shared,)),
    "eagle3_llama": ("eagle3", (llama, reduced)),
    "eagle3_options": ("eagle3", (norm_before_residual, fc_norm, norm_output)),
    "eagle3_bias_window": ("eagle3", (bias, window)),
}


def make(name: str) -> Model:
    """The head `name`, float32."""
    packaged, changes = HEADS[name]
    base, rms = _base(packaged)
    rng = np.random.default_rng(sum(map(ord, name)))
    params = {
        path: np.asarray(x, np.float64) if path != "d2t" else np.asarray(x)
        for path, x in weights.flatten_params(base.params)
    }
    d = Draft(base.config, params, rms)
    for change in changes:
        change(d, rng)
    for path, x in d.params.items():
        if path not in ("d2t", "embed.table") and x.size:
            d.params[path] = x * (1 + 0.01 * rng.normal(size=x.shape))
    graph = Model.of(DraftHead(d.config, rngs=nnx.Rngs(0)), d.config).graph
    arrays = {
        path: jnp.asarray(x, jnp.int32 if path == "d2t" else jnp.float32)
        for path, x in d.params.items()
    }
    if odd := {path for path, _ in param_mapping.table(d.config).values()} ^ arrays.keys():
        raise AssertionError(f"{name}: {sorted(odd)}")
    return Model(d.config, graph, weights.unflatten_params(arrays))


@functools.cache
def _base(packaged: str) -> tuple[Model, np.ndarray]:
    embedding = load_target(ASSETS / "target", dtype=np.float32).params["embed"]["table"]
    head = load_drafter(ASSETS / packaged, dtype="float32", embedding=embedding)
    target = load_target(
        ASSETS / "target",
        aux_hidden_state_layers=head.config.aux_hidden_state_layers,
        dtype=np.float32,
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(5, 400, (1, 64)))
    batch = Batch(tokens, jnp.zeros_like(tokens), jnp.ones(tokens.shape, bool))
    aux_hidden_state_layers, _ = jax.jit(lambda p: compute_hidden_states(target.bind(p), batch))(
        target.params
    )
    sizes = jnp.sqrt(
        (
            aux_hidden_state_layers.reshape(64, len(head.config.aux_hidden_state_layers), -1) ** 2
        ).mean((0, 2))
    )
    return head, np.asarray(sizes, np.float64)


# ---------------------------------------------------------------- folders as others write them


def rewrite(
    source: Path,
    out: Path,
    rename: Callable[[str], str],
    config: Callable[[dict], dict],
    more: Callable[[dict], dict] = lambda raw: {},
) -> Path:
    """A copy of a folder under other names and keys, and with `more(config)` tensors: stands for another project's writer."""
    out.mkdir(parents=True)
    raw = weights.read_json(source / "config.json")
    tensors = more(raw) | {
        rename(name): np.asarray(t) for name, t in weights.open_folder(source).items()
    }
    weights.write_folder(out, config(raw), tensors, {})
    return out


def as_automodel(source: Path, out: Path) -> Path:
    """Layout C: everything but the top-level tensors under `model.`, its architecture, ids that count outputs."""
    top = ("lm_head.weight", "mask_hidden", "d2t", "t2d")

    def rename(n):
        return n if n in top else "model." + n.replace("midlayer.", "layers.0.")

    def config(raw):
        ids = [i - 1 for i in raw["eagle_aux_hidden_state_layer_ids"]]
        raw = {k: v for k, v in raw.items() if k not in ("eagle_config", "ptd_token_id")}
        # its config is a copy of the target's: with as many layers as that has, and windows that the head does not read
        raw |= {
            "num_hidden_layers": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "sliding_window": 16,
        }
        return raw | {
            "architectures": ["LlamaEagle3DraftModel"],
            "parallel_drafting": True,
            "eagle_aux_hidden_state_layer_ids": ids,
        }

    return rewrite(source, out, rename, config)


def as_specforge(source: Path, out: Path) -> Path:
    """Layout D: tap ids count the layer whose output is taken; both tables are always there."""

    def config(raw):
        ids = [i - 1 for i in raw["eagle_aux_hidden_state_layer_ids"]]
        drop = ("ptd_token_id", "rope_parameters", "num_depths", "eagle_aux_hidden_state_layer_ids")
        raw = {k: v for k, v in raw.items() if k not in drop}
        return raw | {
            "architectures": ["PEagleDraftModel"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
        }

    def identity(raw):
        return {
            "d2t": np.zeros(raw["vocab_size"], np.int64),
            "t2d": np.ones(raw["vocab_size"], bool),
        }

    return rewrite(source, out, lambda n: n.replace("midlayer.", "layers.0."), config, identity)


def as_fp8(source: Path, out: Path) -> Path:
    """Matrices as e4m3: one scale a row for attention, blocks of 128 x 128 for the MLP, one number for `fc`."""
    out.mkdir(parents=True)
    tensors = {}
    for name, t in weights.open_folder(source).items():
        x = np.asarray(t).astype(np.float32)
        if "_proj.weight" not in name and name != "fc.weight":
            tensors[name] = np.asarray(t)
            continue
        if "mlp" in name:
            rows, columns = (-(-s // 128) for s in x.shape)
            blocks = np.pad(
                x, [(0, rows * 128 - x.shape[0]), (0, columns * 128 - x.shape[1])]
            ).reshape(rows, 128, columns, 128)
            scale = np.abs(blocks).max((1, 3)) / 448
            spread, suffix = (
                np.repeat(np.repeat(scale, 128, 0), 128, 1)[: x.shape[0], : x.shape[1]],
                "_scale_inv",
            )
        elif "attn" in name:
            scale = np.abs(x).max(1, keepdims=True) / 448
            spread, suffix = scale, "_scale"
        else:
            spread = scale = np.float32(np.abs(x).max() / 448)
            suffix = "_scale"
        tensors |= {
            name: (x / spread).astype(ml_dtypes.float8_e4m3fn),
            name + suffix: np.asarray(scale, np.float32),
        }
    weights.write_folder(out, weights.read_json(source / "config.json"), tensors, {})
    return out
