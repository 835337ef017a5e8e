"""Sentences of the report are computed: with other numbers they say the opposite."""

import pytest

from peagle_jax.report import statements
from tests.report.made_rows import FRESH, ROWS, eval_row, row


def drafting(peagle_seconds, eagle3_seconds=(0.001, 0.004)):
    """Rows of K = 1 and 11 with these drafting times."""
    rows = [row("none", 0)]
    for method, seconds in (("peagle", peagle_seconds), ("eagle3", eagle3_seconds)):
        rows += [row(method, k, draft_seconds=s) for k, s in zip((1, 11), seconds, strict=True)]
    return rows


@pytest.mark.parametrize(
    "seconds, words",
    [
        ((0.0010, 0.0011), "hardly changes: 1.00 to 1.10 ms"),
        ((0.00306, 0.0098), "grows 3.2-fold: 3.06 to 9.80 ms"),  # batch 8 on 2 CPU cores
        ((0.0020, 0.0010), "falls to 50 %: 2.00 to 1.00 ms"),
    ],
)
def test_how_drafting_grows_with_k(seconds, words):
    caption = statements.against_k_caption(drafting(seconds))
    assert f"From K = 1 to K = 11 P-EAGLE's drafting (one forward) {words}" in caption
    assert "EAGLE-3's drafting (one forward per token) grows 4.0-fold" in caption


def test_drafting_at_a_single_k():
    caption = statements.against_k_caption([row("none", 0), row("peagle", 4)])
    assert "P-EAGLE drafts 4 tokens in 1.00 ms" in caption and "From K" not in caption


def test_which_speed_a_plot_shows():
    fast = statements.against_k_caption([row("none", 0), row("peagle", 3, speedup=1.4)])
    assert "P-EAGLE is fastest at K = 3, with 1.40 times plain decoding's speed" in fast
    assert "slower" not in fast
    slow = statements.against_k_caption([row("none", 0), row("peagle", 3, speedup=0.7)])
    assert "P-EAGLE is slower than plain decoding at every K. A step of" in slow
    assert "fastest" not in slow


@pytest.mark.parametrize(
    "speedups, words",
    [
        ((1.2, 1.4), "P-EAGLE gains at every K"),
        ((0.8, 1.4), "P-EAGLE gains at K = 3 only"),
        ((0.8, 0.9), "P-EAGLE gains at no K"),
    ],
)
def test_where_a_method_gains(speedups, words):
    rows = [row("peagle", k, speedup=s) for k, s in zip((1, 3), speedups, strict=True)]
    assert f"Batch size 1: {words}." in statements.break_even_caption([row("none", 0), *rows])


def test_parts_of_a_step_may_be_more_than_the_step():
    plain = row("none", 0, device="AMD EPYC, 2 cores")
    slow = row("peagle", 3, step_seconds=0.007, draft_seconds=0.001, verify_seconds=0.004)
    caption = statements.step_caption([plain, slow])
    assert "1.00 ms drafting and 4.00 ms verification when alone, and 2.00 ms more" in caption
    assert "load them again" in caption
    fast = slow | {"step_seconds": 0.0045}
    caption = statements.step_caption([plain, fast])
    assert "0.50 ms less than the two together" in caption and "load them again" not in caption
    gpu = [plain | {"device": "NVIDIA H200"}, slow | {"device": "NVIDIA H200"}]
    assert "load them again" not in statements.step_caption(gpu)
    shared = statements.step_caption([plain, slow | {"num_threads": 2}])
    assert "without a neighbour" in shared and "load them again" not in shared
    assert "neighbour" not in statements.step_caption([plain, slow | {"num_threads": 1}])


def test_acceptance_at_both_ends():
    rows = [row("peagle", 3, accepted_per_position=[0.8, 0.5, 0.25])]
    caption = statements.per_position_caption([rows])
    assert "Greedy: P-EAGLE 80 % at position 1 and 25 % at position 3." in caption
    single = [row("peagle", 1, temperature=1.0)]
    assert "At temperature 1: P-EAGLE 30 % at position 1." in statements.per_position_caption(
        [single]
    )


