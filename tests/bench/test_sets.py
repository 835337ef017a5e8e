"""Benchmark questions: rows of every form, turns with the target's own answers, mistakes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from peagle_jax import text
from peagle_jax.bench import sets
from peagle_jax.bench.answer_statistics import lengths_by_category, mean_acceptance_length
from peagle_jax.bench.set_prompts import _written, ask
from peagle_jax.bench.sets import SETS, Question, read_set, turns_of_row
from peagle_jax.cli import main
from peagle_jax.decode.generate import generate
from peagle_jax.decode.requests import Generation
from peagle_jax.types import InputError
from tests import tiny

ASSETS = Path(__file__).parents[2] / "peagle_jax/assets"
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"turns": ["a", "b"], "prompt": "c"}, ("a", "b")),
        ({"messages": CHAT}, ("one", "two")),
        ({"turns": CHAT}, ("one", "two")),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}, "x"),
        ({"prompt": ["a", "b"]}, ("a", "b")),
        ({"prompt": "def f():"}, ("def f():",)),
        ({"problem": "1 + 1", "answer": "2"}, ("1 + 1",)),
        ({"question": "why"}, ("why",)),
        ({"question_content": "sort"}, ("sort",)),
        ({"instruction": "add", "input": "1 2", "output": "3"}, ("add\n\n1 2",)),
        ({"instruction": "add", "input": ""}, ("add",)),
        ({"answer": "2"}, ()),
        ({"turns": []}, ()),
        ({"turns": ["a", 3]}, ()),
        ({"turns": [" "]}, ()),
        ({"messages": [{"role": "assistant", "content": "a"}]}, ()),
        ({"messages": "text"}, ()),
        ({"messages": [{"role": ["user"], "content": "a"}]}, ()),
        ({"conversations": [{"from": {"name": "human"}, "value": "a"}]}, ()),
    ],
)
def test_turns(row, turns):
    assert turns_of_row(row) == (tuple(turns) if turns else ())


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_file(tmp_path):
    rows = [{"turns": ["a"], "category": "math"}, {"turns": ["b", "c"]}, {"turns": ["d"]}]
    path = write(tmp_path / "mine.jsonl", rows)
    questions = read_set(path, 2)
    assert questions == [
        Question("mine:1", ("a",), "math"),
        Question("mine:2", ("b", "c"), "mine"),
    ]
    assert len(read_set(path)) == 3


def test_the_hub_through_datasets(monkeypatch):
    """With the library's own interface, and no network."""
    asked = []

    class Rows(list):
        column_names = ("prompt", "category", "prompt_id", "pixels")

        def select_columns(self, columns):
            return Rows({c: row[c] for c in columns} for row in self)

    def load_dataset(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        row = {"prompt": ["a", "b"], "category": "writing", "prompt_id": 7, "pixels": b"large"}
        return Rows([row, row])

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_set("gsm8k", 1) == [Question("gsm8k:1", ("a", "b"), "writing")]
    assert asked == [("openai/gsm8k", "main", "test", True)]


def test_offline_is_one_line(monkeypatch, capsys, tmp_path):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'philschmid/mt-bench'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    code, lines = bench(capsys, tmp_path, "--sets", "mt-bench")
    assert code == 2 and len(lines) == 1
    assert "philschmid/mt-bench" in lines[0] and "network" in lines[0]


def test_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install"):
        read_set("humaneval")


def bench(capsys, out, *arguments):
    code = main(
        [
            *("bench", "--target", str(ASSETS / "target"), "--drafter", str(ASSETS / "peagle")),
            *("--out", str(out / "out"), *map(str, arguments)),
        ]
    )
    return code, capsys.readouterr().err.strip().splitlines()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"answer": "x"}], ("set.jsonl:1", "needs turns", "answer")),
        ([{"turns": ["a"]}, {}], ("set.jsonl:2", "an empty row")),
        ([{"messages": [{"role": ["user"], "content": "a"}]}], ("set.jsonl:1", "needs turns")),
        ([], ("must have questions",)),
        ([{"turns": ["x " * 5000]}], ("set:1", "must fit")),
    ],
)
def test_rows_that_cannot_be_asked(rows, words, tmp_path, capsys):
    path = write(tmp_path / "set.jsonl", rows)
    code, lines = bench(capsys, tmp_path, "--sets", path)
    assert code == 2 and len(lines) == 1 and all(word in lines[0] for word in words)


def test_a_prompt_that_does_not_fit_is_named_by_its_line(tmp_path, capsys):
    path = write(tmp_path / "p.jsonl", [{"prompt": "x"}, {"prompt": "x " * 5000}])
    code, lines = bench(capsys, tmp_path, "--prompts", path)
    assert code == 2 and len(lines) == 1 and "p.jsonl:2: prompt" in lines[0]


