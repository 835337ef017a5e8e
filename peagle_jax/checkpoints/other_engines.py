"""How engines beside vLLM serve an EAGLE-3 head in the vllm format, and which heads they cannot.

Rules of their loaders, as they were read in November 2026: SGLang's models/llama_eagle3.py and
TensorRT-LLM's _torch/models/modeling_speculative.py. Neither was run here: both need a GPU.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.draft.head import HeadConfig
from peagle_jax.types import InputError
from peagle_jax.weights import split_revision

NUM_AUX_LAYERS = 3  # that SGLang's `fc` reads
# Keys of a HeadConfig -> what an engine that has no place for them would do. Both load a tensor
# that they do not know without a word, or leave their own as it is.
NEITHER = {
    "parallel": "draft in parallel (P-EAGLE)",
    "predicts_features": "draft from the final hidden state (EAGLE-1)",
    "qk_norm": "norm queries and keys",
    "norm_before_residual": "take the residual after the norm",
    "markov_rank": "have a Markov head",
    "confidence": "have a confidence head",
}
SGLANG_LACKS = NEITHER | {
    "attention_bias": "have biases in attention",
    "norm_before_fc": "norm aux hidden states before fc",
    "fc_norm": "norm each aux hidden state",
    "norm_output": "hand on normed hidden states",
}


def check_servable_by(engine: str, head: HeadState, path: str | Path) -> None:
    """Checks that an engine would serve the folder that `head` was read from.

    Args:
      engine: a key of ENGINES.
      head: in the vllm format.
      path: its folder, for the error.

    Raises:
      InputError: the engine would refuse the head, or draft wrongly with it; or `path` is a
        revision on the hub.
    """
    name, revision = split_revision(str(path))
    if revision is not None:
        raise InputError(
            path,
            rule=f"a command for {ENGINE_NAMES[engine]} is written for a folder, or a whole hub id",
            got=f"revision {revision}",
            next_step=f"download that revision of {name}, and give its folder",
        )
    cfg = head.config
    lacks = SGLANG_LACKS if engine == "sglang" else NEITHER
    found = [words for key, words in lacks.items() if getattr(cfg, key)]
    if cfg.layers > 1:  # their further layers have other norms and other names
        found.append(f"have {cfg.layers} layers")
    if any(window is not None for window in cfg.windows):
        found.append("have sliding windows")
    if engine == "sglang" and len(cfg.aux_hidden_state_layers) != NUM_AUX_LAYERS:
        found.append(f"read {len(cfg.aux_hidden_state_layers)} aux hidden states")
    if engine == "tensorrt-llm" and not head.shares_embedding and cfg.target_dim == cfg.dim:
        found.append("have their own embedding (peagle convert --share-embedding, if it can)")
    if found:
        raise InputError(
            path,
            rule=f"{ENGINE_NAMES[engine]} serves EAGLE-3 heads of one Llama layer",
            got="a head that would " + ", and ".join(found),
            next_step="serve it with vLLM: peagle serve-config --engine vllm",
        )


def sglang_line(cfg: HeadConfig, path: str, target: str, k: int) -> str:
    """The command that serves a head with SGLang, a chain of K drafts a step."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", path]
    words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(k + 1)])


def tensorrt_llm_line(cfg: HeadConfig, path: str, target: str, k: int) -> str:
    """What TensorRT-LLM's options file has for a head, in one line (JSON is YAML, too)."""
    speculative = {
        "decoding_type": "Eagle3",
        "max_draft_len": k,
        "speculative_model": path,
        "eagle3_layers_to_capture": as_outputs(cfg.aux_hidden_state_layers),
    }
    return json.dumps({"speculative_config": speculative})


def as_outputs(aux_layers: Sequence[int]) -> list[int]:
    """Ids that count outputs of layers, as both engines do; ours count inputs."""
    return [i - 1 for i in aux_layers]


def notes(engine: str, cfg: HeadConfig, target: str) -> list[str]:
    """What else somebody who serves a head must know, in sentences."""
    ids = as_outputs(cfg.aux_hidden_state_layers)
    if engine == "sglang":
        return [
            f"SGLang counts outputs of layers: write {ids} as eagle_aux_hidden_state_layer_ids of "
            "eagle_config into a copy of the folder, which is then SGLang's alone"
        ]
    return [f"write this line into a file FILE: trtllm-serve {target} --extra_llm_api_options FILE"]


ENGINES: dict[str, Callable[[HeadConfig, str, str, int], str]] = {
    "sglang": sglang_line,
    "tensorrt-llm": tensorrt_llm_line,
}
ENGINE_NAMES = {"sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
