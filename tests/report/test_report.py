"""The report: every plot of any rows, one page that needs no other file, nothing unescaped."""

import json
import re

import matplotlib.pyplot as plt
import pytest

from peagle_jax import atomic_write
from peagle_jax.report import method, peers, plots
from peagle_jax.report.method import draw_method
from peagle_jax.report.page import STYLE, SampleText, first_lines, rounded, write_report
from peagle_jax.report.pictures import save
from peagle_jax.report.records import Records, best, cells, one_line, read_rows
from peagle_jax.report.statements import headline
from peagle_jax.types import InputError
from tests.report.made_rows import CURVES, FRESH, ROWS, row

SAMPLE = SampleText(
    prompt="p&",
    pieces=[("a<b", True), ("c", False)],
    k=2,
    temperature=0.0,
    repeated_4grams=0.111111111,
    num_candidates=4,
)


def test_the_page_needs_no_other_file(tmp_path):
    pictures = [draw_method(tmp_path), *plots.draw(tmp_path, ROWS, CURVES, FRESH)]
    names = [name for name, _ in pictures]
    assert names == [
        "method.png",
        "against_k_batch_1.png",
        "against_k_batch_8.png",
        "break_even.png",
        "step.png",
        "acceptance_per_position.png",
        "training.png",
        "fresh_head.png",
    ]
    runs = [("x", {"y": "<z>"})]
    page = write_report(tmp_path, ROWS, pictures=pictures, sample=SAMPLE, runs=runs).read_text()
    assert page.count("<img ") == len(names) and not re.findall(r'(?:src|href)="(?!data:)', page)
    for escaped in ("<mark>a&lt;b</mark>c", "p&amp;", "&lt;z&gt;", "d&lt;"):
        assert escaped in page, escaped
    assert "at temperature 1" in page and "1.40 times plain decoding" in page
    assert "(11 % repeated 4-grams)" in page
    assert "Why some rows are slower than plain decoding" in page


def peer_row(engine: str, method: str, batch_size: int, speed: float, **changes) -> dict:
    """A row as `scripts/peers/compare_speed.py` records it."""
    row = {
        "time": "2026-11-20T10:00:00Z",
        "commit": "abc1234",
        "device": "Some <CPU>, 2 cores",
        "command": "compare_speed.py",
        "engine": engine,
        "engine_version": "0.32.1",
        "method": method,
        "k": 0 if method == "plain" else 6,
        "dtype": "bfloat16",
        "batch_size": batch_size,
        "tokens_per_second": speed,
        "seconds": [1024 / speed] * 3,
        "target": "target",
        "num_prompts": 8,
        "max_new_tokens": 128,
        "vllm_compiled": True,
    }
    return row | changes


def test_a_ratio_of_speeds_is_the_median_over_rounds():
    """A round in which the machine was slow was slow for both."""
    ours = peer_row("peagle_jax", "plain", 1, 10.0, seconds=[1.0, 2.0, 4.0])
    vllm = peer_row("vllm", "plain", 1, 10.0, seconds=[1.5, 4.0, 2.0])
    # both medians are 2 seconds; of the rounds vLLM took 1.5, 2 and 0.5 times as long
    assert peers.speed_ratio(ours, vllm) == 1.5
    # twice the tokens in the same seconds
    assert peers.speed_ratio(ours | {"tokens_per_second": 20.0}, vllm) == 3.0
    assert peers.speed_ratio(ours, vllm | {"seconds": [1.0, 4.0]}) == 1.0  # not of the same rounds
    assert "1.50x" in peers.table([ours, vllm])[1][2] and "1.50x" in peers.ratios([ours, vllm])


