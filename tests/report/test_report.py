"""The report: all pictures from any records, one page that needs no other file, nothing unescaped."""

import re

import pytest

from peagle_jax.report import plots
from peagle_jax.report.method import draw_method
from peagle_jax.report.page import write_report
from peagle_jax.report.records import best, headline

ORIGIN = {
    "time": "t",
    "device": "d<",
    "python": "3",
    "jax": "1",
    "flax": "2",
    "commit": "c",
    "dirty": False,
    "command": "peagle demo",
}


def record(method, k, batch=1, temperature=0.0, speedup=1.0, **more):
    made = ORIGIN | {
        "method": method,
        "k": k,
        "batch": batch,
        "temperature": temperature,
        "prompts": 4,
        "new_tokens": 8,
        "speedup": speedup,
        "tokens_per_second": 100 * speedup,
        "step_seconds": 0.004 + 0.001 * k,
        "repeated_4grams": 0.25,
        "acceptance_length": 1 + 0.3 * k if k else None,
        "accepted_per_position": [0.3] * k,
    }
    if temperature == 0:
        made |= {
            "draft_seconds": 0.001 * bool(k),
            "verify_seconds": 0.003,
            "break_even": 1.3 if k else 1.0,
        }
        if k:
            made |= {"lossless": True, "near_ties": 0, "different": 0}
    return made | more


RECORDS = [
    record("none", 0),
    record("eagle3", 1, speedup=1.2),
    record("eagle3", 3, speedup=1.1),
    record("peagle", 1, speedup=1.0),
    record("peagle", 3, speedup=1.4),
    record("none", 0, batch=8),
    record("eagle3", 3, batch=8, speedup=0.9),
    record("peagle", 3, batch=8, speedup=0.8),
    record("none", 0, 8, 1.0),
    record("peagle", 3, 8, 1.0),
]
CURVES = {
    "peagle": [
        {
            "step": 5,
            "seconds": 9.0,
            "acceptance_length": 1.5,
            "accepted_per_position": [0.3, 0.1, 0.0, 0.0],
        }
    ]
}
FRESH = [
    {"step": s, "seconds": s, "loss": 3.0 / s, "accuracy": [0.1 * s, 0.05 * s]} for s in (1, 2, 3)
]


def test_the_page_needs_no_other_file(tmp_path):
    pictures = [draw_method(tmp_path), *plots.draw(tmp_path, RECORDS, CURVES, FRESH)]
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
    page = write_report(
        tmp_path,
        RECORDS,
        pictures=pictures,
        sample=[("a<b", True), ("c", False)],
        runs=[("x", {"y": "<z>"})],
        prompt="p&",
    ).read_text()
    assert page.count("<img ") == len(names) and not re.findall(r'(?:src|href)="(?!data:)', page)
    assert (
        "<mark>a&lt;b</mark>c" in page
        and "p&amp;" in page
        and "&lt;z&gt;" in page
        and "d&lt;" in page
    )
    assert "at temperature 1" in page and "1.40 times plain decoding" in page


def test_one_method_alone_and_no_records(tmp_path):
    alone = [r for r in RECORDS if r["method"] != "eagle3"]
    assert len(plots.draw(tmp_path, alone, {}, [])) == 5
    page = write_report(tmp_path, [], pictures=[], sample=None, runs=[])
    assert "P-EAGLE in JAX" in page.read_text()


def test_headline_tells_losses_too():
    lines = headline(RECORDS)
    assert (
        lines[0]
        == "Batch 1: P-EAGLE at its best K (3) runs at 1.40 times plain decoding; EAGLE-3 at its best K (1) runs at 1.20 times plain decoding."
    )
    assert (
        "0.80 times" in lines[1]
        and lines[1].endswith("a step at K = 3 costs 1.30 plain tokens and emits 1.90.")
        and "Nothing" not in lines[0]
    )
    assert lines[2] == "P-EAGLE over EAGLE-3 at the same K, batch 1: K = 1: 0.83, K = 3: 1.27."
    assert lines[3].startswith("Lossless: 24 speculative texts") and "every one equals" in lines[3]
    broken = [*RECORDS, record("peagle", 7, lossless=False, different=2, near_ties=1)]
    assert "2 differ, 1 at near ties" in headline(broken)[-1]
    assert best(RECORDS, "peagle", 1)["k"] == 3 and best(RECORDS, "peagle", 4) is None


def test_running_mean():
    assert (
        plots._running_mean([4.0, 0.0, 8.0], 0.5) == [4.0, 2.0, 5.0]
        and plots._running_mean([]) == []
    )


@pytest.mark.parametrize("key", ["acceptance_length", "break_even", "tokens_per_second"])
def test_pictures_show_the_records_own_numbers(key, tmp_path, monkeypatch):
    """What is plotted is what was recorded, method by method, in the order of K."""
    drawn = []
    original = plots._series
    monkeypatch.setattr(
        plots,
        "_series",
        lambda records, method, value: (
            drawn.append((method, *original(records, method, value))) or drawn[-1][1:]
        ),
    )
    plots.draw(tmp_path, RECORDS, CURVES, FRESH)
    wanted = (
        "peagle",
        [1, 3],
        [r[key] for r in RECORDS if r["method"] == "peagle" and r["batch"] == 1],
    )
    assert any(
        m == wanted[0] and ks == wanted[1] and vs == pytest.approx(wanted[2]) for m, ks, vs in drawn
    )
