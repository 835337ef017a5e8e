"""What is trained with published chat templates, of which a checkout for its developers has copies.

Templates like them that the project brings are in test_trained_spans.py.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from spans import CONTENTS, THOUGHTS, apart, assistant, call, dialogue, trained, trained_text, user

from peagle_jax.chat.encoding import encode_conversation, encode_turns
from peagle_jax.chat.pieces import Conversation
from peagle_jax.types import InputError

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
pytestmark = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="published templates are not in this checkout"
)

# the end of a turn, and of the last turn, in each published template
PUBLISHED_ENDS = {
    "Qwen-Qwen3-0.6B": ("<|im_end|>", "<|im_end|>"),
    "Qwen3-Coder": ("<|im_end|>", "<|im_end|>"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("<｜end▁of▁sentence｜>",) * 2,
    "google-gemma-4-31B-it": ("<turn|>", "<turn|>"),
    "meta-llama-Llama-3.1-8B-Instruct": ("<|eot_id|>", "<|eot_id|>"),
    "microsoft-Phi-3.5-mini-instruct": ("<|end|>", "<|end|>"),
    "openai-gpt-oss-120b": ("<|end|>", "<|return|>"),
}


@pytest.mark.parametrize("name", PUBLISHED_ENDS)
def test_published_templates(tokenizer, name):
    template = (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
    end, last_end = PUBLISHED_ENDS[name]
    rng = np.random.default_rng(5)
    for turns, system in itertools.product((1, 2, 3, 4, 5), (None, "be yes")):
        contents = [CONTENTS[i] for i in rng.integers(0, len(CONTENTS), turns)]
        found = trained(tokenizer, template, dialogue(*contents, system=system))
        assert found == [*(c + end for c in contents[:-1]), contents[-1] + last_end]


@pytest.mark.parametrize("name", PUBLISHED_ENDS)
@pytest.mark.parametrize("kind", [{"type": "text"}, {"type": "input_text"}, {}])
def test_contents_in_parts(tokenizer, name, kind):
    """Nothing that parts say is lost, and no list is written as Python or JSON shows it."""
    tokenizer.chat_template = (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
    system = {"role": "system", "content": [kind | {"text": "SYSTEM"}]}
    asked = user([kind | {"text": "QUESTION"}, kind | {"text": "AGAIN"}])
    said = Conversation((system, asked, assistant("a"), user([]), assistant("b")))
    shown = encode_conversation(tokenizer, said, "x:1").text
    assert all(word in shown for word in ("SYSTEM", "QUESTION", "AGAIN"))
    assert not any(code in shown for code in ("type", "[{", "[]"))


@pytest.mark.parametrize("name", PUBLISHED_ENDS)
def test_keys_that_hold_nothing(tokenizer, name):
    tokenizer.chat_template = (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
    plain = trained_text(tokenizer, [user("b"), assistant("a")])
    empty = {"tool_calls": [], "reasoning_content": "", "thinking": [], "reasoning": None}
    assert trained_text(tokenizer, [user("b"), assistant("a", **empty)]) == plain


@pytest.mark.parametrize("name", [n for n in PUBLISHED_ENDS if "Phi" not in n])
@pytest.mark.parametrize("as_text", [True, False], ids=["arguments as text", "as objects"])
def test_published_templates_with_calls(tokenizer, name, as_text):
    """The text is transformers', also of arguments in a string and of a content of None.

    Phi's template knows no calls.
    """
    template = (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
    _, last_end = PUBLISHED_ENDS[name]
    arguments = {"city": "Paris", "days": 3}
    with_objects = call("weather", **arguments)
    with_text = {**with_objects, "function": dict(with_objects["function"])}
    with_text["function"]["arguments"] = json.dumps(arguments)
    used = with_text if as_text else with_objects
    result = {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "rain"}
    messages = [user("weather?"), assistant(None, tool_calls=[used]), result, assistant("wet")]
    tokenizer.chat_template = template
    encoded = encode_conversation(tokenizer, Conversation(tuple(messages)), "data.jsonl:7")
    # without keys of None, as newer versions of transformers pass them, or with an empty content
    called = {"role": "assistant", "tool_calls": [with_objects]}
    expected = [user("weather?"), called, *messages[2:]]
    if (shown := _rendered(tokenizer, expected)) is None:
        expected[1] = {"content": "", **called}
        shown = _rendered(tokenizer, expected)
    assert encoded.text == shown
    spans = [encoded.text[start:end] for start, end in encoded.trained]
    assert "".join(spans).count("weather") == 1 and "Paris" in spans[0]
    assert spans[-1].endswith("wet" + last_end)
    # as a prompt it begins the same
    turns = encode_turns(tokenizer, Conversation(tuple(messages[:3])), "data.jsonl:7")
    prompt = _rendered(tokenizer, expected[:3], add_generation_prompt=True)
    assert turns == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def _rendered(tokenizer, messages, **options):
    """What transformers makes of messages; None where the template raises."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception:  # what a template raises
        return None


