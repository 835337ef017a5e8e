"""Files written under former names are still read: head.json of runs, and states of targets."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from checkpoints.folder_edits import equal

from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import from_model, save_drafter
from peagle_jax.checkpoints.orbax_io import Checkpoints
from peagle_jax.checkpoints.runs import read_run, write_run
from peagle_jax.old_names import HEAD_JSON_KEYS
from peagle_jax.types import InputError

FORMER_HEAD_JSON_KEYS = {"aux_hidden_state_layers": "taps", "num_depths": "depths"}


def with_former_keys(path, keep_new=False):
    """head.json as it was written before the names of docs/glossary.md."""
    raw = json.loads(path.read_text())
    former = {FORMER_HEAD_JSON_KEYS.get(key, key): value for key, value in raw.items()}
    path.write_text(json.dumps({**raw, **former} if keep_new else former))


def test_head_json_with_former_keys(tmp_path):
    head = tiny.head()
    write_run(from_model(head), head, tmp_path)
    with_former_keys(tmp_path / "head.json")
    assert {"taps", "depths"} <= json.loads((tmp_path / "head.json").read_text()).keys()
    equal(read_run(tmp_path), head)
    assert HEAD_JSON_KEYS == {old: new for new, old in FORMER_HEAD_JSON_KEYS.items()}


def test_head_json_with_a_key_under_both_names(tmp_path):
    head = tiny.head()
    write_run(from_model(head), head, tmp_path)
    with_former_keys(tmp_path / "head.json", keep_new=True)
    with pytest.raises(InputError, match="aux_hidden_state_layers was formerly called taps"):
        read_run(tmp_path)


def trained(params):
    """A training state after one step, as train/trainer.py saves it."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt = optimizer.init(params)
    grads = jax.tree.map(lambda x: 0.1 * x, params)
    updates, opt = optimizer.update(grads, opt, params)
    params = optax.apply_updates(params, updates)
    return {"params": params, "opt": opt, "step": jnp.ones((), jnp.int32)}


def restored(folder, state, like):
    """`state`, saved and read back in the shape of `like`."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state)
    checkpoints.close()
    checkpoints = Checkpoints(folder)
    state = checkpoints.restore(checkpoints.latest(), like)
    checkpoints.close()
    return state


def test_state_of_a_target_whose_output_matrix_was_called_head(tmp_path):
    """Saved by `peagle train` (task: lm) before `Decoder.head` became `Decoder.lm_head`."""
    params = tiny.target().params
    former = {("head" if key == "lm_head" else key): value for key, value in params.items()}
    assert "head" in former and "lm_head" not in former
    want = trained(params)
    got = restored(tmp_path, trained(former), jax.tree.map(jnp.zeros_like, want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_state_of_today(tmp_path):
    want = trained(tiny.target().params)
    got = restored(tmp_path, want, jax.tree.map(jnp.zeros_like, want))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_convert_takes_the_former_name_of_its_option(tmp_path):
    save_drafter(tiny.head(), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "new", to="vllm", aux_layer_numbering="output")
    convert(tmp_path / "a", tmp_path / "former", to="vllm", tap_numbering="output")
    new, former = ((tmp_path / name / "config.json").read_text() for name in ("new", "former"))
    assert new == former and json.loads(new)["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


def test_convert_refuses_an_option_under_both_names_and_an_unknown_one(tmp_path):
    both = {"aux_layer_numbering": "input", "tap_numbering": "output"}
    with pytest.raises(InputError, match="formerly called tap_numbering"):
        convert(tmp_path / "a", tmp_path / "b", to="vllm", **both)
    with pytest.raises(TypeError, match="dtypes"):
        convert(tmp_path / "a", tmp_path / "b", to="vllm", dtypes="float16")
