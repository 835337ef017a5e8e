"""Recipes: defaults, former spellings, refusals."""

import dataclasses
import datetime
from pathlib import Path

import pytest
import yaml
from recipes import ALL_CHANGED, DEFAULTS, MINIMAL, load, minimal, write

from peagle_jax.train.config import (
    DataConfig,
    DepthStage,
    Eagle3Run,
    HeadShape,
    LmRun,
    LmShape,
    OptimizerConfig,
    PeagleRun,
    dump,
    load_run,
)
from peagle_jax.train.recipe_sections import ComputeConfig, MeshConfig
from peagle_jax.train.settings import (
    build,
    differences,
    example_of,
    field_types,
    options_of,
    plain,
)
from peagle_jax.types import InputError

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
FORMER = Path(__file__).parent / "former_recipes"


# ---------------------------------------------------------------- defaults


@pytest.mark.parametrize("task", MINIMAL)
def test_a_recipe_needs_few_keys(task, tmp_path):
    assert plain(load(tmp_path, minimal(task))) == DEFAULTS[task]


@pytest.mark.parametrize("task", MINIMAL)
def test_keys_without_a_default_are_named(task, tmp_path):
    for key in MINIMAL[task]:
        recipe = minimal(task)
        del recipe[key]
        with pytest.raises(
            InputError, match=f"recipe.yaml: {key} must be given; got no {key}; add"
        ):
            load(tmp_path, recipe)


@pytest.mark.parametrize("task", ["peagle", "eagle3"])
def test_a_head_needs_a_corpus(task, tmp_path):
    with pytest.raises(
        InputError, match="data: source must be given; .* example source: installed"
    ):
        load(tmp_path, minimal(task, data={"seq_len": 64}))


def test_placeholders_that_read_the_text(tmp_path):
    """A key that excludes another one of the recipe below."""
    run = load(tmp_path, minimal("peagle", placeholder={"true_tokens": 0.125}))
    assert isinstance(run, PeagleRun) and run.placeholder.true_tokens == 0.125


def test_every_key_is_read(tmp_path):
    run = load(tmp_path, minimal("peagle", **ALL_CHANGED))
    assert isinstance(run, PeagleRun)
    got, default = plain(run), DEFAULTS["peagle"]
    for key, value in ALL_CHANGED.items():
        assert got[key] == value != default[key], key
        if isinstance(value, dict):
            same = {k for k in value if default[key] and value[k] == default[key][k]}
            assert same <= {"norm_before_fc", "source", "true_tokens"}, key
    assert build(PeagleRun, yaml.safe_load(dump(run)), "dumped") == run


def test_keys_of_a_section_left_out_take_the_tasks_defaults(tmp_path):
    """`head: {qk_norm: true}` does not change how many layers a head of its task has."""
    for task, layers in (("peagle", 4), ("eagle3", 1)):
        run = load(tmp_path, minimal(task, head={"qk_norm": True}))
        assert (run.head.layers, run.head.qk_norm) == (layers, True)
    run = load(tmp_path, minimal("lm", data={"batch_size": 3}, optimizer={"steps": 5}))
    assert (run.data.seq_len, run.data.batch_size, run.data.source) == (256, 3, None)
    assert (run.optimizer.steps, run.optimizer.weight_decay) == (5, 0.1)
    run = load(tmp_path, minimal("peagle", head={"rope": {"factor": 8}}))
    assert (run.head.rope.rope_theta, run.head.rope.factor) == (500_000.0, 8.0)
    assert (run.head.rope.low_freq_factor, run.head.rope.high_freq_factor) == (1.0, 4.0)
    assert run.head.rope.original_max_position_embeddings == 8192


