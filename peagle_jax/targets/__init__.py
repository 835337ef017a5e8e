"""Target models: one file per family, chosen by `model_type` in the checkpoint's config.json."""

from peagle_jax.targets.folders import TARGETS, convert_folder, load_embedding, load_target, read_config, read_facts, save_target

__all__ = ["TARGETS", "convert_folder", "load_embedding", "load_target", "read_config", "read_facts", "save_target"]
