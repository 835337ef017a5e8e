"""Recipes and overrides with anything in any place: a run or one line, never anything else."""

from pathlib import Path

import pytest
import yaml
from fuzzing import cases, changed, damaged, only_input_errors, values
from hypothesis import given
from hypothesis import strategies as st
from recipes import minimal

from peagle_jax.train.config import TASKS, PeagleRun, dump, load_run
from peagle_jax.train.overrides import apply_overrides
from peagle_jax.train.settings import build, plain

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "train").glob("*.yaml"))
# What YAML reads in a way that may surprise: dates, other bases, names, tags, depth.
PIECES = (
    b"2001-99-99",
    b"0b_",
    b"0x" + b"f" * 5000,
    b"1" * 400,
    b".inf",
    b"3e-3",
    b"&a [",
    b"*a",
    b"&a [*a, *a]",
    b"[" * 3000,
    b"!!python/object/apply:os.system [true]",
    b"!!binary x",
    b"<<: ",
    b"? ",
    b"|\n ",
    b": ",
    b"\n- ",
    b"\t",
    b"\xff",
    b"\0",
    b"---\n",
)
# numbers that Python does not write out, not even in a message of hypothesis
huge = st.builds(lambda: -(16**5000))
more_values = (
    values
    | huge
    | st.sampled_from([10**400, {"a": [[[{}]]]}, ["x"] * 99, "3e999", "folder", {"0": 1}, {0: {}}])
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes") / "recipe.yaml"


@pytest.mark.fuzz
@pytest.mark.parametrize("task", TASKS)
def test_any_value_anywhere(task):
    raw = plain(build(TASKS[task], minimal(task), "recipe.yaml"))

    @cases(100, len(TASKS))
    @given(changed(raw, ("task", "base", "0"), more_values))
    def check(raw):
        with only_input_errors():
            run = build(TASKS[task], raw, "recipe.yaml")
            assert build(TASKS[task], yaml.safe_load(dump(run)), "again") == run

    check()


@pytest.mark.fuzz
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_any_bytes_anywhere(recipe, path):
    @cases(20, len(RECIPES))
    @given(damaged(path.read_bytes(), PIECES))
    def check(content):
        recipe.write_bytes(content)
        with only_input_errors():
            load_run(recipe)

    check()


@pytest.mark.fuzz
@cases(300)
@given(
    option=st.sampled_from(
        ["--seed", "--optimizer.steps", "--head.taps", "--depth_schedule", "--grow.0.until"]
        + ["--out", "--loss", "--cod.ratio", "--head.rope.factor", "--trackers", "--a.b", "--"]
    ),
    texts=st.lists(
        st.text(max_size=6) | st.sampled_from([piece.decode("latin1") for piece in PIECES]),
        max_size=3,
    ),
)
def test_any_override(option, texts):
    run = build(PeagleRun, minimal("peagle"), "recipe.yaml")
    with only_input_errors():
        apply_overrides(run, [option, *texts], "recipe.yaml")