def test_the_newest_comparison_with_other_engines(tmp_path):
    rows = [
        peer_row("peagle_jax", "plain", 1, 1.0, time="2026-11-19T10:00:00Z"),
        peer_row("peagle_jax", "plain", 1, 1200.4),
        peer_row("peagle_jax", "peagle", 1, 1500.0),
        peer_row("vllm", "peagle", 8, 90.0, dtype="float32", time="2026-11-21T10:00:00Z"),
        peer_row("vllm", "plain", 1, 600.2),
        peer_row("vllm", "peagle", 1, 1000.0),
        peer_row("transformers", "plain", 1, 300.0),
        peer_row("transformers", "prompt_lookup", 1, 999.0),
        peer_row("vllm", "plain", 8, 5000.0),
    ]
    file = tmp_path / "peers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    newest = peers.newest(file)
    assert peers.newest(file, "float32") == [rows[3]] and not peers.newest(tmp_path / "none")
    assert newest == [rows[i] for i in (1, 2, 4, 5, 6, 7, 8)]
    # comparisons of something else, or without vLLM, are not those of the README
    later = {"time": "2026-11-22T10:00:00Z"}
    others = [
        peer_row("peagle_jax", "plain", 1, 1.0, **later),
        peer_row("transformers", "plain", 1, 1.0, **later),
        peer_row("vllm", "plain", 1, 1.0, num_prompts=4, **later),
        peer_row("vllm", "plain", 1, 1.0, max_new_tokens=64, **later),
        peer_row("vllm", "plain", 1, 1.0, target="mine", **later),
        peer_row("vllm", "plain", 1, 1.0, vllm_compiled=False, time="2026-11-23T10:00:00Z"),
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows + others))
    assert peers.newest(file) == newest
    assert peers.table(newest) == [
        ["method", "K", "batch 1: ours", "vLLM", "transformers", "batch 8: vLLM"],
        ["plain decoding", "", "1,200 (2.00x)", "600", "300", "5,000"],
        ["prompt lookup", "6", "", "", "999", ""],
        ["P-EAGLE", "6", "1,500 (1.50x)", "1,000", "", ""],
    ]
    page = write_report(
        tmp_path, ROWS, pictures=[], sample=None, runs=[], peer_rows=newest
    ).read_text()
    assert "Beside vLLM and transformers" in page and "1,500 (1.50x)" in page
    assert page.count("<img ") == 1 and "Some &lt;CPU&gt;" in page and "vLLM 0.32 " in page
    without = write_report(tmp_path, ROWS, pictures=[], sample=None, runs=[]).read_text()
    assert "Beside vLLM" not in without


def test_what_a_head_gains_in_vllm_stands_where_it_gains_little_here():
    speeds = {"plain": 20.0, "eagle3": 25.0, "peagle": 44.0}
    rows = [peer_row("vllm", m, 1, speed) for m, speed in speeds.items()]
    rows += [peer_row("vllm", "plain", 8, 7.0), peer_row("peagle_jax", "peagle", 1, 3.0)]
    want = (
        "Recorded earlier, the packaged heads in vLLM 0.32.1, one text, K = 6, bfloat16, on Some "
        "<CPU>, 2 cores (commit abc1234): EAGLE-3 at 1.25 times plain decoding, P-EAGLE at 2.20 "
        "times."
    )
    assert peers.gains_in_vllm(rows) == want
    assert peers.gains_in_vllm(rows[1:]) == peers.gains_in_vllm([]) == ""
    weak = [row("none", 0), row("peagle", 3, speedup=1.1)]
    strong = [weak[0], row("peagle", 3, speedup=1.6)]
    assert first_lines(weak, rows)[-1] == want and want not in first_lines(weak, [])
    assert want not in first_lines(strong, rows)


