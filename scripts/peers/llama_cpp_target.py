"""A Qwen3 target as a GGUF file, for check_llama_cpp.py: llama.cpp's own converter needs torch.

    write(folder, file)                         (from check_llama_cpp.py)

It is for tests alone. Everything is float32, and the tokenizer must be one of GPT-2's kind, as the
packaged target's is: llama.cpp knows others by the name of their splitting rule, not by the rule.
"""

import json
from pathlib import Path

import gguf
import numpy as np

from peagle_jax import weights
from peagle_jax.types import InputError


def write(folder: Path, file: Path) -> None:
    """Writes the target in `folder` to `file`.

    Raises:
      InputError: it is no Qwen3, or its tokenizer is of another kind.
    """
    config = weights.read_json(folder / "config.json")
    if config["model_type"] != "qwen3" or config["tie_word_embeddings"]:
        raise InputError(
            folder,
            rule="the check writes Qwen3 targets with their own lm_head",
            got=config["model_type"],
            next_step="make the GGUF file with llama.cpp's convert_hf_to_gguf.py, and give it with "
            "--target-gguf",
        )
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    add_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in weights.open_folder(folder).items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None, name
        writer.add_tensor(theirs, np.asarray(tensor).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict) -> None:
    """The tokenizer of a folder, which must split text as GPT-2's does."""
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    splitter = raw["pre_tokenizer"]
    if raw["model"]["type"] != "BPE" or (splitter["type"], splitter["use_regex"]) != (
        "ByteLevel",
        True,
    ):
        raise InputError(
            folder / "tokenizer.json",
            rule="must be byte-level BPE that splits text as GPT-2 does",
            got=f"{raw['model']['type']} after {splitter['type']}",
            next_step="use the packaged target",
        )
    special = {token["id"]: token["content"] for token in raw["added_tokens"]}
    tokens = {i: token for token, i in raw["model"]["vocab"].items()} | special
    ids = range(config["vocab_size"])
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"[unused {i}]") for i in ids])
    writer.add_token_types(
        [
            kinds.CONTROL if i in special else kinds.NORMAL if i in tokens else kinds.UNUSED
            for i in ids
        ]
    )
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]]
    )
    writer.add_eos_token_id(config["eos_token_id"])
