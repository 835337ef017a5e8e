"""Any layout's config.json of a draft head -> HeadConfig. docs/checkpoints.md has the layouts as tables."""

from collections.abc import Mapping

import numpy as np

from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.layers import Rope
from peagle_jax.types import InputError
from peagle_jax.weights import Fields, Tensor

MASK_TOKEN_KEYS = (
    "mask_token_id",
    "pard_token",
    "ptd_token_id",
)  # in vLLM's order, after dflash_config.mask_token_id
AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# an id names the layer whose input is tapped (vLLM, speculators), or whose output is: numbering "input" and "output"
COUNTS_OUTPUTS = ("automodel", "specforge")


def detect_format(raw: Mapping) -> str:
    """ "speculators", "automodel", "specforge", or "vllm", by what their writers alone write."""
    names = _architectures(raw)
    if "speculators_model_type" in raw:
        return "speculators"
    return (
        "automodel"
        if "LlamaEagle3DraftModel" in names
        else "specforge"
        if "PEagleDraftModel" in names
        else "vllm"
    )


def is_drafter(raw: Mapping) -> bool:
    """Whether a config.json describes a draft head rather than a target."""
    return (
        "speculators_model_type" in raw
        or any("agle" in name for name in _architectures(raw))
        or "draft_vocab_size" in raw
    )


