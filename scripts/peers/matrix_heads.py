"""Heads of every option, which check_matrix.py shows to vLLM and speculators.

They are made from the packaged, trained heads, so that their drafts are accepted. Most changes keep
what the head computes (doubled attention heads, padded widths, an aux hidden state that is hardly
read); the others disturb it mildly. All of them get some noise, so that no two heads are alike.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from peagle_jax import weights
from peagle_jax.checkpoints import param_mapping
from peagle_jax.checkpoints.pair import load_pair
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
    """A head under construction.

    Attributes:
      config: of the head.
      params: NumPy arrays by the paths of our parameters, matrices as [in, out].
      rms: root mean square of each of the target's aux hidden states.
    """

    config: HeadConfig
    params: dict[str, np.ndarray]
    rms: np.ndarray

    def set(self, **changes):
        """Changes the configuration."""
        self.config = dataclasses.replace(self.config, **changes)

    def layers(self) -> list[str]:
        """Paths of the layers."""
        return [f"layers.{i}" for i in range(self.config.layers)]


Change = Callable[[Draft, np.random.Generator], None]


def bias(d: Draft, rng):
    """Biases in attention."""
    d.set(attention_bias=True)
    # vLLM's layers with norms of q and k have no bias of the output: heads with one are refused
    scales = {"q": 0.03, "k": 0.03, "v": 0.03, "o": 0.0 if d.config.qk_norm else 0.1}
    for p in d.layers():
        for q, scale in scales.items():
            size = d.params[f"{p}.attn.{q}.kernel"].shape[1]
            d.params[f"{p}.attn.{q}.bias"] = scale * rng.normal(size=size)


def llama(d: Draft, rng):
    """Without the norms of q and k, whose typical effect moves into the matrices.

    It is made milder: attention scores of 100 are ill-conditioned.
    """
    d.set(qk_norm=False)
    for p in d.layers():
        scale = d.params[f"{p}.input_norm.scale"]
        if p == "layers.0":
            scale = np.concatenate([scale, d.params[f"{p}.hidden_norm.scale"]])
        for q in "qk":
            kernel = d.params[f"{p}.attn.{q}.kernel"]
            norm = d.params.pop(f"{p}.attn.{q}_norm.scale")
            squares = ((kernel * scale[:, None]) ** 2).sum(0)
            typical = np.sqrt(squares.reshape(-1, len(norm)).mean(1))
            factors = (0.65 * norm[None] / typical[:, None]).reshape(-1)
            d.params[f"{p}.attn.{q}.kernel"] = kernel * factors[None]


def reduced(d: Draft, rng):
    """A reduced draft vocabulary."""
    ids = np.sort(rng.permutation(d.config.vocab)[: d.config.vocab * 4 // 5])
    d.set(draft_vocab=len(ids))
    d.params["lm_head.kernel"] = d.params["lm_head.kernel"][:, ids]
    d.params["d2t"] = ids - np.arange(len(ids))


def norm_before_residual(d: Draft, rng):
    """The residual becomes the normed hidden state; the norm's scale is made to fit that."""
    d.set(norm_before_residual=True)
    d.params["layers.0.hidden_norm.scale"] = d.params["layers.0.hidden_norm.scale"] * 1.02


def norm_before_fc(d: Draft, rng):
    """One norm over all aux hidden states, whose scale is their typical size."""
    d.set(norm_before_fc=True)
    d.params["fusion.input_norm.scale"] = np.full(
        len(d.config.aux_hidden_state_layers) * d.config.target_dim, np.sqrt((d.rms**2).mean())
    )


def fc_norm(d: Draft, rng):
    """One norm over each aux hidden state, whose scale is its typical size."""
    d.set(fc_norm=True)
    for i, rms in enumerate(d.rms):
        d.params[f"fusion.fc_norm.{i}.scale"] = np.full(d.config.target_dim, rms)


def norm_output(d: Draft, rng):
    """Feedback after the final norm."""
    d.set(norm_output=True)


def window(d: Draft, rng):
    """All layers slide: vLLM keeps the drafting layers in one cache group."""
    d.set(windows=(24,) * d.config.layers)


def rope(kind: str, d: Draft, rng):
    """Another kind of rotary embedding."""
    theta = json.loads(d.config.rope.source)["rope_theta"]
    raw = {
        "rope_parameters": ROPE[kind] | {"rope_theta": theta},
        "max_position_embeddings": d.config.context,
    }
    d.set(rope=Rope.from_hf(raw, d.config.head_dim, kind))


def more_heads(d: Draft, rng):
    """Every query head twice, each with half of the output.

    So heads x head_dim is no longer the width.
    """
    h = d.config.head_dim
    d.set(heads=2 * d.config.heads)
    for p in d.layers():
        q, o = d.params[f"{p}.attn.q.kernel"], d.params[f"{p}.attn.o.kernel"]
        doubled_q = np.repeat(q.reshape(len(q), -1, h), 2, axis=1)
        doubled_o = np.repeat(o.reshape(-1, h, o.shape[1]), 2, axis=0)
        d.params[f"{p}.attn.q.kernel"] = doubled_q.reshape(len(q), -1)
        d.params[f"{p}.attn.o.kernel"] = doubled_o.reshape(-1, o.shape[1]) / 2


