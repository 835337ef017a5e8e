"""Every number that a page quotes with its row is that row's, and prose says no other decimals."""

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = ("does_it_pay.md", "benchmark.md")
# | number | what | results/FILE.jsonl: key=value ... -> [mean of N: ]key |
QUOTE = re.compile(
    r"^\| (?P<number>[\d.,]+)(?P<unit> %| MB)? \| .* \| "
    r"results/(?P<file>[\w/]+\.jsonl): (?P<keys>.*) -> "
    r"(?:mean of (?P<count>\d+): )?(?P<path>[\w.]+) \|$",
    re.MULTILINE,
)
SCALE = {None: 1, " %": 100, " MB": 1e-6}
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)|(?<![\w.])\d+(?= %)")


def quotes(page: str):
    return list(QUOTE.finditer((ROOT / "docs" / page).read_text()))


def matches(row: dict, key: str, value: str) -> bool:
    """Whether a row has a key's value; spaces are written as underscores."""
    found = row.get(key)
    if isinstance(found, float) and re.fullmatch(r"[\d.]+", value):
        return found == float(value)
    return str(found).replace(" ", "_") == value


def value_at(row: dict, path: str) -> float:
    value = row
    for part in path.split("."):
        value = value[int(part) if isinstance(value, list) else part]
    return value


def looked_up(quote: re.Match) -> str:
    """The number of a quote's rows, written as the page writes it."""
    lines = (ROOT / "results" / quote["file"]).read_text().splitlines()
    wanted = [pair.split("=") for pair in quote["keys"].split()]
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if all(matches(row, key, value) for key, value in wanted)]
    assert len(rows) == int(quote["count"] or 1), f"{len(rows)} rows: {quote[0]}"
    number = statistics.fmean(value_at(row, quote["path"]) for row in rows) * SCALE[quote["unit"]]
    decimals = len(quote["number"].partition(".")[2])
    return f"{number:,.{decimals}f}"


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_rows(page):
    found = quotes(page)
    assert len(found) >= 12
    for quote in found:
        assert looked_up(quote) == quote["number"], quote[0]
        # another budget's rows may come later, and would be counted with these
        assert "budget=" in quote["keys"] or not quote["file"].startswith("experiments/"), quote[0]


def test_prose_has_no_number_without_a_row():
    text = (ROOT / "docs" / "does_it_pay.md").read_text()
    quoted = {quote["number"] for quote in quotes("does_it_pay.md")}
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    assert set(DECIMAL.findall(prose)) <= quoted
    # every line of a table is a quote, or its head
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = sum(line.startswith(("| number", "| ---")) for line in lines)
    assert len(lines) - heads == len(quotes("does_it_pay.md"))


def test_a_wrong_number_would_be_noticed():
    [quote] = QUOTE.finditer(quotes("does_it_pay.md")[0][0].replace("| 1.92 |", "| 1.93 |"))
    assert looked_up(quote) != quote["number"]


def test_the_page_is_one_page():
    text = (ROOT / "docs" / "does_it_pay.md").read_text()
    assert len(text.splitlines()) < 120 and text.count("\n## ") == 5
