"""How much worse does a parallel head draft than an EAGLE-3 head of equal size or equal training?

    python -m experiments.run against_eagle3 --seeds 3

`EAGLE-3` has one layer and as many steps. `EAGLE-3 of equal parameters` has as many layers as
the parallel head; `EAGLE-3 of equal seconds` too, in the steps that the parallel head's training
time is enough for. `EAGLE-3 of equal FLOPs` has one layer, and steps until its training took the
parallel head's arithmetic (train_flops of the rows). EAGLE-1 heads learn one step, of the target's
final hidden state: `EAGLE-1 of equal parameters` has as many layers as the parallel head, and
`EAGLE-1 of equal FLOPs` has those and its arithmetic, in several times as many steps.
Expects: EAGLE-3 drafts later positions better, since it sees the tokens that it drafted; the
first position is equal at equal layers. EAGLE-1 drafts its first token as well and later ones worse
than EAGLE-3, since it never learned from its own hidden states.
Result: e8fd383, 2026-11-26, 3 seeds, budget sampled: P-EAGLE 2.38, EAGLE-3 3.15, 3.53 of equal
parameters, 3.06 of equal seconds, 3.11 of equal FLOPs; EAGLE-1 3.26 of equal parameters, 3.99 of
equal FLOPs. docs/late_positions_tables.md has more.
"""

from experiments.arithmetic import training_flops
from experiments.base import Experiment, Measurement, Variant
from experiments.base_run import as_eagle, as_eagle3, as_eagle3_of_equal_layers, with_steps
from peagle_jax.pipelines.budgets import lm_shape
from peagle_jax.train.config import EagleRun, HeadRun, PeagleRun

# Seconds of a step beside the parallel head's, on one core: the fastest of three trainings each of
# an EAGLE-3 head of two layers (3,176 tokens/s, commit 7149b82) and of the base (5,019, 4722e37).
# Other pairs of trainings on this shared machine give 1.0 to 1.6: these are the fewest steps.
EAGLE3_SECONDS = 1.58

GREEDY_AND_SAMPLED = (Measurement(), Measurement(temperature=1.0))


def of_equal_seconds(base: PeagleRun) -> HeadRun:
    return with_steps(as_eagle3_of_equal_layers(base), round(base.optimizer.steps / EAGLE3_SECONDS))


def of_equal_flops(base: PeagleRun) -> HeadRun:
    return _with_flops_of(base, as_eagle3(base))


def eagle_of_equal_parameters(base: PeagleRun) -> EagleRun:
    return as_eagle(base, layers=base.head.layers)


def eagle_of_equal_flops(base: PeagleRun) -> HeadRun:
    return _with_flops_of(base, eagle_of_equal_parameters(base))


def _with_flops_of(base: PeagleRun, run: HeadRun) -> HeadRun:
    """The run with as many steps as the base's arithmetic is enough for."""
    head = base.head
    # of the target only the width and the vocabulary are read, which are the base head's
    sizes = (head.draft_vocab, 1, head.dim, head.mlp_dim, head.heads, head.kv_heads, head.head_dim)
    target = lm_shape(*sizes, base.data.seq_len)
    ratio = training_flops(base, target) / training_flops(run, target)
    return with_steps(run, round(base.optimizer.steps * ratio))


EXPERIMENT = Experiment(
    name="against_eagle3",
    question="How much worse does a parallel head draft than an EAGLE-3 head of equal size or "
    "equal training?",
    expects="EAGLE-3 drafts later positions better; the first position is equal at equal layers.",
    axis="head",
    kind="bars",
    reference="P-EAGLE",
    variants={
        "P-EAGLE": Variant(measurements=GREEDY_AND_SAMPLED),
        "EAGLE-3": Variant(run=as_eagle3, method="eagle3", measurements=GREEDY_AND_SAMPLED),
        "EAGLE-3 of equal parameters": Variant(
            run=as_eagle3_of_equal_layers, method="eagle3", measurements=GREEDY_AND_SAMPLED
        ),
        "EAGLE-3 of equal seconds": Variant(
            run=of_equal_seconds, method="eagle3", measurements=GREEDY_AND_SAMPLED
        ),
        "EAGLE-3 of equal FLOPs": Variant(
            run=of_equal_flops, method="eagle3", measurements=GREEDY_AND_SAMPLED
        ),
        "EAGLE-1 of equal parameters": Variant(
            run=eagle_of_equal_parameters, method="eagle", measurements=GREEDY_AND_SAMPLED
        ),
        "EAGLE-1 of equal FLOPs": Variant(
            run=eagle_of_equal_flops, method="eagle", measurements=GREEDY_AND_SAMPLED
        ),
    },
    paper="Acceptance per position on HumanEval at K = 8: P-EAGLE 63 38 23 14 9 5 3 2 %, "
    "EAGLE-3 71 49 32 21 14 9 5 3 % (vLLM #32628).",
)