def test_runs_can_be_made_in_python():
    """With the same defaults and the same refusals as from YAML."""
    run = PeagleRun(target="t", out="o", data=DataConfig(source="d"))
    assert (run.task, run.num_depths, run.head) == ("peagle", 8, HeadShape(layers=4))
    assert Eagle3Run(target="t", out="o", data=DataConfig(source="d")).num_depths == 6
    shape = LmShape(vocab=300, layers=1, dim=8, mlp_dim=8, heads=1, kv_heads=1, head_dim=8)
    assert LmRun(out="o", model=shape).task == "lm"
    with pytest.raises(ValueError, match="steps: must be 1 or more; got 0; use 10000"):
        OptimizerConfig(steps=0)


def test_num_depths_follow_the_schedule():
    stages = (DepthStage(until=2, num_depths=1), DepthStage(until=5, num_depths=3))
    run = PeagleRun(target="t", out="o", data=DataConfig(source="d"), depth_schedule=stages)
    assert [run.num_depths_at(step) for step in range(7)] == [1, 1, 3, 3, 3, 8, 8]


@pytest.mark.parametrize("text, number", [("3e-3", 3e-3), ("2E4", 2e4), (".5", 0.5), ("1", 1.0)])
def test_numbers_without_a_point_are_numbers(text, number, tmp_path):
    """YAML 1.1 reads 3e-3 as text."""
    path = write(tmp_path / "recipe.yaml", minimal("peagle"))
    path.write_text(path.read_text() + f"optimizer: {{peak_lr: {text}}}\n")
    run = load_run(path)
    assert run.optimizer.peak_lr == number and type(run.optimizer.peak_lr) is float


# ---------------------------------------------------------------- former spellings


@pytest.mark.parametrize("path", sorted(FORMER.glob("*.yaml")), ids=lambda p: p.stem)
def test_former_spellings(path):
    """Every key had to be given then; today's recipe of the same name is the same run."""
    old, new = path.read_text(), (CONFIGS / path.name).read_text()
    assert "measure:" in old and "measure:" not in new
    run, today = load_run(path), load_run(CONFIGS / path.name)
    # keys that no recipe had then
    today = dataclasses.replace(today, mesh=MeshConfig(), compute=ComputeConfig())
    if isinstance(today, PeagleRun):
        today = dataclasses.replace(today, cod=dataclasses.replace(today.cod, partitions=1))
    assert run == today


@pytest.mark.parametrize("gated, kind", [(False, "vanilla"), (True, "gated")])
def test_a_former_kind_of_markov_head(gated, kind, tmp_path):
    run, today = (
        load(tmp_path, minimal("peagle", markov={"rank": 4, **key}))
        for key in ({"gated": gated}, {"kind": kind})
    )
    assert run == today and "gated:" not in dump(run)


def test_every_former_key(tmp_path):
    """A recipe with each former key, whose values are not the defaults."""
    recipe = minimal("peagle", **ALL_CHANGED)
    former = dict(recipe)
    for new, old in {
        "hidden_states_dir": "features",
        "init": "start",
        "init_from": "start_from",
        "eval": "measure",
        "depth_schedule": "grow",
        "feature_noise": "blur",
    }.items():
        former[old] = former.pop(new)
    former["grow"] = [{"until": 2, "depths": 1}, {"until": 3, "depths": 2}]
    former["blur"] = {"feature_noise": 0.5, "feature_dropout": 0.25}
    former["measure"] = {"every": 13, "prompts": "p.jsonl", "count": 3, "new_tokens": 5}
    former["measure"] |= {"ignore_eos": True, "keep": "best", "patience": 4}  # of today
    former["cod"] = {"depths": 5, "ratio": 0.5, "floor": 0.125, "anchors": 11}
    former["cod"]["partitions"] = 3  # of today
    former["data"] = {
        "source": "answers.jsonl",
        "max_chars": 77,
        "held_out": 0.25,
        "bad_rows": "skip",
        "length": 64,
        "batch": 24,
        "packing": "whole",
    }
    of_today = ("chat_template_kwargs", "special_tokens", "split_turns")
    former["data"] |= {key: recipe["data"][key] for key in of_today}
    former["optimizer"] = dict(recipe["optimizer"])
    former["optimizer"]["clip"] = former["optimizer"].pop("max_grad_norm")
    former["head"] = dict(recipe["head"])
    former["head"]["taps"] = former["head"].pop("aux_hidden_state_layers")
    former["head"]["rope"] = {
        "theta": 1000.0,
        "factor": 2.0,
        "low": 1.5,
        "high": 3.5,
        "original": 512,
    }
    assert load(tmp_path, former) == load(tmp_path, recipe)


