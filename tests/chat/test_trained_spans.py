"""What of a conversation is trained: the answers and the ends of their turns, and nothing else."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import templates
from transformers.utils import chat_template_utils

from peagle_jax import text
from peagle_jax.chat import encoding
from peagle_jax.chat.apply_template import render
from peagle_jax.chat.encoding import encode_conversation, encode_turns
from peagle_jax.chat.pieces import Conversation
from peagle_jax.types import InputError

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
SPECIAL = ["<|im_start|>", "<|eot|>", "<|return|>", "<turn|>", "</s>"]
# contents that are easily taken for something else
CONTENTS = [
    "yes",
    "a",
    "",
    "assistant",
    "im_end",
    "user\nhi",
    "<b>bold</b> x",
    "no\n\nyes",
    "yes yes",
    "é漢🙂",
    "1 < 2 > 0",
    "[INST] x",
    "\U00100005 private",
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = text.train_tokenizer(["<|im_start|>assistant\nyes no\n" * 40], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "bos_token": "<s>"})
    return tokenizer


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **further):
    return {"role": "assistant", "content": content, **further}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def as_newer_versions_pass_it(message):
    """A message whose reasoning has all of its names; older transformers pass it as it is."""
    names = "reasoning_content", "reasoning", "thinking"
    found = [message[name] for name in names if name in message]
    if not found or hasattr(chat_template_utils, "_alias_reasoning_fields"):
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def trained(tokenizer, template, messages):
    """What is trained; its tokens spell the same."""
    tokenizer.chat_template = template
    encoded = encode_conversation(tokenizer, Conversation(tuple(messages)), "data.jsonl:7")
    spans = [encoded.text[start:end] for start, end in encoded.trained]
    ids = tokenizer.apply_chat_template(
        [
            as_newer_versions_pass_it({k: v for k, v in m.items() if v is not None})
            for m in messages
        ],
        tokenize=False,
    )
    assert encoded.text == ids
    assert encoded.tokens.tolist() == tokenizer(ids, add_special_tokens=False)["input_ids"]
    spelled = tokenizer.decode(encoded.tokens[encoded.loss_mask])
    if template == templates.COUNTS:  # a word's first token has the space before it
        assert spelled.replace(" ", "") == "".join(spans).replace(" ", "")
    else:
        assert spelled == "".join(spans)
    return spans


def dialogue(*contents, system=None):
    """A conversation with such answers, to questions that have the same words."""
    first = [{"role": "system", "content": system}] if system else []
    turns = [(user(f"{content} {content}"), assistant(content)) for content in contents]
    return [*first, *itertools.chain.from_iterable(turns)]


ENDS = {"PLAIN": "<|im_end|>", "GOES_ON": "<|im_end|>", "COUNTS": "</s>", "MARKED": "<|im_end|>"}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("turns", [1, 2, 3, 5])
@pytest.mark.parametrize("system", [None, "be yes"])
def test_answers_and_their_ends(tokenizer, name, turns, system):
    rng = np.random.default_rng(turns)
    for _ in range(8):
        contents = [CONTENTS[i] for i in rng.integers(0, len(CONTENTS), turns)]
        if name in ("COUNTS", "MARKED"):
            # without a loop over messages the place of an empty answer is unknown, and an empty
            # generation is none
            contents = [content or "x" for content in contents]
        found = trained(tokenizer, getattr(templates, name), dialogue(*contents, system=system))
        assert found == [content + ENDS[name] for content in contents]


def test_marks_may_end_with_the_line(tokenizer):
    """What begins the next turn is not trained."""
    found = trained(tokenizer, templates.MARKED_TO_THE_LINE, dialogue("yes", "no"))
    assert found == ["yes<|im_end|>\n", "no<|im_end|>\n"]
    plain = text.train_tokenizer(["yes no\n" * 40], 300)
    plain.add_tokens(["<|im_start|>"])  # of which transformers does not say that they are special
    found = trained(plain, templates.MARKED_TO_THE_LINE.replace("im_end", "done"), dialogue("a"))
    assert found == ["a<|done|>\n"]


def test_space_belongs_to_an_answer_that_keeps_it(tokenizer):
    messages = dialogue("  yes \n", "\n\nno", " ")
    assert trained(tokenizer, templates.PLAIN, messages) == [
        "  yes \n<|im_end|>",
        "\n\nno<|im_end|>",
        " <|im_end|>",
    ]
    assert trained(tokenizer, templates.TRIMS, messages) == ["yes<|eot|>", "no<|eot|>", "<|eot|>"]


def test_reasoning_that_a_template_drops(tokenizer):
    messages = dialogue("<think>\nfoo\n</think>\n\nyes", "<think>\nbar\n</think>\n\nno")
    assert trained(tokenizer, templates.DROPS_REASONING, messages) == [
        "yes<|im_end|>",
        "<think>\nbar\n</think>\n\nno<|im_end|>",
    ]
    assert trained(tokenizer, templates.DROPS_REASONING, dialogue("yes", "no")) == [
        "yes<|im_end|>",
        "no<|im_end|>",  # and not the empty <think> that the template writes before it
    ]
    only_thought = dialogue("<think>\nfoo\n</think>", "no")
    assert trained(tokenizer, templates.DROPS_REASONING, only_thought) == [
        "<|im_end|>",
        "no<|im_end|>",
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_field_of_its_own(tokenizer, key):
    messages = [user("a"), assistant("x", **{key: "y"}), user("b"), assistant("no", **{key: "bar"})]
    assert trained(tokenizer, templates.DROPS_REASONING, messages) == [
        "x<|im_end|>",
        "<think>\nbar\n</think>\n\nno<|im_end|>",
    ]
    assert trained(tokenizer, templates.CHANNELS, messages) == [
        "x<|end|>",
        "<|channel|>analysis<|message|>bar<|end|><|start|>assistant<|channel|>final<|message|>"
        "no<|return|>",
    ]


@pytest.mark.parametrize("content", ["let me see", "", None])
def test_calls_of_tools(tokenizer, content):
    messages = [
        user("weather in Paris?"),
        assistant(content, tool_calls=[call("weather", city="Paris"), call("time")]),
        {"role": "tool", "content": "sunny in Paris"},
        assistant("It is sunny"),
    ]
    first, last = trained(tokenizer, templates.DROPS_REASONING, messages)
    calls = '\n<call>weather {"city": "Paris"}</call>\n<call>time {}</call><|im_end|>'
    assert first == (content or "") + calls and last == "It is sunny<|im_end|>"
    # arguments as a string, as OpenAI writes them, are the same
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Paris"}'
    assert trained_text(tokenizer, messages) == [first, last]


def trained_text(tokenizer, messages):
    encoded = encode_conversation(tokenizer, Conversation(tuple(messages)), "x:1")
    return [encoded.text[start:end] for start, end in encoded.trained]


def test_results_of_tools_within_a_turn_are_not_trained(tokenizer):
    messages = [
        user("weather?"),
        assistant("", tool_calls=[call("weather")]),
        {"role": "tool", "content": "sunny"},
        assistant("It is sunny"),
        user("and now?"),
        assistant("", tool_calls=[call("now")]),
    ]
    assert trained(tokenizer, templates.ONE_TURN, messages) == [
        "<|call>weather<call|><|result>",
        "It is sunny<turn|>",
        "<|call>now<call|><|result>",
    ]


def test_a_tool_call_that_a_template_forgets_is_refused(tokenizer):
    messages = [user("weather?"), assistant("", tool_calls=[call("weather")])]
    with pytest.raises(InputError, match=r"^data.jsonl:7: every answer .* turn 2, "):
        trained(tokenizer, templates.PLAIN, messages)


def test_contents_in_parts(tokenizer):
    parts = [{"type": "text", "text": "yes"}, {"type": "text", "text": "no"}]
    template = templates.PLAIN.replace(
        "{{ message['content'] }}",
        "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}",
    )
    messages = [user([parts[1]]), assistant(parts)]
    assert trained(tokenizer, template, messages) == ["yesno<|im_end|>"]


def test_contents_in_parts_of_templates_that_know_text_alone(tokenizer):
    """They would write what Python shows of a list. Parts are lines of one text, as in vLLM."""
    parts = [{"type": "text", "text": "yes"}, {"text": "no"}]
    messages = [user(parts[1:]), assistant(parts)]
    # as newer templates of Qwen3 write nothing of what is no text
    drops = templates.PLAIN.replace(
        "{{ message['content'] }}",
        "{{ message['content'] if message['content'] is string else '' }}",
    )
    assert drops != templates.PLAIN
    tokenizer.chat_template = drops
    encoded = encode_conversation(tokenizer, Conversation(tuple(messages)), "x:1")
    assert "no<|im_end|>" in encoded.text and "yes\nno<|im_end|>" in encoded.text
    tokenizer.chat_template = templates.PLAIN
    assert trained_text(tokenizer, messages) == ["yes\nno<|im_end|>"]
    for name in (n for n in PUBLISHED_ENDS if PUBLISHED.is_dir()):
        tokenizer.chat_template = (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
        for kind in ({"type": "text"}, {"type": "input_text"}, {}):
            system = {"role": "system", "content": [kind | {"text": "SYSTEM"}]}
            asked = user([kind | {"text": "QUESTION"}, kind | {"text": "AGAIN"}])
            said = Conversation((system, asked, assistant("a"), user([]), assistant("b")))
            shown = encode_conversation(tokenizer, said, "x:1").text
            assert all(word in shown for word in ("SYSTEM", "QUESTION", "AGAIN")), name
            assert not any(code in shown for code in ("type", "[{", "[]")), name


def test_keys_that_hold_nothing(tokenizer):
    """Templates ask whether there are calls, or reasoning, by the keys."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.keys() | list }}{% endfor %}"
    empty = {"tool_calls": [], "reasoning_content": "", "thinking": [], "reasoning": None}
    _, rendered = render(tokenizer, Conversation((assistant("a", **empty),)), "x:1")
    assert rendered == "['role', 'content']"
    for name in (n for n in PUBLISHED_ENDS if PUBLISHED.is_dir()):
        tokenizer.chat_template = (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
        plain = trained_text(tokenizer, [user("b"), assistant("a")])
        assert trained_text(tokenizer, [user("b"), assistant("a", **empty)]) == plain, name


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_calls_without_arguments(tokenizer, arguments):
    """An empty object, as in vLLM: nothing, or null, is no JSON that a parser of calls reads."""
    used = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [user("time?"), assistant("", tool_calls=[used])]
    tokenizer.chat_template = templates.DROPS_REASONING
    assert "now {}" in trained_text(tokenizer, messages)[0]


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="published templates are not in this checkout")
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


