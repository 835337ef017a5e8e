"""What `peagle inspect` says of a folder: facts for programs, and words for people."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
from checkpoints.folder_edits import edit

from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import from_model, save_drafter
from peagle_jax.checkpoints.inspect import (
    KNOWN_TARGETS,
    describe,
    printable,
    printable_rows,
)
from peagle_jax.checkpoints.runs import _state_of_head, config_from_json, write_run
from peagle_jax.checkpoints.target_io import context_of, save_target
from peagle_jax.cli import main
from peagle_jax.types import InputError


@pytest.fixture
def folder(tmp_path):
    save_drafter(tiny.head(), tmp_path / "a", k=9)
    return tmp_path / "a"


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # of `more`
def test_inspect_says_what_loading_would(folder, tmp_path):
    broken = edit(
        folder,
        tmp_path / "b",
        lambda t: t | {"mask_hidden": np.zeros((1, 1, 71), np.float32), "more": np.ones(2)},
    )
    assert "unknown: more; wrong shape: mask_hidden" in describe(broken)["problem"]
    assert describe(folder)["problem"] is None


def test_a_head_whose_ids_may_count_outputs(tmp_path, capsys):
    """As SpecForge writes them: in eagle_config alone. What is said is said of no other head."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    save_drafter(tiny.head(mask_token=None), tmp_path / "a", k=4)
    nested = {"eagle_config": ids, "eagle_aux_hidden_state_layer_ids": ...}
    both = {"eagle_config": ids, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    edit(tmp_path / "a", tmp_path / "nested", **nested)
    edit(tmp_path / "a", tmp_path / "both", **both)
    save_drafter(tiny.head(), tmp_path / "p", k=4)
    edit(tmp_path / "p", tmp_path / "parallel", **nested)
    facts = describe(tmp_path / "nested")
    assert facts["aux_hidden_state_layers"] == [1, 3, 5] and facts["min_target_layers"] == 5
    (question,) = facts["open_questions"]
    assert "SpecForge" in question and "--aux-layer-numbering output" in question
    assert main(["inspect", str(tmp_path / "nested")]) == 0
    assert "SpecForge" in " ".join(capsys.readouterr().out.split())
    for name in ("a", "both", "parallel"):
        assert describe(tmp_path / name)["open_questions"] == []


def test_facts_of_a_run(folder, tmp_path):
    convert(folder, tmp_path / "run", to="orbax")
    facts = describe(tmp_path / "run")
    assert facts["kind"] == "training_run"
    assert facts["num_parameters"] == describe(folder)["num_parameters"]
    assert facts["dtypes"] == ["float32"] and facts["source"] == "a"
    assert facts["checkpoints"] == [0] and facts["target"] is None and facts["left_out"] == []


def test_a_run_whose_result_names_a_place(folder, tmp_path):
    """The step that was kept is a number, and no path out of the run."""
    run = tmp_path / "run"
    convert(folder, run, to="orbax")
    convert(folder, tmp_path / "other", to="orbax")
    kept = str(tmp_path / "other" / "checkpoints" / "0")
    for kept_step in (kept, "../../other/checkpoints/0", "x" * 300, 0.0, True):
        (run / "result.json").write_text(json.dumps({"step": 0, "kept_step": kept_step}))
        assert _state_of_head(run) == run / "checkpoints" / "0" / "default"


@pytest.mark.parametrize("windows", [["a", None], [-3, None], [True, None], [0, None], [1.5, None]])
def test_windows_of_a_run_are_numbers(folder, tmp_path, windows):
    run = tmp_path / "run"
    convert(folder, run, to="orbax")
    head = json.loads((run / "head.json").read_text())
    assert len(head["windows"]) == 2
    (run / "head.json").write_text(json.dumps(head | {"windows": windows}))
    with pytest.raises(InputError, match="with a number of 1 or more, or null, for each layer"):
        config_from_json(run / "head.json")


def test_facts_of_a_target_that_says_nonsense(tmp_path, capsys):
    save_target(tiny.target(), tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    raw = json.loads(path.read_text())
    odd = {"hidden_size": "\udc00", "vocab_size": [1], "model_type": "made_up", "head_dim": True}
    path.write_text(json.dumps(raw | odd))
    facts = describe(tmp_path / "target")
    assert [facts[key] for key in ("hidden_size", "vocab_size", "head_dim")] == [None] * 3
    assert facts["num_hidden_layers"] == raw["num_hidden_layers"]
    assert main(["inspect", str(tmp_path / "target")]) == 0


def test_a_context_that_cannot_be_known(tmp_path):
    assert context_of("x" * 5000) is None and context_of(None) is None
    for text_config in ([1], 5, "x", {"max_position_embeddings": "9"}):
        raw = {"text_config": text_config, "max_position_embeddings": 7}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        want = None if isinstance(text_config, dict) else 7
        assert context_of(str(tmp_path)) == want


def test_facts_of_a_head(folder):
    facts = describe(folder)
    assert facts["kind"] == "draft_head" and facts["checkpoint_format"] == "vllm"
    assert facts["parallel"] is True and facts["mask_token_id"] == 5 and facts["num_depths"] == 9
    assert facts["aux_hidden_state_layers"] == [1, 2, 3] and facts["min_target_layers"] == 3
    assert facts["hidden_size"] == 20 and facts["target_hidden_size"] == 24
    assert facts["sliding_windows"] == [None, None] and facts["known_targets"] == []
    assert facts["shares_embedding"] is False and facts["target"] is None
    assert facts["export_status"] == "as it is"
    assert facts["llama_cpp_lacks"] == ["draft in parallel (P-EAGLE)", "have 2 layers"]
    assert facts["metadata"]["source"] == "peagle_jax.save_drafter"


def test_facts_of_an_autoregressive_head(tmp_path):
    save_drafter(tiny.head(mask_token=None, num_depths=None), tmp_path / "a", own_embedding=False)
    facts = describe(tmp_path / "a")
    assert facts["parallel"] is False and facts["shares_embedding"] is True
    for key in ("mask_token_id", "num_depths", "placeholder_hidden", "placeholder_token"):
        assert facts[key] is None, key
    rows = printable_rows(facts)
    assert rows["drafts"] == "one by one (EAGLE-3)"
    assert rows["embedding"] == "the target's, shared" and rows["trained for K"] == "not recorded"


def test_facts_of_a_target(tmp_path):
    save_target(tiny.target(), tmp_path / "t")
    facts = describe(tmp_path / "t")
    assert facts["kind"] == "target" and facts["model_type"] == "qwen3"
    assert facts["num_hidden_layers"] == 4 and facts["hidden_size"] == 24
    assert facts["has_tokenizer"] is False and facts["num_files"] == 1
    config = json.loads((tmp_path / "t/config.json").read_text()) | {"model_type": "other"}
    (tmp_path / "t/config.json").write_text(json.dumps(config))
    facts = describe(tmp_path / "t")
    assert facts["kind"] == "unsupported_target"
    assert printable_rows(facts)["kind"] == "target of a family that is not supported"


def test_keys_are_snake_case_and_values_are_json(folder, tmp_path):
    """For programs: no sentence stands where a number, a list or null belongs."""
    save_target(tiny.target(), tmp_path / "target")
    convert(folder, tmp_path / "run", to="orbax")
    for name in ("a", "target", "run"):
        facts = describe(tmp_path / name)
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", key) for key in facts)
        assert json.loads(json.dumps(facts)) == facts
        empty_words = {"none", "nothing", "not named", "not recorded", "unknown", ""}
        assert not empty_words & {v for v in facts.values() if isinstance(v, str)}
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "0")
    unsaved = describe(tmp_path / "run")
    assert unsaved["checkpoints"] == [] and unsaved["num_bytes"] is unsaved["target"] is None
    assert unsaved.keys() == facts.keys() and json.loads(json.dumps(unsaved)) == unsaved
    assert printable_rows(unsaved).keys() == printable_rows(facts).keys()


def test_words_for_people(folder):
    rows = printable_rows(describe(folder))
    assert rows["kind"] == "draft head" and rows["style"] == "llama"
    assert rows["heads"] == "4, 2 of keys and values, 10 wide"
    assert rows["aux hidden states, vLLM numbering (input of layer i)"] == "1, 2, 3"
    assert rows["aux hidden states, SpecForge numbering (output of layer i)"] == "0, 1, 2"
    assert rows["placeholder, hidden side"].startswith("shared: one learned vector")
    assert rows["sliding windows"] == rows["problems"] == rows["options"] == "none"
    assert rows["what its config leaves open"] == "nothing"
    refused = "refused: it would draft in parallel (P-EAGLE), have 2 layers"
    assert rows["for llama.cpp (GGUF)"] == refused
    assert rows["file says: source"] == "peagle_jax.save_drafter"
    assert all(isinstance(text, str) for text in rows.values())


def test_printable():
    assert printable(None) == printable([]) == "none"
    assert printable(1_234_567) == "1,234,567" and printable(4321) == "4321"
    assert printable([1, None]) == "1, None" and printable(True) == "True"


def test_known_targets_have_their_published_sizes():
    """configs/targets has the published config of each; its file is named after the model."""
    folder = Path(__file__).parents[2] / "configs" / "targets"
    for (width, vocab), models in KNOWN_TARGETS.items():
        for model in models:
            name, layers = re.fullmatch(r"[^/]+/(.+) \((\d+) layers\)", model).groups()
            raw = json.loads((folder / f"{name.lower()}.json").read_text())
            text = raw.get("text_config", raw)
            sizes = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]
            assert sizes == (width, vocab, int(layers)), model


def test_attention_is_shown_where_it_is_not_the_papers(tmp_path):
    head = tiny.head(placeholder_attention="committed")
    write_run(from_model(head), head, tmp_path / "run")
    facts = describe(tmp_path / "run")
    assert (facts["placeholder_attention"], facts["placeholder_context"]) == ("committed", "layers")
    rows = printable_rows(facts)
    assert rows["placeholders attend to"] == (
        "committed: the committed tokens, and no other placeholder"
    )
    assert "keys and values of committed tokens" not in rows
