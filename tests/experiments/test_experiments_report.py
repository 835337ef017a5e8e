"""The page of experiments: which rows count, what is left out, and that it needs no other file."""

import dataclasses
import json
import re
import sys
import types

import matplotlib.pyplot as plt
import numpy as np
import pytest
from made_rows import IDENTITY, ROWS, experiment, made, runs, write

from experiments import panels, report, tables
from experiments.findings import find
from experiments.published import LENGTH_BY_K, NUMBERS, PEAGLE_POSITIONS
from experiments.rows import latest, read_rows


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    depth = experiment(
        "speculation_depth", {"k2": 2.0, "k4": 4.0, "k7": 7.0}, "k4", kind="curve", axis="K"
    )
    against = experiment("against_eagle3", {"p2": None, "eagle": None}, "eagle")
    rows = [
        *ROWS,
        *runs("against_eagle3", {"p2": 0.5, "eagle": 0.5}, more_k=(7,)),
        *runs("unheard_of", {"x": 0.4, "y": 0.5}, seeds=1, dirty=True),
    ]
    rows += [
        row
        for k in (2, 4, 7)
        for row in runs("speculation_depth", {f"k{k}": 0.5}, k=k, commit=f"c{k}")
    ]
    waiting = experiment("waiting", {"a": None}, "a")
    page = report.build(
        rows,
        {e.name: e for e in (IDENTITY, depth, against, waiting)},
        out,
        warnings=["file.jsonl:3: <torn>"],
    )
    return out, page.read_text(), (out / "tables.md").read_text()


def test_the_page_needs_no_other_file(built):
    out, page, _ = built
    names = {p.name for p in out.iterdir()}
    assert names == {"report.html", "tables.md"} | {
        f"{e}{t}.png"
        for e in ("hidden", "speculation_depth", "against_eagle3", "unheard_of")
        for t in ("", "_training")
    }
    assert not re.findall(r"""(?:src|href)=(?!"data:)|url\(|<link|<script|@import|<iframe""", page)
    assert page.count('src="data:image/png;base64,') == 8


def test_verdicts_and_values(built):
    _, page, text = built
    lines = {
        line.split(" | ")[0]: line
        for line in section(text, "hidden").split("**Accepted at")[0].splitlines()
    }
    assert (
        "| reference |" in lines["| shared"]
        and "| better |" in lines["| good"]
        and "| within noise |" in lines["| same"]
    )
    assert (
        lines["| later"].startswith("| later | did not run |")
        and "python -m experiments.run hidden --seeds 3" in text
    )
    assert "| 0 1 2 |" in lines["| good"] and "| 1.29x | yes | as it is |" in lines["| good"]
    found = find("hidden", ROWS, IDENTITY)
    good = next(v for v in found.variants if v.name == "good")
    assert (
        f"{good.length.value:.2f} ({good.length.low:.2f} to {good.length.high:.2f})"
        in lines["| good"]
    )
    assert f"good ({good.against.difference:+.2f})" in overview(
        text, "hidden"
    ) and "| 3 of 4 | 3 |" in overview(text, "hidden")
    assert '<td class="better">better</td>' in page and "| 0 of 1 |" in overview(text, "waiting")


def test_what_a_reader_must_know_is_said(built):
    _, page, text = built
    assert "The registry does not know this experiment" in section(
        text, "unheard_of"
    ) and "one seed only" in section(text, "unheard_of")
    assert "2 of 2 runs were made in a working tree with changes" in section(
        text, "unheard_of"
    ) and "abc1234 (with changes)" in section(text, "unheard_of")
    assert "from 3 commits: c2, c4, c7" in section(text, "speculation_depth")
    assert "temperature" not in section(
        text, "hidden"
    ) and "K = 7, greedy, 65 after 33 tokens" in section(text, "against_eagle3")
    assert "file.jsonl:3: &lt;torn&gt;" in page and "file.jsonl:3: \\<torn>" in text


def test_published_numbers_stand_beside_ours(built):
    _, page, text = built
    captions = dict(re.findall(r'<h2 id="(\w+)">.*?<figcaption>(.*?)</figcaption>', page, re.S))
    assert (
        PEAGLE_POSITIONS.source in captions["against_eagle3"]
        and LENGTH_BY_K.source in captions["speculation_depth"]
    )
    assert "Dotted" not in captions["hidden"]
    assert all(n.source in text and n.differs in text for n in NUMBERS)


