"""Overrides of recipes on the command line: `peagle train RECIPE --section.key value`."""

import pytest
from recipes import DATA, minimal

from peagle_jax.train.config import PeagleRun
from peagle_jax.train.overrides import apply_overrides
from peagle_jax.train.settings import build
from peagle_jax.types import InputError


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
    ("--head.taps 2,5,7", {"head": {"aux_hidden_state_layers": [2, 5, 7]}}),
    ("--head.taps=2,5", {"head": {"aux_hidden_state_layers": [2, 5]}}),
    ("--head.taps 2", {"head": {"aux_hidden_state_layers": [2]}}),
    ("--markov.rank 4 --markov.gated true", {"markov": {"rank": 4, "kind": "gated"}}),
    ("--markov.rank 4 --markov.gated=false", {"markov": {"rank": 4, "kind": "vanilla"}}),
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
        "--optimizer.speed names no key: those of optimizer are name, steps, peak_lr",
    ),
    ("--optimizer.step 3", "got step; remove --optimizer.step, or write --optimizer.steps"),
    ("--head.foo 3", "got foo; remove --head.foo"),
    ("--speed 3", "--speed names no key: those of the recipe are task, out, seed"),
    ("--seed.x 3", "--seed.x names no key: seed has a value, and no keys"),
    ("--seed", "recipe.yaml with --seed: --seed needs a value; got none; write --seed 0"),
    ("--seed 3 4", "--seed takes one value; got 3 4; write --seed 3"),
    ("--out a b", "--out takes one value; got a b; write --out 'a b'"),
    ("--optimizer", "--optimizer needs a value; got none; write --optimizer.name adamw"),
    ("--grow", "--grow needs a value; got none; write --depth_schedule.0.until 10"),
    ("--grow.4.until", "got none; write --depth_schedule.4.until 100"),
    ("--head.rope.factor", "got none; write --head.rope.factor 0.5"),
    ("--head.taps", "got none; write --head.aux_hidden_state_layers null"),
    ("--head.taps=", "--head.taps needs a value in every place; got --head.taps; write --head.aux"),
    ("--head.taps 2,,5", "--head.taps needs a value in every place; got --head.taps 2  5; write"),
    ("--head.taps [2, 5", "[2, 5; quote it for the shell: --head.taps '[2, 5, 7]'"),
    ("--seed four", "recipe.yaml with --seed four: seed: must be a whole number; got 'four'"),
    ("--seed [", "the value of an override must be YAML; got --seed [; write --seed 0"),
    (
        "--task eagle3",
        "the recipe's task stays peagle: another one has other keys; got eagle3; make a recipe by "
        "peagle init-config --task eagle3",
    ),
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
