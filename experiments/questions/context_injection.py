"""Should every layer read the target's hidden states, or only the first?

    python -m experiments.run context_injection --seeds 3 --budget sampled

An EAGLE-3 head reads embeddings and fused hidden states in its first layer. `injected` makes the
keys and values of committed tokens of them in every layer behind the first, too, behind norms of
that layer; placeholders keep keys and values of their own. `both` has bidirectional placeholders as
well. DFlash's drafters are of this kind, and differ: they inject into all layers, hidden states
alone, and the newest token stands in the block with keys and values of its own. A head of two
layers has two norms more.
Expects: a small gain at late positions: a placeholder's second layer then reads what the target
knows, and not what one layer of a small head made of it.
Result: e8fd383, 2026-11-26, 3 seeds, budget sampled: within noise, 2.40 and 2.39 against 2.38.
docs/late_positions_tables.md has more.
"""

import dataclasses

from experiments.base import Experiment, Variant
from experiments.base_run import with_placeholder
from peagle_jax.train.config import PeagleRun


def with_design(**design: str) -> Variant:
    def run(base: PeagleRun) -> PeagleRun:
        head = dataclasses.replace(base.head, layers=max(2, base.head.layers))
        return with_placeholder(**design)(dataclasses.replace(base, head=head))

    return Variant(run=run)


EXPERIMENT = Experiment(
    name="context_injection",
    question="Should every layer read the target's hidden states, or only the first?",
    expects="Injection gains a little at late positions.",
    axis="keys and values of committed tokens",
    kind="bars",
    reference="layers",
    variants={
        "layers": with_design(context="layers"),
        "injected": with_design(context="injected"),
        "both": with_design(context="injected", attention="bidirectional"),
    },
    paper="DFlash gives every layer of its drafter keys and values of the target's hidden states "
    "(speculators 0.9, models/dflash). Nobody has published it for P-EAGLE.",
)