def _architectures(raw: Mapping) -> list[str]:
    names = raw.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def read_config(
    raw: Mapping,
    tensors: Mapping[str, Tensor],
    where: str,
    *,
    target_layers: int | None = None,
    mask_token: int | None = None,
    numbering: str | None = None,
) -> HeadConfig:
    """HeadConfig from any layout's config.json; what a config may leave out is read off the tensors.

    Args:
      tensors: by plain names (`names.plain`), scales of FP8 already applied.
      target_layers: of the target, for a folder that names no taps: vLLM then takes (2, L//2, L-3).
      mask_token: for a folder that does not name it.
      numbering: of the tap ids, "input" or "output"; None takes what the layout's writers use.

    Raises:
      InputError: a key is missing or wrong, or asks for what this head does not compute.
    """
    checkpoint_format = detect_format(raw)
    top, eagle = Fields(raw, where), Fields(raw, where).child("eagle_config")
    shape = top.child("transformer_layer_config") if checkpoint_format == "speculators" else top
    if "fc.weight" not in tensors or len(tensors["fc.weight"].shape) != 2:
        raise InputError(
            where,
            "a draft head needs the matrix fc.weight",
            "none",
            "check that this is an EAGLE-3 or P-EAGLE head",
        )
    _refuse_what_is_not_computed(top, shape, eagle)
    dim, heads, layers, vocab = (
        shape.get_int(k)
        for k in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    )
    if (
        checkpoint_format == "automodel"
    ):  # whose config is its target's: as many layers, and windows that the head does not have
        layers = (
            len({name.split(".")[1] for name in tensors if name.startswith("layers.")}) or layers
        )
    kv_heads, head_dim = (
        shape.get_int("num_key_value_heads", heads),
        shape.get_int("head_dim", None) or dim // heads or 1,
    )
    if heads % kv_heads:
        raise InputError(
            where,
            "num_attention_heads must be a multiple of num_key_value_heads",
            f"{heads} and {kv_heads}",
            "mend it",
        )
    if layers > len(tensors):  # before a table of so many layers is made
        raise InputError(
            where,
            "num_hidden_layers must be what the weights hold",
            f"{layers} with {len(tensors)} tensors",
            "mend it",
        )
    aux_hidden_state_layers = _aux_layers(top, eagle, checkpoint_format, target_layers, numbering)
    width = tensors["fc.weight"].shape[1]
    target_dim = top.get_int("target_hidden_size", None) or width // len(aux_hidden_state_layers)
    if top.get_int(
        "num_aux_hidden_states",
        shape.get_int("num_aux_hidden_states", len(aux_hidden_state_layers)),
    ) != len(aux_hidden_state_layers) or width != target_dim * len(aux_hidden_state_layers):
        got = f"{len(aux_hidden_state_layers)} taps of {target_dim} and fc.weight over {width}"
        raise InputError(
            where,
            "fc.weight must read all taps",
            got,
            f"mend {AUX_LAYER_IDS} or target_hidden_size",
        )
    return HeadConfig(
        vocab=vocab,
        draft_vocab=top.get_int("draft_vocab_size", vocab),
        dim=dim,
        layers=layers,
        mlp_dim=shape.get_int("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=Rope.from_hf(shape.raw, head_dim, where),
        norm_eps=float(shape.get_float("rms_norm_eps")),
        context=shape.get_int("max_position_embeddings"),
        target_dim=target_dim,
        aux_hidden_state_layers=aux_hidden_state_layers,
        mask_token=_mask_token(top, tensors, vocab, mask_token),
        num_depths=_depths(top),
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        # an absent norm_before_residual means True in speculators' EAGLE-3 alone
        norm_before_residual=top.get_bool(
            "norm_before_residual", raw.get("speculators_model_type") == "eagle3"
        ),
        norm_before_fc=eagle.get_bool("norm_before_fc", top.get_bool("norm_before_fc", False)),
        fc_norm=top.get_bool("fc_norm", False),
        norm_output=top.get_bool("norm_output", False),
        **PAPER_DESIGN,
        dtype=np.float32,
        windows=(None,) * layers if checkpoint_format == "automodel" else _windows(shape, layers),
    )


def read_target(raw: Mapping, where) -> tuple[str | None, str | None]:
    """Name and architecture of the target, which speculators' layout carries."""
    verifier = Fields(raw, where).child("speculators_config").child("verifier")
    architectures = verifier.get_strs("architectures", None) or [None]
    return verifier.get_str("name_or_path", None), architectures[0]


def _refuse_what_is_not_computed(top: Fields, shape: Fields, eagle: Fields) -> None:
    shape.require("mlp_bias", False, "the MLP has no biases here")
    shape.require("hidden_act", "silu", "the MLP is gated by SiLU")
    shape.require("hidden_activation", "silu", "the MLP is gated by SiLU")
    shape.require("partial_rotary_factor", 1.0, "all of a head is rotated")
    top.require("logit_scale", 1.0, "logits are not scaled")
    eagle.require(
        "use_aux_hidden_state", True, "a head reads its target's taps (EAGLE-1 and -2 do not)"
    )


def _aux_layers(
    top: Fields,
    eagle: Fields,
    checkpoint_format: str,
    target_layers: int | None,
    numbering: str | None,
) -> tuple[int, ...]:
    """In vLLM's numbering: id i is the input of layer i."""
    ids, nested = top.get_ints(AUX_LAYER_IDS, None), eagle.get_ints(AUX_LAYER_IDS, None)
    if ids and nested and ids != nested:
        raise InputError(
            top.where,
            f"{AUX_LAYER_IDS} must be the same at top level and in eagle_config",
            f"{ids} and {nested}",
            "mend one",
        )
    ids = ids or nested
    if not ids and numbering is not None:
        raise InputError(
            "--tap-numbering",
            "the config names no taps whose numbering could be said",
            numbering,
            "leave it out",
        )
    if not ids:
        if target_layers is None:
            raise InputError(
                top.where,
                f"a folder without {AUX_LAYER_IDS} needs its target, for the number of layers",
                "none",
                "give --target",
            )
        return (
            2,
            target_layers // 2,
            target_layers - 3,
        )  # vLLM's; Automodel and SpecForge write the same as outputs 1, L//2-1, L-4
    outputs = numbering == "output" or numbering is None and checkpoint_format in COUNTS_OUTPUTS
    return tuple(i + 1 for i in ids) if outputs else tuple(ids)


def _mask_token(
    top: Fields, tensors: Mapping[str, Tensor], vocab: int, given: int | None
) -> int | None:
    if "mask_hidden" not in tensors:  # a head that only drafts one by one
        if given is not None:
            raise InputError(
                "--mask-token",
                "a head without mask_hidden has no mask token",
                given,
                "leave it out",
            )
        return None
    token = top.child("dflash_config").get_int("mask_token_id", None, least=0)
    for key in MASK_TOKEN_KEYS:
        token = top.get_int(key, None, least=0) if token is None else token
    if token is not None and given is not None:
        raise InputError(
            "--mask-token", "the config names the mask token itself", token, "leave it out"
        )
    token = given if token is None else token
    if token is None:
        rule = f"a head with mask_hidden needs one of {', '.join(MASK_TOKEN_KEYS)}"
        raise InputError(
            top.where, rule, "none", "add it to the config, or convert with --mask-token"
        )
    if token >= vocab:
        raise InputError(
            top.where, f"the mask token must lie in 0..{vocab - 1}", token, "mend the config"
        )
    return token


def _depths(top: Fields) -> int | None:
    """K: Automodel's and our `num_depths`, or the first proposal of speculators."""
    methods = top.child("speculators_config").get("proposal_methods", None) or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise InputError(
            top.where,
            "proposal_methods must be a list of objects",
            repr(methods)[:80],
            "mend the config",
        )
    return top.get_int(
        "num_depths",
        Fields(methods[0], top.where, "the proposal method").get_int("speculative_tokens", None),
    )


def _windows(shape: Fields, layers: int) -> tuple[int | None, ...]:
    """As vLLM's draft models: `layer_types` says which layers slide, and without it none does; but a Qwen3 config slides only with
    `use_sliding_window`, and then without `layer_types` from `max_window_layers` on (configuration_qwen3.py)."""
    kinds = shape.get_strs("layer_types", [])
    if shape.get_str("model_type", None) == "qwen3":
        first = shape.get_int("max_window_layers", 28, least=0)
        if not shape.get_bool("use_sliding_window", False):
            return (None,) * layers
        kinds = kinds or [
            "sliding_attention" if i >= first else "full_attention" for i in range(layers)
        ]
    sliding = [i < len(kinds) and kinds[i] == "sliding_attention" for i in range(layers)]
    window = shape.get_int("sliding_window") if any(sliding) else None
    return tuple(window if s else None for s in sliding)
