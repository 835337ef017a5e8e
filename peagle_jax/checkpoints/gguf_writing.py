"""An EAGLE-3 head as a GGUF file, which llama.cpp drafts with (`--spec-type draft-eagle3`).

Names of keys and tensors are those that src/models/eagle3.cpp of llama.cpp reads, as it was in
October 2026. The file holds no tokenizer: a head reads and writes ids, and llama.cpp turns text
into ids with the target's. scripts/peers/check_llama_cpp.py shows such files to llama.cpp.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from peagle_jax import weights
from peagle_jax.checkpoints import param_mapping
from peagle_jax.checkpoints.head_reading import short_name
from peagle_jax.checkpoints.head_state import HeadState
from peagle_jax.draft.head import HeadConfig
from peagle_jax.layers import Rope
from peagle_jax.provenance import versions
from peagle_jax.types import InputError
from peagle_jax.weights import Tensor

ARCHITECTURE = "eagle3"
WRITER = "peagle_jax.writer"  # key by which a file of ours is known, so that it may be replaced
DTYPES = ("float32", "bfloat16", "float16")  # of matrices
NUM_AUX_LAYERS = 3  # "EAGLE3 requires exactly 3 entries in 'extract_layers'"
TENSORS = {
    "embed_tokens.weight": "token_embd.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "fc.weight": "fc.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
D2T = "d2t"
# What llama.cpp divides the plain frequencies by, one number for each pair.
ROPE_FACTORS = "rope_freqs.weight"
# Fields of a HeadConfig -> what a head with them would do. llama.cpp has no place for their
# tensors and stops at a file that holds one, or it has no key for them and would draft otherwise.
LLAMA_CPP_LACKS = {
    "parallel": "draft in parallel (P-EAGLE)",
    "predicts_features": "draft from the final hidden state (EAGLE-1)",
    "qk_norm": "norm queries and keys",
    "attention_bias": "have biases in attention",
    "fc_norm": "norm each aux hidden state",
    "norm_output": "hand on normed hidden states",
    "markov_rank": "have a Markov head",
    "confidence": "have a confidence head",
}


def write_gguf(
    head: HeadState,
    path: str | Path,
    *,
    dtype: str | None,
    metadata: Mapping[str, str],
    own_embedding: bool = True,
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:
    """Writes a head as one GGUF file, which appears whole or not at all. Needs the library gguf.

    Matrices keep their dtype, or are rounded once to `dtype`. Norms are float32, as everywhere in
    GGUF. The rows of the projections of queries and keys change places, because llama.cpp rotates
    neighboring channels where Llama's checkpoints rotate channels half a head apart.

    Args:
      head: an EAGLE-3 head of one Llama layer.
      path: the file. Another GGUF file of ours that is there is replaced.
      dtype: "float32", "bfloat16" or "float16", of the matrices; None keeps them.
      metadata: the command line, under "command".
      own_embedding: whether the embedding is written; llama.cpp reads the target's otherwise.
      on_bytes: called after each tensor with the bytes written so far, and with all of them.

    Raises:
      InputError: llama.cpp would refuse the head, or draft otherwise with it; gguf is not
        installed; or `path` is something else's file, not writable, or the disk is full.
    """
    head.check()
    check_llama_cpp(head, path, dtype)
    gguf = import_gguf(path)
    tensors = _tensors(head, dtype, own_embedding)
    with weights.new_file(Path(path), lambda file: _is_ours(gguf, file)) as temporary:
        writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
        _add_keys(writer, head, metadata)
        _write_tensors(gguf, writer, tensors, on_bytes)


def check_llama_cpp(head: HeadState, path: str | Path, dtype: str | None) -> None:
    """Checks that llama.cpp has a place for everything in a head.

    Args:
      dtype: that it is to be written in; None keeps its own.

    Raises:
      InputError: it has none for something.
    """
    cfg, found = head.config, llama_cpp_lacks(head.config)
    if found:
        own = {"--drop-markov": cfg.markov_rank is not None, "--drop-confidence": cfg.confidence}
        flags = "".join(f" {flag}" for flag, is_needed in own.items() if is_needed)
        is_all = found == [LLAMA_CPP_LACKS["qk_norm"]]
        trained = ", or train one with head.qk_norm false" if is_all else ""
        raise InputError(
            path,
            rule="llama.cpp drafts with EAGLE-3 heads of one Llama layer that reads 3 aux hidden "
            "states",
            got="a head that would " + ", and ".join(found),
            next_step=f"serve it with vLLM: peagle convert --to vllm{flags}{trained}",
        )
    if dtype not in (None, *DTYPES):
        rule = "a GGUF file of a head has one of the dtypes " + ", ".join(DTYPES)
        raise InputError(path, rule, dtype, "give --dtype bfloat16 or float32")
    head.check_written_dtype(path, dtype)


def llama_cpp_lacks(cfg: HeadConfig) -> list[str]:
    """What a head would do for which llama.cpp has no place, in words; empty if it takes it."""
    found = [words for key, words in LLAMA_CPP_LACKS.items() if getattr(cfg, key)]
    if cfg.layers > 1:
        found.append(f"have {cfg.layers} layers")
    if any(window is not None for window in cfg.windows):
        found.append("have sliding windows")
    if len(cfg.aux_hidden_state_layers) != NUM_AUX_LAYERS and not cfg.predicts_features:
        found.append(f"read {len(cfg.aux_hidden_state_layers)} aux hidden states")
    return found


def import_gguf(where: str | Path) -> ModuleType:
    """The library gguf, of llama.cpp's authors.

    Raises:
      InputError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise InputError(
            where,
            rule="GGUF files are written by the library gguf",
            got=f"no {error.name}",
            next_step="pip install 'peagle-jax[gguf]'",
        ) from None
    return gguf


