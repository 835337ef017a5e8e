"""The demo as a whole on a tiny budget: stages, losslessness, and what is measured again."""

import dataclasses
import json
import re

import numpy as np
import pytest

from peagle_jax.pipelines import budgets, demo
from peagle_jax.pipelines.budgets import Budget, ScratchModels, TrainingSize
from peagle_jax.types import InputError

TINY = Budget(
    minutes="1",
    needs_scratch=True,
    fresh_head=None,
    ks=(2,),
    batch_sizes=(1,),
    sampled_k=None,
    num_prompts=2,
    max_new_tokens=8,
    repeats=1,
    dtype="bfloat16",
    scratch=ScratchModels(
        target_shape=budgets.lm_shape(320, 3, 32, 48, 2, 1, 16, 512),
        source=None,
        max_chars=100_000,
        seq_len=48,
        target=TrainingSize(30, 2),
        peagle=TrainingSize(32, 1),
        eagle3=TrainingSize(31, 1),
        peagle_layers=2,
        peagle_mlp_dim=24,
        num_depths=3,
    ),
)


ROOT = demo.PACKAGE.parent


def tracked_data():
    """Data files of the repository that a run could write by mistake, with their times."""
    files = [*(ROOT / "results").rglob("*"), *demo.ASSETS.rglob("*")]
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A first run in a folder, its result, and the data files before and after."""
    out, before = tmp_path_factory.mktemp("demo"), tracked_data()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(budgets.BUDGETS, "smoke", TINY)
        result = demo.run_demo(out, "smoke", lambda line: None)
    return out, result, (before, tracked_data())


def test_nothing_is_written_outside_of_its_folder(made):
    _, _, (before, after) = made
    assert before and after == before


def test_everything_is_there(made):
    out, result, _ = made
    assert result.lossless and result.report == out / "report.html"
    for name in (
        "target/model",
        "peagle/head",
        "eagle3/head",
        "peagle-vllm",
        "peagle-speculators",
        "eagle3-vllm",
        "eagle3-speculators",
    ):
        assert (out / name / "config.json").exists(), name
    page = result.report.read_text()
    assert page.count("<img ") >= 7 and "K = 2, " in page and "% repeated 4-grams" in page
    assert not re.findall(r"\d\.\d{7,}", re.sub(r'src="data:[^"]*"', "", page))


def test_exactness_is_judged_in_float32_and_speed_in_the_budgets_dtype(made):
    out, _, _ = made
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    exact = [r for r in rows if r["name"] == "demo/smoke/exactness"]
    timed = [r for r in rows if r["name"] == "demo/smoke"]
    assert (
        [r["method"] for r in exact] == [r["method"] for r in timed] == ["none", "eagle3", "peagle"]
    )
    assert {r["dtype"] for r in exact} == {"float32"} and all(r["lossless"] for r in exact[1:])
    assert {r["dtype"] for r in timed} == {"bfloat16"} and not any("lossless" in r for r in timed)


def test_a_second_run_measures_nothing_again_unless_something_changed(made, monkeypatch):
    out, first, _ = made
    monkeypatch.setitem(budgets.BUDGETS, "smoke", TINY)
    monkeypatch.setattr(demo, "run_suite", lambda *a, **k: pytest.fail("measured again"))
    saved = json.loads((out / "suite.json").read_text())
    again = demo.run_demo(out, "smoke", lambda s: None)
    assert again.lossless == first.lossless
    assert json.loads((out / "suite.json").read_text()) == saved
    for changed in (
        dataclasses.replace(TINY, max_new_tokens=9),
        dataclasses.replace(TINY, ks=(3,)),
    ):
        monkeypatch.setitem(budgets.BUDGETS, "smoke", changed)
        with pytest.raises(pytest.fail.Exception, match="measured again"):
            demo.run_demo(out, "smoke", lambda s: None)


def test_new_weights_are_measured_again(made, monkeypatch, tmp_path):
    out, _, _ = made
    models = demo.Models(
        out / "target" / "model",
        {"peagle": out / "peagle" / "head", "eagle3": out / "eagle3" / "head"},
        {},
    )
    prompts = [[3, 1], [4]]
    before = demo._suite_key(TINY, models, prompts, "x")
    swapped = dataclasses.replace(models, heads=models.heads | {"eagle3": models.heads["peagle"]})
    assert demo._suite_key(TINY, models, [np.array([3, 1]), [4]], "x") == before
    assert demo._suite_key(TINY, swapped, prompts, "x")["digest"] != before["digest"]
    assert demo._suite_key(TINY, models, [[3, 1], [5]], "x")["digest"] != before["digest"]


def test_a_folder_has_one_demo(tmp_path):
    """Before anything is measured, and also where it is only said what would be done."""
    (tmp_path / demo.DEMO_FILE).write_text('{"budget": "small", "from_scratch": false}\n')
    before = sorted(tmp_path.iterdir())
    for call in (
        lambda: demo.run_demo(tmp_path, "smoke", lambda line: None),
        lambda: demo.plan("smoke", tmp_path, False),
    ):
        with pytest.raises(InputError, match="one demo; got budget smoke, was small; choose"):
            call()
    with pytest.raises(InputError, match="from_scratch True, was False"):
        demo.plan("small", tmp_path, True)
    assert demo.plan("small", tmp_path, False)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("is_faster, want", [(True, "bfloat16"), (False, "float32")])
def test_the_small_demo_runs_in_the_dtype_that_is_faster_here(is_faster, want, monkeypatch):
    monkeypatch.setattr(budgets, "has_bfloat16_products", lambda: is_faster)
    assert budgets.budget_here("small").dtype == want
    assert budgets.budget_here("smoke").dtype == "float32"
