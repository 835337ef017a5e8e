"""Ties, tiny numbers and wide integers: every decoder still writes plain decoding's text."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.checkpoints.target_io import load_target, save_target
from peagle_jax.decode.generate import generate
from peagle_jax.types import InputError, WeightsWarning

PROMPTS = [[3, 14, 15], [9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 23], [8]]
NEW = 20
DECODERS = {
    "chain": {"k": 4},
    "tree": {"k": 4, "num_tree_nodes": 9},
    "one by one": {"k": 3, "method": "eagle3"},
}


def with_output(model, output):
    """The target or head with another output matrix."""
    params = {**model.params, "lm_head": {"kernel": jnp.asarray(output, jnp.float32)}}
    return dataclasses.replace(model, params=params)


@functools.cache
def outputs() -> dict[str, np.ndarray]:
    """Output matrices [D V] of the target by name."""
    kernel = np.asarray(tiny.target().params["lm_head"]["kernel"])
    twins = kernel.copy()
    twins[:, 1::2] = kernel[:, :-1:2]  # tokens 2 i and 2 i + 1 have equal logits
    # logits of at most 1e-38: what is smaller is no normal number in float32
    return {"nothing": np.zeros_like(kernel), "twins": twins, "denormal": kernel * 1e-39}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("output", ["nothing", "twins", "denormal"])
def test_ties_are_broken_alike(output, decoder):
    target = with_output(tiny.target(), outputs()[output])
    plain = [generate(target, None, [p], max_new_tokens=NEW)[0] for p in PROMPTS]
    answers = generate(target, tiny.head(), PROMPTS, max_new_tokens=NEW, **DECODERS[decoder])
    for answer, want in zip(answers, plain, strict=True):
        assert answer.output_token_ids == want.output_token_ids
    written = {token for answer in plain for token in answer.output_token_ids}
    if output == "nothing":
        assert written == {0}
    if output == "twins":
        assert all(token % 2 == 0 for token in written) and len(written) > 3


def test_of_equal_drafts_the_first_is_drafted():
    """A head whose logits are all equal drafts token 0, and a target that writes it accepts all."""
    target = with_output(tiny.target(), outputs()["nothing"])
    head = tiny.head()
    flat = with_output(head, np.zeros(head.params["lm_head"]["kernel"].shape))
    (answer,) = generate(target, flat, [[3, 1]], k=4, max_new_tokens=NEW)
    assert answer.output_token_ids == [0] * NEW
    assert answer.acceptance_length == 5.0


def of_nan(head, value=np.nan):
    """The head with NaN, or another number, in the place of every weight."""
    params = jax.tree.map(
        lambda x: jnp.full_like(x, value) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        head.params,
    )
    return dataclasses.replace(head, params=params)


@pytest.mark.parametrize(
    "decoder, value", [*((name, np.nan) for name in DECODERS), ("chain", np.inf), ("tree", -np.inf)]
)
def test_a_head_of_nan_or_infinity_changes_no_text(decoder, value):
    """Its hidden states, logits and probabilities are no numbers."""
    target, head = tiny.target(), of_nan(tiny.head(), value)
    plain = [generate(target, None, [p], max_new_tokens=NEW)[0] for p in PROMPTS]
    answers = generate(target, head, PROMPTS, max_new_tokens=NEW, **DECODERS[decoder])
    for answer, want in zip(answers, plain, strict=True):
        assert answer.error is None
        assert answer.output_token_ids == want.output_token_ids


@pytest.mark.parametrize("num_tree_nodes", [None, 9])
@pytest.mark.parametrize("change", [lambda head: head, of_nan], ids=["sound", "NaN"])
def test_equal_logits_are_sampled_evenly(change, num_tree_nodes):
    target, head = with_output(tiny.target(), outputs()["nothing"]), change(tiny.head())
    options = {"k": 4, "num_tree_nodes": num_tree_nodes, "max_new_tokens": 80, "temperature": 0.7}
    answers = generate(target, head, [[3]] * 16, seed=5, **options)
    tokens = np.concatenate([answer.output_token_ids for answer in answers])
    counts = np.bincount(tokens, minlength=41)
    expected = len(tokens) / 41
    # chi-square with 40 degrees of freedom: 73 is exceeded once in a thousand
    assert ((counts - expected) ** 2 / expected).sum() < 73


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_output_matrix_that_is_damaged_is_refused(value, tied, tmp_path):
    target = tiny.target(tied_embeddings=tied)
    params = jax.tree.map(lambda x: x, target.params)
    if tied:
        params["embed"]["table"] = params["embed"]["table"].at[7, 3].set(value)
    else:
        params["lm_head"]["kernel"] = params["lm_head"]["kernel"].at[3, 7].set(value)
    with pytest.warns(WeightsWarning, match="holds NaN or infinite numbers"):
        save_target(dataclasses.replace(target, params=params), tmp_path / "target")
    with pytest.warns(WeightsWarning), pytest.raises(InputError) as error:
        load_target(tmp_path / "target")
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'target'}: the output matrix")
    assert "\n" not in message and message.endswith("and compare their checksums")


X64 = """
import jax
jax.config.update("jax_enable_x64", True)
import sys
sys.path[:0] = {paths!r}
import tiny
from peagle_jax.decode.generate import generate
target, head, prompts = tiny.target(), tiny.head(), {prompts!r}
plain = [a.output_token_ids for a in generate(target, None, prompts, max_new_tokens={new})]
for options in {options!r}:
    answers = generate(target, head, prompts, max_new_tokens={new}, **options)
    assert [a.output_token_ids for a in answers] == plain, options
def sampled(**options):
    answers = generate(target, head, prompts, k=4, max_new_tokens={new}, temperature=0.8, **options)
    return [a.output_token_ids for a in answers]
# seeds decide, and top_k of 1 leaves the greedy text
assert sampled(seed=7) == sampled(seed=7) != sampled(seed=8)
assert sampled(seed=7, top_k=1) == plain
print(plain)
"""


def test_with_64_bits_switched_on():
    """A program that has `jax_enable_x64` gets the same texts."""
    want = generate(tiny.target(), None, PROMPTS, max_new_tokens=NEW)
    options = list(DECODERS.values())
    code = X64.format(paths=sys.path, prompts=PROMPTS, new=NEW, options=options)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == str([answer.output_token_ids for answer in want])
