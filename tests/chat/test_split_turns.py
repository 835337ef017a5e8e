"""Answers apart: each as the target saw the turns before it, with the reasoning it had then."""

import json

import pytest
import templates
from spans import THOUGHTS, apart, assistant, dialogue, trained, user

from peagle_jax import corpus
from peagle_jax.documents import Document
from peagle_jax.pipelines.evaluate import eval_prompts
from peagle_jax.text import encode_stream
from peagle_jax.train.config import PeagleRun
from peagle_jax.train.corpus_store import CorpusChoice, open_corpus
from peagle_jax.train.document_file import DocumentFile, DocumentWriter
from peagle_jax.train.settings import build
from peagle_jax.types import InputError


@pytest.mark.parametrize("name", ["PLAIN", "GOES_ON", "COUNTS", "MARKED", "TRIMS"])
def test_the_answers_are_those_of_the_whole(tokenizer, name):
    """Where a template shows each turn the same in later ones; the same words are in all turns."""
    template = getattr(templates, name)
    messages = dialogue("yes", "yes yes", "assistant", "yes", system="be yes")
    want = trained(tokenizer, template, messages)
    found = apart(tokenizer, template, messages)
    assert [spans for spans, _ in found] == [[span] for span in want] and len(want) == 4
    texts = [text for _, text in found]
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))


def test_reasoning_of_earlier_turns_is_trained(tokenizer):
    """All at once a template drops it; and the end of an earlier turn is another one (GPT-OSS)."""
    thought = "<think>\ny\n</think>\n\nx<|im_end|>"
    messages = [*THOUGHTS[:3], THOUGHTS[-1]]
    assert trained(tokenizer, templates.DROPS_REASONING, messages)[0] == "x<|im_end|>"
    (first, shown), (second, _) = apart(tokenizer, templates.DROPS_REASONING, messages)
    assert first == [thought] and second == ["<think>\nbar\n</think>\n\nno<|im_end|>"]
    assert shown.endswith(thought + "\n") and "no" not in shown
    (first, _), _ = apart(tokenizer, templates.CHANNELS, messages)
    assert first[0].startswith("<|channel|>analysis<|message|>y<|end|>")
    assert first[0].endswith("x<|return|>")


def test_what_is_a_document_of_its_own():
    whole = Document("d:1", None, tuple(THOUGHTS), chat_template_kwargs={"a": 1})
    first, second, third = whole.answers_apart()
    assert first.messages == tuple(THOUGHTS[:2]) and third.messages == whole.messages
    assert second.messages[-1]["tool_calls"] and second.name == "d:1, answer 2"
    assert {d.from_name for d in (first, second, third)} == {"d:1"}
    assert all(d.only_last and d.chat_template_kwargs == {"a": 1} for d in (first, second, third))
    assert len({d.digest() for d in (whole, first, second, third)}) == 4
    # what comes before the first user answers nothing
    greeting = Document("e", None, (assistant("hi"), user("a"), assistant("b")))
    assert [len(d.messages) for d in greeting.answers_apart()] == [3]
    for alone in (Document("t", "text"), Document("q", None, (user("a"),))):
        assert list(alone.answers_apart()) == [alone]
    assert len(list(Document("g", None, (assistant("hi"),)).answers_apart())) == 1


def test_a_mark_outside_of_the_loop_over_messages_is_refused(tokenizer):
    template = (
        "{% for n in range(messages | length) %}{% if messages[n].role == 'assistant' %}"
        "{% generation %}{{ messages[n].content }}{% endgeneration %}{% else %}"
        "{{ messages[n].content }}{% endif %}{% endfor %}"
    )
    assert trained(tokenizer, template, dialogue("yes", "no")) == ["yes", "no"]
    with pytest.raises(InputError, match="d:1, answer 1: every answer must be found"):
        apart(tokenizer, template, dialogue("yes", "no"))


def test_a_corpus(tokenizer, tmp_path):
    """All answers of a conversation are held out together, and each is read in its place."""
    tokenizer.chat_template = templates.DROPS_REASONING
    rows = [{"messages": dialogue(f"yes {i}", f"no {i}", "maybe")} for i in range(40)]
    rows.append({"text": "x = 1"})
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = corpus.read_corpus(path, split_turns=True)
    assert len(read) == 121 and [d.name for d in read[:2]] == [
        "d.jsonl:1, answer 1",
        "d.jsonl:1, answer 2",
    ]
    train, held_out = corpus.split(read, 0.3)
    assert not {d.from_name for d in train} & {d.from_name for d in held_out} and held_out
    # a row that another one continues has no answer of its own
    rows.append({"messages": dialogue("yes 3")})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(corpus.read_corpus(path, split_turns=True)) == 121
    rows.pop()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {}
    for split_turns in (False, True):
        choice = CorpusChoice(str(path), held_out=0.3, split_turns=split_turns)
        store = open_corpus(tmp_path / "store", choice, tokenizer, print)
        sizes[split_turns] = len(store.ends), len(store.held_out), int(store.loss_mask.sum())
    assert sizes[True][:2] == (len(train), len(held_out))
    # every answer is trained once in both
    assert sizes[True][2] == sizes[False][2] and 2 * sizes[False][0] < sizes[True][0]
    with DocumentWriter(tmp_path / "documents") as writer:
        for document in held_out:
            writer.add(document)
    assert list(DocumentFile(tmp_path / "documents")) == held_out
    # held-out prompts are what each answer answers
    raw = {"target": "t", "out": "o", "data": {"source": None}}
    run = build(PeagleRun, raw, "test")
    prompts = eval_prompts(run, tokenizer, held_out[:5], 500)
    # first answers of both conversations come first
    lengths = [len(prompt) for prompt in prompts]
    assert len(lengths) == 5 and lengths.index(max(lengths)) > 1
    assert all(tokenizer.decode(ids).endswith("<|im_start|>assistant\n") for ids in prompts)
    assert "yes" in tokenizer.decode(prompts[-1]) and "maybe" not in tokenizer.decode(prompts[0])


def test_an_answer_without_anything_to_train_is_left_out(tokenizer):
    """As an empty one of a template that marks generations; the others are trained."""
    template = templates.MARKED.replace("{{ '<|im_end|>\\n' }}", "")
    assert template != templates.MARKED
    tokenizer.chat_template = template
    whole = Document("d:1", None, tuple(dialogue("yes", "", "no")))
    found = [document.name for document, _ in encode_stream(tokenizer, whole.answers_apart())]
    assert found == ["d:1, answer 1", "d:1, answer 3"]
