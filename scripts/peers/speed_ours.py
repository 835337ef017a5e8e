"""peagle_jax as one of the engines of compare_speed.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from line_worker import batches, serve

from peagle_jax import (
    Generation,
    Request,
    acceptance_length,
    generate,
    load_pair,
    load_target,
    make_engine,
)
from peagle_jax.cli.libraries import configure_libraries
from peagle_jax.decode.base_engine import BaseEngine
from peagle_jax.decode.generate import make_drafter


def start(job: dict):
    """Loads the models of a job; greedy decoding."""
    configure_libraries()
    dtype = jnp.dtype(job["dtype"])
    if job["drafter"] is None:
        target, head = load_target(job["target"], dtype=dtype), None
    else:
        target, head = load_pair(job["target"], job["drafter"], dtype=dtype)
    k = job["k"] or None
    drafter = make_drafter(head, k, job["method"]) if head is not None and k else None
    draft_params = None if head is None else head.params
    engines: dict[int, BaseEngine] = {}  # that stream, by batch size

    def stream(prompts: list[list[int]], request: dict) -> list[Generation]:
        size = request["batch_size"]
        if size not in engines:
            engines[size] = make_engine(target, drafter, draft_params, max_batch=size)
        return stream_answers(engines[size], prompts, request["max_new_tokens"])

    def decode(request: dict) -> dict:
        answers = []
        for prompts in batches(request):
            if request["stream"]:
                answers += stream(prompts, request)
                continue
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


def stream_answers(
    engine: BaseEngine, prompts: list[list[int]], max_new_tokens: int
) -> list[Generation]:
    """The answers to prompts, with the tokens that the steps handed out."""
    asked = [
        Request(prompt=prompt, max_new_tokens=max_new_tokens, stop_ids=(), stream=True)
        for prompt in prompts
    ]
    numbers = [engine.add(request) for request in asked]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    answers: dict[int, Generation] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            if output.answer is not None:
                answers[output.request_id] = output.answer
    return [dataclasses.replace(answers[n], output_token_ids=tokens[n]) for n in numbers]


if __name__ == "__main__":
    serve(start, "peagle_jax")
