"""P-EAGLE (parallel-drafting EAGLE-3 speculative decoding, arXiv:2602.01469) in JAX and Flax.

    head = peagle_jax.load_drafter("HEAD")
    target = peagle_jax.load_target("TARGET", taps=head.config.taps)
    answers = peagle_jax.generate(target, head, [[1, 2, 3]], k=7, max_new_tokens=64)

The names below are the public ones; they are imported when first used, so that `import peagle_jax` is quick.
"""

import importlib

_PUBLIC = {
    "load_target": "checkpoints.target_io",
    "save_target": "checkpoints.target_io",
    "load_drafter": "checkpoints.runs",
    "save_drafter": "checkpoints.head_io",
    "HeadConfig": "draft.head",
    "DraftHead": "draft.head",
    "generate": "decode.generate",
    "Generation": "decode.generate",
    "acceptance_length": "decode.generate",
    "Drafter": "decode.drafters",
    "CodConfig": "train.cod",
    "cod_sample": "train.cod",
    "load_run": "train.config",
    "train_lm": "train.pretrain",
    "train_head": "pipelines.train_head",
    "convert": "checkpoints.convert",
    "Model": "types",
    "InputError": "types",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'peagle_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"peagle_jax.{_PUBLIC[name]}"), name)


def __dir__():
    return __all__
