"""P-EAGLE in JAX and Flax: speculative decoding with draft heads that draft in parallel.

A draft head proposes several tokens, the target model verifies all of them in one forward, and the
text stays the target's own (P-EAGLE: arXiv:2602.01469; EAGLE-3: arXiv:2503.01840). This package
trains such heads, decodes with them, and exports them for vLLM. The target and the two heads that
come with the package decode without a download:

    from pathlib import Path

    import peagle_jax
    from transformers import AutoTokenizer

    models = Path(peagle_jax.__file__).parent / "assets"
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    target, head = peagle_jax.load_pair(models / "target", models / "peagle")
    prompts = tokenizer(["def main():", "import os"])["input_ids"]
    answers = peagle_jax.generate(target, head, prompts, k=5, max_new_tokens=64)
    print(tokenizer.decode(answers[0].output_token_ids))
    print(peagle_jax.acceptance_length(answers), "tokens per forward of the target")

Models and checkpoints:
  load_pair          a target and its draft head, loaded so that they fit each other
  load_target        a target alone: a Hugging Face folder or id
  load_drafter       a draft head alone: a folder, a Hugging Face id or a training run
  save_target        writes a target's folder, for transformers and vLLM
  save_drafter       writes a head's folder, for vLLM, speculators or this package
  convert            converts heads, training runs and targets between formats
  Model              what the loaders return: a configuration and a dict of arrays
  HeadConfig         the configuration of a draft head
  DraftHead          the draft head as a Flax module

Decoding:
  generate           decodes prompts with a target, alone or with a draft head
  Generation         one answer, with the counters of speculative decoding
  acceptance_length  tokens per forward of the target, over several answers
  make_drafter       a drafter that runs a draft head, for an engine
  make_engine        decodes requests that come and go: one engine, or one for each core
  Engine             continuous batching and streaming, in one thread
  AsyncEngine        the same for asyncio
  Request            what an engine is asked
  Output             what an engine answers, whole or in parts
  Drafter            the interface of anything that proposes tokens

Training:
  load_run           reads a YAML recipe
  train_head         trains a P-EAGLE, EAGLE-3 or EAGLE-1 head as a recipe says
  train_lm           trains a small target as a recipe says
  CodConfig          the settings of COD sampling
  cod_sample         chooses which elements of a row are trained on

Errors:
  InputError         a file or a value that cannot be used, with what to do about it

The command line has the same functions: `peagle --help`. Names are imported when they are first
used, so that `import peagle_jax` is quick. docs/glossary.md explains the words.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle_jax.checkpoints.convert import convert
    from peagle_jax.checkpoints.head_writing import save_drafter
    from peagle_jax.checkpoints.pair import load_pair
    from peagle_jax.checkpoints.runs import load_drafter
    from peagle_jax.checkpoints.target_io import load_target, save_target
    from peagle_jax.decode.drafters import Drafter
    from peagle_jax.decode.engine import Engine
    from peagle_jax.decode.generate import generate, make_drafter
    from peagle_jax.decode.parallel_engine import make_engine
    from peagle_jax.decode.requests import Generation, Output, Request, acceptance_length
    from peagle_jax.decode.serving import AsyncEngine
    from peagle_jax.draft.head import DraftHead, HeadConfig
    from peagle_jax.pipelines.train_head import train_head
    from peagle_jax.train.cod import CodConfig, cod_sample
    from peagle_jax.train.config import load_run
    from peagle_jax.train.pretrain import train_lm
    from peagle_jax.types import InputError, Model

    __version__: str

_MODULES = {
    "AsyncEngine": "decode.serving",
    "CodConfig": "train.cod",
    "DraftHead": "draft.head",
    "Drafter": "decode.drafters",
    "Engine": "decode.engine",
    "Generation": "decode.requests",
    "HeadConfig": "draft.head",
    "InputError": "types",
    "Model": "types",
    "Output": "decode.requests",
    "Request": "decode.requests",
    "acceptance_length": "decode.requests",
    "cod_sample": "train.cod",
    "convert": "checkpoints.convert",
    "generate": "decode.generate",
    "load_drafter": "checkpoints.runs",
    "load_pair": "checkpoints.pair",
    "load_run": "train.config",
    "load_target": "checkpoints.target_io",
    "make_drafter": "decode.generate",
    "make_engine": "decode.parallel_engine",
    "save_drafter": "checkpoints.head_writing",
    "save_target": "checkpoints.target_io",
    "train_head": "pipelines.train_head",
    "train_lm": "train.pretrain",
}
__all__ = [  # type checkers read only a list that is written out
    "AsyncEngine",
    "CodConfig",
    "DraftHead",
    "Drafter",
    "Engine",
    "Generation",
    "HeadConfig",
    "InputError",
    "Model",
    "Output",
    "Request",
    "acceptance_length",
    "cod_sample",
    "convert",
    "generate",
    "load_drafter",
    "load_pair",
    "load_run",
    "load_target",
    "make_drafter",
    "make_engine",
    "save_drafter",
    "save_target",
    "train_head",
    "train_lm",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("peagle-jax")
        except PackageNotFoundError:  # a checkout that is not installed
            return "not installed"
    if name not in _MODULES:
        raise AttributeError(f"module 'peagle_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"peagle_jax.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, for `dir` and completion."""
    return [*__all__, "__version__"]
