"""`peagle show-data`: what of a corpus is trained, for people and for programs."""

import json

import pytest

from peagle_jax import text
from peagle_jax.cli import main


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder with a tokenizer, which is all that the command reads of a target."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n" * 50], 300)
    tokenizer.save_pretrained(folder)
    return folder


LINES = [
    '{"messages": [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "yes"}]}',
    '{"messages": [{"role": "user", "content": "unanswered"}]}',
    "not json",
    '{"prompt": "def f", "completion": "(x):"}',
    '{"text": "x = 1"}',
    '{"prompt_token_ids": [100], "output_token_ids": [101, 102]}',
]
CHAT = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"


@pytest.fixture
def data(tmp_path):
    (tmp_path / "d.jsonl").write_text("\n".join(LINES), encoding="utf-8")
    return tmp_path / "d.jsonl"


def run(target, data, *flags):
    return main(["show-data", "--target", str(target), "--data", str(data), *flags])


def test_json(target, data, capsys):
    assert run(target, data, "--json", "--bad-rows", "skip") == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    tokenizer = text.load_tokenizer(target)
    written = [tokenizer.decode([100]), tokenizer.decode([101, 102])]
    assert rows == [
        {"text": CHAT, "trained": ["yes<|im_end|>"]},
        {"text": "def f(x):", "trained": ["(x):"]},
        {"text": "x = 1", "trained": ["x = 1"]},
        {"text": "".join(written), "trained": [written[1]]},
    ]
    assert "hé" in out  # as it is
    skipped = [line for line in err.splitlines() if line.startswith("skipped: ")]
    assert len(skipped) == 2 and "d.jsonl:2" in skipped[0] and "d.jsonl:3" in skipped[1]


def test_brackets_where_there_are_no_colours(target, data, capsys):
    assert run(target, data, "--bad-rows", "skip", "--limit", "3") == 0
    out = capsys.readouterr().out
    assert "--- d.jsonl:1\n" in out and "assistant\n⟦yes<|im_end|>⟧\n" in out
    assert "def f⟦(x):⟧\n" in out and "2 documents, " in out  # and one that is skipped


def test_colours_on_a_terminal(target, data, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert run(target, data, "--bad-rows", "skip", "--limit", "1") == 0
    out = capsys.readouterr().out
    assert "\x1b[1;32myes<|im_end|>\x1b[0m" in out and "⟦" not in out


@pytest.mark.parametrize(
    "lines, words",
    [
        (LINES[1], "d.jsonl:1: a document must have something to train; got no answer"),
        (LINES[2], "d.jsonl:1: each line must be a JSON object"),
        ('{"prompt": "def f"}', "d.jsonl:1: a document must have something to train"),
        ('{"text": "\\ud800"}', "d.jsonl:1: text must be Unicode"),
    ],
)
def test_what_cannot_be_trained_is_named(target, tmp_path, capsys, lines, words):
    (tmp_path / "d.jsonl").write_text(lines)
    assert run(target, tmp_path / "d.jsonl") == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1


def test_other_mistakes(target, data, tmp_path, capsys):
    assert run(target, data, "--limit", "0") == 2
    assert "--limit: must be 1 or more" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert run(tmp_path / "empty", data) == 2
    assert "needs a tokenizer" in capsys.readouterr().err


def test_options_of_the_template(target, tmp_path, capsys):
    folder = tmp_path / "thinks"
    tokenizer = text.load_tokenizer(target)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for message", "{{ effort | default('none') }}{% for message", 1
    )
    tokenizer.save_pretrained(folder)
    (tmp_path / "d.jsonl").write_text(LINES[0] + "\n" + LINES[4], encoding="utf-8")
    for flags, effort in (((), "none"), (("--chat-template-kwargs", '{"effort": "high"}'), "high")):
        assert run(folder, tmp_path / "d.jsonl", "--json", *flags) == 0
        chat, plain = map(json.loads, capsys.readouterr().out.splitlines())
        assert chat == {"text": effort + CHAT, "trained": ["yes<|im_end|>"]}
        assert plain == {"text": "x = 1", "trained": ["x = 1"]}