def test_both_spellings_of_a_key_are_refused(tmp_path):
    data = {"source": "d", "length": 64, "seq_len": 64}
    with pytest.raises(InputError, match="data: seq_len was formerly called length"):
        load(tmp_path, minimal("peagle", data=data))


# ---------------------------------------------------------------- refusals

BAD = [
    ({"speed": 3}, "recipe.yaml: known keys are task, out"),
    ({"sede": 3}, "got unknown sede; remove sede, or rename sede to seed"),
    ({"sede": 3, "foo": 1}, "got unknown foo, sede; remove foo, sede, or rename sede to seed"),
    ({"data": {"source": "d", "rows": 3}}, "recipe.yaml: data: known keys are source"),
    ({"data": [1]}, "recipe.yaml: data: must be a mapping of keys; got list; give keys of source"),
    ({"data": None}, "recipe.yaml: data: must be a mapping of keys; got null"),
    ({"eval": None}, "keep, patience; leave it out for their defaults"),
    ({"seed": "four"}, "recipe.yaml: seed: must be a whole number; got 'four'; write seed: 0"),
    ({"seed": True}, "seed: must be a whole number; got True"),
    ({"seed": 1.5}, "seed: must be a whole number; got 1.5"),
    ({"seed": "3"}, "seed: must be a whole number; got '3'"),
    ({"seed": None}, "seed: must be a whole number; got None"),
    ({"out": 7}, "out: must be text; got 7; write out: runs/my_head"),
    ({"out": None}, "out: must be text; got None; write out: runs/my_head"),
    ({"head": {"dim": "x"}}, "head.dim: must be a whole number; got 'x'; write dim: 256, or null"),
    ({"max_seconds": "long"}, "a number; got 'long'; write max_seconds: 3600, or null"),
    ({"max_seconds": "3e"}, "max_seconds: must be a number; got '3e'"),
    ({"max_seconds": True}, "max_seconds: must be a number; got True"),
    (
        {"max_seconds": float("nan")},
        "max_seconds: must be a finite number; got nan; write a number",
    ),
    (
        {"optimizer": {"peak_lr": float("inf")}},
        "optimizer.peak_lr: must be a finite number; got inf",
    ),
    ({"optimizer": {"peak_lr": "1e999"}}, "optimizer.peak_lr: must be a finite number; got inf"),
    ({"optimizer": {"weight_decay": -0.1}}, "optimizer.weight_decay: must be 0 or more; got -0.1"),
    ({"train_embedding": 1}, "train_embedding: must be true or false; got 1; write train_"),
    ({"train_embedding": "yes"}, "must be true or false; got 'yes'; write train_embedding: true"),
    ({"init": "lukewarm"}, "init: must be one of random, target; got 'lukewarm'; use random"),
    ({"depth_schedule": 3}, "got 3; write depth_schedule: [{until: 100, num_depths: 1}]"),
    ({"depth_schedule": {"0": {"until": 1}}}, "depth_schedule: must be a list"),
    ({"head": {"aux_hidden_state_layers": [1, "2"]}}, "head.aux_hidden_state_layers[1]: must be"),
    ({"head": {"aux_hidden_state_layers": [1, "2"]}}, "write aux_hidden_state_layers: [2, 5, 7]"),
    ({"head": {"aux_hidden_state_layers": 3}}, "aux_hidden_state_layers: [2, 5, 7], or null"),
    ({"depth_schedule": [{}]}, "add them, for example until: 100 and num_depths: 1"),
    ({"head": {"rope": {"theta": 0}}}, "head.rope.rope_theta: must be above 0; got 0.0; use 500"),
    ({"head": {"rope": {"low": 4}}}, "head.rope.low_freq_factor: must be below high_freq_factor"),
    ({"head": {"norm_before_fc": True, "fc_norm": True}}, "head.fc_norm: excludes norm_before_fc"),
    ({"placeholder": {"hidden": "x"}}, "placeholder.hidden: must be one of shared, shared_fused"),
    ({"placeholder": {"token": "x"}}, "placeholder.token: must be one of mask, "),
    (
        {"placeholder": {"attention": "block"}},
        "placeholder.attention: must be one of causal, bidirectional, committed; got block",
    ),
    ({"placeholder": {"context": "x"}}, "placeholder.context: must be one of layers, injected"),
    (
        {"placeholder": {"context": "injected"}, "head": {"layers": 1}},
        "placeholder.context: needs a head of two layers or more; got injected with 1; set head",
    ),
    (
        {"placeholder": {"true_tokens": 0.5}, "confidence": {}},
        "placeholder.true_tokens: must be 0 with a confidence head, or with a part trained alone",
    ),
    (
        {
            "placeholder": {"true_tokens": 0.5},
            "init_from": "head",
            "markov": {"rank": 4, "train_alone": True},
        },
        "placeholder.true_tokens: must be 0 with a confidence head, or with a part trained alone",
    ),
    ({"placeholder": {"true_tokens": 1.5}}, "placeholder.true_tokens: must lie in 0..1; got 1.5"),
    (
        {"data": {"source": "s", "chat_template_kwargs": {"day": datetime.date(2024, 7, 26)}}},
        "data.chat_template_kwargs: must be what JSON has: names, text, numbers, true or false; ",
    ),
    (
        {"data": {"source": "s", "chat_template_kwargs": {True: 1}}},
        "data.chat_template_kwargs: must be what JSON has",
    ),
    (
        {"data": {"source": "s", "chat_template_kwargs": "thinking"}},
        "data.chat_template_kwargs: must be a mapping; got 'thinking'; write chat_template_kwargs: "
        "{enable_thinking: false}, or null",
    ),
    ({"markov": {"rank": 0}}, "markov.rank: must be 1 or more; got 0; use 256"),
    ({"markov": {"gated": True}}, "markov: rank must be given; got no rank"),
    (
        {"markov": {"rank": 4, "gated": "yes"}},
        'markov: gated must be one of false, true; got "yes"; write kind, one of v',
    ),
    (
        {"markov": {"rank": 4, "gated": True, "kind": "gated"}},
        "markov: kind was formerly called gated: only one of the two may be given",
    ),
    (
        {"markov": {"rank": 4, "kind": "gru"}},
        "markov.kind: must be one of vanilla, gated, rnn; got gru; use vanilla",
    ),
    (
        {"markov": {"rank": 4, "train_alone": True}},
        "markov.train_alone: needs a trained head, which it leaves as it is; got init_from: null",
    ),
    (
        {"confidence": {"train_alone": True}},
        "confidence.train_alone: needs a trained head, which it leaves as it is; got init_from: "
        "null; set init_from to that head's folder, or confidence.train_alone: false",
    ),
    ({"feature_noise": {"noise": -1.0}}, "feature_noise.noise: must be 0 or more; got -1.0"),
    ({"feature_noise": {"dropout": 1.0}}, "feature_noise.dropout: must lie in 0..1, below 1"),
    ({"cod": {"max_anchors": 0}}, "cod.max_anchors: must be 1 or more, or null; got 0"),
    ({"data": {"source": "d", "max_chars": 0}}, "data.max_chars: must be 1 or more; got 0; use"),
    ({"data": {"source": "d", "held_out": 1}}, "data.held_out: must lie in 0..1, below 1; got 1"),
    ({"data": {"source": "d", "batch_size": 0}}, "data.batch_size: must be 1 or more; got 0"),
    ({"data": {"source": "d", "bad_rows": "x"}}, "data.bad_rows: must be refuse or skip; got x"),
    ({"optimizer": {"peak_lr": 0}}, "optimizer.peak_lr: must be above 0; got 0.0; use 1e-4"),
    ({"optimizer": {"warmup": -1}}, "optimizer.warmup: must be 0 or more"),
    ({"optimizer": {"max_grad_norm": 0}}, "optimizer.max_grad_norm: must be above 0"),
    ({"eval": {"every": 0}}, "eval.every: must be 1 or more, or null; got 0; use 1000"),
    ({"eval": {"max_new_tokens": 0}}, "eval.max_new_tokens: must be 1 or more"),
    ({"save_every": 0}, "save_every: must be 1 or more; got 0; use 1000"),
    ({"loss": "none"}, "loss: must be one of forward_kl, cross_entropy"),
    (
        {"depth_schedule": [{"until": 9, "num_depths": 8}]},
        "depth_schedule: must ascend in until and in num_depths, and stay below 8 depths; got",
    ),
]


