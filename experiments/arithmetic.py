"""How much arithmetic the training of a head takes, counted by its matrix products."""

import dataclasses

from peagle_jax.train.config import HeadRun, PeagleRun


def training_flops(run: HeadRun) -> float:
    """Of all steps, every row real: a backward pass counts twice its forward, of weights that are not trained and of inputs that
    need no gradient once; the loss forms logits twice (recomputation).

    The target's own forward is not counted, since its features are stored; its logits are, since the loss forms them. The run says
    every size of its head, and the head is as wide as its target.
    """
    head = run.head
    qkv, attention = head.head_dim * (head.heads + 2 * head.kv_heads), head.heads * head.head_dim

    def layer(width):
        return width * qkv + attention * head.dim + 3 * head.dim * head.mlp_dim

    layers = layer(2 * head.dim) + (head.layers - 1) * layer(head.dim)
    fusion, output = (
        len(head.aux_hidden_state_layers) * head.dim * head.dim,
        head.dim * head.draft_vocab,
    )  # the target's output has that size too
    total = 0.0
    for step_depths, steps in _depths(run):
        n = run.data.seq_len - 1
        if isinstance(run, PeagleRun):
            rows = n + dataclasses.replace(run.cod, num_depths=step_depths).capacity(n)
            fused = n
        else:
            rows, fused = n * step_depths, n
        scores = (
            2 * rows * (n / 2) * attention * head.layers
        )  # q.k and weights.v over a causal prefix, half of it on average
        logits = (
            rows * (2 + 2 + 1 + run.train_lm_head) * output
        )  # the head's and the target's twice; backward
        total += (
            steps
            * run.data.batch_size
            * 2
            * (3 * (rows * layers + scores) + 2 * fused * fusion + logits)
        )
    return total


def parameters(run: HeadRun) -> int:
    """Of the head, about: norms are not counted."""
    head = run.head
    qkv, attention = head.head_dim * (head.heads + 2 * head.kv_heads), head.heads * head.head_dim
    layers = (
        head.layers * (head.dim * qkv + attention * head.dim + 3 * head.dim * head.mlp_dim)
        + head.dim * qkv
    )
    return (
        layers
        + len(head.aux_hidden_state_layers) * head.dim * head.dim
        + 2 * head.dim * head.draft_vocab
    )


def _depths(run: HeadRun) -> list[tuple[int, int]]:
    """(depths, steps trained with so many)."""
    starts = [0, *(g.until for g in run.depth_schedule), run.optimizer.steps]
    num_depths = [*(g.num_depths for g in run.depth_schedule), run.num_depths]
    return [
        (d, end - begin) for d, begin, end in zip(num_depths, starts[:-1], starts[1:], strict=True)
    ]
