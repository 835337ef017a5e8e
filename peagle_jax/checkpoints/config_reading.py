"""config.json of a draft head, in any checkpoint format -> HeadConfig.

docs/checkpoints.md lists the formats and their keys.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from peagle_jax.checkpoints.checkpoint_format import (
    AUX_LAYER_IDS,
    CALIBRATION,
    COUNTS_OUTPUTS,
    MASK_TOKEN_KEYS,
    architectures_of,
    detect_format,
    is_eagle1,
)
from peagle_jax.draft.confidence import (
    NO_CONFIDENCE,
    calibration_from_json,
    check_confidence,
)
from peagle_jax.draft.head import HeadConfig
from peagle_jax.draft.markov import KINDS, NO_MARKOV, check_kind, check_rank
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.layers import FINAL_HIDDEN_STATE, Rope
from peagle_jax.types import InputError
from peagle_jax.weights import Fields, Tensor

# What transformers' LlamaConfig and Qwen3Config mean by a rope_theta that is not there.
DEFAULT_ROPE_THETA = 10000.0
# What transformers' Qwen3Config means by a head_dim that is not there.
QWEN3_HEAD_DIM = 128
# What vLLM makes heads of Qwen3's layers for.
QWEN3_ARCHITECTURES = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM")
Q_NORM = "layers.0.self_attn.q_norm.weight"


def read_config(
    raw: Mapping,
    tensors: Mapping[str, Tensor],
    where: str,
    *,
    target_layers: int | None = None,
    mask_token: int | None = None,
    aux_layer_numbering: str | None = None,
) -> HeadConfig:
    """The configuration of a head. What a config.json may leave out is read off the tensors.

    Args:
      raw: the parsed config.json.
      tensors: under the names of `param_mapping.plain_name`, with FP8 scales already applied.
      where: the file, for errors.
      target_layers: how many layers the target has. It is needed where the config does not say
        which aux hidden states the head reads: vLLM then takes layers (2, L//2, L-3).
      mask_token: id of the mask token, where the config does not name it.
      aux_layer_numbering: "input" or "output", what an aux layer id names of its layer; None
        takes what the writers of the format mean.

    Raises:
      InputError: a key is missing or wrong, or asks for what this head does not compute.
    """
    checkpoint_format = detect_format(raw)
    top = Fields(raw, where)
    eagle = top.child("eagle_config")
    shape = top.child("transformer_layer_config") if checkpoint_format == "speculators" else top
    if "fc.weight" not in tensors or len(tensors["fc.weight"].shape) != 2:
        raise InputError(
            where,
            rule="a draft head needs the matrix fc.weight",
            got="none",
            next_step="name a head's folder; Medusa and speculators' EAGLE-1 are not read",
        )
    predicts_features = is_eagle1(raw)
    if predicts_features and "fc.bias" in tensors:
        raise InputError(
            where,
            rule="fc must have no bias: vLLM's llama_eagle.py has none either",
            got="fc.bias",
            next_step="train the head again with task: eagle",
        )
    _refuse_unsupported_options(top, shape, eagle)
    _refuse_contradictions(raw, shape, tensors)
    dim = shape.get_int("hidden_size")
    heads = shape.get_int("num_attention_heads")
    layers = shape.get_int("num_hidden_layers")
    vocab = shape.get_int("vocab_size")
    if checkpoint_format == "automodel":
        # Automodel copies the target's config: it has the target's number of layers, and windows
        # that the head does not have.
        layers = _count_layers(tensors) or layers
    kv_heads = shape.get_int("num_key_value_heads", heads)
    head_dim = _head_dim(shape, dim, heads)
    if heads % kv_heads:
        raise InputError(
            where,
            rule="num_attention_heads must be a multiple of num_key_value_heads",
            got=f"{heads} and {kv_heads}",
            next_step="use the config.json that came with these weights",
        )
    if layers > len(tensors):  # before a table of so many layers is made
        raise InputError(
            where,
            rule="num_hidden_layers must be what the weights hold",
            got=f"{layers} with {len(tensors)} tensors",
            next_step="use the config.json that came with these weights",
        )
    if predicts_features:
        _refuse_numbering(aux_layer_numbering)
        aux_layers, target_dim = (FINAL_HIDDEN_STATE,), dim
        _check_features(top, tensors["fc.weight"].shape, dim, vocab)
    else:
        aux_layers = _aux_layers(top, eagle, checkpoint_format, target_layers, aux_layer_numbering)
        fc_width = tensors["fc.weight"].shape[1]
        target_dim = _target_dim(top, shape, fc_width, len(aux_layers))
    draft_vocab = top.get_int("draft_vocab_size", vocab)
    mask_token_id = _mask_token(top, tensors, vocab, mask_token)
    return HeadConfig(
        vocab=vocab,
        draft_vocab=draft_vocab,
        dim=dim,
        layers=layers,
        mlp_dim=shape.get_int("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=Rope.from_hf({"rope_theta": DEFAULT_ROPE_THETA, **shape.raw}, head_dim, where),
        norm_eps=shape.get_float("rms_norm_eps"),
        context=shape.get_int("max_position_embeddings"),
        target_dim=target_dim,
        aux_hidden_state_layers=aux_layers,
        mask_token=mask_token_id,
        num_depths=_num_depths(top),
        qk_norm=Q_NORM in tensors,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        # An absent norm_before_residual means True in speculators' EAGLE-3 alone.
        norm_before_residual=top.get_bool(
            "norm_before_residual", raw.get("speculators_model_type") == "eagle3"
        ),
        norm_before_fc=eagle.get_bool("norm_before_fc", top.get_bool("norm_before_fc", False)),
        fc_norm=top.get_bool("fc_norm", False),
        norm_output=top.get_bool("norm_output", False),
        **PAPER_DESIGN,
        **_markov(top, draft_vocab, mask_token_id),
        **_confidence(top, mask_token_id),
        dtype=np.float32,
        windows=(None,) * layers if checkpoint_format == "automodel" else _windows(shape, layers),
    )


def read_target(raw: Mapping, where: str | Path) -> tuple[str | None, str | None]:
    """Name and architecture of the target, which the speculators format carries."""
    verifier = Fields(raw, where).child("speculators_config").child("verifier")
    architectures = verifier.get_strs("architectures", None) or [None]
    return verifier.get_str("name_or_path", None), architectures[0]


def _refuse_unsupported_options(top: Fields, shape: Fields, eagle: Fields) -> None:
    shape.require("mlp_bias", False, "the MLP has no biases here")
    shape.require("hidden_act", "silu", "the MLP is gated by SiLU")
    shape.require("hidden_activation", "silu", "the MLP is gated by SiLU")
    shape.require("partial_rotary_factor", 1.0, "all of a head is rotated")
    for part in (top, shape):
        part.require("logit_scale", 1.0, "logits are not scaled")
    eagle.require(
        "use_aux_hidden_state",
        True,
        "an EAGLE-3 head reads aux hidden states of its target",
    )


def _refuse_contradictions(raw: Mapping, shape: Fields, tensors: Mapping[str, Tensor]) -> None:
    """Raises InputError where weights have what config.json denies, or lack what it promises.

    vLLM goes by config.json: without a word it leaves biases out, and norms as they begin.
    """
    biases = (n for n in tensors if ".self_attn." in n and n.endswith("_proj.bias"))
    # vLLM's llama.py knows three names of the key
    keys = ("attention_bias", "bias", "qkv_bias")
    if not any(shape.get_bool(key, False) for key in keys):
        if name := next((name for name in biases if np.asarray(tensors[name]).any()), None):
            raise InputError(
                shape.where,
                rule="attention_bias must be true where the weights have biases",
                got=name,
                next_step="set attention_bias to true, if the head was trained with them",
            )
    kinds = architectures_of(raw)
    if detect_format(raw) == "speculators":
        kinds = [shape.get_str("model_type", "")]
    if Q_NORM not in tensors and {"qwen3", *QWEN3_ARCHITECTURES} & {*kinds}:
        raise InputError(
            shape.where,
            rule=f"a head of {kinds[0]} has norms of queries and keys",
            got=f"no {Q_NORM}",
            next_step="use the weights that came with this config.json",
        )


def _head_dim(shape: Fields, dim: int, heads: int) -> int:
    """Width of a head; where the key is absent, what transformers' configuration has."""
    if "head_dim" not in shape.raw and shape.get("model_type", None) == "qwen3":
        return QWEN3_HEAD_DIM
    return shape.get_int("head_dim", None) or dim // heads or 1


def _count_layers(tensors: Mapping[str, Tensor]) -> int:
    return len({name.split(".")[1] for name in tensors if name.startswith("layers.")})


def _check_features(top: Fields, fc_shape: tuple[int, ...], dim: int, vocab: int) -> None:
    """Raises InputError unless an EAGLE-1 head reads and predicts what its target's lm_head reads.

    Args:
      fc_shape: of fc.weight, [D, 2D].
    """
    if fc_shape[1] != 2 * dim:
        raise InputError(
            top.where,
            rule=f"fc.weight of an EAGLE-1 head must read 2 x hidden_size = {2 * dim} numbers",
            got=fc_shape[1],
            next_step="use the config.json that came with these weights",
        )
    draft_vocab = top.get_int("draft_vocab_size", vocab)
    if draft_vocab != vocab:
        raise InputError(
            top.where,
            rule=f"an EAGLE-1 head drafts from its target's vocabulary of {vocab} tokens",
            got=draft_vocab,
            next_step=f"set draft_vocab_size to {vocab}, or leave it out",
        )


def _target_dim(top: Fields, shape: Fields, fc_width: int, num_aux_layers: int) -> int:
    """Width of one aux hidden state; fc.weight [D, A] must read all of them."""
    target_dim = top.get_int("target_hidden_size", None) or fc_width // num_aux_layers
    declared = top.get_int(
        "num_aux_hidden_states", shape.get_int("num_aux_hidden_states", num_aux_layers)
    )
    if declared != num_aux_layers or fc_width != target_dim * num_aux_layers:
        raise InputError(
            top.where,
            rule="fc.weight must read all aux hidden states",
            got=f"{num_aux_layers} of width {target_dim}, and fc.weight over {fc_width}",
            next_step=f"correct {AUX_LAYER_IDS}, num_aux_hidden_states or target_hidden_size",
        )
    return target_dim


def _aux_layers(
    top: Fields,
    eagle: Fields,
    checkpoint_format: str,
    target_layers: int | None,
    numbering: str | None,
) -> tuple[int, ...]:
    """The layers whose hidden states the head reads, in vLLM's numbering: id i is layer i's input.

    They are in the order in which `fc` reads them. Engines collect hidden states as the target
    computes them, whatever the order of the ids in a config; only our own format keeps an order.

    Raises:
      InputError: the two places of the ids disagree; no place has them and `target_layers` is
        not given; or `numbering` is given and there is nothing to number.
    """
    ids, nested_ids = top.get_ints(AUX_LAYER_IDS, None), eagle.get_ints(AUX_LAYER_IDS, None)
    if ids and nested_ids and ids != nested_ids:
        raise InputError(
            top.where,
            rule=f"{AUX_LAYER_IDS} must be the same at top level and in eagle_config",
            got=f"{ids} and {nested_ids}",
            next_step="keep one of the two, the one that the head was trained with",
        )
    ids = ids or nested_ids
    if not ids:
        _refuse_numbering(numbering)
        if target_layers is None:
            raise InputError(
                top.where,
                rule=f"a folder without {AUX_LAYER_IDS} needs its target, for the number of layers",
                got="none",
                next_step="give --target",
            )
        # vLLM's default. Automodel and SpecForge mean the same by outputs 1, L//2-1, L-4.
        return (2, target_layers // 2, target_layers - 3)
    if numbering is None:
        numbering = "output" if checkpoint_format in COUNTS_OUTPUTS else "input"
    ids = ids if checkpoint_format == "peagle_jax" else sorted(ids)
    return tuple(i + 1 for i in ids) if numbering == "output" else tuple(ids)


def _refuse_numbering(numbering: str | None) -> None:
    """Raises InputError where a numbering of layers was given, and there are none to number."""
    if numbering is not None:
        raise InputError(
            "--aux-layer-numbering",
            rule="needs layer ids, and the config has none",
            got=numbering,
            next_step="leave out --aux-layer-numbering",
        )


def _mask_token(
    top: Fields, tensors: Mapping[str, Tensor], vocab: int, given: int | None
) -> int | None:
    """The mask token's id, from the config or as `given`; None for an autoregressive head."""
    if "mask_hidden" not in tensors:
        if given is not None:
            raise InputError(
                "--mask-token",
                rule="a head without mask_hidden has no mask token",
                got=given,
                next_step="leave out --mask-token",
            )
        return None
    token = top.child("dflash_config").get_int("mask_token_id", None, least=0)
    for key in MASK_TOKEN_KEYS:
        token = top.get_int(key, None, least=0) if token is None else token
    if token is not None and given is not None:
        raise InputError(
            "--mask-token",
            rule="the config names the mask token itself",
            got=token,
            next_step="leave out --mask-token",
        )
    token = given if token is None else token
    if token is None:
        rule = f"a head with mask_hidden needs one of {', '.join(MASK_TOKEN_KEYS)}"
        raise InputError(
            top.where, rule, "none", "add it to the config, or convert with --mask-token"
        )
    if token >= vocab:
        raise InputError(
            top.where,
            rule=f"the mask token must lie in 0..{vocab - 1}",
            got=token,
            next_step="set mask_token_id to the id that the head was trained with",
        )
    return token


def _markov(top: Fields, draft_vocab: int, mask_token: int | None) -> dict:
    """The fields of a `HeadConfig` about a Markov head, under DSpark's keys.

    Raises:
      InputError: its rank is out of range, or its kind is none of DSpark's.
    """
    rank = top.get_int("markov_rank", None)
    if rank is None:
        return NO_MARKOV
    kind = top.get_str("markov_head_type", KINDS[0])
    next_step = "use the config.json that came with these weights"
    where = f"{top.where}: markov_rank"
    check_rank(rank, draft_vocab, mask_token is not None, where, next_step)
    check_kind(kind, f"{top.where}: markov_head_type", next_step)
    return {"markov_rank": rank, "markov_kind": kind}


def _confidence(top: Fields, mask_token: int | None) -> dict:
    """The fields of a `HeadConfig` about a confidence head, under DSpark's keys.

    Raises:
      InputError: it does not go together with the rest of the head, or its calibration is none.
    """
    confidence, raw = top.get_bool("enable_confidence_head", False), top.get(CALIBRATION, None)
    again = "use the config.json that came with these weights"
    calibration = calibration_from_json(raw, str(top.where), again)
    where = f"{top.where}: enable_confidence_head"
    check_confidence(confidence, calibration is not None, mask_token is not None, where)
    if not confidence:
        return NO_CONFIDENCE
    has_markov = top.get_int("markov_rank", None) is not None
    reason = "it reads the token before a draft where the head has a Markov head, and only there"
    top.require("confidence_head_with_markov", has_markov, reason)
    return {"confidence": True, "confidence_calibration": calibration}


def _num_depths(top: Fields) -> int | None:
    """K: `num_depths` of Automodel and of our own folders, or speculators' first proposal."""
    methods = top.child("speculators_config").get("proposal_methods", None) or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise InputError(
            top.where,
            rule="proposal_methods must be a list of objects",
            got=repr(methods)[:80],
            next_step="use the config.json that speculators wrote",
        )
    first = Fields(methods[0], top.where, "the proposal method")
    return top.get_int("num_depths", first.get_int("speculative_tokens", None))


def _windows(shape: Fields, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, by the rule of vLLM's draft models.

    `layer_types` says which layers slide, and without it none does. A Qwen3 config slides only
    with `use_sliding_window`; without `layer_types` it then slides from layer `max_window_layers`
    on (transformers, configuration_qwen3.py).
    """
    kinds = shape.get_strs("layer_types", [])
    if shape.get_str("model_type", None) == "qwen3":
        first_sliding = shape.get_int("max_window_layers", 28, least=0)
        if not shape.get_bool("use_sliding_window", False):
            return (None,) * layers
        kinds = kinds or [
            "sliding_attention" if i >= first_sliding else "full_attention" for i in range(layers)
        ]
    is_sliding = [i < len(kinds) and kinds[i] == "sliding_attention" for i in range(layers)]
    window = shape.get_int("sliding_window") if any(is_sliding) else None
    return tuple(window if sliding else None for sliding in is_sliding)
