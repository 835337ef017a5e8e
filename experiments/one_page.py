"""The heads of several experiments in one table, for docs/late_positions.md.

They were trained on one target and measured on the same texts, so that they can be compared.
"""

import statistics as stdlib
from collections.abc import Mapping, Sequence

from experiments.statistics import among_several, compare, interval, per_position
from experiments.tables import Table

# (name in the table, experiment, variant); the first is what the others are shown beside
HEADS = (
    ("P-EAGLE", "sequential_head", "P-EAGLE"),
    ("trained for twice the steps", "warm_start", "twice the steps"),
    ("four layers", "one_forward", "twice the layers"),
    ("Markov head, rank 32", "sequential_head", "with a Markov head"),
    ("Markov head, rank 128", "sequential_head", "with a Markov head of rank 128"),
    ("four layers, Markov head, rank 32", "one_forward", "twice the layers and a Markov head"),
    ("RNN head, rank 128", "sequential_head", "with an RNN head of rank 128"),
    ("drafts known (a bound)", "one_forward", "drafts known (a bound)"),
    ("EAGLE-3, two layers", "sequential_head", "EAGLE-3"),
    ("EAGLE-3, four layers", "one_forward", "EAGLE-3, twice the layers"),
)
# that head of each experiment, trained again with other code: a head is compared with its own
REFERENCES = {
    "sequential_head": "P-EAGLE",
    "warm_start": "target's last layer",
    "one_forward": "P-EAGLE",
}
LARGEST_P = 0.005  # after Holm's correction: the page says so of all
MARKER = "heads of one target"


def heads_table(rows: Sequence[Mapping]) -> Table:
    """A line for each of HEADS.

    Args:
      rows: of one budget; of the same experiment, variant and seed one.

    Raises:
      ValueError: one of them has no rows, two are of different targets or texts, or a difference is
        not as sure as the page says.
    """
    of: dict[tuple[str, str], list[Mapping]] = {}
    for row in rows:
        of.setdefault((row["experiment"], row["variant"]), []).append(row)
    wanted = [(experiment, variant) for _, experiment, variant in HEADS]
    references = list(REFERENCES.items())
    if missing := [
        f"{variant} ({name})" for name, variant in wanted + references if (name, variant) not in of
    ]:
        raise ValueError(f"there are no rows of {', '.join(dict.fromkeys(missing))}")
    runs = [of[key] for key in wanted]
    targets = {row["target_digest"] for key in wanted + references for row in of[key]}
    if len(targets) > 1:
        raise ValueError(f"rows are of {len(targets)} targets")
    compared = among_several(
        [
            compare(group, of[experiment, REFERENCES[experiment]])
            for (_, experiment, _), group in zip(HEADS[1:], runs[1:], strict=True)
        ]
    )
    if any(one.p_holm is None or one.p_holm > LARGEST_P for one in compared):
        raise ValueError(f"a difference has p above {LARGEST_P}")
    flops = stdlib.median(row["train_flops"] for row in runs[0])
    head = ["head", "parameters", "arithmetic of its training", "acceptance length (95 %)"]
    table = [[*head, "over P-EAGLE", "2nd draft, %", "7th draft, %"]]
    for (name, *_), group, against in zip(HEADS, runs, [None, *compared], strict=True):
        length = interval(group)
        chances = per_position(group, chances=True)
        table.append(
            [
                name,
                f"{group[0]['num_parameters'] / 1e6:.2f}M",
                f"{stdlib.median(row['train_flops'] for row in group) / flops:.2f}",
                f"{length.value:.2f} ({length.low:.2f} to {length.high:.2f})",
                "" if against is None else f"{against.difference:+.2f}",
                f"{100 * chances[1]:.0f}",
                f"{100 * chances[6]:.0f}",
            ]
        )
    return table
