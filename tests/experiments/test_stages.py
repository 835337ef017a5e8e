"""What runs share: made once, found again, making it anew when what it depends on changed."""

import dataclasses
import json
import shutil
import types

import pytest

from experiments import code_keys, folders
from experiments.budgets import BUDGETS
from experiments.stages.answers import answers_stage
from experiments.stages.cache import DONE, WITHOUT, Stage, missing_stages, prepare
from experiments.stages.hidden_states import hidden_states_stage
from experiments.stages.prompts import prompts_stage
from experiments.stages.target import target_stage
from experiments.texts import KINDS
from peagle_jax import text
from peagle_jax.types import InputError


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder whose modules are hashed in the place of the checkout's."""
    monkeypatch.setattr(folders, "ROOT", tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("")
    code_keys.forget()
    yield tmp_path
    code_keys.forget()


@pytest.fixture
def made(root):
    """Of every stage that was made: its name and its parents' folders."""
    return []


def stage(
    made, name="text", *, parents=(), config=None, module="text", size=10, fails=None
) -> Stage:
    def make(folder, parent_folders, log):
        made.append(name)
        assert all((parent / DONE).exists() for parent in parent_folders)
        assert [f.name.split("-")[0] for f in parent_folders] == [p.name for p in parents]
        with (folder / "lines").open("a") as file:
            file.write("line\n")
        if fails:
            raise fails.pop()
        log(f"{name} has {len((folder / 'lines').read_text().splitlines())} lines")

    path = folders.ROOT / "experiments" / f"{module}.py"
    if not path.exists():
        path.write_text("A = 1\n")
    modules = (f"experiments.{module}",)
    return Stage(name, config or {"chars": 5}, modules, tuple(parents), size, make)


def test_a_key_is_name_config_code_and_parents(made, root):
    plain = stage(made)
    others = [
        stage(made, "target"),
        stage(made, config={"chars": 6}),
        stage(made, config={"chars": 5, "x": None}),
        stage(made, module="b"),
    ]
    above = [stage(made, "answers", parents=[one]) for one in (plain, *others)]
    keys = [one.key for one in (plain, *others, *above)]
    assert len(set(keys)) == len(keys) and stage(made, size=99).key == plain.key
    (root / "experiments" / "text.py").write_text("A = 2\n")
    code_keys.forget()
    changed = [one.key for one in (plain, above[0])]
    assert not set(changed) & set(keys) and others[3].key == keys[4]


def test_a_stage_behind_all_that_it_needs_each_once(made):
    source = stage(made)
    target = stage(made, "target", parents=[source])
    answers = stage(made, "answers", parents=[source, target])
    features = stage(made, "features", parents=[target, answers])
    assert [one.name for one in features.with_parents()] == [
        "text",
        "target",
        "answers",
        "features",
    ]


def test_made_once_and_found_again(made, root, tmp_path):
    cache, said = tmp_path / "new" / "cache", []
    source = stage(made)
    wanted = [stage(made, "features", parents=[source]), stage(made, "prompts", parents=[source])]
    prepare(wanted, cache, said.append)
    assert made == ["text", "features", "prompts"] and missing_stages(wanted, cache) == []
    assert said[:2] == [f"text-{source.key}: making it", "text has 1 lines"] and len(said) == 6
    facts = json.loads((wanted[0].folder(cache) / DONE).read_text())
    assert facts == {
        "name": "features",
        "config": {"chars": 5},
        "code": code_keys.code_key(("experiments.text",), WITHOUT),
        "parents": [source.key],
    }
    said.clear()
    prepare(wanted, cache, said.append)
    assert made == ["text", "features", "prompts"] and said == []


def test_what_is_stale_is_named_and_left(made, root, tmp_path):
    said = []
    old = stage(made)
    prepare([stage(made, "features", parents=[old])], tmp_path, lambda line: None)
    before = {p.name for p in tmp_path.glob("*-*")}
    (root / "experiments" / "text.py").write_text("A = 2\n")
    code_keys.forget()
    new = stage(made)
    prepare([stage(made, "features", parents=[new])], tmp_path, said.append)
    assert (
        len(said) == 6
        and "is of other settings, parents or code; making it anew" in said[0]
        and said[1] == f"text-{new.key}: making it"
    )
    assert before < {p.name for p in tmp_path.glob("*-*")} and any(
        name in said[0] for name in before
    )
    said.clear()
    prepare([stage(made, config={"chars": 7})], tmp_path, said.append)
    assert (
        said[0].startswith("text: text-")
        and ", text-" in said[0]
        and "are of other settings" in said[0]
    )


def test_several_of_one_name_are_not_stale(made, tmp_path):
    said = []
    prepare([stage(made, "prompts", config={"tokens": n}) for n in (32, 96)], tmp_path, said.append)
    assert made == ["prompts", "prompts"] and not any("settings" in line for line in said)


def test_a_stage_that_was_cut_short_goes_on(made, tmp_path):
    said = []
    source = stage(made)
    wanted = stage(made, "answers", parents=[source], fails=[KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        prepare([wanted], tmp_path, said.append)
    assert (
        missing_stages([wanted], tmp_path) == [wanted]
        and not (wanted.folder(tmp_path) / DONE).exists()
    )
    prepare([wanted], tmp_path, said.append)
    assert (
        made == ["text", "answers", "answers"]
        and said[-1] == "answers has 2 lines"
        and missing_stages([wanted], tmp_path) == []
    )
    assert not any("settings" in line for line in said)  # what is half made is not stale


def test_too_little_room_is_said_before_anything_is_made(made, tmp_path, monkeypatch):
    asked, cache = [], tmp_path / "a" / "cache"
    source, room = stage(made, size=2_000_000_000), types.SimpleNamespace(free=3_400_000_000)
    wanted = stage(made, "features", parents=[source], size=1_500_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or room)
    with pytest.raises(InputError) as error:
        prepare([wanted], cache)
    said = str(error.value)
    assert (
        f"{cache}: what is to be cached takes 3.5 GB (text 2.0, features 1.5); got 3.4 GB free"
        in said
        and "--cache" in said
        and "\n" not in said
    )
    assert made == [] and not cache.exists() and asked == [tmp_path]
    room.free = 3_500_000_000
    prepare([wanted], cache, lambda line: None)
    room.free = 0
    prepare([wanted], cache)  # nothing is needed any more


def test_stages_of_a_budget():
    small, smoke = BUDGETS["small"], BUDGETS["smoke"]
    whole = hidden_states_stage(small, small.answers, 128)
    assert [one.name for one in whole.with_parents()] == [
        "text",
        "target",
        "answers",
        "hidden_states",
    ]
    fewer = hidden_states_stage(small, dataclasses.replace(small.answers, num_samples=9), 128)
    assert [
        a.key == b.key for a, b in zip(whole.with_parents(), fewer.with_parents(), strict=True)
    ] == [
        True,
        True,
        False,
        False,
    ]
    assert [
        a.key == b.key
        for a, b in zip(
            whole.with_parents(),
            hidden_states_stage(small, small.answers, 64).with_parents(),
            strict=True,
        )
    ] == [True] * 3 + [False]
    assert not {one.key for one in whole.with_parents()} & {
        one.key for one in hidden_states_stage(smoke, smoke.answers, 64).with_parents()
    }
    # of every token, three aux hidden states and the final one in float32
    assert whole.num_bytes == pytest.approx(4096 * 128 * 4 * 128 * 4, rel=0.02) and whole.config[
        "aux_hidden_state_layers"
    ] == (1, 4, 5)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A text stage, the tokenizer of a target stage, and the texts of every kind."""
    root = tmp_path_factory.mktemp("texts")
    lines = {
        kind: [
            f"{kind} {i} " + " ".join(f"{kind[:2]}{i * j}" for j in range(40 + i)) for i in range(9)
        ]
        for kind in KINDS
    }
    rows = [
        {"name": f"module{i}.py#{kind}", "kind": kind, "text": t}
        for kind, many in lines.items()
        for i, t in enumerate(many)
    ]
    for folder in ("text", "target/model"):
        (root / folder).mkdir(parents=True)
    for side in ("train", "held_out"):
        (root / "text" / f"{side}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    text.train_tokenizer([row["text"] for row in rows], 320).save_pretrained(
        root / "target" / "model"
    )
    return root / "text", root / "target", lines


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_are_of_every_kind(corpora, tmp_path):
    source, target, lines = corpora
    wanted = prompts_stage(dataclasses.replace(BUDGETS["smoke"], num_prompts=3), 21)
    wanted.make(tmp_path, [source, target], lambda line: None)
    rows, tokenizer = read(tmp_path / "prompts.jsonl"), text.load_tokenizer(target / "model")
    names = {row["name"].split("#")[0] for row in read(source / "held_out.jsonl")}
    assert [row["kind"] for row in rows] == [kind for kind in KINDS for _ in range(3)]
    for row in rows:
        assert row["module"] in names and "#" not in row["module"]
        assert len(row["prompt_token_ids"]) == 21
        said = tokenizer.decode(row["prompt_token_ids"])
        assert any(said in line and not line.startswith(said) for line in lines[row["kind"]])
    assert len({tuple(row["prompt_token_ids"]) for row in rows}) == len(rows)


def test_too_few_prompts(corpora, tmp_path):
    budget = dataclasses.replace(BUDGETS["smoke"], num_prompts=10)
    rule = "10 held-out texts of more than 21 tokens are needed of kind json; got 9; use a Python"
    with pytest.raises(InputError, match=rule) as error:
        prompts_stage(budget, 21).make(tmp_path, corpora[:2], lambda line: None)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_the_corpus_itself_as_answers(corpora, tmp_path):
    source, target, lines = corpora
    answers = dataclasses.replace(
        BUDGETS["smoke"].answers, num_samples=12, prompt_tokens=5, max_new_tokens=7, temperatures=()
    )
    answers_stage(BUDGETS["smoke"], answers).make(tmp_path, [source, target], lambda line: None)
    rows, tokenizer = read(tmp_path / "answers.jsonl"), text.load_tokenizer(target / "model")
    assert len(rows) == 12 and all(
        len(row["prompt_token_ids"]) == 5 and len(row["output_token_ids"]) == 7 for row in rows
    )
    every = [line for many in lines.values() for line in many]
    for row in rows:
        said = tokenizer.decode(row["prompt_token_ids"] + row["output_token_ids"])
        assert any(said in line for line in every)


def test_the_target_is_the_budgets():
    config = target_stage(BUDGETS["small"]).config
    assert (
        config["model"] == dataclasses.asdict(BUDGETS["small"].model)
        and config["optimizer"]["steps"] == 2400
        and config["seed"] == 0
    )
