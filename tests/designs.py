"""What every placeholder design is, written a second time in NumPy, from its description alone.

Nothing here comes from peagle_jax/draft/placeholders.py.
"""

import numpy as np

HIDDEN_DESIGNS = (
    "shared",
    "shared_fused",
    "per_depth",
    "shared_depth",
    "low_rank",
    "last_feature",
    "gated",
    "mean_feature",
    "zero",
    "frozen_random",
)
TOKEN_DESIGNS = ("mask", "frozen", "last_token", "zero", "mean")
# each design once; both sides are changed together where that tells as much
OTHER_TOKENS = {"zero": "last_token", "frozen_random": "zero"}  # all others with "mask"
PAIRS = [(hidden, OTHER_TOKENS.get(hidden, "mask")) for hidden in HIDDEN_DESIGNS] + [
    ("shared", "frozen"),
    ("shared", "mean"),
]
ALL = dict([(f"{h}-{t}", {"placeholder_hidden": h, "placeholder_token": t}) for h, t in PAIRS])


def fused(head, depth: int, last: np.ndarray, fuse) -> np.ndarray:
    """Hidden side of the placeholder at `depth`.

    Args:
      last: fused hidden state of the real row before it.
      fuse: [1, A] -> [1, D].
    """
    params, name = head.params, head.config.placeholder_hidden
    own = {key: np.asarray(value) for key, value in params.get("placeholder", {}).items()}

    def fuse_one(aux_hidden_states):
        return np.asarray(fuse(np.asarray(aux_hidden_states)[None]))[0]

    # drafting deeper than trained repeats the last depth
    number = min(depth, head.config.num_depths - 1) - 1
    if name == "shared_fused":
        return own["fused"]
    if name == "per_depth":
        return fuse_one(own["table"][number])
    if name == "last_feature":
        return last
    if name == "zero":
        return np.zeros_like(last)
    shared = np.asarray(params["mask_hidden"])
    if name == "low_rank":
        return fuse_one(
            shared + sum(own["codes"][number][r] * own["directions"][r] for r in range(4))
        )
    if name == "shared_depth":
        return fuse_one(shared) + own["depth"][number]
    if name == "gated":
        share = 1 / (1 + np.exp(-own["gate"]))
        return share * last + (1 - share) * fuse_one(shared)
    return fuse_one(shared)


def embedding(head, last: np.ndarray) -> np.ndarray:
    """Of a placeholder's token, behind a real row whose token's embedding is `last`."""
    name, table = head.config.placeholder_token, np.asarray(head.params["embed"]["table"])
    if name == "mask":
        return table[head.config.mask_token]
    if name == "last_token":
        return last
    if name == "zero":
        return np.zeros_like(last)
    return np.asarray(head.params["placeholder"]["token"])
