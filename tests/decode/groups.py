"""What is decoded on one device and on groups of simulated ones, by test_device_groups.py."""

import numpy as np
import tiny

from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.requests import Request
from peagle_jax.targets.sharding import DATA, MODEL

MAX_BATCH = 6
# sizes of the mesh's axes, and options of an engine
CASES = {
    "four": ({DATA: 4, MODEL: 1}, {}),
    "two_by_two": ({DATA: 2, MODEL: 2}, {"num_tree_nodes": 7}),
}


def models():
    """Target, drafter and the head's parameters."""
    target, head = tiny.pair("peagle", context=640)
    return target, make_drafter(head, 3, "peagle"), head.params


def requests(count: int = 14, seed: int = 3) -> list[Request]:
    """Requests of any length, greedy and sampled."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            prompt=rng.integers(0, 40, rng.integers(1, 30)).tolist(),
            max_new_tokens=int(rng.integers(1, 40)),
            temperature=0.8 if i % 3 == 1 else 0.0,
            seed=1000 + i,
            stop_ids=(),
        )
        for i in range(count)
    ]
