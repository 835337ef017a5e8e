"""Folders of EAGLE-1 heads: vLLM's layout, what is the target's, round trips and refusals."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
from checkpoints.folder_edits import edit, equal, files_equal

import peagle_jax
from peagle_jax import weights
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.inspect import describe, printable_rows
from peagle_jax.checkpoints.pair import load_drafter_for, with_aux_layers
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.types import InputError, Model

PROMPT = [7, 30, 2]
OPTIONS = {"attention_bias": True, "num_depths": 5}
TARGETS = {"tied": {"tied_embeddings": True}, "untied": {}}


def head_of(target: Model, **changes) -> Model:
    """A random EAGLE-1 head with its target's embedding and output matrix."""
    head = tiny.head(**tiny.EAGLE, **changes)
    module = target.bind(target.params)
    shared = {
        "embed": {"table": module.embed.table[...]},
        "lm_head": {"kernel": module.lm_head_weight()},
    }
    return dataclasses.replace(head, params={**head.params, **shared})


@pytest.fixture(scope="module", params=TARGETS)
def folders(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    target = tiny.target(**TARGETS[request.param])
    save_target(target, root / "target")
    save_drafter(head_of(target, **OPTIONS), root / "head")
    return root, target


def test_what_vllm_reads(folders):
    """The names and shapes of llama_eagle.py, which has no norm before the first attention."""
    root, _ = folders
    raw = weights.read_json(root / "head" / "config.json")
    assert raw["architectures"] == ["EagleLlamaForCausalLM"] and raw["model_type"] == "llama"
    assert (raw["hidden_size"], raw["num_hidden_layers"], raw["head_dim"]) == (24, 2, 10)
    assert raw["attention_bias"] is True and raw["num_depths"] == 5
    tensors = {name: t.shape for name, t in weights.open_folder(root / "head").items()}
    layer = {
        "post_attention_layernorm.weight": (24,),
        "mlp.gate_proj.weight": (36, 24),
        "mlp.up_proj.weight": (36, 24),
        "mlp.down_proj.weight": (24, 36),
    }
    for name, rows in {"q": 40, "k": 20, "v": 20}.items():
        layer[f"self_attn.{name}_proj.weight"] = (rows, 24)
        layer[f"self_attn.{name}_proj.bias"] = (rows,)
    layer |= {"self_attn.o_proj.weight": (24, 40), "self_attn.o_proj.bias": (24,)}
    want = {f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()}
    want |= {"fc.weight": (24, 48), "layers.1.input_layernorm.weight": (24,)}
    assert tensors == want
    card = (root / "head" / "README.md").read_text()
    assert "An EAGLE-1 draft head (arXiv:2401.15077)" in card
    assert '"method": "eagle"' in card and "parallel_drafting" not in card


def test_the_head_and_what_it_shares(folders):
    root, made = folders
    target, head = peagle_jax.load_pair(root / "target", root / "head")
    equal(head, head_of(made, **OPTIONS))
    assert head.config.method == "eagle" and head.config.num_depths == 5
    (answer,) = peagle_jax.generate(target, head, [PROMPT], k=3, max_new_tokens=9, stop_ids=())
    (plain,) = peagle_jax.generate(target, None, [PROMPT], max_new_tokens=9, stop_ids=())
    assert answer.output_token_ids == plain.output_token_ids
    with pytest.raises(InputError, match="or the target's embedding; got neither"):
        load_drafter(root / "head")
    table = np.asarray(made.params["embed"]["table"])
    with pytest.raises(InputError, match="lm_head.weight, or its target's; got neither"):
        load_drafter(root / "head", embedding=table)
    lm_head = np.asarray(head.params["lm_head"]["kernel"]).T
    equal(load_drafter(root / "head", embedding=table, lm_head=lm_head), head)


def test_beside_heads_of_other_kinds(folders, tmp_path):
    """One target serves both; its arrays are not copied."""
    root, _ = folders
    save_drafter(tiny.head(mask_token=None), tmp_path / "eagle3")
    for first, second in (
        (root / "head", tmp_path / "eagle3"),
        (tmp_path / "eagle3", root / "head"),
    ):
        target, _ = peagle_jax.load_pair(root / "target", first)
        head = load_drafter_for(target, second)
        again = with_aux_layers(target, head.config.aux_hidden_state_layers)
        assert (
            again.params["blocks"][0]["attn"]["q"]["kernel"]
            is (target.params["blocks"][0]["attn"]["q"]["kernel"])
        )
        answers = [
            peagle_jax.generate(t, h, [PROMPT], k=k, max_new_tokens=6, stop_ids=())[0]
            for t, h, k in ((target, None, None), (again, head, 2))
        ]
        assert answers[0].output_token_ids == answers[1].output_token_ids


def test_round_trips(folders, tmp_path):
    root, _ = folders
    with pytest.raises(InputError, match="or the target's embedding; got neither; give --target"):
        convert(root / "head", tmp_path / "run", to="orbax")
    convert(root / "head", tmp_path / "run", to="orbax", target=root / "target")
    convert(tmp_path / "run", tmp_path / "again", to="vllm")
    files_equal(root / "head", tmp_path / "again")
    equal(load_drafter(tmp_path / "run"), peagle_jax.load_pair(root / "target", root / "head")[1])


def test_matrices_of_its_own_are_compared_with_the_targets(folders, tmp_path):
    """Written folders have none, and vLLM would read a head's own embedding."""
    root, made = folders
    shared = {
        "embed_tokens.weight": np.asarray(made.params["embed"]["table"]),
        "lm_head.weight": np.asarray(made.bind(made.params).lm_head_weight()).T,
    }
    for name, matrix in shared.items():
        stem = name.split(".")[0]
        own = edit(root / "head", tmp_path / stem, lambda t, n=name, x=matrix: t | {n: x})
        with pytest.raises(InputError, match=f"{name}, which must be its target's; got one that"):
            convert(own, tmp_path / "out", to="vllm")
        convert(own, tmp_path / f"{stem}_out", to="vllm", target=root / "target")
        files_equal(root / "head", tmp_path / f"{stem}_out")
        other = edit(
            root / "head", tmp_path / f"{stem}_other", lambda t, n=name, x=matrix: t | {n: x + 1}
        )
        with pytest.raises(InputError, match="its target's; got another one; let vLLM serve"):
            convert(other, tmp_path / "out", to="vllm", target=root / "target")
    assert not (tmp_path / "out").exists()


def test_layers_that_it_does_not_have_are_not_numbered(folders, tmp_path):
    with pytest.raises(InputError, match="--aux-layer-numbering: needs layer ids"):
        convert(folders[0] / "head", tmp_path / "a", to="vllm", aux_layer_numbering="output")


def test_what_it_is_in_words(folders):
    facts = describe(folders[0] / "head")
    assert (facts["method"], facts["parallel"], facts["problem"]) == ("eagle", False, None)
    assert facts["missing_tensors"] == [] and facts["open_questions"] == []
    rows = printable_rows(facts)
    assert rows["drafts"] == "one by one, by predicted hidden states (EAGLE-1)"
    assert "the final hidden state, after the norm" in rows.values()


@pytest.mark.parametrize(
    "changes, to, words",
    [
        ({"qk_norm": True}, "vllm", "got norms of queries and keys; train without head.qk_norm"),
        ({}, "speculators", "in the vllm format alone; got an EAGLE-1 head; use --to vllm"),
    ],
)
def test_what_no_format_expresses(changes, to, words, tmp_path):
    with pytest.raises(InputError, match=words):
        save_drafter(tiny.head(**tiny.EAGLE, **changes), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, tensor, words",
    [
        ({"hidden_size": 20}, None, r"must read 2 x hidden_size = 40 numbers; got 48"),
        ({"draft_vocab_size": 17}, None, "its target's vocabulary of 41 tokens; got 17"),
        ({}, "fc.bias", "fc must have no bias"),
        ({}, "norm.weight", "norm.weight"),
    ],
)
def test_folders_that_are_refused(changes, tensor, words, tmp_path):
    save_drafter(tiny.head(**tiny.EAGLE), tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    raw = json.loads(config.read_text()) | changes
    tensors = dict(weights.open_folder(tmp_path / "head"))
    if tensor is not None:
        tensors[tensor] = np.zeros(24, np.float32)
    with weights.new_folder(tmp_path / "edited") as folder:
        weights.write_folder(folder, raw, tensors, {}, None, None)
    with pytest.raises(InputError, match=words):
        read_head(tmp_path / "edited").check()
