"""scripts/peers/compare_training.py: its arguments, and real speculators where it is installed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "peers" / "compare_training.py"
ENV = ROOT / ".venv-speculators"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import compare_training

    return compare_training


def test_speculators_needs_its_environment(script, capsys):
    assert script.main(["--speculators", "nowhere"]) == 2
    assert "make it: scripts/peers/install_speculators.sh nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rows", "--rounds", "--round-steps", "--seeds", "--threads"])
def test_numbers_below_one(option, script, tmp_path, capsys):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert script.main(["--speculators", str(tmp_path), option, "0"]) == 2
    assert f"{option}: must be 1 or more; got 0; give {option} 1" in capsys.readouterr().err


@pytest.mark.peer
@pytest.mark.skipif(not ENV.exists(), reason=".venv-speculators: make test-peers installs it")
def test_the_two_train_the_same(tmp_path):
    """With one depth nothing is drawn: step by step the losses are the same.

    So inputs, head, loss, clipping, AdamW and schedule are.
    """
    recipe = (ROOT / "configs/train/demo_peagle.yaml").read_text()
    recipe = recipe[: recipe.index("depth_schedule")] + recipe[recipe.index("eval:") :]
    recipe = recipe.replace("num_depths: 8", "num_depths: 1").replace("steps: 9000", "warmup: 3")
    (tmp_path / "recipe.yaml").write_text(recipe)
    subprocess.run(
        [sys.executable, SCRIPT, "--speculators", ENV, "--recipe", tmp_path / "recipe.yaml"]
        + ["--rows", "8", "--rounds", "1", "--round-steps", "10", "--seconds", "0"]
        + ["--record", tmp_path / "rows.jsonl"],
        check=True,
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ours, *theirs = rows
    assert ours["trainer"] == "peagle_jax" and len(theirs) == 2
    assert len({row["trained_parameters"] for row in rows}) == 1
    losses = np.array(ours["losses_of_a_round"])
    assert losses[-1] < 0.9 * losses[0]
    for row in theirs:
        np.testing.assert_allclose(row["losses_of_a_round"], losses, rtol=1e-3)