def test_results_that_are_empty_or_in_the_message_itself_are_not_trained(tokenizer):
    """Gemma 4 writes results within the turn that called the tool."""
    tokenizer.chat_template = (PUBLISHED / "google-gemma-4-31B-it.jinja").read_text("utf-8")
    asked = [user("weather?"), assistant("", tool_calls=[call("weather", city="Paris")])]
    for content in ("rain", "", []):
        result = {"role": "tool", "name": "weather", "content": content}
        spans = trained_text(tokenizer, [*asked, result, assistant("wet")])
        assert "Paris" in spans[0] and spans[-1] == "wet<turn|>"
        assert not any("response" in span.replace("<|tool_response>", "") for span in spans)
    native = assistant(
        "wet",
        tool_calls=asked[1]["tool_calls"],
        tool_responses=[{"name": "weather", "response": {"value": "rain"}}],
    )
    spans = trained_text(tokenizer, [asked[0], native])
    assert "Paris" in spans[0] and "wet" in spans[-1] and not any("rain" in s for s in spans)


def test_a_second_call_of_one_function_that_a_template_forgets_is_refused(tokenizer):
    tokenizer.chat_template = (PUBLISHED / "openai-gpt-oss-120b.jinja").read_text("utf-8")
    calls = [call("weather", city="Paris"), call("weather", city="Rome")]
    results = [{"role": "tool", "content": "rain"}, {"role": "tool", "content": "sun"}]
    messages = [user("weather?"), assistant("", tool_calls=calls), *results, assistant("wet")]
    with pytest.raises(InputError, match="turn 2, which the template drops or rewrites"):
        trained_text(tokenizer, messages)
    messages[1]["tool_calls"] = calls[:1]
    spans = trained_text(tokenizer, [*messages[:3], assistant("wet")])
    assert "Paris" in spans[0]


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="published templates are not here")
@pytest.mark.parametrize(
    "name", ["Qwen-Qwen3-0.6B", "openai-gpt-oss-120b", "google-gemma-4-31B-it"]
)
def test_answers_apart(tokenizer, name):
    """Each answer is trained once, and only it; Gemma 4 shows reasoning before calls alone."""
    template = (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
    found = apart(tokenizer, template, THOUGHTS)
    texts = ["".join(spans) for spans, _ in found]
    assert len(texts) == 3
    for (before, word, behind), text in zip(
        [("y", "x", "now"), ("z", "now", "late"), ("bar", "no", "x")], texts, strict=True
    ):
        assert word in text and behind not in text.replace("<|channel|>", "")
        if "gemma" not in name:
            assert before in text
    assert texts[0].endswith(PUBLISHED_ENDS[name][1])


def test_the_table_of_templates(monkeypatch):
    """docs/chat_templates.md shows what is trained today."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts/generate")
    import template_table

    shown = template_table.PAGE.read_text(encoding="utf-8")
    assert template_table.page(shown, template_table.table(PUBLISHED)) == shown
    for name in PUBLISHED_ENDS:
        assert f"| {name} | `First." in shown