@pytest.mark.parametrize(
    "start, end, words",
    [
        (1.5, 3.2, "rises from 1.50 to 3.20"),
        (3.2, 1.5, "falls from 3.20 to 1.50"),
        (2.0, 2.001, "stays at 2.00"),
    ],
)
def test_how_training_went(start, end, words):
    curves = {"peagle": [eval_row(60.0, start), eval_row(600.0, end)]}
    caption = statements.training_caption(curves)
    assert f"P-EAGLE's acceptance length {words} within 10 minutes." in caption
    assert "EAGLE-3's" not in caption


def test_what_the_fresh_head_learned():
    caption = statements.fresh_head_caption(FRESH)
    assert "the loss falls from 3.00 to" in caption
    assert "to show training, not the one measured above" in caption
    measured = statements.fresh_head_caption(FRESH, is_measured=True)
    assert measured.startswith("Training of the P-EAGLE head measured above;")
    assert "Depth 0 (reads real tokens) ends at 17 %" in caption
    rising = [r | {"loss": r["step"]} for r in FRESH]
    assert "the loss rises from 1.00 to" in statements.fresh_head_caption(rising)
    later = [FRESH[0] | {"accuracy": [0.1]}, *FRESH[1:]]
    caption = statements.fresh_head_caption(later)
    assert "Depth 1 (reads placeholders), trained from step 2 on, ends at" in caption


def test_running_mean():
    assert statements.running_mean([4.0, 0.0, 8.0], 0.5) == [4.0, 2.0, 5.0]
    assert statements.running_mean([]) == []


# ---------------------------------------------------------------- why a row is slow


def test_a_slow_step_has_its_parts_as_reason():
    """7 ms against plain steps of 4 ms: 1.75 plain steps."""
    slow = row("peagle", 3, speedup=0.8, draft_seconds=0.002, verify_seconds=0.004)
    reason = statements.slowdown_reason([row("none", 0), slow], slow)
    assert reason == (
        "A step of P-EAGLE at K = 3 costs 1.75 plain steps (0.50 for drafting, 1.00 for verifying "
        "4 tokens) and writes 1.90 tokens per row. The steps alone would pay; the rest of the "
        "call, with its prefill, does not."
    )
    quicker = slow | {"step_seconds": 0.0053}  # the parts take 0.006
    reason = statements.slowdown_reason([row("none", 0), quicker], quicker)
    parts = "1.00 for verifying 4 tokens; these were timed apart, and add up to more"
    assert parts in reason
    slower = slow | {"step_seconds": 0.012}
    reason = statements.slowdown_reason([row("none", 0), slower], slower)
    assert reason.startswith("A step of P-EAGLE at K = 3 costs 3.00 plain steps")
    assert reason.endswith("and writes 1.90 tokens per row.")


def test_places_that_were_free_are_part_of_the_reason():
    """4 answers of 8 tokens in 10 steps of 2 places: 1.40 per place and step instead of 1.90."""
    counts = {"num_tokens": 32, "num_prompts": 4, "num_steps": 10}
    slow = row("peagle", 3, 2, speedup=0.7, step_seconds=0.01, **counts)
    reason = statements.slowdown_reason([row("none", 0, 2), slow], slow)
    assert "writes 1.40 tokens per row (1.90 if all places were in use" in reason
    quick = slow | {"num_steps": 7.5}  # 1.87 tokens, which is no loss to speak of
    reason = statements.slowdown_reason([row("none", 0, 2), quick], quick)
    assert "writes 1.90 tokens per row" in reason and "were in use" not in reason


def test_a_sampled_row_has_no_parts():
    slow = row("peagle", 3, 8, 1.0, speedup=0.5)
    reason = statements.slowdown_reason([row("none", 0, 8, 1.0), slow], slow)
    assert "costs 1.75 plain steps and writes" in reason
    assert statements.slowdown_reason([slow], slow) == ""


def test_every_slow_row_has_a_reason():
    reasons = statements.slowdown_reasons(ROWS)
    assert [reason.split(" A step")[0] for reason in reasons] == [
        "Batch size 8, 0.90 times plain decoding.",
        "Batch size 8, 0.80 times plain decoding.",
    ]
    assert statements.slowdown_reasons(ROWS[:5]) == []


# ---------------------------------------------------------------- the first lines


