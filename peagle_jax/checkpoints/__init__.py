"""Checkpoints on disk: draft heads, targets and training runs, read, written and converted.

A draft head's folder is a config.json with safetensors weights, in one of four checkpoint formats
(docs/checkpoints.md describes them). Whatever the format, it becomes a `HeadState`, a configuration
with tensors that are read when they are needed, and from there a model, a folder or a training run.

Loading for use:
  pair.py                  `load_pair`: a target and its draft head, loaded so that they fit
  target_io.py             targets: `load_target`, `save_target`, conversion of a target's folder
  runs.py                  training runs of heads, and `load_drafter`, which opens any head

Draft heads in detail:
  head_state.py            `HeadState`: a head's configuration and tensors, outside any model
  head_reading.py          a folder in any format -> HeadState -> model
  head_writing.py          model -> HeadState -> a folder for vLLM or speculators (`save_drafter`)
  checkpoint_format.py     whose format a config.json is in
  config_reading.py        config.json in any format -> `HeadConfig`
  config_writing.py        `HeadConfig` -> config.json, and the flag with which vLLM serves it
  param_mapping.py         names of tensors in folders <-> paths of our parameters
  export_placeholders.py   placeholder designs rewritten into the only one that vLLM knows
  model_card.py            README.md of an exported head
  serving_checks.py        what vLLM would refuse or misread of a folder as it is

Everything together:
  convert.py               `convert`: one kind of checkpoint into another
  inspect.py               `describe`: what a folder is, for `peagle inspect`
  orbax_io.py              training state on disk, by Orbax
"""
