"""Fits of the plan's constants, and the published tables that it is held against."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from test_decoding_plan import DEVICE, ROUND

from experiments import published
from peagle_jax.pipelines.acceptance_rates import PUBLISHED
from peagle_jax.report.published_tables import PublishedTable, read_tables
from peagle_jax.types import InputError

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "results/published"


def script(name):
    """A module of scripts/measure."""
    path = ROOT / f"scripts/measure/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


plan_fit = script("plan_fit")
HEAD = dataclasses.replace(ROUND, layers=1)


def made_steps(device):
    """Steps that take exactly what a plan on a device says."""
    steps = []
    for method, k in (("none", 0), ("eagle3", 1), ("eagle3", 4), ("peagle", 4), ("peagle", 7)):
        step = plan_fit.Step(
            label=f"{method} {k}",
            target=ROUND,
            head=HEAD if k else None,
            method=method,
            k=k,
            length=1.5 if k else 1.0,
            concurrency=2,
            context=16,
            seconds=1.0,
        )
        steps.append(dataclasses.replace(step, seconds=step.planned(device)))
    return steps


@pytest.mark.parametrize(
    "constants",
    [
        {"layer_seconds": 3e-5, "pass_seconds": 4e-4},
        {"bandwidth": 0.6, "rate": 1.7},
        {"bandwidth": 0.6, "cache_bandwidth": 2e7},
    ],
)
def test_constants_are_found(constants):
    device = dataclasses.replace(DEVICE, overlaps=False)
    steps = made_steps(plan_fit.with_constants(device, constants))
    found = plan_fit.fit(device, steps, list(constants))
    assert found == pytest.approx(constants, rel=1e-3)
    assert max(map(abs, plan_fit.errors_left_out(device, steps, list(constants)))) < 1e-3


def test_a_step_is_left_out_of_its_own_fit():
    names = "layer_seconds", "pass_seconds"
    steps = made_steps(plan_fit.with_constants(DEVICE, {"layer_seconds": 3e-5}))
    wrong = dataclasses.replace(steps[2], seconds=2 * steps[2].seconds)
    errors = plan_fit.errors_left_out(DEVICE, [*steps[:2], wrong, *steps[3:]], names)
    assert errors[2] == pytest.approx(-0.5, abs=1e-3)


def test_no_third_constant():
    with pytest.raises(ValueError, match="at most 2"):
        plan_fit.fit(DEVICE, made_steps(DEVICE), ("bandwidth", "rate", "layer_seconds"))


# ---------------------------------------------------------------- published tables


def test_published_tables():
    tables = read_tables(TABLES)
    for table in tables.values():
        assert table.rows and table.facts["differs"]
        for row in table.rows:
            rates = row.get("accepted_percent", [])
            assert sorted(rates, reverse=True) == rates and len(rates) in (0, row.get("k"))
            length = row.get("acceptance_length")
            if rates and length:  # two ways to say the same, each rounded
                assert 1 + sum(rates) / 100 == pytest.approx(length, abs=0.02)
    # numbers that stand elsewhere, too
    aws = [row.get("tokens_per_second") for row in tables["aws_qwen3_coder"].rows[:3]]
    [numbers] = [n.values for n in published.NUMBERS if n.unit == "tokens/s" and len(n.values) == 3]
    assert tuple(aws) == numbers
    by_method = {r["method"]: r for r in tables["vllm_32628"].rows if r["k"] == 8}
    for method, rates in PUBLISHED.items():
        assert tuple(by_method[method]["accepted_percent"]) == rates
    assert published.PEAGLE_POSITIONS.values == PUBLISHED["peagle"]


def test_steps_of_published_rows():
    table = PublishedTable("made", {}, [])
    assert table.step_seconds({"method": "none", "concurrency": 1, "tpot_ms": 7.07}) == 7.07e-3
    row = {"method": "eagle3", "concurrency": 8, "tokens_per_second": 1180}
    assert table.step_seconds(row) is None  # nobody said how many tokens a step brings
    row = {**row, "accepted_percent": [73, 52, 36]}
    assert table.step_seconds(row) == pytest.approx(8 * 2.61 / 1180)
    assert table.step_seconds({"method": "peagle", "acceptance_length": 2.0}) is None


def test_tables_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="must have published tables"):
        read_tables(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps({"name": "a", "title": "A"}))
    with pytest.raises(InputError, match="source, engine, target"):
        read_tables(tmp_path)


@pytest.mark.slow
def test_plans_against_measured_steps():
    """At least as good as docs/plan.md says: three published tables and more within 15 %."""
    validate = script("validate_plan")
    groups = validate.published_groups()
    counts = {}
    for group in groups:
        errors = group.errors()
        good = sum(abs(error) <= plan_fit.GOOD for error in errors)
        counts[group.name.split(" (")[0], len(errors)] = good
    assert counts["vLLM issue 20780", 7] == 7
    assert counts["vLLM pull request 32628", 24] == 24
    assert counts["vLLM pull request 16035", 3] == 3
    assert counts["vLLM pull request 32887", 2] == 2
    paper = [good for (name, _), good in counts.items() if "arXiv:2602.01469" in name]
    assert len(paper) == 3 and sum(paper) >= 34
    own = validate.own_groups()  # of whatever was measured here last
    assert len(own) > 3 and all(len(group.steps) > 3 for group in own)
    recorded = [
        json.loads(x) for x in (ROOT / "results/plan_validation.jsonl").read_text().splitlines()
    ]
    # one run writes all its rows at one time; names of earlier runs' groups may be no more
    latest = [row for row in recorded if row["time"] == recorded[-1]["time"]]
    assert {group.name for group in groups} <= {row["group"] for row in latest}
    page = (ROOT / "docs/plan.md").read_text()
    for row in latest:
        good = f"{row['within_15_percent']} of {row['steps']}"
        assert re.search(rf"^\| {re.escape(row['group'])} \|.*\| {good} \|", page, re.MULTILINE)
