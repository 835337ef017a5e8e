"""What of a conversation is trained: the answers and the ends of their turns, and nothing else."""

import numpy as np
import pytest
import templates
from spans import CONTENTS, assistant, call, dialogue, trained, trained_text, user

from peagle_jax import text
from peagle_jax.chat import encoding
from peagle_jax.chat.apply_template import render
from peagle_jax.chat.encoding import encode_conversation
from peagle_jax.chat.pieces import Conversation
from peagle_jax.types import InputError

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


def test_keys_that_hold_nothing(tokenizer):
    """Templates ask whether there are calls, or reasoning, by the keys."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.keys() | list }}{% endfor %}"
    empty = {"tool_calls": [], "reasoning_content": "", "thinking": [], "reasoning": None}
    _, rendered = render(tokenizer, Conversation((assistant("a", **empty),)), "x:1")
    assert rendered == "['role', 'content']"


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_calls_without_arguments(tokenizer, arguments):
    """An empty object, as in vLLM: nothing, or null, is no JSON that a parser of calls reads."""
    used = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [user("time?"), assistant("", tool_calls=[used])]
    tokenizer.chat_template = templates.DROPS_REASONING
    assert "now {}" in trained_text(tokenizer, messages)[0]


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


def test_parts_beside_tools(tokenizer):
    """Tools are lists of objects, too: a template that goes through parts still gets them."""
    loop = "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    template = templates.PLAIN.replace("{{ message['content'] }}", loop)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + template
    parts = [{"type": "text", "text": "yes"}, {"type": "text", "text": "no"}]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"required": []}}}]
    said = Conversation((user(parts), assistant(parts)), tuple(tools))
    assert "yesno<|im_end|>" in encode_conversation(tokenizer, said, "x:1").text


def test_a_second_call_that_a_template_forgets_is_refused(tokenizer):
    """As GPT-OSS's template, which writes the first call of a message alone."""
    tokenizer.chat_template = templates.DROPS_REASONING.replace(
        "message['tool_calls'] or []", "(message['tool_calls'] or [])[:1]"
    )
    assert tokenizer.chat_template != templates.DROPS_REASONING
    calls = [call("now", city="Paris"), call("now", city="Rome")]
    with pytest.raises(InputError, match="turn 2, which the template drops or rewrites"):
        trained_text(tokenizer, [user("time?"), assistant("", tool_calls=calls)])
    (span,) = trained_text(tokenizer, [user("time?"), assistant("", tool_calls=calls[:1])])
    assert "Paris" in span