def test_headline():
    lines = statements.headline(ROWS)
    assert lines[0] == (
        "Batch size 1: P-EAGLE at its best K (3) runs at 1.40 times plain decoding; EAGLE-3 at its "
        "best K (1) runs at 1.20 times plain decoding."
    )
    assert "P-EAGLE at its best K (3) runs at 0.80 times" in lines[1]
    assert "A step of P-EAGLE at K = 3 costs 1.75 plain steps" in lines[1]
    assert "A step of EAGLE-3 at K = 3 costs" in lines[1]
    assert lines[2] == (
        "P-EAGLE over EAGLE-3 at the same K, batch size 1: K = 1: 0.83, K = 3: 1.27."
    )
    compared = "Compared with plain greedy decoding: 24 speculative texts; every one is the same"
    assert lines[3] == f"{compared}, token for token."


def test_a_small_gain_of_peagle_is_explained_by_this_machine():
    """Steps of 1.75 plain ones that write 2.10 tokens: 1.2 times, where 1.3 are hoped for."""
    plain = row("none", 0)
    small = row("peagle", 3, speedup=1.2, acceptance_length=2.1, step_seconds=0.007)
    small |= {"draft_seconds": 0.002, "verify_seconds": 0.005}
    (line, *_) = statements.headline([plain, small])
    assert line.endswith(
        "A step of P-EAGLE at K = 3 costs 1.75 plain steps (0.50 for drafting, 1.25 for verifying "
        "4 tokens) and writes 2.10 tokens per row."
    )
    assert "A step of" not in statements.headline([plain, {**small, "speedup": 1.31}])[0]
    eagle3 = row("eagle3", 3, speedup=1.2)
    assert "A step of" not in statements.headline([plain, eagle3])[0]


@pytest.mark.parametrize(
    "speedups, short",
    [((1.29, 1.0), True), ((1.4, 1.0), False), ((1.4, 1.5), True), ((1.5, 1.5), False)],
)
def test_where_peagle_falls_short(speedups, short):
    """Of 1.3 times plain decoding, or of EAGLE-3; with one text, each at its best K."""
    peagle, eagle3 = speedups
    rows = [row("none", 0), row("peagle", 3, speedup=peagle), row("peagle", 7, speedup=0.5)]
    rows += [row("eagle3", 3, speedup=eagle3), row("peagle", 3, 8, speedup=0.9)]
    assert statements.falls_short(rows) == short
    assert not statements.falls_short([row("none", 0), row("eagle3", 3, speedup=0.5)])


def test_headline_tells_of_texts_that_differ():
    broken = [*ROWS, row("peagle", 7, lossless=False, different=2, near_ties=1)]
    assert "2 differ, 1 at near ties" in statements.headline(broken)[-1]
    assert "only plain decoding" in statements.headline([row("none", 0)])[0]


def test_headline_tells_of_an_adaptive_k_and_of_trees():
    """They are no points on a curve against K, and not called the best K."""
    auto = row("peagle", 8, speedup=1.8, adaptive_k=True)
    tree = row("peagle", 3, speedup=0.7, num_tree_nodes=16)
    lines = statements.headline([*ROWS, auto, tree])
    assert "P-EAGLE at its best K (3) runs at 1.40" in lines[0]
    how = "Batch size 1: P-EAGLE with"
    over = "times plain decoding"
    assert lines[1] == (
        f"{how} K chosen while decoding runs at 1.80 {over}, 1.29 times the speed of its best K."
    )
    assert lines[2] == (
        f"{how} trees of 16 drafts (K = 3) runs at 0.70 {over}, 0.50 times the speed of its best K."
    )
    assert lines[3].startswith("Batch size 8: P-EAGLE at its best K")
    assert "32 speculative texts" in lines[-1]
    alone = statements.headline([row("none", 0), auto])
    assert alone[0] == f"{how} K chosen while decoding runs at 1.80 times plain decoding."
    slow = [{**auto, "speedup": 0.9}, tree]
    assert statements.slowdown_reasons([row("none", 0), *slow]) == []


# ---------------------------------------------------------------- the sample text


def test_the_sample_says_how_much_it_repeats():
    loops = statements.sample_caption(7, 0.0, 0.78, 8)
    assert "K = 7, greedy; of 8 answers" in loops and "(78 % repeated 4-grams)" in loops
    assert "inflates acceptance" in loops
    ordinary = statements.sample_caption(5, 1.0, 0.07, 8)
    assert "sampled at temperature 1" in ordinary and "(7 % repeated 4-grams)" in ordinary
    assert "inflates" not in ordinary
