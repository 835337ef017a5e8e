"""What a head begins as: placeholders that differ in nothing but their design."""

import dataclasses
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax import text, weights
from peagle_jax.checkpoints.head_writing import from_model, save_drafter
from peagle_jax.checkpoints.runs import write_run
from peagle_jax.layers import Rope
from peagle_jax.train.config import PeagleRun
from peagle_jax.train.data import pack
from peagle_jax.train.head_config import head_config
from peagle_jax.train.hidden_states import compute_hidden_states
from peagle_jax.train.new_head import new_head
from peagle_jax.train.settings import build
from peagle_jax.types import InputError, WeightsWarning

TOKENIZER = text.train_tokenizer(["def f"], 300)  # what it encodes is not asked


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(1)
    documents = [(rng.integers(6, 41, 23).astype(np.int32), np.ones(23, bool)) for _ in range(4)]
    return pack(documents, 23)


def recipe(design, **changes):
    raw = {
        "target": "not read here",
        "out": "runs/x",
        "data": {"source": "not read here", "seq_len": 23, "batch_size": 1},
        "head": {"layers": 1, "mask_token": 5, "qk_norm": True},  # as the target has
        "cod": {"num_depths": 4},
        "placeholder": {"hidden": design},
    }
    return build(PeagleRun, raw | changes, "test")


def begun(rows, design, **changes):
    return new_head(recipe(design, **changes), tiny.target(), rows, TOKENIZER).params


def finished(**changes):
    """A trained head of the recipe's shape."""
    config = head_config(recipe("shared"), tiny.target(), None)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return tiny.head.__wrapped__(3, **fields | changes)


def mean_aux_hidden_states(rows):
    batch, target = rows.take(slice(None)), tiny.target()
    states = jax.jit(lambda params, batch: compute_hidden_states(target.bind(params), batch))
    return np.asarray(states(target.params, batch)[0], np.float64).reshape(-1, 72).mean(axis=0)


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_vectors_that_are_not_learned_have_the_size_that_is_documented(rows):
    """Also where the layers begin at random, and learned placeholders small."""
    mean = mean_aux_hidden_states(rows)
    for init in ("random", "target"):
        fixed = begun(rows, "mean_feature", init=init)["mask_hidden"]
        np.testing.assert_allclose(fixed, mean, rtol=1e-4, atol=1e-5)
        random = begun(rows, "frozen_random", init=init)["mask_hidden"]
        assert 0.7 < rms(random) / rms(mean) < 1.4
        assert abs(np.corrcoef(random, mean)[0, 1]) < 0.4
    assert rms(begun(rows, "shared")["mask_hidden"]) < 0.1 * rms(mean)
    learned = begun(rows, "shared", init="target")["mask_hidden"]
    np.testing.assert_allclose(learned, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("init", ["random", "target"])
def test_the_token_side_does_not_depend_on_the_hidden_side(init, rows):
    tables = [
        np.asarray(begun(rows, design, init=init)["embed"]["table"])
        for design in ("shared", "mean_feature", "frozen_random", "zero")
    ]
    for table in tables[1:]:
        np.testing.assert_array_equal(table, tables[0])
    embedding = np.asarray(tiny.target().params["embed"]["table"])
    is_reset = not np.array_equal(tables[0][5], embedding[5])
    assert is_reset == (init == "target")


def test_a_parallel_head_of_another_design_to_begin_from(rows, tmp_path):
    """What both have is the trained head's; the rest begins as its own design says."""
    changes = {"layers": 1, "windows": (None,), "dim": 24, "mlp_dim": 40, "num_depths": 4}
    rope = tiny.target_config().rope
    trained = tiny.head.__wrapped__(3, head_dim=12, rope=rope, **changes)
    save_drafter(trained, tmp_path / "trained")
    start = {"init_from": str(tmp_path / "trained")}
    same = begun(rows, "shared", **start)
    np.testing.assert_array_equal(same["mask_hidden"], trained.params["mask_hidden"])
    np.testing.assert_array_equal(same["embed"]["table"], trained.params["embed"]["table"])
    low_rank = begun(rows, "low_rank", **start)
    np.testing.assert_array_equal(low_rank["mask_hidden"], trained.params["mask_hidden"])
    assert not np.asarray(low_rank["placeholder"]["codes"]).any()  # as the shared vector alone
    fixed = begun(rows, "mean_feature", **start)
    mean = mean_aux_hidden_states(rows)
    np.testing.assert_allclose(fixed["mask_hidden"], mean, rtol=1e-4, atol=1e-5)
    kernel = trained.params["fusion"]["fc"]["kernel"]
    for params in (same, low_rank, fixed):
        assert jnp.array_equal(params["fusion"]["fc"]["kernel"], kernel)


@pytest.mark.parametrize(
    "changes, key",
    [
        ({}, "train_lm_head"),
        ({"train_embedding": False, "train_lm_head": True}, "train_embedding"),
        ({"train_lm_head": True}, None),
    ],
)
def test_no_matrix_stays_as_it_began_at_random(rows, changes, key):
    """A head of another width has none of the target's."""
    raw = {"head": {"layers": 1, "mask_token": 5, "dim": 16, "head_dim": None}, **changes}
    if key is None:
        assert begun(rows, "shared", **raw)["lm_head"]["kernel"].shape[0] == 16
        return
    with pytest.raises(InputError, match=f"has none of its matrices; got 16; set {key}: true"):
        begun(rows, "shared", **raw)


def test_another_width_may_begin_with_a_trained_heads(rows, tmp_path):
    changes = {"layers": 1, "windows": (None,), "mlp_dim": 40, "num_depths": 4, "dim": 16}
    trained = tiny.head.__wrapped__(3, head_dim=12, rope=tiny.target_config().rope, **changes)
    save_drafter(trained, tmp_path / "trained")
    raw = {"head": {"layers": 1, "mask_token": 5, "dim": 16, "mlp_dim": 40}}
    params = begun(rows, "shared", init_from=str(tmp_path / "trained"), **raw)
    np.testing.assert_array_equal(params["lm_head"]["kernel"], trained.params["lm_head"]["kernel"])


def test_a_head_to_begin_from_that_names_no_layers(rows, tmp_path):
    """It reads those that vLLM chooses for the target that is trained with."""
    trained = finished(aux_hidden_state_layers=(2, 5, 8))
    save_drafter(trained, tmp_path / "trained")
    where = tmp_path / "trained" / "config.json"
    raw = json.loads(where.read_text())
    del raw["eagle_aux_hidden_state_layer_ids"]
    raw.get("eagle_config", {}).pop("eagle_aux_hidden_state_layer_ids", None)
    where.write_text(json.dumps(raw))
    run = recipe("shared", init_from=str(tmp_path / "trained"))
    deep = tiny.target(layers=11, windows=(None,) * 11)
    with pytest.raises(InputError, match=r"set head.aux_hidden_state_layers: \[2, 5, 8\]"):
        new_head(run, deep, rows, TOKENIZER)
    deep = tiny.target(layers=11, windows=(None,) * 11, aux_hidden_state_layers=(2, 5, 8))
    params = new_head(run, deep, rows, TOKENIZER).params
    np.testing.assert_array_equal(params["mask_hidden"], trained.params["mask_hidden"])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"norm_before_residual": True}, "has head.norm_before_residual: true, the new one false"),
        ({"norm_output": True}, "has head.norm_output: true, the new one false; it does not begin"),
        ({"heads": 2, "kv_heads": 1}, "has head.heads: 2, the new one 4"),
        ({"rope": Rope.from_hf({"rope_theta": 778}, 12, "")}, "has head.rope: .*778.*777.0"),
    ],
)
def test_a_head_to_begin_from_that_computes_something_else(changes, words, rows, tmp_path):
    """Its weights fit, and mean something else: it is said."""
    trained = finished(**changes)
    write_run(from_model(trained), trained, tmp_path / "trained")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        begun(rows, "shared", init_from=str(tmp_path / "trained"))
    said = [str(one.message) for one in said if one.category is WeightsWarning]
    assert re.search(words, said[0]) and len(said) == (2 if "heads" in changes else 1)


