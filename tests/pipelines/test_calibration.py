"""Calibration of a confidence head: what decoding accepted, what is fitted to it, and its error."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import optimize, special

from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.cli import main
from peagle_jax.decode.generate import generate
from peagle_jax.pipelines import calibration
from peagle_jax.pipelines.calibration import Outcomes, calibration_error, fit_position
from peagle_jax.train.attention import PackedCausal
from peagle_jax.types import InputError, Model

K, NEW = 3, 12
PROMPTS = [[7, 8, 9], [4, 30, 2, 11, 12], [1]]


@functools.cache
def agreeing_pair(markov_rank: int | None = None) -> tuple[Model, Model]:
    """A target and a head that write one of three tokens mostly, so that drafts are accepted."""
    models = tiny.target(5), tiny.head(confidence=True, markov_rank=markov_rank)
    others = np.arange(41) >= 3
    return tuple(
        Model(model.config, model.graph, model.params | {"lm_head": {"kernel": kernel}})
        for model in models
        for kernel in [jnp.where(others, 0, 2 * model.params["lm_head"]["kernel"])]
    )


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_what_decoding_accepted(kind):
    """The steps are those of `generate`, and no step of a row that is done is among them."""
    target, head = agreeing_pair()
    seen = calibration.collect(target, head, PROMPTS, k=K, kind=kind, max_new_tokens=NEW)
    temperature = {"greedy": 0.0, "sampled": 1.0}[kind]
    options = {"k": K, "max_new_tokens": NEW, "temperature": temperature, "stop_ids": ()}
    answers = generate(target, head, PROMPTS, **options)
    assert 0 < (seen.num_accepted > 0).mean() < 1
    for i, answer in enumerate(answers):
        mine = seen.num_accepted[seen.prompt == i]
        assert len(mine) == answer.num_drafts
        per_position = [(mine > d).sum() for d in range(K)]
        assert per_position == answer.num_accepted_per_pos
    assert seen.logits.shape == (len(seen.num_accepted), K)
    batched = calibration.collect(
        target, head, PROMPTS, k=K, kind=kind, max_new_tokens=NEW, batch_size=2
    )
    order = np.argsort(batched.prompt, kind="stable"), np.argsort(seen.prompt, kind="stable")
    np.testing.assert_array_equal(batched.num_accepted[order[0]], seen.num_accepted[order[1]])
    np.testing.assert_allclose(batched.logits[order[0]], seen.logits[order[1]], atol=2e-5)


@pytest.mark.parametrize("markov_rank", [None, 4])
def test_confidences_of_the_first_step(markov_rank):
    """Of hidden states without a cache, and of the tokens before the drafts."""
    target, head = agreeing_pair(markov_rank)
    prompt = PROMPTS[1]
    seen = calibration.collect(target, head, [prompt], k=K, kind="greedy", max_new_tokens=4)
    answer = generate(target, None, [prompt], max_new_tokens=4, stop_ids=())[0].output_token_ids
    tokens = np.array([*prompt, answer[0]])
    positions = jnp.arange(len(tokens) - 1)[None]
    module, one = target.bind(target.params), jnp.zeros((1, len(tokens) - 1), jnp.int32)
    out, _ = module(jnp.asarray(tokens[None, :-1]), positions, PackedCausal(one), None)
    draft = head.bind(head.params)
    masks = jnp.full(K - 1, head.config.mask_token)
    embeddings = draft.embed(jnp.concatenate([jnp.asarray(tokens[1:]), masks]))
    mask_fused = jnp.tile(draft.fuse(draft.mask_hidden[...][None]), (K - 1, 1))
    fused = jnp.concatenate([draft.fuse(out.aux_hidden_states[0]), mask_fused])
    rows = len(fused)
    attend = PackedCausal(jnp.zeros((1, rows), jnp.int32))
    hidden, _ = draft(embeddings[None], fused[None], jnp.arange(rows)[None], attend, None)
    normed = draft.final_norm(hidden)[0, -K:]
    logits = np.asarray(normed @ draft.lm_head.kernel[...])
    previous, wanted = int(answer[0]), []
    for d in range(K):
        x, scores = np.asarray(normed[d]), logits[d]
        if markov_rank is not None:
            embedded = np.asarray(draft.markov.w1.table[...])[previous]
            x = np.concatenate([x, embedded])
            scores = scores + embedded @ np.asarray(draft.markov.w2.kernel[...])
        parts = draft.confidence.kernel, draft.confidence.bias
        kernel, bias = (np.asarray(p[...]) for p in parts)
        wanted.append(float(x @ kernel[:, 0] + bias[0]))
        previous = int(scores.argmax())
    np.testing.assert_allclose(seen.logits[0], wanted, atol=2e-4)
    assert np.ptp(wanted) > 0.1


@pytest.mark.parametrize("steps", [50, 3000])
@pytest.mark.parametrize("true", [(0.5, -1.0), (0.25, -0.5), (0.33, 0.0), (1.0, -3.0), (3.0, 1.0)])
def test_the_scale_and_the_shift_are_those_with_the_least_cross_entropy(true, steps):
    """Also of logits that are too sure, by four times: there Newton's own steps lead away."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2 / true[0], steps)
    accepted = rng.random(steps) < special.expit(true[0] * logits + true[1])

    def loss(pair):
        scaled = pair[0] * logits + pair[1]
        ridge = 0.5 * ((pair[0] - 1) ** 2 + pair[1] ** 2)
        return (np.logaddexp(0, scaled) - accepted * scaled).sum() + ridge

    wanted = optimize.minimize(loss, true, tol=1e-12).x
    found = fit_position(logits, accepted)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    if steps == 3000:
        np.testing.assert_allclose(found, true, atol=0.25)


