"""Real llama.cpp on EAGLE-3 heads in GGUF files (scripts/peers/check_llama_cpp.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LLAMA_CPP = ROOT / ".venv-llama-cpp"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "peers")
    import check_llama_cpp

    return check_llama_cpp


@pytest.mark.peer
def test_llama_cpp_writes_the_same_and_counts_the_same(tmp_path):
    if not (LLAMA_CPP / "bin/python").exists():
        pytest.skip(f"{LLAMA_CPP.name}: make test-peers installs it")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/peers/check_llama_cpp.py", "--llama-cpp", LLAMA_CPP]
        + ["--out", tmp_path / "llama_cpp"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]


def steps_of_llama_cpp(lengths, k, new):
    """Its server's loop, step by step: a limit on what may still be written, then the target's."""
    drafted = accepted = 0
    left = new - 1
    for length in lengths:
        if left <= 0:
            break
        num_drafts = min(k, left - 1)
        num_kept = min(length, num_drafts)
        drafted, accepted, left = drafted + num_drafts, accepted + num_kept, left - num_kept - 1
    return drafted, accepted


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("lengths", [(0,) * 30, (9,) * 30, (0, 1, 2, 3, 4, 0, 7) * 9])
@pytest.mark.parametrize("new", [1, 2, 3, 5, 8, 17, 30])
def test_counters_by_the_rule_of_llama_cpp(script, k, lengths, new):
    """From our record of which tokens were drafts, which is cut at the answer's end."""
    is_draft = [False]
    for length in lengths:
        is_draft += [True] * min(length, k) + [False]
    is_draft = is_draft[:new]
    expected = steps_of_llama_cpp([min(length, k) for length in lengths], k, new)
    assert script.counted_as_llama_cpp(is_draft, k, new) == expected


def test_the_rule_by_hand(script):
    # the prompt's token; 2 of 3 drafts and the target's; with 3 tokens left 2 drafts, both kept
    is_draft = [False, True, True, False, True, True, True]
    assert script.counted_as_llama_cpp(is_draft, 3, 7) == (5, 4)


def test_every_option_that_llama_cpp_knows_is_shown_to_it(script):
    import matrix_heads

    configs = [
        matrix_heads.change(name, "eagle3", changes).config
        for name, changes in script.CASES.items()
    ]
    both = {True, False}
    assert {c.norm_before_residual for c in configs} == both
    assert {c.norm_before_fc for c in configs} == both
    assert {c.draft_vocab < c.vocab for c in configs} == both
    assert {c.dim == c.target_dim for c in configs} == both
    assert {c.heads * c.head_dim == c.dim for c in configs} == both
    assert {c.heads == c.kv_heads for c in configs} == both
    assert len({c.rope.source for c in configs}) == 4
    for config in configs:
        assert not any(getattr(config, key) for key in script.gguf_writing.LLAMA_CPP_LACKS)


def test_a_head_that_llama_cpp_lacks_is_one_line(script, tmp_path, monkeypatch, capsys):
    words = ["check_llama_cpp.py", "--llama-cpp", "nowhere", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--drafter", str(ROOT / "peagle_jax/assets/eagle3")])
    assert script.main() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "norm queries and keys" in error
