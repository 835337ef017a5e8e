"""Target models: one file per family, chosen by `model_type` in the checkpoint's config.json."""

from peagle_jax.targets.families import TARGETS, Family, read_config

__all__ = ["TARGETS", "Family", "read_config"]