@pytest.mark.parametrize("change, words", BAD)
def test_refusals(change, words, tmp_path):
    with pytest.raises(InputError) as error:
        load(tmp_path, minimal("peagle", **change))
    assert words in str(error.value), error.value


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "task: chess",
            "the key task must be one of lm, peagle, eagle3, eagle; got chess; write task:",
        ),
        ("task: [lm]", "the key task must be one of"),
        ("out: x", "got None"),
        ("- 1", "got list"),
        ("out: x\na: [", "; correct line 2"),
        ("a: \x01", "; remove the character at position 3"),
        (b"\xff", "; save the file as UTF-8"),
    ],
)
def test_files_that_are_no_recipes(text, words, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as error:
        load_run(path)
    assert words in str(error.value), error.value


@pytest.mark.parametrize(
    "change, words",
    [
        ({"vocab": 259}, "model.vocab: must be 260 or more"),
        ({"layers": 0}, "model.layers: must be 1 or more; got 0; use 8"),
        ({"dim": 0}, "model.dim: must be 1 or more; got 0; use 512"),
        ({"context": 0}, "model.context: must be 1 or more"),
        ({"rope_theta": 0}, "model.rope_theta: must be above 0"),
        (
            {"heads": 3, "kv_heads": 2},
            "model.heads: must be a multiple of kv_heads, 2; got 3; use 2",
        ),
        ({"kv_heads": 0}, "model.kv_heads: must be 1 or more"),
        ({"head_dim": 15}, "model.head_dim: must be even and 2 or more; got 15"),
    ],
)
def test_targets_that_cannot_be(change, words, tmp_path):
    model = {**MINIMAL["lm"]["model"], **change}
    with pytest.raises(InputError) as error:
        load(tmp_path, minimal("lm", model=model))
    assert words in str(error.value), error.value


def test_differences_name_keys_and_values():
    run = PeagleRun(target="t", out="o", data=DataConfig(source="d"))
    changed = dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, seq_len=64, max_chars=5),
        depth_schedule=(DepthStage(until=2, num_depths=1),),
    )
    assert differences(run, run) == []
    assert sorted(differences(run, changed)) == [
        "data.max_chars 5, was null",
        "data.seq_len 64, was 2048",
        "depth_schedule [{'until': 2, 'num_depths': 1}], was []",
    ]


def test_examples_in_errors_are_right():
    """What an error says to write, for any key of any recipe, is accepted."""
    seen = 0
    for run in (LmRun, PeagleRun, Eagle3Run):
        for path, key, hint in keys_of(run):
            example = yaml.safe_load(str(example_of(key, hint)))
            alone = dataclasses.make_dataclass("Alone", [(key, hint)])
            made = build(alone, {key: example}, f"{path}{key}")
            assert getattr(made, key) is not None
            seen += 1
    assert seen > 100


def keys_of(cls: type, path: str = ""):
    """(path, key, type) of every key below a class of settings."""
    for key, hint in field_types(cls).items():
        yield path, key, hint
        for kind in options_of(hint):
            if dataclasses.is_dataclass(kind):
                yield from keys_of(kind, f"{path}{key}.")