def test_ratios_of_other_devices(tmp_path):
    old, new = ({"device": "Old CPU", "time": f"2026-11-1{n}T10:00:00Z"} for n in (5, 7))
    speeds = [("peagle_jax", "plain", 30.0), ("vllm", "plain", 20.0), ("vllm", "peagle", 5.0)]
    rows = [
        peer_row(engine, method, batch, speed * batch, **when)
        for when in (old, new, {"time": "2026-11-16T10:00:00Z"})
        for engine, method, speed in speeds
        for batch in (1, 4)
    ]
    rows[6] |= {"tokens_per_second": 50.0, "seconds": [1024 / 50] * 3}  # the newest of the old one
    file = tmp_path / "peers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert peers.newest(file) == rows[6:12]
    found = peers.newest_of_devices(file)
    assert list(found) == ["Old CPU", "Some <CPU>, 2 cores"]
    assert list(found.values()) == [rows[6:12], rows[12:]]
    assert peers.ratios(rows[6:12]) == (
        "On Old CPU (commit abc1234, vLLM without tcmalloc) at batch 1 and 4: plain decoding 2.50x "
        "and 1.50x."
    )
    assert peers.newest_of_devices(tmp_path / "none") == {}


def test_vllm_without_its_compiler_is_another_comparison(tmp_path):
    command = {"time": "2026-11-28T10:00:00Z", "command": "x.py --vllm-compile --rounds 5"}
    eager = {"time": "2026-11-29T10:00:00Z", "vllm_compiled": False}
    elsewhere = {"device": "Old CPU", "time": "2026-11-01T10:00:00Z"}
    rows = [
        peer_row("vllm", "plain", 1, 150.0),
        peer_row("peagle_jax", "plain", 1, 200.0),
        peer_row("vllm", "plain", 1, 160.0, commit="def5678", **command),
        peer_row("peagle_jax", "plain", 1, 400.0, commit="def5678", **command),
        peer_row("vllm", "plain", 1, 100.0, **eager),
        peer_row("vllm", "plain", 1, 90.0, **elsewhere),
        peer_row("vllm", "plain", 1, 90.0, **elsewhere),
    ]
    for silent in (rows[2], rows[3], rows[6]):  # which do not say it but in their command
        del silent["vllm_compiled"]
    file = tmp_path / "peers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert peers.newest(file) == rows[2:4]
    here = rows[0]["device"]
    assert peers.newest_of_devices(file) == {here: rows[2:4], "Old CPU": [rows[5]]}
    assert peers.newest_of_devices(file, "float32") == {}
    # what streams is one of its own, as is a batch that is never empty
    streams = [row | {"stream": True, "time": "2026-11-30T10:00:00Z"} for row in rows[2:4]]
    moving = [row | {"continuous": True, "time": "2026-11-30T11:00:00Z"} for row in rows[2:4]]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *streams, *moving]))
    assert peers.newest_of_devices(file) == {here: rows[2:4], "Old CPU": [rows[5]]}
    assert peers.newest_of_devices(file, stream=True) == {here: streams}
    # vLLM at its best counts alone
    best = [row | {"vllm_preload": "libtcmalloc_minimal.so.4"} for row in rows[:2]]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*best, *rows[2:]]))
    assert peers.newest_of_devices(file) == {here: best, "Old CPU": [rows[5]]}
    assert "(commit abc1234) at batch 1" in peers.ratios(best)
    # the packaged head was another one then
    length = {"k": 7, "acceptance_length": 4.0}
    ours = peer_row("peagle_jax", "peagle", 1, 400.0, **length)
    theirs = peer_row("vllm", "peagle", 1, 100.0, **length)
    for other, said in ((4.04, ""), (4.6, ", a P-EAGLE head of length 4.00, not 4.60")):
        beside = [ours | {"acceptance_length": other}]
        text = peers.ratios([ours, theirs], beside=beside)
        assert f"(commit {ours['commit']}, vLLM without tcmalloc{said})" in text
    assert peers.ratios(rows[2:4], "Compiled") == (
        "Compiled (commit def5678, vLLM without tcmalloc) at batch 1: plain decoding 2.50x."
    )