def test_positions_are_not_compared_across_k():
    """A share at position 1 of drafts of another length says nothing of the heads."""
    rows = runs("hidden", {"shared": 0.5})
    rows += [dict(row, variant="good") for row in runs("hidden", {"shared": 0.5}, k=6)]
    good = next(v for v in find("hidden", rows, IDENTITY).variants if v.name == "good")
    assert good.against is not None and good.against_by_position == ()


def test_what_is_said_of_targets_and_modules():
    rows = runs("hidden", {"shared": 0.5, "good": 0.6})
    notes = " ".join(find("hidden", rows, IDENTITY).notes)
    assert "144 of 144 prompts do not say which module" in notes and "targets" not in notes
    for row in rows:
        row["target_digest"] = "a" if row["seed"] else "b"
        for number, prompt in enumerate(row["measurements"][0]["prompts"]):
            prompt["module"] = f"m{number % 5}"
    notes = " ".join(find("hidden", rows, IDENTITY).notes)
    assert "which module" not in notes and "measured on 2 different targets" in notes
    for row in rows:  # the same contents, made by other code
        row |= {"target_digest": "a", "stages": {"target": f"t{row['seed']}"}}
    assert "targets" not in " ".join(find("hidden", rows, IDENTITY).notes)


def test_what_is_said_of_rows_that_differ_in_their_origin():
    rows = runs("hidden", {"shared": 0.5, "good": 0.6})
    for row in rows:
        row |= {"training_code": "5a", "base": "6b", "measuring_code": "7c"}
    notes = " ".join(find("hidden", rows, IDENTITY).notes)
    assert "several" not in notes and "differ" not in notes
    rows[3] |= {"training_code": "8d", "base": "9e", "jax": "0.11.0", "config": {"x": 1, "seed": 0}}
    rows[4] |= {"device": "Intel Xeon, 2 cores", "measuring_code": "af"}
    notes = " ".join(find("hidden", rows, IDENTITY).notes)
    assert "several devices (AMD EPYC, 1 core; Intel Xeon, 2 cores)" in notes
    assert "several base runs: differences" in notes
    assert "several versions of the code that trains: " in notes
    assert "several versions of the code that measures: " in notes
    assert "several versions of JAX: 0.10.2, 0.11.0: " in notes and "Flax" not in notes
    assert "The runs of good differ in more than their seed." in notes
    for row in rows[3:]:
        row["config"] = {"x": 1, "seed": row["seed"]}
    assert "in more than their seed" not in " ".join(find("hidden", rows, IDENTITY).notes)


def test_sampled_drafts_of_rows_with_fewer_measurements(tmp_path):
    """Rows of before have the first measurement alone; that one is never drawn twice."""
    variants = {
        name: dataclasses.replace(v, x=float(i))
        for i, (name, v) in enumerate(IDENTITY.variants.items())
    }
    experiment_of_curves = dataclasses.replace(IDENTITY, kind="curve", variants=variants)
    rows = runs("hidden", {"shared": 0.5, "good": 0.6}, more_k=(4,))
    for row in rows:
        row["measurements"][1]["sample_drafts"] = True
    found = find("hidden", rows, experiment_of_curves)
    figure, axis = plt.subplots()
    panels.sampled_drafts(axis, found.variants)
    assert len(axis.containers) == 1
    # with other prompts, or after drafts that were sampled too, it is something else
    for place, key, value in ((1, "prompt_tokens", 97), (0, "sample_drafts", True)):
        figure, axis = plt.subplots()
        with pytest.MonkeyPatch.context() as patch:
            for row in rows:
                patch.setitem(row["measurements"][place], key, value)
            panels.sampled_drafts(axis, find("hidden", rows, experiment_of_curves).variants)
        assert not axis.containers
    for row in rows:
        if row["seed"] == 2:
            del row["measurements"][1:]
    figure, axis = plt.subplots()
    panels.sampled_drafts(axis, find("hidden", rows, experiment_of_curves).variants)
    assert not axis.containers
    plt.close("all")


