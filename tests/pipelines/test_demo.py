"""The demo as a whole on a tiny budget: stages, exactness in float32, what is kept and what is measured again."""

import dataclasses
import json

import pytest

from peagle_jax.pipelines import budgets, demo
from peagle_jax.pipelines.budgets import Budget, Scratch

TINY = Budget(
    minutes="1",
    needs_scratch=True,
    fresh=None,
    ks=(2,),
    batches=(1,),
    sampled_k=None,
    prompts=2,
    new_tokens=8,
    repeats=1,
    dtype="bfloat16",
    scratch=Scratch(
        model=budgets.lm_shape(320, 3, 32, 48, 2, 1, 16, 512),
        source=None,
        max_chars=100_000,
        length=48,
        lm=(30, 2),
        peagle=(32, 1),
        eagle3=(31, 1),
        peagle_layers=2,
        peagle_mlp=24,
        num_depths=3,
    ),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The first run, and what it said."""
    out, said = tmp_path_factory.mktemp("demo"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.BUDGETS, "smoke", TINY)
        return out, demo.run_demo(out, "smoke", said.append), said


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
    assert page.count("<img ") >= 7 and "K = 2, greedy" in page


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
    monkeypatch.setitem(demo.BUDGETS, "smoke", TINY)
    monkeypatch.setattr(demo, "run_suite", lambda *a, **k: pytest.fail("measured again"))
    saved = json.loads((out / "suite.json").read_text())
    again = demo.run_demo(out, "smoke", lambda s: None)
    assert (
        again.lossless == first.lossless and json.loads((out / "suite.json").read_text()) == saved
    )
    for changed in (dataclasses.replace(TINY, new_tokens=9), dataclasses.replace(TINY, ks=(3,))):
        monkeypatch.setitem(demo.BUDGETS, "smoke", changed)
        with pytest.raises(pytest.fail.Exception, match="measured again"):
            demo.run_demo(out, "smoke", lambda s: None)


def test_new_weights_are_measured_again(made, monkeypatch, tmp_path):
    out, _, _ = made
    models = demo.Models(
        out / "target" / "model",
        {"peagle": out / "peagle" / "head", "eagle3": out / "eagle3" / "head"},
        {},
    )
    before = demo._suite_key(TINY, models, "x")
    swapped = dataclasses.replace(models, heads=models.heads | {"eagle3": models.heads["peagle"]})
    assert (
        demo._suite_key(TINY, models, "x") == before
        and demo._suite_key(TINY, swapped, "x")["digest"] != before["digest"]
    )