def test_numbers_of_the_page_are_rounded(tmp_path):
    """Whatever rows, facts and captions hold, no number has more than four decimals."""
    third = 1 / 3
    rows = [
        row("none", 0, step_seconds=third / 100, verify_seconds=third / 100),
        row("peagle", 3, speedup=third, acceptance_length=1 + third, draft_seconds=third / 100),
    ]
    facts = {"bits": third, "shares": [third, 2 * third], "minutes": 12345.678, "none": None}
    page = write_report(
        tmp_path,
        rows,
        pictures=plots.draw(tmp_path, rows, CURVES, FRESH),
        sample=SAMPLE,
        runs=[("x", facts)],
    ).read_text()
    text = re.sub(r'src="data:[^"]*"', "", page)
    assert not re.findall(r"\d+\.\d{5,}", text)
    assert "0.3333, 0.6667" in text and "12,346" in text


def test_rounded():
    assert rounded(0.000123456) == "0.0001235" and rounded(3) == "3" and rounded("a") == "a"
    assert rounded([]) == rounded(None) == "none"


def test_one_method_alone_and_no_rows(tmp_path):
    alone = [r for r in ROWS if r["method"] != "eagle3"]
    assert len(plots.draw(tmp_path, alone, {}, [])) == 5
    assert plots.draw(tmp_path, [], {}, []) == []
    # an adaptive K and trees have a line in the table, and no point in a picture
    auto = row("peagle", 8, speedup=1.8, adaptive_k=True)
    tree = row("peagle", 3, speedup=0.7, num_tree_nodes=16)
    assert plots.draw(tmp_path, [row("none", 0), auto, tree], {}, []) == []
    pictures = plots.draw(tmp_path, [*alone, auto, tree], {}, [])
    assert pictures == plots.draw(tmp_path, alone, {}, [])
    page = write_report(tmp_path, [*alone, auto, tree], pictures=[], sample=None, runs=[])
    assert {"<td>auto</td>", "<td>3, tree 16</td>"} <= set(
        re.findall(r"<td>[^<]*</td>", page.read_text())
    )
    page = write_report(tmp_path, [], pictures=[], sample=None, runs=[])
    assert "P-EAGLE in JAX" in page.read_text()


def test_rows_of_which_nothing_was_drafted(tmp_path):
    """As where every answer ends with its first token: a report, and no number that is none."""
    empty = {"acceptance_length": None, "accepted_per_position": [0.0] * 3, "break_even": 1.1}
    rows = [row("none", 0), row("peagle", 3, speedup=0.9, **empty)]
    pictures = plots.draw(tmp_path, rows, {}, [])
    page = write_report(tmp_path, rows, pictures=pictures, sample=None, runs=[]).read_text()
    words = re.sub(r'"data:image[^"]*"', "", page)
    assert "P-EAGLE drafted nothing" in words and "nan" not in words and "None" not in words
    assert headline(rows)


