"""Result rows: every case decodes every prompt, exactness is noticed, ratios are of one round."""

import dataclasses
import itertools

import jax
import pytest

from peagle_jax.bench import suite as suites
from peagle_jax.bench.answer_statistics import repeated_share
from peagle_jax.bench.exact import compare
from peagle_jax.bench.suite import Case, Decoding, choose_sample, in_turns, run_suite
from peagle_jax.decode import loop, parallel_engine
from peagle_jax.decode.generate import generate
from peagle_jax.decode.requests import Generation
from peagle_jax.layers import full_precision
from peagle_jax.types import InputError
from tests import tiny

PROMPTS = [[3, 9, 4], [7, 1, 2], [8, 8, 5]]


@pytest.fixture(scope="module")
def suite():
    heads = {"peagle": tiny.head(0), "eagle3": tiny.head(1, mask_token=None)}
    heads["eagle"] = tiny.head(**tiny.EAGLE)  # reads other hidden states of the same target
    recorded, activities = [], []
    made = run_suite(
        tiny.target(),
        heads,
        PROMPTS,
        ks=(2,),
        batch_sizes=(1, 2),
        max_new_tokens=6,
        repeats=3,
        on_record=recorded.append,
        sampled_k=3,
        label={"name": "x"},
        progress=activities.append,
    )
    assert recorded == made.records
    assert "batch size 2, temperature 0: round 3 of 3" in activities
    return made


def ending_target(prompt: list[int]):
    """(a target whose answers end, what it writes after `prompt` until then)."""
    (free,) = generate(tiny.target(), None, [prompt], max_new_tokens=12)
    written = free.output_token_ids
    place = next(i for i in range(2, 11) if written[i] not in written[:i])
    return tiny.target(stop_ids=(written[place],)), written[: place + 1]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_answers_end_where_those_of_users_do(ignore_eos):
    """At the target's end-of-sequence token, unless the answers are to have the same length."""
    target, until_end = ending_target(PROMPTS[0])
    made = run_suite(
        target,
        {"peagle": tiny.head()},
        PROMPTS,
        ks=(2,),
        batch_sizes=(3,),
        max_new_tokens=12,
        repeats=1,
        on_record=lambda record: None,
        ignore_eos=ignore_eos,
    )
    assert len(made.decodings) == 2
    for decoding in made.decodings:
        answer = decoding.answers[0]
        ended = answer.output_token_ids == until_end and answer.finish_reason == "stop"
        assert ended != ignore_eos
        if ignore_eos:
            assert {len(answer.output_token_ids) for answer in decoding.answers} == {12}


def test_every_case_is_there_in_order(suite):
    cases = [(r["method"], r["k"], r["batch_size"], r["temperature"]) for r in suite.records]
    greedy = [
        (method, k, batch_size, 0.0)
        for batch_size in (1, 2)
        for method, k in (("none", 0), ("eagle", 2), ("eagle3", 2), ("peagle", 2))
    ]
    sampled = [(m, 3, 2, 1.0) for m in ("eagle", "eagle3", "peagle")]
    assert cases == [*greedy, ("none", 0, 2, 1.0), *sampled]
    assert all(r["name"] == "x" and r["commit"] for r in suite.records)
    assert {r["max_new_tokens"] for r in suite.records} == {6}


def test_all_prompts_are_decoded_at_every_batch_size(suite):
    greedy = [r for r in suite.records if r["temperature"] == 0]
    assert [r["num_prompts"] for r in greedy] == [3] * 8
    assert suite.lossless
    assert all(r["lossless"] and r["different"] == 0 for r in greedy if r["k"])
    # sampled texts differ: there is nothing to compare
    assert not any("lossless" in r for r in suite.records if r["temperature"])
    for r in suite.records:
        assert len(r["seconds"]) == 3 and len(r["accepted_per_position"]) == r["k"]
        if r["k"]:
            assert r["acceptance_length"] == pytest.approx(1 + sum(r["accepted_per_position"]))


