"""All experiments, in the order in which they are reported."""

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
    losses,
    regularization,
    sampling,
    sequential_head,
    speculation_depth,
    token_designs,
    true_tokens,
    warm_start,
)

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
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
        sampling,
    )
}