@pytest.mark.parametrize(
    "shape, words",
    [({"heads": 3}, "kv_heads, 2; got 3; set both"), ({"kv_heads": 3}, "kv_heads, 3; got 4; set")],
)
def test_heads_of_which_one_number_is_the_targets(shape, words):
    """Whether they go together is known when the target is."""
    run = recipe("shared", head={"layers": 1, "mask_token": 5, **shape})
    with pytest.raises(InputError, match=f"^head.heads: must be a multiple of head.{words}"):
        head_config(run, tiny.target(), None)
    other = recipe("shared", head={"layers": 1, "mask_token": 5, "heads": 6})
    assert head_config(other, tiny.target(), None).heads == 6


@pytest.mark.parametrize("trained_with", ["last_token", "mask"])
def test_the_mask_tokens_row_of_a_head_that_has_no_use_for_it(trained_with, rows, tmp_path):
    """It begins as `init` says; the rest of the table, and a row that is in use, as trained."""
    trained = finished(placeholder_token=trained_with)
    write_run(from_model(trained), trained, tmp_path / "trained")
    start = {"init": "target", "init_from": str(tmp_path / "trained")}
    table = np.asarray(begun(rows, "shared", **start)["embed"]["table"])
    expected = np.array(trained.params["embed"]["table"])
    if trained_with == "last_token":
        expected[5] = expected.mean(axis=0)
    np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)


ALONE = {"markov": {"rank": 3, "train_alone": True}}


