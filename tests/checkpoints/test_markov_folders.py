"""Heads with a Markov head in files: what keeps it, what refuses it, and what drops it."""

import json

import ml_dtypes
import numpy as np
import pytest
import tiny
from checkpoints.folder_edits import edit, equal, files_equal

from peagle_jax import weights
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.inspect import describe, printable_rows
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.cli import main
from peagle_jax.types import InputError

HEADS = {
    "vanilla": {"markov_rank": 4},
    "gated_reduced": {"markov_rank": 6, "markov_kind": "gated", "draft_vocab": 17, "qk_norm": True},
    "rnn": {"markov_rank": 3, "markov_kind": "rnn", "qk_norm": True},
}
NAMES = {f"markov_head.{name}" for name in ("markov_w1.weight", "markov_w2.weight")}
# beside them, by kind; DSpark's names and shapes
OTHERS = {
    "vanilla": {},
    "gated": {"gate_proj.weight": (6, 20 + 6), "gate_proj.bias": (6,)},
    "rnn": {"joint_proj.weight": (9, 2 * 3 + 20), "joint_proj.bias": (9,)},
}


@pytest.mark.parametrize("name", HEADS)
def test_our_formats_keep_it(name, tmp_path):
    """Folder -> training run -> folder, bit for bit; and the head is the same."""
    head = tiny.head(**HEADS[name])
    save_drafter(head, tmp_path / "a", "peagle_jax", k=5)
    convert(tmp_path / "a", tmp_path / "run", to="orbax")
    convert(tmp_path / "run", tmp_path / "b", to="peagle_jax")
    files_equal(tmp_path / "a", tmp_path / "b")
    raw = weights.read_json(tmp_path / "a" / "config.json")
    assert raw == weights.read_json(tmp_path / "b" / "config.json")
    assert raw["markov_rank"] == head.config.markov_rank
    assert raw["markov_head_type"] == head.config.markov_kind == name.split("_")[0]
    again = load_drafter(tmp_path / "run")
    assert again.config.num_depths == 5
    for folder in ("a", "run", "b"):
        loaded = load_drafter(tmp_path / folder)
        equal(loaded, again)
        for path, x in weights.flatten_params(head.params):
            assert np.array_equal(x, dict(weights.flatten_params(loaded.params))[path]), path
    stored = weights.open_folder(tmp_path / "a")
    found = {n for n in stored if n.startswith("markov")}
    others = {f"markov_head.{n}": shape for n, shape in OTHERS[name.split("_")[0]].items()}
    assert found == NAMES | others.keys()
    assert all(stored[n].shape == shape for n, shape in others.items())
    width, rank = head.config.draft_vocab, head.config.markov_rank
    assert stored["markov_head.markov_w1.weight"].shape == (41, rank)
    assert stored["markov_head.markov_w2.weight"].shape == (width, rank)
    convert(tmp_path / "a", tmp_path / "half", to="peagle_jax", dtype="bfloat16")
    assert (
        load_drafter(tmp_path / "half").params["markov"]["w1"]["table"].dtype == ml_dtypes.bfloat16
    )


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_what_vllm_serves_has_none(to, tmp_path, capsys):
    head = tiny.head(**HEADS["gated_reduced"])
    save_drafter(head, tmp_path / "a", "peagle_jax")
    command = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", to]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "no Markov head in P-EAGLE" in error and "one of rank 6" in error
    assert "--drop-markov" in error and error.count("\n") == 1
    assert not (tmp_path / "b").exists()
    with pytest.raises(InputError, match="no Markov head in P-EAGLE"):
        save_drafter(head, tmp_path / "b", to)

    assert main([*command, "--drop-markov"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "DSpark (arXiv:2607.05147) reports fewer accepted drafts" in said
    params = {name: x for name, x in head.params.items() if name != "markov"}
    without = tiny.head(**{**HEADS["gated_reduced"], "markov_rank": None, "markov_kind": "vanilla"})
    object.__setattr__(without, "params", params)
    save_drafter(without, tmp_path / "c", to)
    files_equal(tmp_path / "b", tmp_path / "c")
    left_out = weights.read_metadata(tmp_path / "b")["left_out"].split()
    assert set(left_out) == NAMES | {f"markov_head.{n}" for n in OTHERS["gated"]}
    assert main([*command, "--drop-markov"]) == 0  # the same again
    capsys.readouterr()
    assert main(["serve-config", str(tmp_path / "a"), "--engine", "vllm"]) == 2
    assert "vLLM serves the formats vllm, speculators; got peagle_jax" in capsys.readouterr().err
    assert main(["serve-config", str(tmp_path / "b"), "--engine", "vllm"]) == 0


def test_dropping_nothing_is_refused(tmp_path, capsys):
    save_drafter(tiny.head(), tmp_path / "a")
    command = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "vllm"]
    assert main([*command, "--drop-markov"]) == 2
    assert "--drop-markov: needs a head with a Markov head" in capsys.readouterr().err
    with pytest.raises(InputError, match="--drop-markov: --to hf has no use for it"):
        convert(tmp_path / "a", tmp_path / "b", to="hf", drop_markov=True)


@pytest.mark.parametrize("changes", [{}, tiny.EAGLE, {"mask_token": None}])
def test_our_own_format_is_for_nothing_else(changes, tmp_path, capsys):
    """Its card speaks of the Markov head, and no other reader knows it."""
    save_drafter(tiny.head(**changes), tmp_path / "a")
    command = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "peagle_jax"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "heads with a Markov head" in error and error.endswith(
        "got one without; use --to vllm\n"
    )
    assert error.count("\n") == 1 and not (tmp_path / "b").exists()
    save_drafter(tiny.head(**HEADS["vanilla"]), tmp_path / "c", "peagle_jax")
    command = ["convert", str(tmp_path / "c"), str(tmp_path / "b"), "--to", "peagle_jax"]
    assert main([*command, "--drop-markov"]) == 2
    assert "use --to vllm" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"markov_rank": 18},
            r"markov_rank: the Markov head's rank must lie in 1\.\.17, .* got 18",
        ),
        ({"markov_rank": 0}, "markov_rank"),
        ({"markov_rank": 5}, "markov_head.gate_proj.weight"),
        ({"markov_rank": ...}, "markov_head"),
        ({"markov_head_type": "rnn"}, "markov_head.joint_proj"),
        (
            {"markov_head_type": "gru"},
            "markov_head_type: must be one of vanilla, gated, rnn; got gru",
        ),
        ({"markov_head_type": "vanilla"}, "markov_head.gate_proj"),
        ({"markov_head_type": 3}, "markov_head_type"),
    ],
)
def test_damaged_configs(changes, words, tmp_path):
    save_drafter(tiny.head(**HEADS["gated_reduced"]), tmp_path / "a", "peagle_jax")
    with pytest.raises(InputError, match=words):
        load_drafter(edit(tmp_path / "a", tmp_path / "b", **changes))


