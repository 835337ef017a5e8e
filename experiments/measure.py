"""What is measured of a trained head: acceptance, exactness, and tokens per second."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.base import Measurement
from experiments.text_acceptance import expected_acceptance
from peagle_jax.bench.answer_statistics import repeated_share
from peagle_jax.bench.exact import compare
from peagle_jax.bench.suite import run_suite
from peagle_jax.decode.generate import generate
from peagle_jax.types import Model

Prompt = dict  # a row of the prompts stage: kind, module, prompt_token_ids
Text = dict  # a row of the continuations stage: those, and output_token_ids


def measure(
    target: Model, head: Model, prompts: Sequence[Prompt], measurement: Measurement, method: str
) -> tuple[dict, dict[str, int]]:
    """Decodes all prompts with a head, and greedy ones without it too.

    Args:
      prompts: of the measurement's length.
      measurement: without None.
      method: "peagle", "eagle3" or "eagle".

    Returns:
      The measurement's part of a row, and in how many prompts the greedy text was plain decoding's
      (same, near_ties, different); zeros for a sampled one.
    """
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    options = {
        "max_new_tokens": measurement.max_new_tokens,
        "stop_ids": (),
        "temperature": measurement.temperature,
        "seed": list(range(len(ids))),
    }
    answers = generate(
        target,
        head,
        ids,
        k=measurement.k,
        method=method,
        sample_drafts=measurement.sample_drafts,
        **options,
    )
    exact = {"same": 0, "near_ties": 0, "different": 0}
    if measurement.temperature == 0:
        plain = generate(target, None, ids, **options)
        texts, plain_texts = ([a.output_token_ids for a in some] for some in (answers, plain))
        comparison = compare(target, ids, texts, plain_texts)
        exact = {name: getattr(comparison, name) for name in exact}
    counts = [
        {"num_drafts": a.num_drafts, "num_accepted_per_pos": a.num_accepted_per_pos}
        for a in answers
    ]
    return _row_of(measurement, prompts, counts, [a.output_token_ids for a in answers]), exact


def measure_on_text(
    target: Model, head: Model, texts: Sequence[Text], measurement: Measurement
) -> dict:
    """Expected acceptance of a head along what the target wrote without it.

    Args:
      texts: of the measurement's lengths and temperature.
      measurement: without None.

    Returns:
      The measurement's part of a row.
    """
    written = [[*text["prompt_token_ids"], *text["output_token_ids"]] for text in texts]
    assert measurement.k is not None and measurement.prompt_tokens is not None
    counts = expected_acceptance(
        target,
        head,
        written,
        measurement.prompt_tokens,
        measurement.k,
        measurement.temperature or 0.0,
        bool(measurement.sample_drafts),
        measurement.drafts_known,
    )
    return _row_of(measurement, texts, counts, [text["output_token_ids"] for text in texts])


def _row_of(
    measurement: Measurement,
    prompts: Sequence[Prompt],
    counts: Sequence[dict],
    outputs: Sequence[Sequence[int]],
) -> dict:
    num_drafts = sum(count["num_drafts"] for count in counts)
    num_accepted = np.sum([count["num_accepted_per_pos"] for count in counts], axis=0)
    lengths = [1 + sum(c["num_accepted_per_pos"]) / c["num_drafts"] for c in counts]
    by_prompt = [
        {"kind": prompt["kind"], "module": prompt["module"], **count}
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    return dataclasses.asdict(measurement) | {
        "prompts": by_prompt,
        "acceptance_length": float(1 + num_accepted.sum() / num_drafts),
        "mean_acceptance_length": float(np.mean(lengths)),
        "accepted_per_position": np.round(num_accepted / num_drafts, 5).tolist(),
        "repeated_4grams": repeated_share(outputs),
    }


def measure_speed(
    target: Model,
    head: Model,
    prompts: Sequence[Prompt],
    measurement: Measurement,
    method: str,
    repeats: int,
) -> dict:
    """Greedy decoding of one prompt at a time, plain and speculative in turns.

    Args:
      prompts: those that are timed.
      measurement: whose K and length are taken.
      method: "peagle", "eagle3" or "eagle".
      repeats: rounds; numbers are medians over them.
    """
    suite = run_suite(
        target,
        {method: head},
        [prompt["prompt_token_ids"] for prompt in prompts],
        ks=[measurement.k],
        batch_sizes=[1],
        max_new_tokens=measurement.max_new_tokens,
        repeats=repeats,
        ignore_eos=True,
        on_record=lambda record: None,
    )
    plain, speculative = suite.records
    return {
        "k": measurement.k,
        "tokens_per_second": speculative["tokens_per_second"],
        "plain_tokens_per_second": plain["tokens_per_second"],
        "speedup": speculative["speedup"],
        "draft_seconds": speculative["draft_seconds"],
        "verify_seconds": speculative["verify_seconds"],
    }
