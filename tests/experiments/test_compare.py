"""`python -m experiments.compare`: any two variants, or all of them."""

import json

import pytest
from made_rows import runs

from experiments import compare as command
from experiments.compare import comparisons
from experiments.statistics import compare, holm

VARIANTS = {"base": 0.5, "good": 0.8, "same": 0.5}


@pytest.fixture
def results(tmp_path):
    """Rows of two budgets, whose variants are the other way round in the other one."""
    rows = runs("hidden", VARIANTS)
    other = [row | {"budget": "full"} for row in runs("hidden", {"base": 0.9, "good": 0.1})]
    (tmp_path / "hidden.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*rows, *other]))
    return tmp_path


def test_pairs_are_compared_as_statistics_compares_them():
    rows = runs("hidden", VARIANTS)
    of = {name: [row for row in rows if row["variant"] == name] for name in VARIANTS}
    pairs = [("good", "base"), ("same", "good"), ("same", "base")]
    found = comparisons(rows, pairs)
    assert [(a, b) for a, b, _ in found] == pairs
    want = [compare(of[a], of[b]) for a, b in pairs]
    assert [c.difference for _, _, c in found] == [c.difference for c in want]
    assert [c.p for _, _, c in found] == [c.p for c in want]
    assert [c.p_holm for _, _, c in found] == holm([c.p for c in want]) != [c.p for c in want]
    assert found[0][2].verdict == "better" and found[1][2].verdict == "worse"


def test_the_command(results, capsys):
    line = ["hidden", "--results", str(results), "--budget", "small"]
    assert command.main([*line, "good", "base"]) == 0
    shown = capsys.readouterr().out
    assert "better" in shown and shown.count("│ good") == 1 and "same" not in shown
    assert command.main(line) == 0
    assert capsys.readouterr().out.count("minus") == 1
    line[-1] = "full"
    assert command.main([*line, "good", "base"]) == 0
    assert "worse" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, error",
    [
        (["other"], "must hold rows of other with the budget small; got none"),
        (["hidden", "good"], "two variants are compared, or all; got good; give two names"),
        (["hidden", "good", "none"], "variants with rows are base, good, same; got none"),
    ],
)
def test_one_line(words, error, results, capsys):
    assert command.main([*words, "--results", str(results), "--budget", "small"]) == 2
    said = capsys.readouterr()
    assert error in said.err and said.err.count("\n") == 1 and not said.out
