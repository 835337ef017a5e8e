"""Result rows and metrics with made-up numbers."""

ORIGIN = {
    "time": "t",
    "device": "d<",
    "python": "3",
    "jax": "1",
    "flax": "2",
    "commit": "c",
    "dirty": False,
    "command": "peagle demo",
}


def row(method, k, batch_size=1, temperature=0.0, speedup=1.0, **more):
    """A result row of `bench.suite`; `more` replaces keys or adds some."""
    made = ORIGIN | {
        "method": method,
        "k": k,
        "batch_size": batch_size,
        "temperature": temperature,
        "num_prompts": 4,
        "max_new_tokens": 8,
        "speedup": speedup,
        "tokens_per_second": 100 * speedup,
        "step_seconds": 0.004 + 0.001 * k,
        "repeated_4grams": 0.25,
        "acceptance_length": 1 + 0.3 * k if k else None,
        "accepted_per_position": [0.3] * k,
    }
    made["break_even"] = made["acceptance_length"] / speedup if k else 1.0
    if temperature == 0:
        made |= {"draft_seconds": 0.001 if k else 0.0, "verify_seconds": 0.003}
        if k:
            made |= {"lossless": True, "near_ties": 0, "different": 0}
    return made | more


ROWS = [
    row("none", 0),
    row("eagle3", 1, speedup=1.2),
    row("eagle3", 3, speedup=1.1),
    row("peagle", 1, speedup=1.0),
    row("peagle", 3, speedup=1.4),
    row("none", 0, batch_size=8),
    row("eagle3", 3, batch_size=8, speedup=0.9),
    row("peagle", 3, batch_size=8, speedup=0.8),
    row("none", 0, 8, 1.0),
    row("peagle", 3, 8, 1.0),
]


def eval_row(seconds, acceptance_length):
    """A row of a training run's metrics with an evaluation."""
    return {
        "step": 5,
        "seconds": seconds,
        "acceptance_length": acceptance_length,
        "accepted_per_position": [0.3, 0.1, 0.0, 0.0],
    }


CURVES = {"peagle": [eval_row(9.0, 1.5)]}
FRESH = [
    {"step": step, "seconds": step, "loss": 3.0 / step, "accuracy": [0.1 * step, 0.05 * step]}
    for step in (1, 2, 3)
]
