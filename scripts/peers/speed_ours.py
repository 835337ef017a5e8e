"""peagle_jax as one of the engines of compare_speed.py."""

import jax
import jax.numpy as jnp
import numpy as np
from line_worker import batches, serve

from peagle_jax import acceptance_length, generate, load_pair, load_target
from peagle_jax.cli.libraries import configure_libraries


def start(job: dict):
    """Loads the models of a job; greedy decoding."""
    configure_libraries()
    dtype = jnp.dtype(job["dtype"])
    if job["drafter"] is None:
        target, head = load_target(job["target"], dtype=dtype), None
    else:
        target, head = load_pair(job["target"], job["drafter"], dtype=dtype)
    k = job["k"] or None

    def decode(request: dict) -> dict:
        answers = []
        for prompts in batches(request):
            answers += generate(
                target,
                head,
                prompts,
                k=k,
                max_new_tokens=request["max_new_tokens"],
                stop_ids=(),
                max_batch=request["batch_size"],
            )
        per_position = np.sum([a.num_accepted_per_pos for a in answers], axis=0)
        return {
            "outputs": [a.output_token_ids for a in answers],
            "device": jax.default_backend(),
            "num_drafts": sum(a.num_drafts for a in answers),
            "num_accepted_per_pos": per_position.tolist(),
            "acceptance_length": acceptance_length(answers),
        }

    return decode


if __name__ == "__main__":
    serve(start, "peagle_jax")
