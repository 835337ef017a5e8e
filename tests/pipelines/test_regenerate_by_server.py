"""Conversations whose answers a server writes."""

import json
import re
import shutil

import pytest
import test_regenerate_conversations
from test_regenerate_conversations import assistant, options, rows, user

from peagle_jax import text
from peagle_jax.cli import main
from peagle_jax.pipelines.regenerate import regenerate
from tests.http_server import Handler, serving

place = test_regenerate_conversations.place  # a fixture
THINKS = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ end }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking %}()\n{% endif %}"
    "{% endif %}"
)


class Server(Handler):
    """Says what it was told, in capitals; what begins with "long" it does not end."""

    def do_GET(self):
        models = {"data": [{"id": "the-model"}]}
        self.answer(json.dumps(models if self.path == "/v1/models" else {}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = body["messages"][-1]["content"]
        if last in ("fail", "too much"):
            words = "no such\nthing" if last == "fail" else "maximum context length is 9"
            self.answer(json.dumps({"error": words}), 400)
            return
        self.server.bodies.append(body)
        message = {"role": "assistant", "content": last.upper(), "reasoning_content": None}
        reason = "length" if last.startswith("long") else "stop"
        choice = {"message": message, "finish_reason": reason}
        usage = {"completion_tokens": len(last)}
        self.answer(json.dumps({"choices": [choice], "usage": usage}))


@pytest.fixture
def server():
    with serving(Server, bodies=[]) as server:
        yield server


def test_a_server_writes(place, tmp_path, server, capsys):
    lines = [
        {"messages": [user("one"), assistant("old"), user("two"), assistant("old")]},
        {"prompt": "long story"},  # a limit, and no tokens: there is nothing to train on
        {"messages": [user("three"), assistant("old"), user("long"), assistant("old")]},
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["regenerate", "--target", str(place / "target"), "--held-out", "0"]
    command += ["--data", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "a.jsonl")]
    command += ["--server", server.url, "--temperature", "0.4"]
    command += ["--max-new-tokens", "33", "--batch-size", "2"]
    assert main(command) == 0
    assert "a.jsonl: 2 rows, 15 tokens" in capsys.readouterr().out.replace("\n", " ")
    first, second = rows(tmp_path / "a.jsonl")
    assert [m["content"] for m in first["messages"]] == ["one", "ONE", "two", "TWO"]
    assert [m["content"] for m in second["messages"]] == ["three", "THREE"]
    assert (second["sample"], second["finish_reason"]) == (2, "length")
    for body in server.bodies:
        assert body["model"] == "the-model" and body["temperature"] == 0.4
        assert body["max_tokens"] == 33 and body["seed"] >= 0
    # what is there already is not asked again
    server.bodies.clear()
    assert main(command) == 0 and server.bodies == []


def test_options_of_the_template_go_with_a_conversation(place, tmp_path, server, capsys):
    """To who writes, and into the row, so that training shows it in the same way."""
    target = tmp_path / "target"
    shutil.copytree(place / "target", target)
    for path in target.glob("chat_template*"):
        path.unlink()
    tokenizer = text.load_tokenizer(target)
    tokenizer.chat_template = THINKS.replace("{{ end }}", text.END_TURN)
    tokenizer.save_pretrained(target)
    of_row, of_all = {"enable_thinking": True}, {"enable_thinking": False}
    lines = [{"prompt": "one"}, {"turns": ["two"], "chat_template_kwargs": of_row}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["regenerate", "--target", str(target), "--held-out", "0"]
    command += ["--data", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "a.jsonl")]
    command += ["--server", server.url, "--max-new-tokens", "33", "--chat-template-kwargs"]
    assert main([*command, json.dumps(of_all)]) == 0
    sent = {body["messages"][0]["content"]: body for body in server.bodies}
    assert [sent[name]["chat_template_kwargs"] for name in ("one", "two")] == [of_all, of_row]
    assert [row["chat_template_kwargs"] for row in rows(tmp_path / "a.jsonl")] == [of_all, of_row]
    # the target's own answers are to prompts that say so, too
    out = tmp_path / "own.jsonl"
    changes = {"source": str(tmp_path / "c.jsonl"), "chat_template_kwargs": of_all}
    regenerate(target, options(place, **changes, temperatures=(1.0,)), out, lambda s: None)
    for row, ends in zip(rows(out), ("<assistant>()\n", "<assistant>"), strict=True):
        said = row["messages"][:1] if "messages" in row else None
        prompt = row.get("prompt_token_ids")
        if said is None:
            assert tokenizer.decode(prompt).endswith(ends)
        else:
            assert row["chat_template_kwargs"]["enable_thinking"] == (ends == "<assistant>")
    # another answer to that question is no continuation of the file
    capsys.readouterr()
    assert main([*command, json.dumps(of_row)]) == 2
    assert "conversations was" in capsys.readouterr().err


def test_a_server_refuses_some(place, tmp_path, server, capsys):
    """What is too long ends its conversation; others are skipped where that is asked for."""
    contents = [["one"], ["two", "too much"], ["too much"], ["fail"], ["three", "fail"], ["four"]]
    lines = [json.dumps({"turns": turns}) + "\n" for turns in contents]
    (tmp_path / "c.jsonl").write_text("".join(lines))
    command = ["regenerate", "--target", str(place / "target"), "--server", server.url]
    command += ["--data", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "a.jsonl")]
    assert main(command) == 2
    # the conversations are asked about at the same time: whichever is refused first
    assert re.search(r"c\.jsonl:(4, turn 2|5, turn 4): ", capsys.readouterr().err)
    assert main([*command, "--bad-rows", "skip"]) == 0
    there = {row["sample"]: row["finish_reason"] for row in rows(tmp_path / "a.jsonl")}
    assert there == {0: "stop", 1: "context", 4: "refused", 5: "stop"}
    out = " ".join(capsys.readouterr().out.split())
    assert "skipped: " in out and "2 conversations gave no row" in out


def test_a_server_for_which_all_is_too_long(place, tmp_path, server, capsys):
    """As where --max-new-tokens is more than it has: said once, and no empty success."""
    (tmp_path / "c.jsonl").write_text('{"prompt": "too much"}\n')
    command = ["regenerate", "--target", str(place / "target"), "--server", server.url]
    command += ["--data", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "a.jsonl")]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "maximum context length is 9" in message and message.count("\n") == 1


@pytest.mark.parametrize(
    "prompt, path, words",
    [
        ("fail", "", '400: {"error": "no such\\nthing"}'),
        ("x", "/elsewhere", "must have data"),
    ],
)
def test_a_server_that_refuses(place, tmp_path, server, capsys, prompt, path, words):
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    command = ["regenerate", "--target", str(place / "target"), "--held-out", "0"]
    command += ["--data", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "a.jsonl")]
    command += ["--server", f"http://127.0.0.1:{server.server_port}{path}"]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1