def test_positions_are_compared_with_the_reference(built):
    _, page, text = built
    part = section(text, "hidden").split("**Accepted at each position")[1].split("**")[1]
    lines = {line.split(" | ")[0]: line for line in part.splitlines()}
    good = next(v for v in find("hidden", ROWS, IDENTITY).variants if v.name == "good")
    first = good.against_by_position[0]
    assert (
        len(good.against_by_position) == 4
        and good.against_by_position[0].verdict == "better"
        and sum(c.difference for c in good.against_by_position)
        == pytest.approx(good.against.difference)
    )
    low, high = (f"{100 * bound:+.1f}" for bound in (first.low, first.high))
    cell = f"{100 * first.difference:+.1f} ({low} to {high}) better"
    assert f"| good | {cell} |" in lines["| good"]
    assert (
        "| shared" not in lines
        and "better" not in lines["| same"]
        and "| same | " in lines["| same"]
    )
    assert "**Accepted at each position" not in section(text, "unheard_of")  # one seed: no claim
    # drafts of other lengths: no position of one is that of the other
    assert "**Accepted at each position" not in section(text, "speculation_depth")


def test_tables_are_tables(built):
    *_, text = built
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        assert (
            len({len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().splitlines()}) == 1
        ), table


def test_everything_is_escaped(tmp_path):
    bad = "<script>alert('$x$')</script> | _b_ &"
    rows = [
        row | {"variant": bad, "command": bad, "device": bad, "export": bad, "changes": [bad]}
        for row in runs("hidden", {"x": 0.5})
    ]
    held = experiment("hidden", {bad: None}, bad, question=bad, expects=bad, axis=bad, paper=bad)
    page = report.build(rows, {"hidden": held}, tmp_path, warnings=[bad]).read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") > 10
    text = (tmp_path / "tables.md").read_text()
    assert not re.findall(r"(?<!\\)<script", text) and "\\<script>alert" in text


def test_a_later_row_replaces_an_earlier_one():
    other = ROWS[0] | {"budget": "full"}
    again = ROWS[0] | {"commit": "new"}
    kept = latest([*ROWS, other, again])
    assert len(kept) == len(ROWS) + 1 and [
        r["commit"]
        for r in kept
        if r["variant"] == "shared" and r["seed"] == 0 and r["budget"] == "small"
    ] == ["new"]


def test_variants_that_the_registry_forgot_or_that_cannot_be_compared():
    rows = [
        *ROWS,
        *runs("hidden", {"renamed": 0.5}),
        *runs("hidden", {"later": 0.5}, prompts=24)[:1],
    ]
    rows[-1]["measurements"][0]["prompts"] = rows[-1]["measurements"][0]["prompts"][:5]
    rows[-1]["exact"]["different"] = 2
    found = find("hidden", rows, IDENTITY)
    assert [v.name for v in found.variants] == [
        "shared",
        "good",
        "same",
        "later",
        "renamed",
    ] and not found.missing
    assert any("does not know these variants: renamed" in note for note in found.notes)
    assert any(
        note.startswith(
            "later cannot be compared with shared: runs are compared on the same prompts; "
            "got 5 and 24"
        )
        for note in found.notes
    )
    cells = dict(zip(*[tables.main_table(found)[i] for i in (0, 4)], strict=True))
    later = next(v for v in found.variants if v.name == "later")
    assert cells["mean over texts"] == f"{later.mean_over_prompts:.2f}"
    assert cells["verdict"] == "not compared" and cells["lossless"] == "NO: 2 of 26 differ"
    without = find("hidden", [row for row in ROWS if row["variant"] != "shared"], IDENTITY)
    assert any("The reference shared did not run" in note for note in without.notes) and not any(
        v.against for v in without.variants
    )


def test_seeds_that_were_measured_differently_are_shown_without_numbers(tmp_path):
    rows = [
        *ROWS,
        *runs("hidden", {"later": 0.5}, seeds=1),
        made(np.random.default_rng(0), "hidden", "later", 1, k=5, changes=["other"]),
    ]
    found = find("hidden", rows, IDENTITY)
    assert found.variants[-1].length is None and any(
        "later cannot be counted" in note for note in found.notes
    )
    assert any("The runs of later differ in more than their seed" in note for note in found.notes)
    assert "cannot be said" in report.build(rows, {"hidden": IDENTITY}, tmp_path).read_text()


def broken(**change) -> dict:
    return json.loads(json.dumps(ROWS[0])) | change


