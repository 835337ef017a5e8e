"""docs/late_positions.md: one page, whose table of heads is what the rows say."""

import re
from pathlib import Path

import pytest

from experiments import folders, one_page
from experiments.rows import latest, read_rows
from experiments.tables import markdown

PAGE = Path(__file__).parents[2] / "docs" / "late_positions.md"


@pytest.fixture(scope="module")
def rows():
    found, warnings = read_rows(folders.ROOT / folders.default_results("sampled"))
    assert not warnings
    return [row for row in latest(found) if row["budget"] == "sampled"]


def test_the_table_of_heads(rows):
    table = one_page.heads_table(rows)
    assert len(table) == 1 + len(one_page.HEADS) and not table[1][4] and table[2][4]
    text = PAGE.read_text(encoding="utf-8")
    shown = re.search(rf"<!-- {one_page.MARKER}: [^\n]*-->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert shown and shown[1] == markdown(table)


def test_heads_of_other_targets_do_not_stand_in_one_table(rows, monkeypatch):
    other = [dict(row) for row in rows]
    last = next(row for row in other if row["variant"] == "twice the steps")
    last["target_digest"] = "another"
    with pytest.raises(ValueError, match="rows are of 2 targets"):
        one_page.heads_table(other)
    monkeypatch.setattr(one_page, "LARGEST_P", 1e-4)
    with pytest.raises(ValueError, match="a difference has p above"):
        one_page.heads_table(rows)
    few = [row for row in rows if row["experiment"] != "warm_start"]
    with pytest.raises(ValueError, match="no rows of twice the steps .warm_start., target's last"):
        one_page.heads_table(few)


def test_it_is_one_page():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 120