@pytest.mark.parametrize("init", ["random", "target"])
def test_a_head_that_stays_as_it_is(init, rows, tmp_path):
    """Every parameter outside the Markov head is its own, whatever its K and context."""
    rope = Rope.from_hf({"rope_theta": 777}, 12, "")  # the target's is of 777.0
    trained = finished(num_depths=7, context=50, rope=rope)
    save_drafter(trained, tmp_path / "trained", dtype="bfloat16")
    stored = {
        path: np.asarray(x).astype("bfloat16") for path, x in weights.flatten_params(trained.params)
    }
    params = begun(rows, "shared", init=init, init_from=str(tmp_path / "trained"), **ALONE)
    assert not np.asarray(params.pop("markov")["w2"]["kernel"]).any()
    taken = dict(weights.flatten_params(params))
    assert taken.keys() == stored.keys()
    assert all(np.array_equal(taken[path], x) for path, x in stored.items())


def test_a_confidence_head_on_a_head_with_a_markov_head(rows, tmp_path):
    """Trained alone, it leaves the Markov head as it is, which must therefore be the same."""
    trained = finished(num_depths=7, markov_rank=3)
    write_run(from_model(trained), trained, tmp_path / "trained")
    start = {"init_from": str(tmp_path / "trained"), "confidence": {"train_alone": True}}
    params = begun(rows, "shared", markov={"rank": 3}, **start)
    confidence = params.pop("confidence")
    assert confidence["kernel"].shape == (trained.config.dim + 3, 1)
    assert not any(np.asarray(x).any() for x in confidence.values())
    taken, stored = (dict(weights.flatten_params(p)) for p in (params, trained.params))
    assert taken.keys() == stored.keys()
    assert all(np.array_equal(taken[path], x) for path, x in stored.items())
    for markov, words in (
        ({"rank": 4}, "markov.rank: with confidence.train_alone: true it must be that of .*, 3"),
        (None, "got null; set markov.rank: 3, or confidence.train_alone: false"),
        ({"rank": 3, "kind": "rnn"}, "markov.kind: .*, vanilla; got rnn"),
    ):
        with pytest.raises(InputError, match=words):
            begun(rows, "shared", markov=markov, **start)
    both = start | {"markov": {"rank": 4, "train_alone": True}}
    with pytest.raises(InputError, match="one of rank 3, vanilla; set markov: {rank: 3, k"):
        begun(rows, "shared", **both)


def test_a_confidence_head_is_not_lost_unseen(rows, tmp_path):
    trained = finished(num_depths=7, confidence=True)
    write_run(from_model(trained), trained, tmp_path / "trained")
    with pytest.raises(InputError, match="trained: its confidence head must not be lost"):
        begun(rows, "shared", init_from=str(tmp_path / "trained"))
    kept = begun(
        rows, "shared", init_from=str(tmp_path / "trained"), confidence={"train_alone": False}
    )
    assert kept["confidence"]["kernel"].shape == (trained.config.dim, 1)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"layers": 2, "windows": (None,) * 2},
            "head.layers: .*, 2; got 1; set head.layers: 2, or",
        ),
        ({"mlp_dim": 20}, "head.mlp_dim: .*, 20; got .*; set head.mlp_dim: 20, or"),
        ({"windows": (9,)}, "head.sliding_window: .*, 9; got null; set head.sliding_window: 9"),
        ({"qk_norm": False}, "head.qk_norm: .*, false; got true; set head.qk_norm: false"),
        ({"norm_before_residual": True}, "head.norm_before_residual: .*; got false"),
        ({"mask_token": 7}, "head.mask_token: .*, 7; got 5; set head.mask_token: 7"),
        ({"norm_eps": 0.5}, "^norm_eps: .*, 0.5; got .*; set markov.train_alone: false$"),
        ({"rope": Rope.from_hf({"rope_theta": 55.0}, 12, "")}, "^rope: .*55.0.*; got .*777.0"),
        ({"placeholder_token": "last_token"}, "placeholder.token: .*; set .*: last_token, or"),
        (
            {"mask_token": None},
            "^markov.train_alone: the head in .* must be a P-EAGLE head; got one of task eagle3",
        ),
    ],
)
def test_another_head_than_the_one_that_stays_is_refused(changes, words, rows, tmp_path):
    """What differs would be random, or read as it was not trained, and would never be trained."""
    trained = finished(**changes)
    write_run(from_model(trained), trained, tmp_path / "trained")
    start = {"init_from": str(tmp_path / "trained")}
    with pytest.raises(InputError, match=words):
        begun(rows, "shared", **start, **ALONE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeightsWarning)
        begun(rows, "shared", **start)  # trained as a whole it may differ


def test_a_parameter_that_the_head_that_stays_lacks(rows, tmp_path):
    trained = finished(placeholder_hidden="per_depth", num_depths=7)
    write_run(from_model(trained), trained, tmp_path / "trained")
    words = "must have the parameter .* of shape .*; set cod.num_depths: 7, or markov.train_alone"
    with pytest.raises(InputError, match=words):
        begun(rows, "per_depth", init_from=str(tmp_path / "trained"), **ALONE)
