"""Conversations that cannot be answered, among others that can."""

import pytest
from test_regenerate_conversations import assistant, user

from peagle_jax.documents import BadRows, Document
from peagle_jax.pipelines import regenerate_conversations
from peagle_jax.pipelines.answer_writers import Answer, RefusedTurnError
from peagle_jax.types import InputError


class Refuses:
    """Writes "new" to what is short; of other turns it says that they are too long, or wrong."""

    def __init__(self):
        self.coming = []

    def submit(self, turn):
        last = turn.conversation.messages[-1]["content"]
        if last.startswith("long"):
            return None
        if last.startswith("wrong"):
            raise RefusedTurnError(turn.where, "must be right", last, "correct it")
        if last.startswith("no memory"):
            raise InputError("cache_size", "must fit the memory", last, "lower it")
        self.coming.append(last)
        return len(self.coming) - 1

    def wait(self):
        numbers = [i for i, last in enumerate(self.coming) if last is not None]
        answer = Answer(assistant("new"), True, (1,), (2,), 1)
        refusal = InputError("server", "must answer", "400", "correct it")
        answers = {"server refuses": refusal, "server context": None, "calls": NO_MESSAGE}
        news = [(i, answers.get(self.coming[i], answer)) for i in numbers]
        self.coming = [None] * len(self.coming)
        return news


NO_MESSAGE = Answer(None, True, (1,), (2, 3), 2)


def written(contents, bad_rows=None, at_a_time=2):
    """The rows of conversations whose users say such things, one string a turn."""
    documents = [
        (i, Document(f"x:{i}", None, tuple(user(content) for content in turns)))
        for i, turns in enumerate(contents)
    ]
    return list(
        regenerate_conversations.rewrite(documents, Refuses(), None, (0.0,), 0, at_a_time, bad_rows)
    )


def test_conversations_that_cannot_be_answered_do_not_end_the_rest():
    """Also where there are more of them in a row than are under way together."""
    contents = [["a"], *[["long"]] * 5, ["b"], *[["long"]] * 3, ["c", "long"]]
    there = written(contents)
    assert [row["sample"] for row in there] == [0, 6, 10]
    assert [row["finish_reason"] for row in there] == ["stop", "stop", "context"]
    assert there[2]["messages"] == [user("c"), assistant("new")]


def test_lack_of_memory_is_no_fault_of_a_row():
    """Or which rows there are would depend on the machine's load."""
    with pytest.raises(InputError, match="must fit the memory"):
        written([["a"], ["no memory"]], BadRows("skip"))


def test_a_conversation_that_is_refused_is_left_out_or_ends_the_run():
    contents = [["a"], ["wrong"], ["b", "wrong"], ["server refuses"], ["c", "server refuses"]]
    contents += [["d", "server context"], ["calls"], ["e", "calls"], ["f"]]
    for last in ("wrong", "server refuses"):
        with pytest.raises(InputError, match="correct it"):
            written([["a"], [last]])
    bad_rows = BadRows("skip")
    there = written(contents, bad_rows)
    assert bad_rows.count == 4
    assert {row["sample"]: row["finish_reason"] for row in there} == {
        0: "stop",
        2: "refused",
        4: "refused",
        5: "context",
        6: "unreadable",
        7: "unreadable",
        8: "stop",
    }
    by_sample = {row["sample"]: row for row in there}
    for sample, question in ((2, "b"), (4, "c"), (5, "d"), (7, "e")):
        assert by_sample[sample]["messages"] == [user(question), assistant("new")]
    # what the target wrote in the place of an answer is trained on as it is
    assert by_sample[6]["output_token_ids"] == [2, 3]
