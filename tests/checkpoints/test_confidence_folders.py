"""Heads with a confidence head in files: what keeps it, what refuses it, and what drops it."""

import json

import pytest
import tiny
from checkpoints.folder_edits import edit, equal, files_equal

from peagle_jax import weights
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.inspect import describe, printable_rows
from peagle_jax.checkpoints.other_engines import check_servable_by
from peagle_jax.checkpoints.runs import load_drafter, open_head
from peagle_jax.cli import main
from peagle_jax.draft.confidence import Calibration
from peagle_jax.types import InputError

CALIBRATION = Calibration(((1.5, -0.25), (0.5, 2.0)), ((1.0, 0.0), (-3.0, 1e-3)))
HEADS = {
    "alone": {"confidence": True},
    "calibrated": {
        "confidence": True,
        "confidence_calibration": CALIBRATION,
        "markov_rank": 4,
        "draft_vocab": 17,
    },
}
NAMES = {"confidence_head.proj.weight", "confidence_head.proj.bias"}


@pytest.mark.parametrize("name", HEADS)
def test_our_formats_keep_it(name, tmp_path):
    """Folder -> training run -> folder, bit for bit; and the head is the same."""
    head = tiny.head(**HEADS[name])
    save_drafter(head, tmp_path / "a", "peagle_jax")
    convert(tmp_path / "a", tmp_path / "run", to="orbax")
    convert(tmp_path / "run", tmp_path / "b", to="peagle_jax")
    files_equal(tmp_path / "a", tmp_path / "b")
    raw = weights.read_json(tmp_path / "a" / "config.json")
    assert raw == weights.read_json(tmp_path / "b" / "config.json")
    assert raw["enable_confidence_head"] is True
    assert raw["confidence_head_with_markov"] == (name == "calibrated")
    assert ("confidence_calibration" in raw) == (name == "calibrated")
    for folder in ("a", "run", "b"):
        equal(load_drafter(tmp_path / folder), head)
    stored = weights.open_folder(tmp_path / "a")
    width = 20 + (4 if name == "calibrated" else 0)
    assert stored["confidence_head.proj.weight"].shape == (1, width)
    assert stored["confidence_head.proj.bias"].shape == (1,)
    rows = printable_rows(describe(tmp_path / "a"))
    calibrated = "calibrated" if name == "calibrated" else "not calibrated (peagle calibrate)"
    assert rows["confidence head"] == calibrated
    card = (tmp_path / "a" / "README.md").read_text()
    assert "--drop-confidence" in card and ("--drop-markov" in card) == (name == "calibrated")
    assert f"| confidence head (arXiv:2607.05147) | {calibrated.split(' (')[0]} |" in card


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_what_vllm_serves_has_none(to, tmp_path, capsys):
    save_drafter(tiny.head(**HEADS["alone"]), tmp_path / "a", "peagle_jax")
    command = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", to]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "no confidence head in P-EAGLE" in error and "or --drop-confidence" in error
    assert error.count("\n") == 1 and not (tmp_path / "b").exists()
    assert main([*command, "--drop-confidence"]) == 0
    # drawn anew, all parameters but those of the confidence head would be the same
    params = {k: v for k, v in tiny.head(**HEADS["alone"]).params.items() if k != "confidence"}
    without = tiny.head(seed=77)
    object.__setattr__(without, "params", params)
    save_drafter(without, tmp_path / "c", to)
    files_equal(tmp_path / "b", tmp_path / "c")
    assert set(weights.read_metadata(tmp_path / "b")["left_out"].split()) == NAMES
    assert main(["serve-config", str(tmp_path / "b"), "--engine", "vllm"]) == 0


