"""Whether vLLM would serve a head's folder as it is: what it refuses, and what it would misread.

Read in vLLM 0.32: models/llama_eagle3.py, qwen3_eagle3.py, llama_eagle.py and utils.py, and the two
model runners. A key that has another value than the weights is what goes wrong without a word.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from peagle_jax import weights
from peagle_jax.checkpoints import head_writing, param_mapping
from peagle_jax.checkpoints.checkpoint_format import AUX_LAYER_IDS, architectures_of
from peagle_jax.checkpoints.config_reading import QWEN3_ARCHITECTURES
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.types import InputError
from peagle_jax.weights import Fields

CONVERT = "peagle convert --to vllm first"
DEFAULT_AUX_LAYERS = 3  # that vLLM counts where a config does not say how many there are


def check_servable(head: HeadState, path: str | Path, by_vllm: bool = True) -> None:
    """Checks that an engine would serve the folder that `head` was read from as it is.

    Args:
      by_vllm: the engine is vLLM, and reads config.json in its own way; what any engine would
        refuse is checked for others, too.

    Raises:
      InputError: it would refuse the folder, or draft wrongly with it.
    """
    head.check()
    folder = weights.find_folder(path)
    stored = {param_mapping.plain_name(name) for name in weights.open_folder(folder)}
    raw = weights.read_json(folder / "config.json")
    _check_tensors(head, stored, path)
    if absent := weights.absent_shards(folder):
        raise InputError(
            path,
            rule=f"vLLM refuses a {weights.INDEX} that names files which are not there",
            got=", ".join(absent),
            next_step=f"delete {weights.INDEX}, because model.safetensors holds all tensors",
        )
    if by_vllm:
        _check_biases(head, stored, raw, path)
        if head.config.predicts_features:
            _check_features(head, stored, raw, path)
        else:
            _check_layers(head, raw, path)
            _check_aux_layers(head, raw, path)
    k = head.config.num_depths or 1
    head_writing.refuse_inexpressible(head, path, head.checkpoint_format, k, np.float32)


def _shape_of(head: HeadState, raw: Mapping, path: str | Path) -> Fields:
    """The part of config.json that vLLM makes its layers of."""
    top = Fields(raw, str(path))
    return top.child("transformer_layer_config") if head.checkpoint_format == "speculators" else top


def _check_tensors(head: HeadState, stored: Collection[str], path: str | Path) -> None:
    if head.config.draft_vocab == head.config.vocab and "d2t" in stored:
        raise InputError(
            path,
            rule="vLLM refuses d2t at full vocabulary",
            got="one",
            next_step=f"{CONVERT}, which leaves it out",
        )
    if foreign := sorted({*param_mapping.VERIFIER_TENSORS} & {*stored}):
        raise InputError(
            path,
            rule="vLLM refuses tensors that are the target's",
            got=", ".join(foreign),
            next_step=f"{CONVERT}, which leaves them out",
        )


def _check_biases(head: HeadState, stored: Collection[str], raw: Mapping, path: str | Path) -> None:
    """vLLM makes biases where `attention_bias` is true, and does not miss those that are absent."""
    if not _shape_of(head, raw, path).get_bool("attention_bias", False):
        return
    # its Qwen3 layers have no bias of the output
    names = "qkv" if head.config.qk_norm else "qkvo"
    wanted = [
        f"layers.{layer}.self_attn.{name}_proj.bias"
        for layer in range(head.config.layers)
        for name in names
    ]
    if absent := [name for name in wanted if name not in stored]:
        raise InputError(
            path,
            rule="vLLM leaves biases that attention_bias promises and no file has uninitialized",
            got=f"no {absent[0]}",
            next_step=f"{CONVERT}, which writes all that it promises",
        )


def _check_features(
    head: HeadState, stored: Collection[str], raw: Mapping, path: str | Path
) -> None:
    """What vLLM's EAGLE-1 heads cannot have."""
    shape = _shape_of(head, raw, path)
    if shape.get("layer_types", None) or shape.get("model_type", None) == "qwen3":
        # transformers' Qwen3Config makes layer_types where there are none
        raise InputError(
            path,
            rule="vLLM does not start with layer_types of an EAGLE-1 head",
            got="some" if "layer_types" in shape.raw else "those of model_type qwen3",
            next_step=f"{CONVERT}, which writes a Llama head without",
        )
    if param_mapping.LM_HEAD in stored:
        raise InputError(
            path,
            rule="vLLM refuses an EAGLE-1 head's output matrix, in whose place it has its target's",
            got=param_mapping.LM_HEAD,
            next_step=f"{CONVERT}, which leaves it out",
        )


def _check_layers(head: HeadState, raw: Mapping, path: str | Path) -> None:
    """vLLM chooses Llama's or Qwen3's layers by the architecture, in format A."""
    names = architectures_of(raw)
    is_llama = head.checkpoint_format == "vllm" and not {*QWEN3_ARCHITECTURES} & {*names}
    if head.config.qk_norm and is_llama:
        raise InputError(
            path,
            rule=f"vLLM makes Llama's layers of {', '.join(names) or 'this architecture'}, which "
            "have no norms of queries and keys",
            got="a head with such norms",
            next_step=f"{CONVERT}, which writes {QWEN3_ARCHITECTURES[0]}",
        )


def _check_aux_layers(head: HeadState, raw: Mapping, path: str | Path) -> None:
    """How many hidden states vLLM would read, of which layers, and how wide ones."""
    cfg, top, shape = head.config, Fields(raw, str(path)), _shape_of(head, raw, path)
    is_at_top = bool(top.get_ints(AUX_LAYER_IDS, None))
    nested = top.child("eagle_config").get_ints(AUX_LAYER_IDS, None)
    # in speculators' format, and in the second model runner, which serves no parallel drafts
    if nested and not is_at_top and (head.checkpoint_format == "speculators" or not cfg.parallel):
        raise InputError(
            path,
            rule=f"vLLM reads the {AUX_LAYER_IDS} of such a head at top level alone, and takes "
            "other layers where it finds none",
            got="some in eagle_config",
            next_step=f"{CONVERT}, which writes both (with --aux-layer-numbering output, if the "
            "ids count outputs, as SpecForge's and SGLang's do)",
        )
    counted = shape.get_int("num_aux_hidden_states", None)
    if cfg.qk_norm:
        counted = shape.get_int("num_aux_layers", None) or counted
    if counted is None:
        ids = shape.child("eagle_config").get_ints(AUX_LAYER_IDS, None)
        if cfg.qk_norm:
            ids = top.get_ints(AUX_LAYER_IDS, None) or ids
        counted = len(ids) if ids else DEFAULT_AUX_LAYERS
    if counted != len(cfg.aux_hidden_state_layers):
        raise InputError(
            path,
            rule=f"vLLM would count {counted} aux hidden states",
            got=len(cfg.aux_hidden_state_layers),
            next_step=f"{CONVERT}, which writes num_aux_hidden_states",
        )
    width = shape.get_int("hidden_size")
    if head.checkpoint_format == "speculators":
        width = top.get_int("target_hidden_size", None) or width
    elif "target_hidden_size" in raw:
        width = raw["target_hidden_size"]
    if width != cfg.target_dim:
        raise InputError(
            path,
            rule=f"vLLM would read aux hidden states of width {width}",
            got=cfg.target_dim,
            next_step=f"{CONVERT}, which writes target_hidden_size",
        )