def test_calls_behind_a_text_keep_what_stands_there(tokenizer):
    """A key that the template does not read, and a result of which it writes nothing."""
    tokenizer.chat_template = templates.DROPS_REASONING
    used = assistant("let me see", tool_calls=[call("now")])
    want = trained_text(tokenizer, [user("time?"), used])
    assert "now" in want[0] and want[0].startswith("let me see")
    with_key = {**used, "tool_responses": [{"name": "now", "response": 1}]}
    assert trained_text(tokenizer, [user("time?"), with_key]) == want
    without_tools = "{% for message in messages if message.role != 'tool' %}"
    tokenizer.chat_template = templates.DROPS_REASONING.replace(templates.LOOP, without_tools)
    result = {"role": "tool", "content": ""}
    assert trained_text(tokenizer, [user("time?"), used, result, assistant("ten")])[0] == want[0]


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="published templates are not in this checkout")
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


def test_space_without_width_is_trained(tokenizer, monkeypatch):
    """Some tokenizers trim offsets, which leaves the indentation of code no characters."""
    trimmed = {
        "input_ids": [5, 6, 7, 8, 9],
        "offset_mapping": [(0, 2), (2, 4), (6, 6), (6, 8), (8, 9)],
    }
    monkeypatch.setattr(encoding, "tokenize", lambda *args, **options: trimmed)
    found = encoding._with_offsets(tokenizer, "ab(c  d)e", [(2, 8)], "x")
    assert found.loss_mask.tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("name", ["BACKWARDS", "TWICE", "FORGETS"])