def own_kv_heads(d: Draft, rng):
    """No grouping: every query head has its own copy of its group's keys and values."""
    h, times = d.config.head_dim, d.config.heads // d.config.kv_heads
    d.set(kv_heads=d.config.heads)
    for p in d.layers():
        for q in "kv":
            kernel = d.params[f"{p}.attn.{q}.kernel"]
            copies = np.repeat(kernel.reshape(len(kernel), -1, h), times, axis=1)
            d.params[f"{p}.attn.{q}.kernel"] = copies.reshape(len(kernel), -1)


def wide(d: Draft, rng):
    """A head wider than its target: zeros, and norms whose scale undoes what zeros do to a mean."""
    old, new = d.config.dim, d.config.dim + 64
    d.set(dim=new)

    def pad(x, *axes):
        """Zeros at the end of these axes."""
        return np.pad(x, [(0, new - old if a in axes else 0) for a in range(x.ndim)])

    shrink = np.sqrt(old / new)  # the mean of the squares is now over more channels
    for name, x in list(d.params.items()):
        last = name.split(".")[-2] if name.endswith(".kernel") else name
        is_layer_norm = name.endswith("_norm.scale") and "attn" not in name and "fusion" not in name
        if is_layer_norm or name == "norm.scale":
            d.params[name] = np.pad(x * shrink, (0, new - old), constant_values=0.7)
        elif name == "embed.table" or last in ("fc", "o", "down"):
            d.params[name] = pad(x, 1)
        elif name == "lm_head.kernel" or last in ("gate", "up"):
            d.params[name] = pad(x, 0)
        elif last in "qkv" and name.startswith("layers.0."):
            d.params[name] = np.concatenate([pad(x[:old], 0), pad(x[old:], 0)])
        elif last in "qkv" and name.endswith(".kernel"):
            d.params[name] = pad(x, 0)


def four_taps(d: Draft, rng):
    """One more aux hidden state, which `fc` hardly reads."""
    low, middle, high = d.config.aux_hidden_state_layers
    d.set(aux_hidden_state_layers=(low, middle - 1, middle, high))
    width = d.config.target_dim

    def insert(x):
        return np.concatenate([x[:width], 1e-3 * rng.normal(size=(width, *x.shape[1:])), x[width:]])

    d.params["fusion.fc.kernel"] = insert(d.params["fusion.fc.kernel"])
    if d.config.parallel:
        d.params["mask_hidden"] = insert(d.params["mask_hidden"])


def four_layers(d: Draft, rng):
    """Two more layers, copies of the last one that add a twentieth of what it adds."""
    last = d.config.layers - 1
    d.set(layers=last + 3, windows=(None,) * (last + 3))
    for name, x in list(d.params.items()):
        if name.startswith(f"layers.{last}."):
            part = name.removeprefix(f"layers.{last}.")
            factor = 0.05 if part.split(".")[-2] in ("o", "down") else 1.0
            for i in (1, 2):
                d.params[f"layers.{last + i}.{part}"] = factor * x


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
    # norms of q and k come after the biases, and the residual before both
    "bias_norm_before_residual": ("peagle", (bias, norm_before_residual)),
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
    "four_layers": ("peagle", (four_layers,)),
    "eagle3": ("eagle3", ()),
    "eagle3_shared": ("eagle3", (shared,)),
    "eagle3_llama": ("eagle3", (llama, reduced)),
    "eagle3_options": ("eagle3", (norm_before_residual, fc_norm, norm_output)),
    "eagle3_bias_window": ("eagle3", (bias, window)),
    "eagle3_bias_norm_before_residual": ("eagle3", (bias, norm_before_residual)),
}


def make(name: str) -> Model:
    """The head `name`, float32."""
    return change(name, *HEADS[name])


def change(name: str, packaged: str, changes: Sequence[Change]) -> Model:
    """A packaged head with changes, float32; `name` gives the seed of its noise."""
    base, rms = _base(packaged)
    rng = np.random.default_rng(sum(map(ord, name)))
    params = {
        path: np.asarray(x, np.float64) if path != "d2t" else np.asarray(x)
        for path, x in weights.flatten_params(base.params)
    }
    d = Draft(base.config, params, rms)
    for one in changes:
        one(d, rng)
    for path, x in d.params.items():
        if path not in ("d2t", "embed.table") and x.size:
            d.params[path] = x * (1 + 0.01 * rng.normal(size=x.shape))
    graph = Model.from_module(DraftHead(d.config, rngs=nnx.Rngs(0)), d.config).graph
    arrays = {
        path: jnp.asarray(x, jnp.int32 if path == "d2t" else jnp.float32)
        for path, x in d.params.items()
    }
    expected = {path for path, _ in param_mapping.table(d.config).values()}
    if differing := expected ^ arrays.keys():
        raise AssertionError(f"{name}: {sorted(differing)}")
    return Model(d.config, graph, weights.unflatten_params(arrays))


