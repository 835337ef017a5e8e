"""Recipes: defaults, former spellings, refusals, and overrides on the command line."""

import dataclasses
from pathlib import Path

import pytest
import yaml

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
from peagle_jax.train.overrides import apply_overrides
from peagle_jax.train.settings import build, differences, plain
from peagle_jax.types import InputError

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
FORMER = Path(__file__).parent / "former_recipes"

MINIMAL = {
    "peagle": {"target": "folder", "out": "runs/x", "data": {"source": "answers.jsonl"}},
    "eagle3": {"target": "folder", "out": "runs/x", "data": {"source": "answers.jsonl"}},
    "lm": {
        "out": "runs/x",
        "model": {
            "vocab": 300,
            "layers": 2,
            "dim": 32,
            "mlp_dim": 48,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 16,
        },
    },
}
DATA = {
    "source": "answers.jsonl",
    "max_chars": None,
    "held_out": 0.05,
    "seq_len": 2048,
    "batch_size": 8,
}
HEAD = {
    "dim": None,
    "mlp_dim": None,
    "heads": None,
    "kv_heads": None,
    "head_dim": None,
    "draft_vocab": None,
    "aux_hidden_state_layers": None,
    "qk_norm": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "mask_token": None,
    "rope": None,
}
OPTIMIZER = {
    "steps": 10_000,
    "peak_lr": 1e-4,
    "warmup": 300,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
}
EVERY_RUN = {"seed": 0, "log_every": 50, "save_every": 1000, "max_seconds": None, "out": "runs/x"}
EVERY_HEAD = EVERY_RUN | {
    "target": "folder",
    "target_dtype": "float32",
    "hidden_states_dir": None,
    "loss": "forward_kl",
    "init": "random",
    "init_from": None,
    "depth_schedule": [],
    "train_lm_head": False,
    "eval": {"every": 1000, "prompts": None, "num_prompts": 16, "max_new_tokens": 96},
    "data": DATA,
    "optimizer": OPTIMIZER,
}
DEFAULTS = {
    "peagle": EVERY_HEAD
    | {
        "task": "peagle",
        "head": {"layers": 4, **HEAD},
        "train_embedding": True,
        "cod": {
            "num_depths": 8,
            "down_sample_ratio": 0.7,
            "down_sample_ratio_min": 0.2,
            "max_anchors": None,
        },
        "placeholder": {"hidden": "shared", "token": "mask"},
        "feature_noise": {"noise": 0.0, "dropout": 0.0},
    },
    "eagle3": EVERY_HEAD
    | {
        "task": "eagle3",
        "head": {"layers": 1, **HEAD},
        "train_embedding": False,
        "ttt": {"steps": 6, "decay": 1.0},
    },
    "lm": EVERY_RUN
    | {
        "task": "lm",
        "model": {**MINIMAL["lm"]["model"], "rope_theta": 10_000.0, "context": 4096},
        "data": {**DATA, "source": None, "seq_len": 256},
        "optimizer": {
            **OPTIMIZER,
            "steps": 4000,
            "peak_lr": 2e-3,
            "warmup": 200,
            "weight_decay": 0.1,
        },
    },
}
# Every key with a value that is not its default.
ALL_CHANGED = {
    "seed": 3,
    "log_every": 7,
    "save_every": 9,
    "max_seconds": 4.5,
    "target_dtype": "bfloat16",
    "hidden_states_dir": "states",
    "loss": "cross_entropy",
    "init": "target",
    "init_from": "trained",
    "depth_schedule": [{"until": 2, "num_depths": 1}, {"until": 3, "num_depths": 2}],
    "train_embedding": False,
    "train_lm_head": True,
    "eval": {"every": None, "prompts": "p.jsonl", "num_prompts": 3, "max_new_tokens": 5},
    "data": {
        "source": "answers.jsonl",
        "max_chars": 77,
        "held_out": 0.25,
        "seq_len": 64,
        "batch_size": 2,
    },
    "optimizer": {
        "steps": 60,
        "peak_lr": 0.5,
        "warmup": 4,
        "weight_decay": 0.25,
        "max_grad_norm": 0.75,
    },
    "head": {
        "layers": 3,
        "dim": 48,
        "mlp_dim": 50,
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 10,
        "draft_vocab": 99,
        "aux_hidden_state_layers": [1, 4],
        "qk_norm": True,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "mask_token": 5,
        "rope": {
            "rope_theta": 1000.0,
            "factor": 2.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 3.5,
            "original_max_position_embeddings": 512,
        },
    },
    "cod": {
        "num_depths": 5,
        "down_sample_ratio": 0.5,
        "down_sample_ratio_min": 0.125,
        "max_anchors": 11,
    },
    "placeholder": {"hidden": "per_depth", "token": "frozen"},
    "feature_noise": {"noise": 0.5, "dropout": 0.25},
}