def test_what_cannot_be_located_is_refused(tokenizer, name):
    template = getattr(templates, name)
    with pytest.raises(InputError, match=r"data.jsonl:7: every answer .* turn 4, .*show-data"):
        trained(tokenizer, template, [user("A"), assistant(""), user("B"), assistant("no")])


def test_what_is_rewritten_in_its_place_is_located(tokenizer):
    assert trained(tokenizer, templates.CAPITALS, dialogue("yes")) == ["YES<|im_end|>"]


@pytest.mark.parametrize(
    "template, got",
    [
        ("{{ raise_exception('roles must\nalternate') }}", "TemplateError: roles must alternate"),
        ("{% for message in messages %}", "TemplateSyntaxError: "),
        ("{{ messages[9]['content'] }}", "UndefinedError: "),
    ],
)
def test_a_template_that_raises(tokenizer, template, got):
    with pytest.raises(InputError) as caught:
        trained(tokenizer, template, dialogue("yes"))
    assert str(caught.value).startswith("data.jsonl:7: the target's chat template must render")
    assert got in str(caught.value) and "\n" not in str(caught.value)


def test_the_end_of_a_text_within_a_message_is_refused(tokenizer):
    with pytest.raises(InputError, match=r"data.jsonl:7, turn 2: .*end-of-sequence"):
        trained(tokenizer, templates.PLAIN, [user("a"), assistant(f"b{tokenizer.eos_token}c")])