@functools.cache
def _base(packaged: str) -> tuple[Model, np.ndarray]:
    """A packaged head, and the root mean square of each aux hidden state that it reads."""
    target, head = load_pair(ASSETS / "target", ASSETS / packaged, dtype=np.float32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(5, 400, (1, 64)))
    batch = Batch(tokens, jnp.zeros_like(tokens), jnp.ones(tokens.shape, bool))
    extract = jax.jit(lambda p: compute_hidden_states(target.bind(p), batch))
    aux_hidden_states, _ = extract(target.params)
    by_layer = aux_hidden_states.reshape(64, len(head.config.aux_hidden_state_layers), -1)
    rms = jnp.sqrt((by_layer**2).mean((0, 2)))
    return head, np.asarray(rms, np.float64)


# ---------------------------------------------------------------- folders as others write them


def no_tensors(raw: dict) -> dict[str, np.ndarray]:
    """For writers that add none."""
    return {}


def rewrite(
    source: Path,
    out: Path,
    rename: Callable[[str], str],
    config: Callable[[dict], dict],
    more_tensors: Callable[[dict], dict] = no_tensors,
) -> Path:
    """A copy of a folder under other names and keys: it stands for another project's writer.

    Args:
      rename: name of a tensor -> its name in the copy.
      config: config.json -> that of the copy.
      more_tensors: config.json -> tensors that the copy has beside those of the source.
    """
    out.mkdir(parents=True)
    raw = weights.read_json(source / "config.json")
    renamed = {rename(name): np.asarray(t) for name, t in weights.open_folder(source).items()}
    weights.write_folder(out, config(raw), more_tensors(raw) | renamed, {})
    return out


def as_automodel(source: Path, out: Path) -> Path:
    """Format C: all tensors but the top-level ones under `model.`; ids that count outputs."""
    top_level = ("lm_head.weight", "mask_hidden", "d2t", "t2d")

    def rename(name):
        return name if name in top_level else "model." + name.replace("midlayer.", "layers.0.")

    def config(raw):
        ids = [i - 1 for i in raw["eagle_aux_hidden_state_layer_ids"]]
        raw = {k: v for k, v in raw.items() if k not in ("eagle_config", "ptd_token_id")}
        # Its config is a copy of the target's: with the target's number of layers, and windows that
        # the head does not read.
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
    """Format D: ids count outputs of layers; both vocabulary tables are always there."""
    drop = ("ptd_token_id", "rope_parameters", "num_depths", "eagle_aux_hidden_state_layer_ids")

    def rename(name):
        return name.replace("midlayer.", "layers.0.")

    def config(raw):
        ids = [i - 1 for i in raw["eagle_aux_hidden_state_layer_ids"]]
        raw = {key: value for key, value in raw.items() if key not in drop}
        return raw | {
            "architectures": ["PEagleDraftModel"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
        }

    def identity(raw):
        vocab = raw["vocab_size"]
        return {"d2t": np.zeros(vocab, np.int64), "t2d": np.ones(vocab, bool)}

    return rewrite(source, out, rename, config, identity)


def as_fp8(source: Path, out: Path) -> Path:
    """Matrices as e4m3, with scales of three kinds.

    Attention has one scale for each row, the MLP one for each block of 128 x 128, `fc` one number.
    """
    out.mkdir(parents=True)
    tensors = {}
    for name, t in weights.open_folder(source).items():
        tensors[name] = np.asarray(t)
        if "_proj.weight" in name or name == "fc.weight":
            matrix = np.asarray(t).astype(np.float32)
            scale, spread, suffix = _fp8_scales(name, matrix)
            tensors[name] = (matrix / spread).astype(ml_dtypes.float8_e4m3fn)
            tensors[name + suffix] = np.asarray(scale, np.float32)
    weights.write_folder(out, weights.read_json(source / "config.json"), tensors, {})
    return out


def _fp8_scales(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, str]:
    """Scales as they are stored, spread over the matrix, and the suffix of their name."""
    largest = 448  # of e4m3
    if "mlp" in name:
        rows, columns = (-(-size // 128) for size in x.shape)
        padded = np.pad(x, [(0, rows * 128 - x.shape[0]), (0, columns * 128 - x.shape[1])])
        blocks = padded.reshape(rows, 128, columns, 128)
        scale = np.abs(blocks).max((1, 3)) / largest
        spread = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: x.shape[0], : x.shape[1]]
        return scale, spread, "_scale_inv"
    if "attn" in name:
        scale = np.abs(x).max(1, keepdims=True) / largest
        return scale, scale, "_scale"
    scale = np.float32(np.abs(x).max() / largest)
    return scale, scale, "_scale"


WRITERS = {"automodel": as_automodel, "specforge": as_specforge, "fp8": as_fp8}