def test_answers_end_as_users_requests_do():
    """With a stop token, and not at the limit behind it."""
    target, head = agreeing_pair()
    whole = generate(target, None, [PROMPTS[0]], max_new_tokens=NEW, stop_ids=())[0]
    stop = whole.output_token_ids[NEW // 2]
    config = dataclasses.replace(target.config, stop_ids=(stop,))
    target = Model(config, target.graph, target.params)
    seen = calibration.collect(target, head, [PROMPTS[0]], k=K, kind="greedy", max_new_tokens=NEW)
    [answer] = generate(target, head, [PROMPTS[0]], k=K, max_new_tokens=NEW)
    assert answer.finish_reason == "stop" and len(seen.num_accepted) == answer.num_drafts


def test_scale_and_shift_of_too_few_steps():
    # all the same, and none at all
    scale, shift = fit_position(np.ones(50), np.ones(50, bool))
    assert np.isfinite([scale, shift]).all() and special.expit(scale + shift) > 0.9
    assert fit_position(np.zeros(0), np.zeros(0, bool)) == (1.0, 0.0)


def test_positions_are_fitted_by_the_steps_that_reach_them():
    rng = np.random.default_rng(3)
    num_accepted = rng.integers(0, K + 1, 400)
    seen = Outcomes(rng.normal(size=(400, K)), num_accepted, np.zeros(400, int))
    scalings = calibration.fit(seen)
    for i in range(K):
        reached = num_accepted >= i
        assert scalings[i] == fit_position(seen.logits[reached, i], num_accepted[reached] > i)
    # fitted, the mean confidence of a position is the share that was accepted
    confidence = calibration.confidences(seen, scalings)
    reached = calibration.reached_positions(seen)
    accepted = calibration.accepted_positions(seen)
    for i in range(K):
        here = reached[:, i]
        assert abs(confidence[here, i].mean() - accepted[here, i].mean()) < 0.01


def test_calibration_error_by_hand():
    confidence = np.array([0.05, 0.05, 0.9, 0.92, 1.0, 0.5])
    accepted = np.array([False, True, True, True, False, True])
    # bins of a fifteenth: [0, 1/15), [13/15, 14/15), [14/15, 1], [7/15, 8/15)
    wanted = (2 * abs(0.05 - 0.5) + 2 * abs(0.91 - 1) + 1 * abs(1 - 0) + 1 * abs(0.5 - 1)) / 6
    assert calibration_error(confidence, accepted) == pytest.approx(wanted)
    bins = calibration.reliability(confidence, accepted)
    assert [n for *_, n in bins] == [2, 1, 2, 1]
    assert calibration_error(np.zeros(0), np.zeros(0, bool)) == 0


def test_the_command_writes_a_calibrated_head(tmp_path):
    target, head = agreeing_pair(4)
    save_drafter(head, tmp_path / "a", "peagle_jax")
    facts = calibration.calibrate_head(
        target, tmp_path / "a", tmp_path / "b", PROMPTS, k=K, max_new_tokens=NEW, command="this"
    )
    found = load_drafter(tmp_path / "b")
    scalings = found.config.confidence_calibration
    for kind in ("greedy", "sampled"):
        seen = calibration.collect(target, head, PROMPTS, k=K, kind=kind, max_new_tokens=NEW)
        np.testing.assert_allclose(getattr(scalings, kind), calibration.fit(seen), atol=1e-4)
        assert facts[f"{kind}: steps"] == len(seen.num_accepted)
        after = facts[f"{kind}: calibration error after"]
        assert after < facts[f"{kind}: calibration error before"]
    save_drafter(tiny.head(), tmp_path / "plain")
    with pytest.raises(
        InputError, match="plain: a calibration needs a head with a confidence head; got"
    ):
        calibration.calibrate_head(
            target, tmp_path / "plain", tmp_path / "c", PROMPTS, k=K, max_new_tokens=NEW
        )
    assert not (tmp_path / "c").exists()


def test_the_command(tmp_path, capsys, monkeypatch):
    """Prints the errors and writes the folder; mistakes come before anything is decoded."""
    target, head = agreeing_pair()
    save_target(target, tmp_path / "target")
    save_drafter(head, tmp_path / "a", "peagle_jax")
    save_drafter(tiny.head(), tmp_path / "plain")
    lines = [json.dumps({"prompt_token_ids": prompt}) for prompt in PROMPTS]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    (tmp_path / "long.jsonl").write_text(
        "\n".join([*lines, json.dumps({"prompt_token_ids": [99]})])
    )
    (tmp_path / "file").write_text("mine")

    def calibrate(src, dst, prompts="p.jsonl", *options):
        words = ["calibrate", tmp_path / src, tmp_path / dst, "--target", tmp_path / "target"]
        words += ["--prompts", tmp_path / prompts, "--max-new-tokens", NEW, *options]
        code = main([str(word) for word in words])
        return code, capsys.readouterr()

    code, said = calibrate("a", "b", "p.jsonl", "-k", K)
    assert code == 0 and "greedy: calibration error after" in said.out
    assert load_drafter(tmp_path / "b").config.confidence_calibration is not None
    # a head that names no layers reads those that vLLM chooses for its target
    opened = []
    monkeypatch.setattr(calibration, "open_head", lambda *words: opened.append(words) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate("a", "c", "p.jsonl", "-k", K)
    assert [(str(path), layers) for path, layers in opened] == [
        (str(tmp_path / "a"), target.config.layers)
    ]
    monkeypatch.undo()
    for arguments, words in (
        (("plain", "c"), "plain: a calibration needs"),
        (("a", "file", "p.jsonl", "-k", K), "file"),
        (("a", "c", "long.jsonl", "-k", K), "long.jsonl:4"),
        (("a", "c", "p.jsonl", "-k", 0), "must be"),
    ):
        code, said = calibrate(*arguments)
        [line] = said.err.strip().splitlines()
        assert code == 2 and words in line
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "c").exists()


def test_answers_that_end_with_their_first_token_have_no_steps(tmp_path, capsys):
    """Alone, and beside others."""
    target, head = agreeing_pair()
    seen = calibration.collect(target, head, PROMPTS, k=K, kind="greedy", max_new_tokens=1)
    assert seen.logits.shape == (0, K) and len(seen.num_accepted) == len(seen.prompt) == 0
    save_target(target, tmp_path / "target")
    save_drafter(head, tmp_path / "head", "peagle_jax")
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [1, 2]}\n')
    command = ["calibrate", str(tmp_path / "head"), str(tmp_path / "out"), "-k", str(K)]
    command += ["--target", str(tmp_path / "target"), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert main([*command, "--max-new-tokens", "1"]) == 2
    assert "--max-new-tokens: some answer must be longer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (answer,) = generate(target, None, PROMPTS[-1:], max_new_tokens=1, stop_ids=())
    config = dataclasses.replace(target.config, stop_ids=tuple(answer.output_token_ids))
    stops = dataclasses.replace(target, config=config)
    options = {"k": K, "kind": "greedy", "max_new_tokens": NEW, "batch_size": 1}
    some = calibration.collect(stops, head, PROMPTS, **options)
    assert 2 not in some.prompt