def test_both_heads_are_dropped_together(tmp_path, capsys):
    """A confidence head reads the Markov head; the other way round one goes without the other."""
    save_drafter(tiny.head(**HEADS["calibrated"]), tmp_path / "a", "peagle_jax")
    command = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "vllm"]
    assert main([*command, "--drop-markov"]) == 2
    assert "got a head with both; add --drop-confidence" in capsys.readouterr().err
    assert main([*command, "--drop-confidence"]) == 2
    assert "no Markov head in P-EAGLE" in capsys.readouterr().err
    assert main([*command, "--drop-markov", "--drop-confidence"]) == 0
    convert(tmp_path / "a", tmp_path / "c", to="peagle_jax", drop_confidence=True)
    config = load_drafter(tmp_path / "c").config
    assert config.markov_rank == 4 and not config.confidence
    assert config.confidence_calibration is None
    save_drafter(tiny.head(), tmp_path / "plain")
    with pytest.raises(InputError, match="--drop-confidence: needs a head with a confidence head"):
        convert(tmp_path / "plain", tmp_path / "d", to="vllm", drop_confidence=True)
    with pytest.raises(InputError, match="--drop-confidence: --to hf has no use for it"):
        convert(tmp_path / "plain", tmp_path / "d", to="hf", drop_confidence=True)
    with pytest.raises(InputError, match="have a confidence head"):
        check_servable_by("sglang", open_head(tmp_path / "a"), "x")


PAIRS = [[1.0, 0.0]]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"enable_confidence_head": 1}, "enable_confidence_head must be true or false"),
        ({"enable_confidence_head": ...}, "a calibration is one of a confidence head"),
        ({"enable_confidence_head": ..., "confidence_calibration": ...}, "confidence_head.proj"),
        ({"confidence_head_with_markov": False}, "confidence_head_with_markov must be true"),
        ({"confidence_calibration": []}, r"lists greedy and sampled of pairs .*; got \[\]"),
        ({"confidence_calibration": {"greedy": PAIRS}}, "lists greedy and sampled"),
        ({"confidence_calibration": {"greedy": PAIRS, "sampled": []}}, "lists greedy and sampled"),
        ({"confidence_calibration": {"greedy": PAIRS, "sampled": [[1.0]]}}, r"got \[1.0\]"),
        ({"confidence_calibration": {"greedy": PAIRS, "sampled": [[1, "0"]]}}, r"got \[1, '0'\]"),
        ({"confidence_calibration": {"greedy": [[1e9, 0]], "sampled": PAIRS}}, "1000000000.0, 0"),
    ],
)
def test_damaged_configs(changes, words, tmp_path):
    save_drafter(tiny.head(**HEADS["calibrated"]), tmp_path / "a", "peagle_jax")
    with pytest.raises(InputError, match=words):
        load_drafter(edit(tmp_path / "a", tmp_path / "b", **changes))


def test_damaged_runs_and_one_from_before(tmp_path):
    save_drafter(tiny.head(), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "run", to="orbax")
    file = tmp_path / "run" / "head.json"
    raw = json.loads(file.read_text())
    assert raw["confidence"] is False and raw["confidence_calibration"] is None
    for changes, words in (
        ({"confidence": True}, "the checkpoint must hold the parameters"),
        ({"confidence": True, "mask_token": None}, "for heads that draft in parallel"),
        ({"confidence_calibration": {"greedy": PAIRS, "sampled": PAIRS}}, "one of a confidence"),
        ({"confidence_calibration": 3}, "lists greedy and sampled"),
        ({"confidence": "yes"}, "confidence must be true or false"),
    ):
        file.write_text(json.dumps(raw | changes))
        with pytest.raises(InputError, match=words):
            load_drafter(tmp_path / "run")
    file.write_text(json.dumps({k: v for k, v in raw.items() if not k.startswith("confidence")}))
    equal(load_drafter(tmp_path / "run"), load_drafter(tmp_path / "a"))


def test_positions_behind_the_last():
    scale, shift = CALIBRATION.of_kind("greedy", 4)
    assert scale.tolist() == [1.5, 0.5, 0.5, 0.5] and shift.tolist() == [-0.25, 2.0, 2.0, 2.0]
    assert CALIBRATION.of_kind("sampled", 1).tolist() == [[1.0], [0.0]]
