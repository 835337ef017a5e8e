"""Answers end where their text has a stop string, whatever is decoded beside them."""

import dataclasses

import pytest
from test_engine import Letters, alone, make_engine, small_sizes  # noqa: F401 (a fixture)

from peagle_jax.decode.requests import Request
from peagle_jax.decode.stop_strings import StopString, find_stop


def test_find_stop():
    letters = Letters()
    ids = [0, 1, 2, 3, 1, 2]
    assert find_stop(letters, ids, ["CD"]) == StopString(4, "AB", "CD")
    assert find_stop(letters, ids, ["CD", "B"]) == StopString(2, "A", "B")
    assert find_stop(letters, ids, ["BC"], num_checked=1) == StopString(3, "A", "BC")
    assert find_stop(letters, ids, ["X", "DC"]) is None
    assert find_stop(letters, [5], ["F"]) == StopString(1, "", "F")
    # of those that begin at one place the first that is named, if both are there
    assert find_stop(letters, ids, ["CD", "C"], num_checked=3) == StopString(4, "AB", "CD")
    assert find_stop(letters, ids, ["CD", "C"]) == StopString(3, "AB", "C")


@pytest.mark.parametrize(
    "min_tokens, want",
    [
        (2, StopString(3, "A", "BC")),
        (3, StopString(6, "ABCD", "BC")),
        (5, StopString(6, "ABCD", "BC")),
        (6, None),
    ],
)
def test_strings_within_the_least_number_of_tokens_end_nothing(min_tokens, want):
    """One that begins there may end behind it, as in vLLM."""
    ids = [0, 1, 2, 3, 1, 2]
    assert find_stop(Letters(), ids, ["BC"], min_tokens, min_tokens) == want


def test_stop_strings():
    request = Request(prompt=[3, 14, 15], max_new_tokens=60)
    whole = alone(request, 3)
    text = Letters().decode(whole.output_token_ids, skip_special_tokens=True)
    stop = text[17:19]
    cut = text.index(stop)
    server = make_engine(3, max_batch=2, tokenizer=Letters())
    answers = dict(server.run([dataclasses.replace(request, stop=["??", stop]), request]))
    assert answers[0].finish_reason == "stop" and answers[0].text == text[:cut]
    assert answers[0].stop_reason == stop and answers[1].stop_reason is None
    assert answers[0].output_token_ids == whole.output_token_ids[: cut + 2]
    assert len(answers[0].is_draft) == cut + 2
    assert answers[1].text == text and answers[1].finish_reason == "length"
    assert answers[0].num_drafts < whole.num_drafts


def test_a_stop_token_is_no_part_of_the_text():
    """As in vLLM; the token is one of the answer's."""
    request = Request(prompt=[3, 14, 15], max_new_tokens=60)
    whole = alone(request, 3)
    token = whole.output_token_ids[17]
    end = whole.output_token_ids.index(token)
    engine = make_engine(3, tokenizer=Letters())
    (answer,) = dict(engine.run([dataclasses.replace(request, stop_ids=[token])])).values()
    assert answer.finish_reason == "stop" and answer.stop_reason == token
    assert answer.output_token_ids == whole.output_token_ids[: end + 1]
    text = Letters().decode(whole.output_token_ids, skip_special_tokens=True)
    assert answer.text == text[:end] and end > 0


@pytest.mark.parametrize("num_tree_nodes", [None, 6])
def test_counters_of_a_stopped_answer_do_not_depend_on_neighbours(num_tree_nodes):
    """Stops are looked for after each step where a neighbour streams, else after several."""
    request = Request(prompt=[3, 14, 15], max_new_tokens=60)
    (whole,) = dict(make_engine(3, num_tree_nodes=num_tree_nodes).run([request])).values()
    text = Letters().decode(whole.output_token_ids, skip_special_tokens=True)
    for place in (5, 12, 17, 40):
        stopped = dataclasses.replace(request, stop=[text[place : place + 3]])
        found = []
        for stream in (False, True):
            neighbour = Request(prompt=[9, 2], max_new_tokens=60, stream=stream)
            options = {"num_tree_nodes": num_tree_nodes, "tokenizer": Letters(), "max_batch": 2}
            found.append(dict(make_engine(3, **options).run([stopped, neighbour]))[0])
        assert found[0] == found[1] and found[0].finish_reason == "stop"
        # each step writes its accepted drafts and one token; the last one may reach past the end
        written = 1 + found[0].num_drafts + found[0].num_accepted_tokens
        assert 0 <= written - found[0].num_tokens <= 3
        per_step = num_tree_nodes or 3
        assert found[0].num_draft_tokens == per_step * found[0].num_drafts