def test_speedups_are_medians_of_the_rounds_own_ratios():
    """Rounds of 1, 10 and 2 seconds for plain decoding: a slow moment concerns both sides."""
    case = Case("none", 0, 1, 0.0)
    plain, fast = (Decoding(case, tiny.target(), None, PROMPTS, 4) for _ in range(2))
    plain.seconds, fast.seconds = [1.0, 10.0, 2.0], [0.5, 4.0, 1.0]
    plain.num_tokens, fast.num_tokens = [8, 8, 8], [8, 8, 8]
    assert suites._speedup(fast, plain) == 2.0
    fast.num_tokens = [4, 4, 4]  # its answers ended sooner: half as fast for half of the tokens
    assert suites._speedup(fast, plain) == 1.0
    assert fast.tokens_per_second == [8.0, 1.0, 4.0]


def test_parts_and_break_even(suite):
    """A method gains exactly where the acceptance length it reached is above its break-even."""
    plain = suite.records[0]
    assert plain["draft_seconds"] == 0 and plain["break_even"] == 1
    for r in suite.records:
        if r["k"]:
            assert (r["acceptance_length"] > r["break_even"]) == (r["speedup"] > 1)
            assert r["temperature"] or min(r["draft_seconds"], r["verify_seconds"]) > 0


def test_an_adaptive_k_and_trees_are_measured_beside_chains(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # step times
    heads = {"peagle": tiny.head(0, num_depths=3), "eagle3": tiny.head(1, mask_token=None)}
    runs = []
    run = Decoding.run

    def note(decoding, *, timed):
        num_new = run(decoding, timed=timed)
        runs.append((decoding.case, timed, num_new))
        return num_new

    monkeypatch.setattr(Decoding, "run", note)
    made = run_suite(
        tiny.target(),
        heads,
        PROMPTS[:2],
        ks=(2,),
        batch_sizes=(1,),
        max_new_tokens=24,
        repeats=1,
        on_record=lambda record: None,
        adaptive_k=True,
        num_tree_nodes=(5, 9),
    )
    ways = [(r["method"], r["k"], r["adaptive_k"], r["num_tree_nodes"]) for r in made.records]
    chains = [("eagle3", 2, False, None), ("peagle", 2, False, None)]
    # K goes up to what a head was trained for
    adaptive = [("eagle3", 6, True, None), ("peagle", 3, True, None)]
    trees = [("peagle", 2, False, 5), ("peagle", 2, False, 9)]
    assert ways == [("none", 0, False, None), *chains, *adaptive, *trees]
    assert made.lossless and all(r["lossless"] for r in made.records[1:])
    _, _, chain, *_ = made.records
    for record, decoding in zip(made.records, made.decodings, strict=True):
        engine = decoding.engine()
        nodes, is_adaptive = record["num_tree_nodes"], record["adaptive_k"]
        assert engine.spec.num_nodes == nodes
        assert (engine.chooser is not None) == is_adaptive
        # a K that changes has no length at which it would pay, and no parts of a step
        assert ("break_even" in record) == (not is_adaptive)
        assert ("draft_seconds" in record) == decoding.case.is_chain
        if is_adaptive:
            assert sum(record["steps_by_k"].values()) == record["num_steps"]
            assert max(record["steps_by_k"]) <= record["k"]
        else:
            assert record["steps_by_k"] is None
        if nodes:
            assert record["acceptance_length"] >= chain["acceptance_length"]
    # one that chooses warms up until a pass compiles nothing
    for record, decoding in zip(made.records, made.decodings, strict=True):
        new = [(timed, count) for case, timed, count in runs if case == decoding.case]
        warm_ups = [count for timed, count in new if not timed]
        assert warm_ups[0] > 0
        if decoding.case.adaptive_k:
            assert all(warm_ups[:-1])
            assert warm_ups[-1] == 0 or len(warm_ups) == suites.MAX_UNTIMED_PASSES
            # shares by position would be of steps that drafted fewer
            assert record["accepted_per_position"] == []
        else:
            assert len(warm_ups) == 1
        timed_new = sum(count for timed, count in new if timed)
        assert record["programs_compiled_while_timed"] == timed_new
    assert made.sample.k == 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 11])
