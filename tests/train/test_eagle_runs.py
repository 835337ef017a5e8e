"""Whole runs of EAGLE-1 heads: learning, resuming, and what such a head has no place for."""

import json

import pytest
import test_runs
from test_runs import config, rows, same, write

from peagle_jax import weights
from peagle_jax.cli import main

corpus, target = test_runs.corpus, test_runs.target  # fixtures


def test_an_eagle_run_learns_and_goes_on_exactly(corpus, target, tmp_path, capsys):
    """Interrupted after steps 1 and 2, it ends with the same bits; its folder has no embedding."""
    for name in ("whole", "interrupted"):
        raw = config("eagle", corpus, tmp_path / name, target)
        raw["optimizer"] |= {"steps": 60, "peak_lr": 1e-2}
        path = write(tmp_path / f"{name}.yaml", raw)
        for _ in range(2 if name == "interrupted" else 0):
            assert main(["train", str(path), "--max_seconds", "0"]) == 0
        assert main(["train", str(path)]) == 0
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    assert same(whole / "head", interrupted / "head")
    losses = {r["step"]: (r["loss"], r["accuracy"]) for r in rows(whole) if "loss" in r}
    assert losses[60] == {r["step"]: (r["loss"], r["accuracy"]) for r in rows(interrupted)}[60]
    assert losses[60][0] < 0.7 * losses[2][0] and losses[60][1][0] > 0.3 > losses[2][1][0]
    result = json.loads((whole / "result.json").read_text())
    assert result["acceptance_length"] > 1.2 and len(result["accepted_per_position"]) == 3
    head = weights.open_folder(whole / "head")
    assert len(head) == 9 and "fc.weight" in head and "layers.0.mlp.up_proj.weight" in head
    # the run and its folder draft the same
    capsys.readouterr()
    texts = []
    for drafter in (whole, whole / "head"):
        command = f"generate --target {target} --drafter {drafter} --prompt def --max-new-tokens 30"
        assert main(command.split()) == 0
        texts.append(capsys.readouterr())
    assert texts[0] == texts[1] and "acceptance length" in texts[0].err


def test_an_eagle_head_that_vllm_cannot_read(corpus, target, tmp_path, capsys):
    """Its run ends as others do, and decodes."""
    raw = config("eagle", corpus, tmp_path / "run", target)
    raw["head"] = {"layers": 1, "qk_norm": True}
    assert main(["train", str(write(tmp_path / "run.yaml", raw))]) == 0
    said = capsys.readouterr()
    assert "no folder for vLLM is written" in said.out + said.err
    assert not (tmp_path / "run" / "head").exists()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["acceptance_length"] >= 1
    command = f"generate --target {target} --drafter {tmp_path / 'run'} --prompt d"
    assert main([*command.split(), "--max-new-tokens", "5"]) == 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"head": {"layers": 1, "dim": 48}}, "head.dim: an EAGLE-1 head reads and predicts"),
        ({"head": {"layers": 1, "draft_vocab": 99}}, "head.draft_vocab: an EAGLE-1 head reads"),
        ({"head": {"layers": 1, "aux_hidden_state_layers": [-1]}}, "must be layers of the target"),
        ({"train_embedding": True}, "train_embedding: an EAGLE-1 head has its target's; got True"),
        ({"train_lm_head": True}, "train_lm_head: an EAGLE-1 head has its target's"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: must be 1 or more; got 0; use 6"),
        ({"depth_schedule": [{"until": 5, "num_depths": 1}]}, "depth_schedule: must be empty"),
        ({"regression": {"noise": -0.1}}, "regression.noise: must be 0 or more; got -0.1"),
        ({"regression": {"weight": 0, "token_weight": 0}}, "regression.weight: must be above 0"),
    ],
)
def test_what_an_eagle_head_has_no_place_for(change, words, corpus, tmp_path, capsys):
    raw = config("eagle", corpus, tmp_path / "run", tmp_path, **change)
    assert main(["train", str(write(tmp_path / "run.yaml", raw))]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
