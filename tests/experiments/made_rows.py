"""Experiments, and rows as they write them, with acceptance that is known because it was drawn
here."""

import json

import numpy as np

from experiments.base import Experiment, Measurement, Variant
from experiments.texts import KINDS, STRUCTURED

PROMPTS = 24


def made(
    rng,
    experiment,
    variant,
    seed,
    *,
    k=4,
    chance=0.5,
    seed_effect=0.0,
    prompts=PROMPTS,
    effects=None,
    more_k=(),
    **replaced,
) -> dict:
    """One run. `chance`: that a draft is accepted after those before it; more on structured text.

    Args:
      effects: of each prompt, added to the chance; the same array for all runs makes prompts easy
        or hard.
    """
    effects = np.zeros(prompts) if effects is None else effects
    measurements = [
        {
            "k": one,
            "temperature": float(i > 1),
            "prompt_tokens": 33,
            "max_new_tokens": 65,
            "prompts": _prompts(rng, one, chance + seed_effect, effects),
            "acceptance_length": 0.0,
            "mean_acceptance_length": 0.0,
            "accepted_per_position": [],
            "repeated_4grams": 0.2,
        }
        for i, one in enumerate((k, *more_k))
    ]

    def rise(s):
        return 1 - float(np.exp(-s / 800))

    row = {
        "experiment": experiment,
        "variant": variant,
        "seed": seed,
        "budget": "small",
        "key": "3fa9",
        "changes": [f"placeholder.hidden: shared -> {variant}"],
        "config": {},
        "time": f"2026-11-2{seed}T10:00:00Z",
        "commit": "abc1234",
        "dirty": False,
        "command": f"python -m experiments.run {experiment} --seeds 3",
        "device": "AMD EPYC, 1 core",
        "python": "3.11.9",
        "peagle_jax": "0.1.0",
        "jax": "0.10.2",
        "flax": "0.12.8",
        "stages": {"target": "t", "hidden_states": "h"},
        "steps": 3000,
        "train_seconds": 240.1,
        "train_tokens_per_second": 9000.0,
        "num_parameters": 700_000,
        "train_flops": 1.2e13,
        "curve": [
            {
                "step": s,
                "seconds": s / 12,
                "loss": 3 - 2 * rise(s) + float(rng.normal(0, 0.03)),
                "accuracy": [chance * rise(s), 0.6 * chance * rise(s), 0.3 * chance * rise(s)],
            }
            for s in range(100, 3001, 100)
        ],
        "measurements": measurements,
        "speed": {
            "k": k,
            "tokens_per_second": 900.0,
            "plain_tokens_per_second": 700.0,
            "speedup": 1.29,
        },
        "exact": {"same": prompts, "near_ties": 0, "different": 0},
        "export": "as it is",
    }
    return row | replaced


def _prompts(rng, k, chance, effects) -> list[dict]:
    out = []
    for i, effect in enumerate(effects):
        kind = KINDS[i % len(KINDS)]
        p = float(np.clip(chance + effect + 0.1 * (kind in STRUCTURED), 0.02, 0.98))
        drafts = int(rng.integers(20, 40))
        lengths = np.minimum(rng.geometric(1 - p, drafts) - 1, k)
        out.append(
            {
                "kind": kind,
                "num_drafts": drafts,
                "num_accepted_per_pos": [int((lengths > j).sum()) for j in range(k)],
            }
        )
    return out


def write(folder, rows) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        with (folder / f"{row['experiment']}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def experiment(name, variants, reference, *, kind="bars", **replaced) -> Experiment:
    by_name = {
        v: Variant(
            measurements=(Measurement(k=4),),
            x=x,
            method="eagle3" if "eagle" in v else "peagle",
        )
        for v, x in variants.items()
    }
    words = {
        "question": f"Does {name} matter?",
        "expects": "A little <more>.",
        "axis": "design",
        "paper": "Table 9 & text",
    } | replaced
    return Experiment(name=name, kind=kind, reference=reference, variants=by_name, **words)


def runs(name, chances, *, seeds=3, **options) -> list[dict]:
    rng = np.random.default_rng(0)
    effects = rng.normal(0, 0.05, 24)
    return [
        made(rng, name, v, s, chance=c, effects=effects, **options)
        for v, c in chances.items()
        for s in range(seeds)
    ]


IDENTITY = experiment(
    "hidden", {"shared": None, "good": None, "same": None, "later": None}, "shared"
)
ROWS = runs("hidden", {"shared": 0.4, "good": 0.6, "same": 0.4})