def test_every_round_begins_with_another_decoder(size):
    orders = [in_turns(range(size), number) for number in range(1, 8)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    firsts = [order[0] for order in orders]
    assert size == 1 or all(a != b for a, b in itertools.pairwise(firsts))
    assert len(set(firsts)) == min(size, 7)


def test_programs_that_a_timed_round_compiles_are_counted():
    run = Decoding(Case("none", 0, 1, 0.0), tiny.target(), None, PROMPTS[:1], 4)
    assert run.run(timed=True) == 3 == run.num_compiled
    assert run.run(timed=True) == 0 and run.record()["programs_compiled_while_timed"] == 3


def test_step_and_speed_follow_from_the_rounds():
    """3 prompts x 4 tokens one at a time are 9 steps after the prompts."""
    run = Decoding(Case("none", 0, 1, 0.0), tiny.target(), None, PROMPTS, 4)
    run.run(timed=True)
    run.seconds, run.prompt_seconds = [2.0, 9.0, 1.0], [0.5, 0.2, 0.8]
    assert run.num_tokens == [12]
    run.num_tokens = [12] * 3
    record = run.record()
    assert record["step_seconds"] == pytest.approx((2.0 - 0.5) / 9)
    assert record["tokens_per_second"] == 12 / 2.0


@pytest.mark.parametrize("num_cores", [1, 2])
def test_a_batch_takes_the_steps_of_its_slowest_row(num_cores, monkeypatch):
    """Of two engines one has two rows, the other one; both take their steps at the same time."""
    monkeypatch.setattr(parallel_engine, "num_cores", lambda: num_cores)
    head = Decoding(Case("peagle", 2, 3, 0.0), tiny.target(), tiny.head(0), PROMPTS, 7)
    head.run(timed=True)
    head.seconds, head.prompt_seconds = [2.0], [0.5]
    num_steps = max(answer.num_drafts for answer in head.answers)
    record = head.record()
    assert record["step_seconds"] == pytest.approx(1.5 / num_steps)
    assert record["num_steps"] == num_steps and record["num_threads"] == num_cores
    assert head.rows_at_once == {1: 3, 2: 2}[num_cores]


def test_the_sample_is_of_the_largest_k(suite):
    assert suite.sample.k == 2 and suite.sample.temperature == 0
    assert suite.sample.answer.prompt_token_ids in PROMPTS
    assert suite.sample.num_candidates == 3


def decoding(texts, k=7, temperature=0.0, method="peagle"):
    """One whose answers are these texts."""
    made = Decoding(Case(method, k, 1, temperature), tiny.target(), None, PROMPTS, 4)
    made.answers = [
        Generation([1], list(ids), "length", [False] * len(ids), 1, k, [0] * k) for ids in texts
    ]
    return made


LOOP, HALF, PLAIN = [1, 2] * 10, [*range(13), *range(10)], list(range(23))


def test_the_sample_repeats_itself_least():
    sample = choose_sample([decoding([LOOP, PLAIN, HALF])])
    assert sample.answer.output_token_ids == PLAIN
    assert (sample.repeated_4grams, sample.num_candidates) == (0, 3)


def test_a_sampled_text_is_shown_where_all_greedy_ones_loop():
    greedy, sampled = decoding([LOOP, HALF]), decoding([PLAIN], temperature=1.0)
    assert choose_sample([greedy, sampled]).temperature == 1
    # a greedy text under 20 % is kept, even if a sampled one repeats less
    assert choose_sample([decoding([[*PLAIN, *PLAIN[:6]]]), sampled]).temperature == 0
    # where all loop, the one that loops least is taken
    worse = decoding([LOOP], temperature=1.0)
    assert choose_sample([greedy, worse]).answer.output_token_ids == HALF
    assert choose_sample([decoding([PLAIN], method="eagle3")]) is None


def test_float32_is_decoded_and_judged_in_full_precision(monkeypatch):
    """GPUs round float32 products unless told otherwise.

    conftest.py tells them for all tests, so this looks at what the program asks for.
    """
    precisions = []
    decode = loop.decode

    def spy(*args, **kwargs):
        precisions.append(jax.config.jax_default_matmul_precision)
        return decode(*args, **kwargs)

    monkeypatch.setattr(loop, "decode", spy)
    bfloat16 = dataclasses.replace(tiny.target(), config=tiny.target_config(dtype="bfloat16"))
    with jax.default_matmul_precision("default"):
        generate(tiny.target(), None, PROMPTS, max_new_tokens=4)
        with full_precision(bfloat16):
            precisions.append(jax.config.jax_default_matmul_precision)
    # of every call, in whichever thread
    assert set(precisions[:-1]) == {"highest"} and precisions[-1] is None


def test_a_wrong_text_is_noticed():
    target = tiny.target()
    run = Decoding(Case("none", 0, 1, 0.0), target, None, PROMPTS, 6)
    run.run(timed=True)
    right = [answer.output_token_ids for answer in run.answers]
    wrong = [list(ids) for ids in right]
    wrong[1][2] = (wrong[1][2] + 1) % target.config.vocab
    assert compare(target, PROMPTS, right, right).lossless
    comparison = compare(target, PROMPTS, wrong, right)
    assert not comparison.lossless
    assert (comparison.same, comparison.different) == (2, 1)


def test_a_batch_larger_than_the_prompts_repeats_them():
    run = Decoding(Case("none", 0, 8, 0.0), tiny.target(), None, PROMPTS, 2)
    assert [request.prompt for request in run.requests] == [*PROMPTS, *PROMPTS, *PROMPTS[:2]]
    assert [request.seed for request in run.requests] == list(range(8))
    assert dataclasses.asdict(run.case)["batch_size"] == 8


def test_repeated_share():
    assert repeated_share([[1, 2, 3, 4, 5]]) == 0
    # 5 four-grams, of which the last one occurred before
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 / 5)
    assert repeated_share([[1, 2]]) == 0


