"""A suite's records: every case decodes every prompt, exactness is noticed, ratios are of the same round."""

import dataclasses

import jax
import pytest

from peagle_jax.bench import suite as suites
from peagle_jax.bench.exact import compare
from peagle_jax.bench.suite import Case, Decoding, repeated_share, run_suite
from peagle_jax.decode import generate as generate_module
from peagle_jax.decode.generate import full_precision
from tests import tiny

PROMPTS = [[3, 9, 4], [7, 1, 2], [8, 8, 5]]


@pytest.fixture(scope="module")
def suite():
    heads = {"peagle": tiny.head(0), "eagle3": tiny.head(1, mask_token=None)}
    seen = []
    made = run_suite(
        tiny.target(),
        heads,
        PROMPTS,
        ks=(2,),
        batches=(1, 2),
        new_tokens=6,
        repeats=3,
        on_record=seen.append,
        sampled_k=3,
        label={"name": "x"},
    )
    assert seen == made.records
    return made


def test_every_case_is_there_in_order(suite):
    cases = [(r["method"], r["k"], r["batch"], r["temperature"]) for r in suite.records]
    greedy = [
        (m, k, b, 0.0) for b in (1, 2) for m, k in (("none", 0), ("eagle3", 2), ("peagle", 2))
    ]
    assert cases == [*greedy, ("none", 0, 2, 1.0), ("eagle3", 3, 2, 1.0), ("peagle", 3, 2, 1.0)]
    assert all(r["name"] == "x" and r["commit"] for r in suite.records)


def test_all_prompts_are_decoded_at_every_batch_size(suite):
    assert [r["prompts"] for r in suite.records if r["temperature"] == 0] == [
        3,
        3,
        3,
        2,
        2,
        2,
    ]  # batches of 2 leave one of three out
    assert suite.lossless and all(
        r["lossless"] and r["different"] == 0
        for r in suite.records
        if r["k"] and r["temperature"] == 0
    )
    assert not any(
        "lossless" in r for r in suite.records if r["temperature"]
    )  # sampled texts differ: nothing to compare
    for r in suite.records:
        assert len(r["seconds"]) == 3 and len(r["accepted_per_position"]) == r["k"]
        if r["k"]:
            assert r["acceptance_length"] == pytest.approx(1 + sum(r["accepted_per_position"]))


def test_speedups_are_medians_of_the_rounds_own_ratios():
    """Rounds of 1, 10 and 2 seconds for plain decoding: a slow moment of the machine hits both sides."""
    plain, fast = (
        Decoding(Case(m, 0, 1, 0.0), tiny.target(), None, PROMPTS, 4) for m in ("none", "none")
    )
    plain.seconds, fast.seconds = [1.0, 10.0, 2.0], [0.5, 4.0, 1.0]
    assert suites._speedup(fast, plain) == 2.0


def test_parts_and_break_even(suite):
    """A method gains exactly where the acceptance length it reached lies above its break-even."""
    assert suite.records[0]["draft_seconds"] == 0 and suite.records[0]["break_even"] == 1
    for r in suite.records:
        if r["k"]:
            assert (r["acceptance_length"] > r["break_even"]) == (r["speedup"] > 1)
            assert r["temperature"] or min(r["draft_seconds"], r["verify_seconds"]) > 0


def test_step_and_speed_follow_from_the_rounds():
    """3 prompts x 4 tokens one at a time: 9 steps after the prompts; a batch's steps are those of its slowest row."""
    run = Decoding(Case("none", 0, 1, 0.0), tiny.target(), None, PROMPTS, 4)
    run.run(timed=True)
    run.seconds, run.prompt_seconds = [2.0, 9.0, 1.0], [0.5, 0.2, 0.8]
    record = run.record()
    assert (
        record["step_seconds"] == pytest.approx((2.0 - 0.5) / 9)
        and record["tokens_per_second"] == 12 / 2.0
    )
    head = Decoding(Case("peagle", 2, 3, 0.0), tiny.target(), tiny.head(0), PROMPTS, 4)
    head.run(timed=True)
    head.seconds, head.prompt_seconds = [2.0], [0.5]
    assert head.record()["step_seconds"] == pytest.approx(
        1.5 / max(a.num_drafts for a in head.answers)
    )


def test_the_sample_is_the_best_answer_of_the_largest_k(suite):
    assert suite.sample_k == 2 and suite.sample.prompt_token_ids in PROMPTS


def test_float32_is_decoded_and_judged_in_full_precision(monkeypatch):
    """GPUs round float32 products unless told otherwise; conftest.py tells them for all tests, so this looks at what the program asks."""
    asked = []

    def spy(*args, **kwargs):
        return asked.append(jax.config.jax_default_matmul_precision) or run(*args, **kwargs)

    run = generate_module.run
    monkeypatch.setattr(generate_module, "run", spy)
    with jax.default_matmul_precision("default"):
        generate_module.generate(tiny.target(), None, PROMPTS, max_new_tokens=4)
        with full_precision(
            dataclasses.replace(tiny.target(), config=tiny.target_config(dtype="bfloat16"))
        ):
            asked.append(jax.config.jax_default_matmul_precision)
    assert asked == ["highest", None]


def test_a_wrong_text_is_noticed():
    target = tiny.target()
    run = Decoding(Case("none", 0, 1, 0.0), target, None, PROMPTS, 6)
    run.run(timed=True)
    right = [a.output_token_ids for a in run.answers]
    wrong = [list(ids) for ids in right]
    wrong[1][2] = (wrong[1][2] + 1) % target.config.vocab
    assert compare(target, PROMPTS, right, right).lossless
    found = compare(target, PROMPTS, wrong, right)
    assert not found.lossless and found.different == 1 and found.same == 2


def test_a_batch_larger_than_the_prompts_repeats_them():
    run = Decoding(Case("none", 0, 8, 0.0), tiny.target(), None, PROMPTS, 2)
    assert [len(g) for g in run.groups] == [8] and run.groups[0][:4] == [*PROMPTS, PROMPTS[0]]
    assert dataclasses.asdict(run.case)["batch"] == 8


def test_repeated_share():
    assert repeated_share([[1, 2, 3, 4, 5]]) == 0
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(
        1 / 5
    )  # 5 four-grams, the last one again
    assert repeated_share([[1, 2]]) == 0