def write(path: Path, recipe: dict) -> Path:
    path.write_text(yaml.safe_dump(recipe))
    return path


def load(tmp_path: Path, recipe: dict):
    return load_run(write(tmp_path / "recipe.yaml", recipe))


def minimal(task: str, **changes) -> dict:
    return {"task": task, **MINIMAL[task], **changes}


# ---------------------------------------------------------------- defaults


@pytest.mark.parametrize("task", MINIMAL)
def test_a_recipe_needs_few_keys(task, tmp_path):
    assert plain(load(tmp_path, minimal(task))) == DEFAULTS[task]


@pytest.mark.parametrize("task", MINIMAL)
def test_keys_without_a_default_are_named(task, tmp_path):
    for key in MINIMAL[task]:
        recipe = minimal(task)
        del recipe[key]
        with pytest.raises(InputError, match=f"recipe.yaml: {key} must be given; got no {key}"):
            load(tmp_path, recipe)


@pytest.mark.parametrize("task", ["peagle", "eagle3"])
def test_a_head_needs_a_corpus(task, tmp_path):
    with pytest.raises(InputError, match="recipe.yaml: data: source must be given"):
        load(tmp_path, minimal(task, data={"seq_len": 64}))


def test_every_key_is_read(tmp_path):
    run = load(tmp_path, minimal("peagle", **ALL_CHANGED))
    assert isinstance(run, PeagleRun)
    got, default = plain(run), DEFAULTS["peagle"]
    for key, value in ALL_CHANGED.items():
        assert got[key] == value != default[key], key
        if isinstance(value, dict):
            same = {k for k in value if default[key] and value[k] == default[key][k]}
            assert same <= {"norm_before_fc", "source"}, key
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
    assert load_run(path) == load_run(CONFIGS / path.name)


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
    former["measure"] = {"every": None, "prompts": "p.jsonl", "count": 3, "new_tokens": 5}
    former["cod"] = {"depths": 5, "ratio": 0.5, "floor": 0.125, "anchors": 11}
    former["data"] = {
        "source": "answers.jsonl",
        "max_chars": 77,
        "held_out": 0.25,
        "length": 64,
        "batch": 2,
    }
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
    ({"sede": 3}, "got unknown sede; remove it, or rename it to seed"),
    ({"data": {"source": "d", "rows": 3}}, "recipe.yaml: data: known keys are source"),
    ({"data": [1]}, "recipe.yaml: data: must be a mapping of keys; got list; give keys of source"),
    ({"data": None}, "recipe.yaml: data: must be a mapping of keys; got NoneType"),
    ({"seed": "four"}, "recipe.yaml: seed: must be a whole number; got 'four'; write seed: 0"),
    ({"seed": True}, "seed: must be a whole number; got True"),
    ({"seed": 1.5}, "seed: must be a whole number; got 1.5"),
    ({"seed": "3"}, "seed: must be a whole number; got '3'"),
    ({"seed": None}, "seed: must be a whole number; got None"),
    ({"out": 7}, "out: must be text; got 7; write it as out: VALUE"),
    ({"max_seconds": "long"}, "max_seconds: must be a number; got 'long'"),
    ({"max_seconds": "3e"}, "max_seconds: must be a number; got '3e'"),
    ({"max_seconds": True}, "max_seconds: must be a number; got True"),
    ({"train_embedding": 1}, "train_embedding: must be true or false; got 1; write train_"),
    ({"train_embedding": "yes"}, "must be true or false; got 'yes'; write train_embedding: true"),
    ({"init": "lukewarm"}, "init: must be one of random, target; got 'lukewarm'; use random"),
    ({"depth_schedule": 3}, "depth_schedule: must be a list; got 3; write depth_schedule: [..]"),
    ({"depth_schedule": {"0": {"until": 1}}}, "depth_schedule: must be a list"),
    ({"head": {"aux_hidden_state_layers": [1, "2"]}}, "head.aux_hidden_state_layers[1]: must be"),
    ({"head": {"rope": {"theta": 0}}}, "head.rope.rope_theta: must be above 0; got 0.0; use 500"),
    ({"head": {"rope": {"low": 4}}}, "head.rope.low_freq_factor: must be below high_freq_factor"),
    ({"head": {"norm_before_fc": True, "fc_norm": True}}, "head.fc_norm: excludes norm_before_fc"),
    ({"placeholder": {"hidden": "x"}}, "placeholder.hidden: must be one of shared, shared_fused"),
    ({"placeholder": {"token": "x"}}, "placeholder.token: must be one of mask, "),
    ({"feature_noise": {"noise": -1.0}}, "feature_noise.noise: must be 0 or more; got -1.0"),
    ({"feature_noise": {"dropout": 1.0}}, "feature_noise.dropout: must lie in 0..1, below 1"),
    ({"cod": {"max_anchors": 0}}, "cod.max_anchors: must be 1 or more, or null; got 0"),
    ({"data": {"source": "d", "max_chars": 0}}, "data.max_chars: must be 1 or more; got 0; use"),
    ({"data": {"source": "d", "held_out": 1}}, "data.held_out: must lie in 0..1, below 1; got 1"),
    ({"data": {"source": "d", "batch_size": 0}}, "data.batch_size: must be 1 or more; got 0"),
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
        ("task: chess", "the key task must be one of lm, peagle, eagle3; got chess; write task:"),
        ("task: [lm]", "the key task must be one of"),
        ("out: x", "got None"),
        ("- 1", "got list"),
        ("a: [", "must be UTF-8 YAML"),
        (b"\xff", "must be UTF-8 YAML"),
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
        ({"layers": 0}, "model.layers: must be 1 or more"),
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