def rope_factors(rope: Rope, head_dim: int) -> np.ndarray | None:
    """What llama.cpp divides the plain frequencies by, float32 [H/2]; None where that is 1."""
    theta = json.loads(rope.source)["rope_theta"]
    plain = Rope.from_hf({"rope_theta": theta}, head_dim, "").frequencies
    factors = (np.asarray(plain) / np.asarray(rope.frequencies)).astype(np.float32)
    return None if (factors == 1).all() else factors


def permute(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection [heads x H, in] so that pairs (i, i + H/2) become (2i, 2i + 1)."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[-1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _tensors(head: HeadState, dtype: str | None, own_embedding: bool) -> dict[str, Tensor]:
    """llama.cpp's name -> tensor, read when it is written."""
    cfg = head.config
    stored = {name: t for name, t in head.tensors.items() if name != D2T}
    if not own_embedding:
        stored.pop(param_mapping.EMBEDDING, None)
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        is_norm = len(tensor.shape) == 1
        written = "float32" if is_norm else dtype
        if written is None and tensor.dtype == np.float64:
            written = "float32"  # GGUF has float64, and llama.cpp multiplies no such matrix
        cast = {name: tensor} if written is None else weights.cast({name: tensor}, written)
        found[TENSORS[name]] = cast[name]
    for name, heads in (("blk.0.attn_q.weight", cfg.heads), ("blk.0.attn_k.weight", cfg.kv_heads)):
        found[name] = _permuted(found[name], heads)
    if D2T in head.tensors:  # ours are differences to the draft's own ids
        found[D2T] = np.arange(cfg.draft_vocab, dtype=np.int64) + np.asarray(head.tensors[D2T])
    factors = rope_factors(cfg.rope, cfg.head_dim)
    if factors is not None:
        found[ROPE_FACTORS] = factors
    return found


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    return weights.apply(lambda t: permute(t, heads), tensor, tensor.shape, tensor.dtype)


def _add_keys(writer: Any, head: HeadState, metadata: Mapping[str, str]) -> None:
    """All keys but `general.architecture`, which the writer has added."""
    cfg = head.config
    writer.add_name(head.source)
    if head.target is not None:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, short_name(head.target))
    writer.add_string(WRITER, versions())
    if "command" in metadata:
        writer.add_string("peagle_jax.command", metadata["command"])
    writer.add_context_length(cfg.context)
    writer.add_embedding_length(cfg.dim)
    writer.add_block_count(cfg.layers)
    writer.add_feed_forward_length(cfg.mlp_dim)
    writer.add_head_count(cfg.heads)
    writer.add_head_count_kv(cfg.kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_dimension_count(cfg.head_dim)
    writer.add_rope_freq_base(json.loads(cfg.rope.source)["rope_theta"])
    if cfg.rope.scale != 1:
        writer.add_float32(f"{ARCHITECTURE}.rope.scaling.attn_factor", cfg.rope.scale)
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(cfg.aux_hidden_state_layers))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", cfg.target_dim)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", cfg.norm_before_residual)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", cfg.norm_before_fc)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(cfg.vocab)


def _write_tensors(
    gguf: ModuleType,
    writer: Any,
    tensors: Mapping[str, Tensor],
    on_bytes: Callable[[int, int], None] | None,
) -> None:
    """Writes the whole file, holding one tensor at a time."""
    kinds = gguf.GGMLQuantizationType
    names = {"float32": kinds.F32, "float16": kinds.F16, "bfloat16": kinds.BF16, "int64": kinds.I64}
    for name, tensor in tensors.items():
        kind = names[np.dtype(tensor.dtype).name]
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in tensors.items():
            array = np.ascontiguousarray(tensor)
            data = array.reshape(-1).view(np.uint8)
            if not weights.all_finite(data, array.dtype):
                weights.warn_not_finite(writer.path.name, name)
            writer.write_tensor_data(data)
            done += tensor.nbytes
            if on_bytes is not None:
                on_bytes(done, total)
    finally:
        writer.close()


def _is_ours(gguf: ModuleType, file: Path) -> bool:
    """Whether a file that is there is a GGUF file that this function wrote."""
    try:
        return WRITER in gguf.GGUFReader(file).fields
    except Exception:  # not GGUF, or cut off: the reader's errors are of many kinds
        return False