def measured(**change) -> dict:
    row = broken()
    row["measurements"][0]["prompts"][1] |= change
    return row


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"experiment": "hid', "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "this is list"),
        (
            json.dumps({k: v for k, v in ROWS[0].items() if k not in ("seed", "budget")}),
            "it lacks seed, budget",
        ),
        (json.dumps(broken(seed="0")), "seed has the wrong type: '0'"),
        (json.dumps(broken(steps=True)), "steps has the wrong type"),
        (json.dumps(broken(experiment="../../x")), "whose file has another name"),
        (json.dumps(broken(measurements=[])), "no measurement"),
        (json.dumps(broken(speed={"k": 4})), "it lacks speed.speedup"),
        (json.dumps(broken(curve=[{"step": 1, "loss": 2.0}])), "it lacks curve[0].accuracy"),
        (
            json.dumps(measured(kind="poem")),
            "measurements[0].prompts[1].kind must be one of json, table",
        ),
        (
            json.dumps(measured(num_accepted_per_pos=[3, 2, 1])),
            "prompts[1].num_accepted_per_pos must be 4 counts",
        ),
        (
            json.dumps(measured(num_accepted_per_pos=[99, 2, 1, 0])),
            "prompts[1].num_accepted_per_pos must be 4 counts",
        ),
    ],
)
def test_bad_lines_are_named_and_left_out(tmp_path, line, said):
    write(tmp_path, ROWS[:2])
    with (tmp_path / "hidden.jsonl").open("ab") as file:
        file.write(
            (line if isinstance(line, bytes) else line.encode())
            + b"\n\n"
            + json.dumps(ROWS[2]).encode()
        )  # no newline at the end
    rows, warnings = read_rows(tmp_path)
    assert rows == ROWS[:3] and len(warnings) == 1
    assert warnings[0].startswith(f"{tmp_path / 'hidden.jsonl'}:3: ") and said in warnings[0]


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        sys.modules, "experiments.registry", types.SimpleNamespace(EXPERIMENTS={"hidden": IDENTITY})
    )
    args = ["--results", str(tmp_path / "rows"), "--out", str(tmp_path / "out")]
    assert report.main(args) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and str(tmp_path / "rows") in error
        and "got none; run python -m experiments.run" in error
    )
    write(tmp_path / "rows", ROWS)
    assert (
        report.main([*args, "--budget", "full"]) == 2
        and "got rows of small; choose one of these with --budget" in capsys.readouterr().err
    )
    (tmp_path / "taken").write_text("")
    assert (
        report.main([*args[:3], str(tmp_path / "taken")]) == 2
        and "must be writable" in capsys.readouterr().err
    )
    with (tmp_path / "rows" / "hidden.jsonl").open("a") as file:
        file.write("torn\n")
    assert report.main(args) == 0
    said = capsys.readouterr()
    assert "hidden.jsonl:10: no JSON" in said.err and said.out.strip() == str(
        tmp_path / "out" / "report.html"
    )
    assert "hidden.jsonl:10: no JSON" in (tmp_path / "out" / "report.html").read_text()


def test_one_report_one_budget(tmp_path):
    with pytest.raises(ValueError, match="one budget; got \\['full', 'small'\\]"):
        report.build([ROWS[0], ROWS[1] | {"budget": "full"}], {}, tmp_path)


def section(text: str, name: str) -> str:
    return re.search(rf"^## {name}\n(.*?)(?=^## )", text, re.S | re.M)[1]


def overview(text: str, name: str) -> str:
    return next(
        line for line in text.split("\n## ")[0].splitlines() if line.startswith(f"| {name} |")
    )


def test_conditional_acceptance():
    """Of the drafts at a position, only those count whose predecessors were accepted."""
    (row,) = runs("hidden", {"shared": 0.4}, seeds=1)
    for i, prompt in enumerate(row["measurements"][0]["prompts"]):
        prompt |= {
            "num_drafts": 10,
            "num_accepted_per_pos": [8, 6, 3, 0] if i % 2 else [4, 2, 0, 0],
        }
    table = tables.conditional(find("hidden", [row], IDENTITY))
    assert table[0][1:] == ["1", "2", "3", "4"]
    assert table[1:] == [["shared", "60", "67", "38", "0"]]