def test_answers_that_failed_are_no_measurement():
    """Else two decoders that both fail would agree, token for token."""
    broken = tiny.with_embedding(tiny.target(), 9, float("nan"))
    with pytest.raises(InputError, match="every prompt must be answered; got the target computed"):
        run_suite(
            broken,
            {},
            PROMPTS,
            ks=(2,),
            batch_sizes=(2,),
            max_new_tokens=6,
            repeats=1,
            on_record=lambda row: None,
        )


def test_a_near_tie_is_between_the_two_tokens():
    """Where the two largest logits are equal, a third token is wrong all the same."""
    target = tiny.target()
    kernel = target.params["lm_head"]["kernel"]
    (answer,) = generate(target, None, [[3, 9]], max_new_tokens=1, stop_ids=())
    best = answer.output_token_ids[0]
    twin = best + 1
    params = target.params | {"lm_head": {"kernel": kernel.at[:, twin].set(kernel[:, best])}}
    tied = dataclasses.replace(target, params=params)
    for other, counts in ((twin, (0, 1, 0)), (best + 2, (0, 0, 1)), (best, (1, 0, 0))):
        found = compare(tied, [[3, 9]], [[best]], [[other]])
        assert (found.same, found.near_ties, found.different) == counts
    assert not compare(tied, [[3, 9]], [[best + 2]], [[twin]]).lossless