def test_mistakes(tmp_path, capsys):
    code, lines = bench(capsys, tmp_path, "--sets", tmp_path / "absent.jsonl")
    assert code == 2 and "absent.jsonl" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--request-rate", "0"], "requests per second"),
        (["--synthetic-acceptance", "medusa=50"], "eagle, eagle3, peagle"),
        (["--synthetic-acceptance", "eagle=50,60"], "must not rise"),
        (["--num-prompts", "0", "--sets", "mt-bench"], "--num-prompts"),
        (["--num-prompts", "3"], "belongs to --sets"),
        (["--sets", "humanevil"], "humaneval, mt-bench"),
    ],
)
def test_mistakes_in_options_come_before_models_are_loaded(arguments, words, tmp_path, capsys):
    absent = str(tmp_path / "absent")
    options = ("bench", "--target", absent, "--drafter", absent, "--out", str(tmp_path / "out"))
    assert main([*options, *arguments]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert words in line and "absent" not in line


def test_every_set_says_where_and_under_which_license():
    assert {"humaneval", "mt-bench", "gsm8k", "math-500", "mbpp", "speed-bench"} <= set(SETS)
    for place in SETS.values():
        assert place.source.count("/") == 1 and place.split and place.license


# ---------------------------------------------------------------- turns


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(["abcdef ghij klmno " * 20], 300)


def test_turns_hold_the_targets_own_answers(tokenizer):
    target = tiny.target(vocab=300, context=512)
    questions = [
        Question("q1", ("abc", "def", "ghi"), "x"),
        Question("q2", ("jkl",), "y"),
    ]
    asked = ask(target, tokenizer, questions, 5, batch_size=2)
    assert [(p.turn, p.category) for p in asked.prompts] == [
        (0, "x"),
        (0, "y"),
        (1, "x"),
        (2, "x"),
    ]
    # oracle: the conversation written out by hand
    messages = []
    for number, turn in zip((0, 2, 3), questions[0].turns, strict=True):
        messages.append({"role": "user", "content": turn})
        want = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = asked.prompts[number].content
        assert prompt == tokenizer(want, add_special_tokens=False)["input_ids"]
        [answer] = generate(target, None, [prompt], max_new_tokens=5)
        said = tokenizer.decode(answer.output_token_ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said})
    assert asked.num_cut == 2  # a target that never stops; the last answer is no prompt


def test_without_a_template(tokenizer):
    plain = text.train_tokenizer(["abcdef ghij klmno " * 20], 300)
    plain.chat_template = None
    target = tiny.target(vocab=300, context=512)
    [prompt] = ask(target, plain, [Question("q", ("abc",), "x")], 5, 1).prompts
    assert prompt.content == plain("abc")["input_ids"]
    with pytest.raises(InputError, match="chat template"):
        ask(target, plain, [Question("q", ("abc", "def"), "x")], 5, 1)


# ---------------------------------------------------------------- counting


def answer(accepted, drafts):
    return Generation([1], [2], "length", [False], drafts, 2 * drafts, accepted)


def test_two_ways_to_count():
    answers = [answer([9, 6], 10), answer([1, 0], 2), answer([], 0)]
    # pooled: 16 accepted of 12 drafts; the mean of 2.5 and 1.5
    assert mean_acceptance_length(answers) == pytest.approx(2.0)
    assert lengths_by_category(answers, ["a", "b", "b"]) == pytest.approx({"a": 2.5, "b": 1.5})
    pooled = lengths_by_category(answers, ["a"] * 3)["a"]
    assert pooled == pytest.approx(1 + 16 / 12) and not np.isclose(pooled, 2.0)
    assert mean_acceptance_length([answer([], 0)]) is None
    assert lengths_by_category(answers, []) == {}


@pytest.mark.slow
def test_bench_with_a_set(tmp_path, capsys):
    rows = [
        {"turns": ["import os", "def f():"], "category": "code"},
        {"turns": ["class A:"], "category": "classes"},
    ]
    path = write(tmp_path / "two.jsonl", rows)
    code, _ = bench(
        *(capsys, tmp_path, "--sets", path, "-k", 2, "--max-new-tokens", 6, "--repeats", 1)
    )
    assert code == 0
    lines = (tmp_path / "out/results.jsonl").read_text().splitlines()
    [plain, peagle] = map(json.loads, lines)
    assert peagle["sets"] == ["two.jsonl"] and peagle["num_questions"] == 2
    assert peagle["num_prompts"] == 3 and plain["acceptance_length_by_category"] == {}
    assert set(peagle["acceptance_length_by_category"]) == {"code", "classes"}
    assert 1 <= peagle["mean_acceptance_length"] <= 3


def test_question_columns_come_before_others():
    """`prompt` of a row that also has `turns` is something else, as in SPEED-Bench."""
    assert sets.TEXT_COLUMNS[0] == "prompt" and "turns" not in sets.TEXT_COLUMNS


def test_synthetic_rates_for_every_head(tmp_path, capsys):
    option = "--synthetic-acceptance"
    code, lines = bench(capsys, tmp_path, "-k", "3", option, "peagle=60,30")
    assert code == 2 and "up to 3 tokens" in lines[0]
    code, lines = bench(capsys, tmp_path, "-k", "1", option, "eagle3=60")
    assert code == 2 and "peagle drafts" in lines[0]
    code, lines = bench(
        capsys, tmp_path, "-k", "1", option, "peagle=60", option, "eagle=50", option, "eagle3=50"
    )
    assert code == 2 and "got eagle, eagle3; give their heads, too" in lines[0]
    code, lines = bench(capsys, tmp_path, option, "peagle=10,20")
    assert code == 2 and "must not rise" in lines[0]


def test_what_was_said_between_turns_has_its_channels(monkeypatch):
    """GPT-OSS's special tokens name them: without these, reasoning would be read as the answer."""
    spelled = "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final"
    spelled += "<|message|>4"
    asked = []
    tokenizer = text.load_tokenizer(ASSETS / "target")
    monkeypatch.setattr(tokenizer, "decode", lambda ids: asked.append(list(ids)) or spelled)
    stopped, cut = (
        Generation([1], [7, 8, 9], reason, [False] * 3, 0, 0, []) for reason in ("stop", "length")
    )
    message = {"role": "assistant", "content": "4", "thinking": "2 + 2"}
    assert _written(tokenizer, stopped) == (message, False)
    assert _written(tokenizer, cut) == (message, True)
    assert asked == [[7, 8], [7, 8, 9]]  # without the stop token
    spelled = "<|channel|>analysis<|message|>2 +"
    assert _written(tokenizer, cut) == ({"role": "assistant", "content": ""}, True)
