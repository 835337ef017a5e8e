"""scripts/peers/compare_speed.py with the engines that need no other environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "peers" / "compare_speed.py"


def compare_speed(*arguments):
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_rows_of_ours_and_transformers(tmp_path):
    code, out, _ = compare_speed(
        *("--engines", "peagle_jax", "transformers", "--dtypes", "float32"),
        *("--batch-sizes", 1, 2, "--rounds", 2, "--num-prompts", 3, "--max-new-tokens", 6),
        *("-k", 3, "--record", tmp_path / "rows.jsonl"),
    )
    assert code == 0 and "prompt_lookup" in out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    cases = {(r["engine"], r["method"], r["batch_size"]) for r in rows}
    ours = {("peagle_jax", m, b) for m in ("plain", "eagle3", "peagle") for b in (1, 2)}
    theirs = {("transformers", m, b) for m, b in (("plain", 1), ("plain", 2), ("prompt_lookup", 1))}
    assert cases == ours | theirs and len(rows) == 9
    for row in rows:
        assert row["same"] + row["near_ties"] == 3 and row["different"] == 0
        assert len(row["seconds"]) == 2 and row["tokens_per_second"] > 0
        assert row["k"] == (0 if row["method"] == "plain" else 3)
        drafted = row["engine"] == "peagle_jax" and row["method"] != "plain"
        assert bool(row["num_drafts"]) == drafted
    transformers = pytest.importorskip("transformers")
    assert transformers.__version__ in {row["engine_version"] for row in rows}


@pytest.mark.slow
def test_a_prompt_enters_where_another_is_done(tmp_path):
    common = ["--engines", "peagle_jax", "--dtypes", "float32", "--continuous"]
    common += ["--methods", "peagle", "plain"]
    code, out, _ = compare_speed(
        *common,
        *("--batch-sizes", 2, "--rounds", 1, "--num-prompts", 5, "--max-new-tokens", 6, "-k", 3),
        *("--record", tmp_path / "rows.jsonl"),
    )
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["plain", "peagle"]
    for row in rows:
        assert row["engine"] == "peagle_jax" and row["continuous"] and row["same"] == 5


@pytest.mark.slow
def test_tokens_step_by_step(tmp_path):
    """The same tokens and counters as whole answers have."""
    rows = {}
    for stream in ([], ["--stream"]):
        file = tmp_path / f"rows{len(stream)}.jsonl"
        code, _, _ = compare_speed(
            *("--engines", "peagle_jax", "--dtypes", "float32", "--methods", "peagle", "plain"),
            *("--batch-sizes", 2, "--rounds", 1, "--num-prompts", 3, "--max-new-tokens", 9),
            *("-k", 3, "--record", file, *stream),
        )
        assert code == 0
        rows[bool(stream)] = [json.loads(line) for line in file.read_text().splitlines()]
    for whole, streamed in zip(rows[False], rows[True], strict=True):
        assert streamed["stream"] and not whole["stream"]
        assert streamed["same"] == 3 and whole["method"] == streamed["method"]
        for name in ("num_drafts", "num_accepted_per_pos", "acceptance_length"):
            assert streamed[name] == whole[name]
        tokens = [row["tokens_per_second"] * row["seconds"][0] for row in (whole, streamed)]
        assert tokens == pytest.approx([27, 27])


def test_counters_are_compared_with_those_of_vllm(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import compare_speed as script

    def row(engine, method, drafts, accepted, **changes):
        case = {"method": method, "dtype": "float32", "batch_size": 2, "engine": engine}
        texts = {"same": 3, "different": 0, "num_prompts": 3}
        return case | texts | {"num_drafts": drafts, "num_accepted_per_pos": accepted} | changes

    vllm = [row("vllm", m, 9, [5, 2]) for m in ("eagle3", "peagle")] + [row("vllm", "plain", 0, [])]
    ours = [
        row("peagle_jax", "plain", 0, []),
        row("peagle_jax", "eagle3", 9, [5, 2]),
        row("peagle_jax", "peagle", 9, [5, 1]),
        row("peagle_jax", "peagle", 8, [5, 2], same=2),  # one text differs at a near tie
        row("peagle_jax", "peagle", 8, [5, 2], dtype="bfloat16"),  # not beside such a row
        row("transformers", "prompt_lookup", None, None),
    ]
    rows = [*ours, *vllm]
    script.add_counters_of_vllm(rows)
    told = [True, True, False, None, None, None, None, None, None]
    assert [one["counters_of_vllm"] for one in rows] == told
    assert [script.disagrees(one) for one in ours] == [False, False, True, False, False, False]
    assert script.disagrees(row("peagle_jax", "plain", 0, [], different=1, counters_of_vllm=None))
    # vLLM's own text differs at a near tie
    rows = [row("peagle_jax", "peagle", 9, [5, 2]), row("vllm", "peagle", 8, [5, 2], same=2)]
    script.add_counters_of_vllm(rows)
    assert rows[0]["counters_of_vllm"] is None and not script.disagrees(rows[0])


def test_transformers_hands_out_no_steps(capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import compare_speed as script

    assert script.main(["--stream", "--engines", "transformers"]) == 2
    assert "--engines: --stream has peagle_jax and vllm; got tran" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--batch-sizes", "1", "2"], "--batch-sizes: --continuous takes one; got [1, 2]"),
        (
            ["--num-prompts", "8"],
            "--num-prompts: --continuous takes more than --batch-sizes; got 8",
        ),
        (
            ["--engines", "transformers"],
            "--engines: --continuous has peagle_jax and vllm; got tran",
        ),
    ],
)
def test_what_cannot_be_continuous(options, message, capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import compare_speed as script

    assert script.main(["--engines", "peagle_jax", "--continuous", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "engines, message",
    [
        (["transformers"], "--methods: transformers has plain, prompt_lookup; got peagle"),
        (["peagle_jax"], "--methods: texts are compared with plain decoding's; got peagle"),
    ],
)
def test_methods_that_cannot_be_compared(engines, message, capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import compare_speed as script

    assert script.main(["--engines", *engines, "--methods", "peagle"]) == 2
    assert message in capsys.readouterr().err


def test_vllm_needs_its_environment():
    code, _, error = compare_speed("--engines", "vllm")
    assert code == 2 and "make it with scripts/peers/install_vllm.sh" in error
    code, _, error = compare_speed("--engines", "vllm", "--vllm", "nowhere")
    assert code == 2 and "make it: scripts/peers/install_vllm.sh nowhere" in error


@pytest.mark.parametrize("option", ["--rounds", "-k", "--batch-sizes", "--max-new-tokens"])
def test_numbers_below_one(option, capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import compare_speed as script

    assert script.main(["--engines", "peagle_jax", option, "0"]) == 2
    assert f"{option}: must be 1 or more; got 0; give {option} 1" in capsys.readouterr().err


@pytest.mark.slow
def test_an_engine_that_fails_is_named(tmp_path):
    code, _, error = compare_speed("--engines", "peagle_jax", "--peagle", tmp_path)
    assert code == 2 and "peagle_jax, peagle, float32: the engine must decode" in error