# ---------------------------------------------------------------- overrides


def peagle_run(**changes) -> PeagleRun:
    return build(PeagleRun, minimal("peagle", **changes), "recipe.yaml")


STAGES = [{"until": 10, "num_depths": 1}, {"until": 60, "num_depths": 2}]
OVERRIDES = [
    ("--optimizer.steps 60", {"optimizer": {"steps": 60}}),
    ("--optimizer.steps=60 --seed 4", {"optimizer": {"steps": 60}, "seed": 4}),
    ("--optimizer.peak_lr 3e-3", {"optimizer": {"peak_lr": 3e-3}}),
    ("--optimizer.peak-lr 3", {"optimizer": {"peak_lr": 3.0}}),
    ("--optimizer.clip 0.5", {"optimizer": {"max_grad_norm": 0.5}}),
    ("--data.length 64 --data.batch 2", {"data": {**DATA, "seq_len": 64, "batch_size": 2}}),
    ("--measure.count 3 --measure.new_tokens 9", {"eval": {"num_prompts": 3, "max_new_tokens": 9}}),
    ("--measure.prompts None --eval.every null", {"eval": {"prompts": None, "every": None}}),
    ("--start target --start-from head", {"init": "target", "init_from": "head"}),
    ("--features states --out 7", {"hidden_states_dir": "states", "out": "7"}),
    ("--blur.feature_dropout 0.25", {"feature_noise": {"dropout": 0.25}}),
    ("--cod.depths 4 --cod.ratio 0.5", {"cod": {"num_depths": 4, "down_sample_ratio": 0.5}}),
    ("--cod.floor 0 --cod.anchors 5", {"cod": {"down_sample_ratio_min": 0.0, "max_anchors": 5}}),
    ("--head.taps 2 5 7", {"head": {"aux_hidden_state_layers": [2, 5, 7]}}),
    ("--head.taps [2,5]", {"head": {"aux_hidden_state_layers": [2, 5]}}),
    ("--head.taps 2", {"head": {"aux_hidden_state_layers": [2]}}),
    ("--head.norm-before-residual True", {"head": {"norm_before_residual": True}}),
    ("--train_embedding false", {"train_embedding": False}),
    ("--head.rope.factor 8", {"head": {"rope": {"factor": 8.0}}}),
    ("--head.rope None", {}),
    ("--grow []", {"depth_schedule": []}),
    ("--max_seconds 1e2 --max_seconds 5", {"max_seconds": 5.0}),
]


