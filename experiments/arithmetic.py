"""How much arithmetic the training of a head takes, counted by its matrix products."""

import dataclasses

from peagle_jax.train.config import EagleRun, HeadRun, HeadShape, LmShape, PeagleRun


def training_flops(run: HeadRun, target: LmShape) -> float:
    """Floating-point operations of all training steps, as if every row were full.

    And as if each placeholder were multiplied: training multiplies those that are the same once.
    A backward pass counts twice its forward, and once for weights that are not trained and for
    inputs that need no gradient. The loss forms logits twice, because it recomputes them. The
    target's own forward is not counted, since its hidden states are stored; its logits are, since
    the loss forms them.

    Args:
      run: whose head is as wide as its target.
      target: what an EAGLE-1 head, whose run does not name them, has of its target.
    """
    head = _sized_head(run, target)
    return sum(
        num_steps * run.data.batch_size * _row_flops(run, head, num_depths)
        for num_depths, num_steps in _depths(run)
    )


def _sized_head(run: HeadRun, target: LmShape) -> HeadShape:
    """The run's head with all of its sizes."""
    dim = target.dim if run.head.dim is None else run.head.dim
    vocab = target.vocab if run.head.draft_vocab is None else run.head.draft_vocab
    return dataclasses.replace(run.head, dim=dim, draft_vocab=vocab)


def _row_flops(run: HeadRun, head: HeadShape, num_depths: int) -> float:
    """Operations of one step on one packed row."""
    num_positions = run.data.seq_len - 1
    if isinstance(run, PeagleRun):
        cod = dataclasses.replace(run.cod, num_depths=num_depths)
        num_elements = num_positions + cod.capacity(num_positions)
    else:
        num_elements = num_positions * num_depths
    # q.k and weights.v over a causal prefix, half of the row on average
    attention_dim = head.heads * head.head_dim
    scores = 2 * num_elements * (num_positions / 2) * attention_dim * head.layers
    layers = _layers_size(run, head)
    # the head's logits and the target's twice, and the backward pass to the hidden states
    logit_products = 2 + 2 + 1 + run.train_lm_head
    logits = num_elements * logit_products * head.dim * head.draft_vocab
    fusion = 2 * num_positions * _fusion_size(run, head)
    # of a Markov head the logits twice, and the backward pass to its weights and its code
    markov = num_elements * (4 * _markov_output_size(run) + 3 * _markov_gate_size(run))
    # a state is read, also twice, for every anchor at every depth but the first, where it is zero
    markov += 4 * num_positions * (num_depths - 1) * _markov_state_size(run)
    return 2 * (3 * (num_elements * layers + scores) + fusion + logits + markov)


def num_parameters(run: HeadRun, target: LmShape) -> int:
    """Parameters of a head, about: norms, biases and placeholders are not counted."""
    head = _sized_head(run, target)
    # the embedding of a Markov head is as large as its output, where the vocabulary is not reduced
    gate = _markov_gate_size(run) + _markov_state_size(run)
    markov = 2 * _markov_output_size(run) + gate
    embeddings = 2 * head.dim * head.draft_vocab
    return _layers_size(run, head) + _fusion_size(run, head) + embeddings + markov


def _markov_output_size(run: HeadRun) -> int:
    """Weights of the matrix that makes a Markov head's bias; 0 without such a head."""
    if not isinstance(run, PeagleRun) or run.markov is None:
        return 0
    return run.markov.rank * run.head.draft_vocab


def _markov_gate_size(run: HeadRun) -> int:
    """Weights between a Markov head's two inputs and its code; 0 of a vanilla one."""
    if not isinstance(run, PeagleRun) or run.markov is None or run.markov.kind == "vanilla":
        return 0
    size = (run.head.dim + run.markov.rank) * run.markov.rank
    return 3 * size if run.markov.kind == "rnn" else size


def _markov_state_size(run: HeadRun) -> int:
    """Weights that read a Markov head's state; 0 of a kind without one."""
    if not isinstance(run, PeagleRun) or run.markov is None or run.markov.kind != "rnn":
        return 0
    return 3 * run.markov.rank**2


def _layers_size(run: HeadRun, head: HeadShape) -> int:
    """Weights of all layers. The first reads embedding and hidden state side by side.

    That of an EAGLE-1 head reads what `fc` makes of the two.
    """
    first = head.dim if isinstance(run, EagleRun) else 2 * head.dim
    return _layer_size(head, first) + (head.layers - 1) * _layer_size(head, head.dim)


def _layer_size(head: HeadShape, input_dim: int) -> int:
    """Weights of one layer's matrices."""
    qkv = input_dim * head.head_dim * (head.heads + 2 * head.kv_heads)
    output = head.heads * head.head_dim * head.dim
    return qkv + output + 3 * head.dim * head.mlp_dim


def _fusion_size(run: HeadRun, head: HeadShape) -> int:
    """Weights of `fc`, over the aux hidden states, or over embedding and hidden state (EAGLE-1)."""
    num_inputs = 2 if isinstance(run, EagleRun) else len(head.aux_hidden_state_layers)
    return num_inputs * head.dim * head.dim


def _depths(run: HeadRun) -> list[tuple[int, int]]:
    """How many depths are trained, and in how many steps, stage by stage."""
    if isinstance(run, EagleRun):
        return [(1, run.optimizer.steps)]
    ends = [*(stage.until for stage in run.depth_schedule), run.optimizer.steps]
    counts = [*(stage.num_depths for stage in run.depth_schedule), run.num_depths]
    starts = [0, *ends[:-1]]
    return [(n, end - start) for n, start, end in zip(counts, starts, ends, strict=True)]
