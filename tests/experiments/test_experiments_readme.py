"""experiments/README.md: its tables and pictures are written anew, and nothing between them."""

import json
import re

import pytest
from made_rows import IDENTITY, ROWS, runs

from experiments import readme
from peagle_jax.types import InputError


def test_the_readme_is_filled_between_its_markers(tmp_path):
    """Twice, with a row that was run again: the same text, and all around the markers stays."""
    path = tmp_path / "README.md"
    path.write_text(
        "# Before\n<!-- overview: x -->\nold\n<!-- end -->\nbetween\n"
        "<!-- hidden: y -->\n<!-- end -->\nafter\n"
    )
    rows = [*ROWS, ROWS[0], *runs("unheard_of", {"x": 0.4}, seeds=1)]
    assert readme.fill(path, rows, {"hidden": IDENTITY}) == ["unheard_of"]
    text = path.read_text()
    assert (
        text.startswith("# Before\n<!-- overview: x -->\n| experiment |")
        and "between\n<!-- hidden: y -->\n![" in text
        and text.endswith("<!-- end -->\nafter\n")
    )
    assert (
        "old" not in text
        and "| good | 0 1 2 |" in text
        and "| better |" in text
        and "did not run" not in text
        and "cannot be said" not in text
    )
    assert (tmp_path / "pictures" / "hidden.png").stat().st_size > 1000 and [
        p.name for p in (tmp_path / "pictures").iterdir()
    ] == ["hidden.png"]
    assert not {"changes", "speedup"} & set(
        re.findall(
            r"[a-z]+", text.split("<!-- hidden: y -->")[1].split("\n| ---")[0].split("\n| ")[1]
        )
    )
    readme.fill(path, rows, {"hidden": IDENTITY})
    assert path.read_text() == text


@pytest.mark.parametrize(
    "end, got",
    [("", "<!-- hidden: y -->"), ("<!-- and -->\n", "<!-- and -->"), (None, "none")],
)
def test_a_marker_without_an_end_replaces_nothing(end, got, tmp_path):
    path = tmp_path / "README.md"
    rest = "" if end is None else "prose\n<!-- hidden: y -->\n<!-- end -->\n"
    path.write_text(f"<!-- overview: x -->\nold\n{end or ''}{rest}")
    before = path.read_text()
    with pytest.raises(InputError, match=f"<!-- overview: .* followed by .*; got {got};"):
        readme.fill(path, ROWS, {"hidden": IDENTITY})
    assert path.read_text() == before and not (tmp_path / "pictures").exists()


def test_the_readme_of_smoke_rows(tmp_path, monkeypatch, capsys):
    """Rows are looked for where they go; the file must be one."""
    monkeypatch.setattr(readme.folders, "ROOT", tmp_path)
    words = ["--budget", "smoke", "--readme", str(tmp_path)]
    assert readme.main(words) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / readme.folders.SMOKE_RESULTS) in said and said.count("\n") == 1
    (tmp_path / "rows").mkdir()
    rows = [dict(row, budget="smoke") for row in ROWS]
    (tmp_path / "rows" / "hidden_designs.jsonl").write_text(
        "".join(json.dumps(dict(row, experiment="hidden_designs")) + "\n" for row in rows)
    )
    assert readme.main([*words, "--results", str(tmp_path / "rows")]) == 2
    assert f"{tmp_path}: must be a file; got a folder" in capsys.readouterr().err


def test_the_readme_shows_other_measurements(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("<!-- hidden: y -->\n<!-- end -->\n")
    rows = runs("hidden", {"shared": 0.4, "good": 0.6}, more_k=(7,))
    for row in rows:
        row["measurements"][1] |= {"temperature": 0.5, "sample_drafts": row["variant"] == "good"}
    readme.fill(path, rows, {"hidden": IDENTITY})
    after = path.read_text().split("Acceptance length, other measurements:")[1]
    assert (
        "| design | K = 7, temperature 0.5, 65 after 33 tokens "
        "| K = 7, temperature 0.5, sampled drafts, 65 after 33 tokens |" in after
    )