@pytest.mark.parametrize("arguments, changes", OVERRIDES)
def test_overrides(arguments, changes):
    got = apply_overrides(peagle_run(), arguments.split(), "recipe.yaml")
    assert got == peagle_run(**changes), arguments


def test_overrides_keep_what_the_recipe_says():
    run = peagle_run(optimizer={"steps": 70, "warmup": 5}, head={"layers": 2}, seed=9)
    got = apply_overrides(run, ["--optimizer.warmup", "6", "--head.qk_norm", "true"], "r")
    want = peagle_run(
        optimizer={"steps": 70, "warmup": 6}, head={"layers": 2, "qk_norm": True}, seed=9
    )
    assert got == want
    assert apply_overrides(run, [], "r") is run


def test_overrides_of_list_items():
    run = peagle_run(depth_schedule=STAGES)
    arguments = ["--depth_schedule.0.until", "20", "--grow.1.depths", "5"]
    got = apply_overrides(run, arguments, "recipe.yaml")
    want = [{"until": 20, "num_depths": 1}, {"until": 60, "num_depths": 5}]
    assert got == peagle_run(depth_schedule=want)
    got = apply_overrides(run, ["--grow", "[{until: 3, depths: 2}]"], "recipe.yaml")
    assert got == peagle_run(depth_schedule=[{"until": 3, "num_depths": 2}])


BAD_OVERRIDES = [
    (
        "--optimizer.speed 3",
        "--optimizer.speed names no key: those of optimizer are steps, peak_lr",
    ),
    ("--optimizer.step 3", "got step; remove it, or rename it to steps"),
    ("--speed 3", "--speed names no key: those of the recipe are task, out, seed"),
    ("--seed.x 3", "--seed.x names no key: seed has a value, and no keys"),
    ("--seed", "each override takes one value; got --seed with none; write --seed VALUE"),
    ("--seed 3 4", "each override takes one value; got --seed with 3 4"),
    ("--seed four", "recipe.yaml with --seed four: seed: must be a whole number; got 'four'"),
    ("--seed [", "the value of an override must be YAML; got --seed ["),
    ("--init cold", "init: must be one of random, target; got 'cold'"),
    ("7 --seed 3", "overrides begin with the name of a key; got 7"),
    ("--grow.2.until 5", "depth_schedule: must be a list, or one of its 2 items by number"),
    ("--data.held_out 1", "data.held_out: must lie in 0..1, below 1; got 1.0; use 0.05"),
    (
        "--optimizer.steps 60",
        "recipe.yaml with --optimizer.steps 60: depth_schedule: must end before the last of 60 "
        "steps (optimizer.steps), or the head is never trained for all its 8 depths; got a stage "
        "until step 60; set optimizer.steps above 60, or depth_schedule to earlier stages or []",
    ),
]


@pytest.mark.parametrize("arguments, words", BAD_OVERRIDES)
def test_overrides_are_refused_with_the_rule_that_they_break(arguments, words):
    run = peagle_run(depth_schedule=STAGES)
    with pytest.raises(InputError) as error:
        apply_overrides(run, arguments.split(), "recipe.yaml")
    assert words in str(error.value), error.value
