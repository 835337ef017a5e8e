"""All experiments, in the order in which they are reported."""

from collections.abc import Sequence
from types import ModuleType

from experiments.base import Experiment
from experiments.questions import (
    against_eagle3,
    aux_layers,
    block_attention,
    cod_sampling,
    context_injection,
    context_length,
    data_amount,
    depth_weights,
    embeddings,
    head_layers,
    hidden_designs,
    layers_and_state,
    losses,
    one_forward,
    regularization,
    sampling,
    sequential_head,
    speculation_depth,
    token_designs,
    true_tokens,
    warm_start,
)

MODULES: tuple[ModuleType, ...] = (
    hidden_designs,
    token_designs,
    block_attention,
    context_injection,
    true_tokens,
    regularization,
    head_layers,
    speculation_depth,
    cod_sampling,
    context_length,
    embeddings,
    losses,
    depth_weights,
    aux_layers,
    data_amount,
    warm_start,
    against_eagle3,
    sequential_head,
    one_forward,
    layers_and_state,
    sampling,
)


def by_name(modules: Sequence[ModuleType]) -> dict[str, Experiment]:
    """The experiments of some files.

    Raises:
      ValueError: a file has the name of another experiment: its rows would be taken for those.
    """
    for module in modules:
        name, file = module.EXPERIMENT.name, module.__name__.rpartition(".")[2]
        if name != file:
            raise ValueError(f"{module.__file__}: must have name={file!r}; got {name!r}")
    return {module.EXPERIMENT.name: module.EXPERIMENT for module in modules}


EXPERIMENTS = by_name(MODULES)