def test_a_damaged_run_and_one_from_before(tmp_path):
    save_drafter(tiny.head(), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "run", to="orbax")
    file = tmp_path / "run" / "head.json"
    raw = json.loads(file.read_text())
    assert raw["markov_rank"] is None
    for changes, words in (
        ({"markov_rank": 42}, r"1\.\.41"),
        ({"markov_rank": 4}, "the checkpoint must hold the parameters"),
        ({"markov_rank": 4, "mask_token": None}, "heads that draft in parallel"),
        ({"markov_kind": "gru"}, "markov_kind: must be one of vanilla, gated, rnn; got gru"),
        ({"markov_gated": True}, "formerly called markov_gated"),
    ):
        file.write_text(json.dumps(raw | changes))
        with pytest.raises(InputError, match=words):
            load_drafter(tmp_path / "run")
    older = {k: v for k, v in raw.items() if not k.startswith("markov")}
    file.write_text(json.dumps(older))
    equal(load_drafter(tmp_path / "run"), load_drafter(tmp_path / "a"))
    file.write_text(json.dumps(older | {"markov_gated": 1}))
    with pytest.raises(InputError, match="markov_gated must be one of false, true; got 1"):
        load_drafter(tmp_path / "run")


def test_former_names_of_kinds(tmp_path):
    for name, gated in (("vanilla", False), ("gated_reduced", True)):
        save_drafter(tiny.head(**HEADS[name]), tmp_path / name, "peagle_jax")
        run = tmp_path / f"{name}_run"
        convert(tmp_path / name, run, to="orbax")
        raw = json.loads((run / "head.json").read_text())
        del raw["markov_kind"]
        (run / "head.json").write_text(json.dumps(raw | {"markov_gated": gated}))
        equal(load_drafter(run), load_drafter(tmp_path / name))


def test_it_is_told(tmp_path):
    save_drafter(tiny.head(**HEADS["gated_reduced"]), tmp_path / "a", "peagle_jax")
    facts = describe(tmp_path / "a")
    assert facts["checkpoint_format"] == "peagle_jax" and facts["problem"] is None
    assert facts["missing_tensors"] == [] and facts["markov_rank"] == 6
    rows = printable_rows(facts)
    assert rows["Markov head, rank"] == "6, gated" and "format E" in rows["checkpoint format"]
    card = (tmp_path / "a" / "README.md").read_text()
    assert "rank 6, gated" in card and "--drop-markov" in card and "vllm serve" not in card
    assert "DSpark (arXiv:2607.05147) reports" in card  # we have not measured it
