"""Conversations whose answers the target writes anew, turn by turn."""

import json

import numpy as np
import pytest

from peagle_jax import corpus, text
from peagle_jax.chat.written_messages import message_of
from peagle_jax.checkpoints.target_io import load_target, save_target
from peagle_jax.cli import main
from peagle_jax.decode.generate import generate
from peagle_jax.documents import Document
from peagle_jax.pipelines import regenerate_conversations
from peagle_jax.pipelines.answer_writers import Answer
from peagle_jax.pipelines.regenerate import RegenerationOptions, regenerate
from peagle_jax.types import InputError
from tests import tiny

TEMPERATURES = (1.3, 0.9)
LIMIT, SEED = 5, 5


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **further):
    return {"role": "assistant", "content": content, **further}


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
ROWS = [
    {"messages": [user("x = 1"), assistant("old"), user("return x"), assistant("old")]},
    {"prompt": "def f"},
    {"turns": ["return 1", "return 2", "return 3"]},
    {"messages": [{"role": "system", "content": "be"}, assistant("hi"), user("x"), assistant("o")]},
    {"messages": [user("x = 2"), assistant("old"), user("again x")]},
    {"messages": [assistant("nobody asked")]},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversations")
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n" * 50], 300)
    tokenizer.save_pretrained(folder / "tokenizer")
    target = tiny.target(vocab=len(tokenizer))
    save_target(target, folder / "target", tokenizer_from=folder / "tokenizer")
    config = json.loads((folder / "target" / "config.json").read_text())
    # a random target: with so many stop tokens answers end soon
    stop_ids = [tokenizer.eos_token_id, *range(30, len(tokenizer), 4)]
    config |= {"eos_token_id": stop_ids}
    (folder / "target" / "config.json").write_text(json.dumps(config))
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def options(place, **changes):
    values = {
        "source": str(place / "chats.jsonl"),
        "held_out": 0.0,
        "num_samples": None,
        "max_new_tokens": LIMIT,
        "temperatures": TEMPERATURES,
        "batch_size": 3,
        "seed": SEED,
    }
    return RegenerationOptions(**{**values, **changes})


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def said_alone(place, number, messages, num_turns, temperature):
    """(message or None if it reached the limit, prompt, token ids), by transformers' template.

    None where the prompt is too long.
    """
    target = load_target(place / "target", aux_hidden_state_layers=())
    tokenizer = text.load_tokenizer(place / "target")
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    if len(prompt) + LIMIT > target.config.context:
        return None
    seed = int(np.random.SeedSequence([SEED, number, num_turns]).generate_state(1)[0]) >> 1
    (answer,) = generate(
        target, None, [prompt], max_new_tokens=LIMIT, temperature=temperature, seed=[seed]
    )
    ids = answer.output_token_ids
    if answer.finish_reason != "stop":
        return None, prompt, ids
    return assistant(tokenizer.decode(ids[:-1])), prompt, ids


def expected_row(place, number, document, temperature):
    """What a simple loop over the turns of one conversation writes."""
    messages, num_turns, num_tokens = [], 0, 0
    for message in regenerate_conversations.turns_of(document):
        asked = any(m["role"] == "user" for m in messages)
        if message["role"] != "assistant" or not asked or message.get("tool_calls"):
            messages.append(message)
            continue
        said = said_alone(place, number, messages, num_turns, temperature)
        if said is None:
            reason = "context"
            break
        answer, prompt, ids = said
        reason = "length" if answer is None else "stop"
        num_tokens += len(ids)
        if answer is None:
            break
        messages.append(answer)
        num_turns += 1
    while reason != "stop" and messages and messages[-1]["role"] != "assistant":
        messages.pop()
    row = {"sample": number, "source": document.name}
    if num_turns == 0:
        row |= {"prompt_token_ids": prompt, "output_token_ids": ids, "num_turns": 1}
    else:
        row |= {"messages": messages, "num_turns": num_turns}
    return row | {"num_tokens": num_tokens, "finish_reason": reason}


def test_every_turn_is_the_targets_own(place, tmp_path):
    out = tmp_path / "a.jsonl"
    there = regenerate(place / "target", options(place, num_samples=16), out, lambda s: None)
    documents = corpus.read_corpus(place / "chats.jsonl")
    # of every second pass each conversation has the other temperature
    one, other = TEMPERATURES
    by_pass = [[one, other] * 3, [other, one] * 3, [one, other] * 2]
    temperatures = [temperature for a_pass in by_pass for temperature in a_pass]
    expected = [
        expected_row(place, i, documents[i % 6], temperatures[i]) for i in range(16) if i % 6 != 5
    ]
    got = rows(out)
    assert got == expected
    assert there.rows == len(got) and there.tokens == sum(row["num_tokens"] for row in got)
    # of both kinds, or this test shows little
    assert {row["finish_reason"] for row in got} == {"stop", "length"}
    assert max(row["num_turns"] for row in got) > 1 and any("messages" not in row for row in got)


class Echo:
    """Says yes, and remembers at which temperature it was asked what."""

    def __init__(self):
        self.asked = []

    def submit(self, turn):
        self.asked.append((turn.conversation.messages[-1]["content"], turn.temperature))
        return len(self.asked)

    def wait(self):
        return [(len(self.asked), Answer(assistant("yes"), True, (), (), 1))]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_pass_takes_the_next_temperature(count):
    echo = Echo()
    documents = [(i, Document(str(i), None, prompt=f"{i % count}")) for i in range(3 * count)]
    list(
        regenerate_conversations.rewrite(documents, echo, None, (0.0, 0.5, 1.0), 0, 1, None, count)
    )
    for i in range(count):
        assert sorted(t for said, t in echo.asked if said == str(i)) == [0.0, 0.5, 1.0]


def test_a_conversation_ends_where_the_context_does(place, tmp_path):
    lines = [{"turns": ["x x"] * 9}, {"prompt": "x" * 200}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"source": str(tmp_path / "long.jsonl"), "num_samples": 8}
    said = []
    regenerate(place / "target", options(place, **changes), tmp_path / "a.jsonl", said.append)
    documents = corpus.read_corpus(tmp_path / "long.jsonl")
    got = rows(tmp_path / "a.jsonl")
    expected = [
        expected_row(place, i, documents[0], TEMPERATURES[i // 2 % 2]) for i in range(0, 8, 2)
    ]
    assert got == expected
    assert "context" in {row["finish_reason"] for row in got}
    assert said[-1].startswith("4 conversations gave no row")


def test_rows_are_read_back_as_training_data(place, tmp_path):
    regenerate(place / "target", options(place, num_samples=16), tmp_path / "a", lambda s: None)
    (tmp_path / "a").rename(tmp_path / "a.jsonl")
    tokenizer = text.load_tokenizer(place / "target")
    documents = corpus.read_corpus(tmp_path / "a.jsonl")
    for document, (tokens, loss_mask) in zip(
        documents, text.encode(tokenizer, documents), strict=True
    ):
        trained = tokenizer.decode(tokens[loss_mask])
        if document.messages:
            own = [m["content"] for m in document.messages if m["role"] == "assistant"]
            assert trained == "".join(f"{content}{text.END_TURN}" for content in own)
        else:
            assert trained == tokenizer.decode(document.output_ids)


def test_training_finds_held_out_answers_in_what_is_written(place, tmp_path):
    """Both choose by the same names: what one leaves out the other cannot measure with."""
    prompts = [json.dumps({"prompt": f"x = {i}"}) + "\n" for i in range(120)]
    (tmp_path / "c.jsonl").write_text("".join(prompts))
    command = ["regenerate", "--target", str(place / "target"), "--data", str(tmp_path / "c.jsonl")]
    command += ["--max-new-tokens", "2", "--out", str(tmp_path / "a.jsonl")]
    assert main(command) == 0
    train, held_out = corpus.split(corpus.read_corpus(tmp_path / "a.jsonl"), 0.05)
    assert 0 < len(held_out) < 20 and len(train) + len(held_out) > 80


def test_a_cut_file_is_completed_to_the_same_rows(place, tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    regenerate(place / "target", options(place), whole, lambda s: None)
    for size in (0, 1, 300, len(whole.read_text()) - 1):
        cut.write_text(whole.read_text()[:size])
        regenerate(place / "target", options(place, batch_size=1), cut, lambda s: None)
        assert cut.read_text() == whole.read_text()
    # a corpus that has changed is noticed
    (tmp_path / "other.jsonl").write_text('{"prompt": "def g"}\n')
    with pytest.raises(InputError, match="conversations was .* and must stay so"):
        other = options(place, source=str(tmp_path / "other.jsonl"))
        regenerate(place / "target", other, cut, lambda s: None)


def test_parts_are_the_whole(place, tmp_path):
    whole, parts = tmp_path / "whole.jsonl", [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    regenerate(place / "target", options(place), whole, lambda s: None)
    for i, part in enumerate(parts):
        regenerate(place / "target", options(place, part=(i, 2)), part, lambda s: None)
    together = sorted((r for p in parts for r in rows(p)), key=lambda row: row["sample"])
    assert together == rows(whole) and all(map(rows, parts))


def test_calls_of_tools_stay(place):
    """Their results are the original's, and nobody could compute them anew."""
    messages = (user("a"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "5"})
    document = Document("x", None, (*messages, assistant("old"), user("b")))
    job = regenerate_conversations._Rewriting(
        0, document, [], regenerate_conversations.deque(regenerate_conversations.turns_of(document))
    )
    assert job.go_on() and job.said == list(messages)
    job.said.append(assistant("new"))
    assert job.go_on() and job.said == [*messages, assistant("new"), user("b")]
    assert not job.go_on()
    # where the answer after the results is cut, nothing of its question is left
    job.said, job.num_turns = [user("a"), assistant("new"), user("b"), *messages[1:]], 1
    row = regenerate_conversations._row(job, None, "context")
    assert row is not None and row["messages"] == [user("a"), assistant("new")]


def test_channels_become_fields():
    spelled = (
        "<|channel|>analysis<|message|>2 + 2\nis easy<|end|><|start|>assistant"
        "<|channel|>final<|message|>4"
    )
    assert message_of(spelled) == assistant("4", thinking="2 + 2\nis easy")
    assert message_of("<|channel|>final<|message|>4") == assistant("4")
    assert message_of("<think>x</think>\n\n4") == assistant("<think>x</think>\n\n4")
    # a call of a tool, which nobody runs here, is no answer
    header = "<|channel|>analysis<|message|>rain?<|end|><|start|>assistant"
    for kind in ("commentary to=functions.weather json", "commentary <|constrain|>json"):
        assert message_of(f'{header}<|channel|>{kind}<|message|>{{"a": 1}}') is None


def test_a_file_keeps_the_share_that_it_was_begun_with(place, tmp_path, capsys):
    prompts = [json.dumps({"prompt": f"x = {i}"}) + "\n" for i in range(30)]
    (tmp_path / "c.jsonl").write_text("".join(prompts))
    command = ["regenerate", "--target", str(place / "target"), "--max-new-tokens", "2"]
    command += ["--data", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "a.jsonl")]
    assert main([*command, "--held-out", "0.5"]) == 0
    whole = (tmp_path / "a.jsonl").read_text()
    assert 5 < whole.count("\n") < 25
    (tmp_path / "a.jsonl").write_text("".join(whole.splitlines(keepends=True)[:3]))
    assert main(command) == 0 and (tmp_path / "a.jsonl").read_text() == whole
    assert main([*command, "--held-out", "0.25"]) == 2
    assert "held_out was 0.5 when a.jsonl was begun" in capsys.readouterr().err


def test_answers_within_their_corpus_are_refused(place, tmp_path, capsys):
    """The next start would answer them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "c.jsonl").write_text('{"prompt": "x"}\n')
    command = ["regenerate", "--target", str(place / "target"), "--data", str(tmp_path / "data")]
    command += ["--max-new-tokens", "2"]
    assert main([*command, "--out", str(tmp_path / "data" / "a.jsonl")]) == 2
    assert "answers must not lie in the corpus" in capsys.readouterr().err
    assert not (tmp_path / "data" / "a.jsonl").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--part", "3/2"], "--part: must be a part of all"),
        (["--part", "x"], "--part: must be a part of all"),
        (
            ["--server-model", "m"],
            "--server-model: is the target's name at a server; got no --serv",
        ),
        (["--server", "localhost:1"], "--server: must be the URL of a server"),
        (["--server", "http://127.0.0.1:1"], "the server must answer"),
        (["--batch-size", "3", "--data-parallel-size", "4"], "--data-parallel-size: must be at mo"),
        (
            ["--server", "http://127.0.0.1:1", "--data-parallel-size", "2"],
            "--data-parallel-size: is of a target that writes here; got --server",
        ),
        (
            ["--server", "http://127.0.0.1:1", "--tensor-parallel-size", "2"],
            "--tensor-parallel-size: is of a target that writes here; got --server",
        ),
        (
            ["--server", "http://127.0.0.1:1", "--dtype", "bfloat16"],
            "--dtype: is of a target that writes here; got --server",
        ),
        (["--max-new-tokens", "96"], "--max-new-tokens: prompt + new tokens must fit the"),
    ],
)
def test_refusals(place, tmp_path, capsys, flags, words):
    base = ["regenerate", "--target", str(place / "target"), "--out", str(tmp_path / "a.jsonl")]
    assert main([*base, "--data", str(place / "chats.jsonl"), *flags]) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1


def test_texts_beside_conversations_are_refused(place, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(InputError, match="both, c.jsonl:2 being a text"):
        regenerate(
            place / "target",
            options(place, source=str(tmp_path / "c.jsonl")),
            tmp_path / "a.jsonl",
            lambda s: None,
        )
