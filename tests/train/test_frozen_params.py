"""What a run does not train is that of its first session."""

import jax.numpy as jnp
import numpy as np
import pytest
from recipes import load, minimal

from peagle_jax.checkpoints import checksums
from peagle_jax.checkpoints.orbax_io import save_tree
from peagle_jax.train.frozen_params import in_place_of, kept_frozen
from peagle_jax.types import InputError

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
FROZEN = {"d2t": jnp.array([0, 2, 2]), "lm_head": {"kernel": jnp.asarray(MATRIX)}}
TODAY = {"d2t": jnp.array([0, 1, 5]), "lm_head": {"kernel": jnp.zeros((2, 3), jnp.bfloat16)}}


def run_in(folder, **changes):
    return load(folder, minimal("peagle", out=str(folder / "run"), **changes))


def begin(run, tmp_path, frozen=FROZEN):
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    if frozen:
        save_tree(tmp_path / "run" / "frozen", frozen)


def test_the_first_sessions_take_the_place_of_todays(tmp_path):
    run = run_in(tmp_path)
    assert kept_frozen(run) is None  # nothing was trained yet
    begin(run, tmp_path)
    kept = kept_frozen(run)
    assert kept is not None and sorted(kept) == ["d2t", "lm_head.kernel"]
    same_vocab = {**TODAY, "d2t": FROZEN["d2t"]}
    got = in_place_of(run, same_vocab, kept)
    np.testing.assert_array_equal(got["lm_head"]["kernel"], MATRIX)
    assert got["lm_head"]["kernel"].dtype == jnp.bfloat16
    with pytest.raises(InputError, match="draft vocabulary that it began with"):
        in_place_of(run, TODAY, kept)
    with pytest.raises(InputError, match="a difference at embed.table"):
        in_place_of(run, {**same_vocab, "embed": {"table": jnp.ones((2, 2))}}, kept)
    with pytest.raises(InputError, match="a difference at a shape"):
        in_place_of(run, {**same_vocab, "lm_head": {"kernel": jnp.ones((2, 4))}}, kept)


def test_a_draft_vocabulary_of_a_trained_head(tmp_path):
    """It is not what this corpus would choose, and goes on."""
    run = run_in(tmp_path, init_from="a head")
    begin(run, tmp_path)
    kept = kept_frozen(run)
    assert kept is not None
    np.testing.assert_array_equal(in_place_of(run, TODAY, kept)["d2t"], FROZEN["d2t"])


def test_former_names(tmp_path):
    run = run_in(tmp_path)
    begin(run, tmp_path, {"head": FROZEN["lm_head"]})
    assert sorted(kept_frozen(run) or {}) == ["lm_head.kernel"]


@pytest.mark.parametrize(
    "changes, kept",
    [
        ({"train_embedding": True, "train_lm_head": True}, {}),
        ({"train_embedding": True}, None),  # its folder is lost
        ({"train_embedding": False, "train_lm_head": True}, None),
        ({"train_embedding": True, "train_lm_head": True, "head": {"draft_vocab": 9}}, None),
        (
            {"train_lm_head": True, "init_from": "a", "markov": {"rank": 4, "train_alone": True}},
            None,
        ),
    ],
)
def test_where_all_is_trained_there_is_no_folder(tmp_path, changes, kept):
    run = run_in(tmp_path, **changes)
    begin(run, tmp_path, None)
    assert kept_frozen(run) == kept


def test_a_folder_that_was_not_finished_is_written_anew(tmp_path):
    run = run_in(tmp_path)
    begin(run, tmp_path)
    for file in (tmp_path / "run" / "frozen").rglob("*"):
        if file.is_file():
            file.unlink() if file.name == checksums.FILE else file.write_bytes(b"")
    assert kept_frozen(run) is None


def test_a_damaged_folder_is_named(tmp_path):
    """What it came from may have been trained since, and would be read in its place."""
    run = run_in(tmp_path)
    begin(run, tmp_path)
    files = [f for f in (tmp_path / "run" / "frozen").rglob("*") if f.is_file()]
    largest = max((f for f in files if f.name != checksums.FILE), key=lambda f: f.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(InputError, match=f"frozen: {largest.name}.* must have the checksum"):
        kept_frozen(run)