def test_as_transformers_masks_marked_templates(tokenizer):
    """The packaged template marks generations, with their ends."""
    messages = dialogue("yes", "no\n\nyes", "assistant")
    tokenizer.chat_template = text.CHAT_TEMPLATE
    out = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = encode_conversation(tokenizer, Conversation(tuple(messages)), "x:1")
    assert encoded.tokens.tolist() == out["input_ids"]
    assert encoded.loss_mask.tolist() == list(map(bool, out["assistant_masks"]))
    # without the marks it is the same
    unmarked = text.CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert unmarked != text.CHAT_TEMPLATE
    tokenizer.chat_template = unmarked
    found = encode_conversation(tokenizer, Conversation(tuple(messages)), "x:1")
    assert (found.loss_mask == encoded.loss_mask).all()


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


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="published templates are not in this checkout")
@pytest.mark.parametrize("name", PUBLISHED_ENDS)
def test_published_templates(tokenizer, name):
    template = (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
    end, last_end = PUBLISHED_ENDS[name]
    rng = np.random.default_rng(5)
    for turns, system in itertools.product((1, 2, 3, 4, 5), (None, "be yes")):
        contents = [CONTENTS[i] for i in rng.integers(0, len(CONTENTS), turns)]
        found = trained(tokenizer, template, dialogue(*contents, system=system))
        assert found == [*(c + end for c in contents[:-1]), contents[-1] + last_end]


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="published templates are not in this checkout")
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


def test_reasoning_before_an_answer_of_nothing(tokenizer):
    """As GPT-OSS has it: all that the template writes after the reasoning is the assistant's."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
        "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
        "{% endif %}<|channel|>final<|message|>{{ m.content }}<|return|>"
        "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    thought = assistant("", thinking="need rain")
    (span,) = trained(tokenizer, template, [user("x"), thought])
    final = "<|start|>assistant<|channel|>final<|message|>"
    assert span == f"<|channel|>analysis<|message|>need rain<|end|>{final}<|return|>"
    (span,) = trained(tokenizer, template, [user("x"), assistant("yes", thinking="need rain")])
    assert span.endswith(f"<|end|>{final}yes<|return|>")