def test_a_picture_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    figure, _ = plt.subplots()
    save(figure, tmp_path / "a.png")
    before = (tmp_path / "a.png").read_bytes()
    assert before.startswith(b"\x89PNG") and not plt.get_fignums()

    def fail(handle, content):
        raise OSError(28, "No space left on device")

    figure, axis = plt.subplots()
    axis.plot([1, 2])
    monkeypatch.setattr(atomic_write.os, "write", fail)
    with pytest.raises(OSError, match="No space"):
        save(figure, tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_bytes() == before


# ---------------------------------------------------------------- plots


@pytest.mark.parametrize("key", ["acceptance_length", "break_even", "tokens_per_second"])
def test_plots_show_the_rows_own_numbers(key, tmp_path, monkeypatch):
    """What is plotted is what was recorded, method by method, in the order of K."""
    drawn = []
    original = plots._series

    def spy(records, method, value):
        ks, values = original(records, method, value)
        drawn.append((method, ks, values))
        return ks, values

    monkeypatch.setattr(plots, "_series", spy)
    plots.draw(tmp_path, ROWS, CURVES, FRESH)
    wanted = [r[key] for r in ROWS if r["method"] == "peagle" and r["batch_size"] == 1]
    peagle = [(ks, values) for method, ks, values in drawn if method == "peagle"]
    assert any(ks == [1, 3] and values == pytest.approx(wanted) for ks, values in peagle)


def lines_outside(figure):
    """Lines of a figure with a point outside of their axes."""
    outside = []
    for axis in figure.axes:
        low, high = axis.get_ylim()
        for line in axis.get_lines():
            ys = line.get_ydata()
            if min(ys) < low or max(ys) > high:
                outside.append((line.get_label(), low, high, list(ys)))
    return outside


def test_curves_stay_within_their_axes():
    """At batch size 8 the break-even is twice what any curve of batch size 1 reaches."""
    high = row("peagle", 11, 8, speedup=0.37, break_even=10.6)
    low = row("peagle", 1, 8, speedup=1.5, break_even=0.87)
    rows = [r for r in [*ROWS, high, low] if r["temperature"] == 0]
    assert lines_outside(plots._break_even(rows)) == []
    for batch_size in (1, 8):
        here = [r for r in rows if r["batch_size"] == batch_size]
        assert lines_outside(plots._against_k(here)) == []


def luminance(color):
    """Relative luminance of "#rrggbb", as WCAG 2 defines it."""
    shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(color, background):
    bright, dark = sorted((luminance(color), luminance(background)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_colors_are_legible():
    """WCAG 2: texts 4.5 : 1, lines and bars 3 : 1."""
    texts = (
        plots.INK,
        method.INK,
        method.SOFT,
        method.BLUE,
        method.BROWN,
        method.GREEN,
        method.RED,
    )
    assert all(contrast(color, "#ffffff") >= 4.5 for color in texts)
    fills = (method.REAL, method.PLACEHOLDER, method.DRAFT)
    fills += (method.ACCEPTED, method.CORRECTED, method.UNUSED)
    assert all(contrast(method.INK, fill) >= 4.5 for fill in fills)
    assert all(contrast(color, "#ffffff") >= 3 for color in plots.COLORS.values())
    viridis = plots.plt.get_cmap("viridis")
    palest = plots.matplotlib.colors.to_hex(viridis(plots.DARKEST_TO_PALEST[1]))
    assert contrast(palest, "#ffffff") >= 2
    prompt_color = re.search(r"\.prompt \{ color: (#\w+)", STYLE)[1]
    assert contrast(prompt_color, "#f4f6f9") >= 4.5


# ---------------------------------------------------------------- rows


def test_best():
    assert best(ROWS, "peagle", 1)["k"] == 3 and best(ROWS, "peagle", 4) is None


def test_cells():
    assert cells(row("none", 0))[:5] == ["plain decoding", "", "1", "100", "1.00"]
    different = row("peagle", 2, speedup=1 / 3, lossless=False, different=2, near_ties=1)
    assert cells(different)[4] == "0.33" and cells(different)[-1] == "NO: 2 differ (1 near ties)"
    assert "P-EAGLE  K=2  batch 1" in one_line(different) and "0.33x" in one_line(different)


def test_rows_are_read_under_former_names(tmp_path):
    new = row("peagle", 3)
    old_names = {"batch_size": "batch", "num_prompts": "prompts", "max_new_tokens": "new_tokens"}
    old = {old_names.get(key, key): value for key, value in new.items()}
    file = Records(tmp_path)
    with pytest.raises(InputError, match=r"results.jsonl: one command adds rows at a time"):
        Records(tmp_path)
    file.add(new)
    with file.path.open("a") as out:
        out.write(json.dumps(old) + "\n")
    assert read_rows(file.path) == [new, new]
    both = tmp_path / "both.jsonl"
    both.write_text(json.dumps(new | {"batch": 1}) + "\n")
    with pytest.raises(InputError, match=r"both.jsonl:1: batch_size was formerly called batch"):
        read_rows(both)
    with pytest.raises(InputError, match="must exist"):
        read_rows(tmp_path / "none.jsonl")
