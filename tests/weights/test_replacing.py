"""Which folders a writer may replace: those that this package wrote, and empty ones."""

import numpy as np
import pytest
import safetensors.numpy

from peagle_jax import weights
from peagle_jax.types import InputError


def test_only_a_checkpoint_folder_is_replaced(tmp_path):
    """A mistyped output must not cost a training run or a folder of runs."""
    (tmp_path / "runs" / "peagle").mkdir(parents=True)
    with (
        pytest.raises(
            InputError, match="only a checkpoint folder is replaced; got one that holds peagle"
        ),
        weights.new_folder(tmp_path / "runs"),
    ):
        pass
    assert (tmp_path / "runs" / "peagle").is_dir() and len(list(tmp_path.iterdir())) == 1


def test_a_folder_of_something_similar_is_not_replaced(tmp_path):
    for name in ("config.json.bak", "tokenizer_backup", "checkpoints_old"):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / name).write_text("mine")
        with (
            pytest.raises(InputError, match="only a checkpoint folder is replaced"),
            weights.new_folder(tmp_path / "a"),
        ):
            pass
        (tmp_path / "a" / name).unlink()
        (tmp_path / "a").rmdir()


@pytest.mark.parametrize(
    "facts, replaced",
    [
        ({}, False),
        ({"format": "pt"}, False),
        ({"writer": "peagle_jax 0.1.0"}, True),
        ({"source": "peagle train, task peagle"}, True),
        (None, False),
    ],
)
def test_a_download_is_not_replaced(facts, replaced, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    if facts is None:
        (tmp_path / "model.safetensors").write_bytes(b"damaged")
    else:
        safetensors.numpy.save_file(
            {"a": np.ones(2)}, tmp_path / "model.safetensors", metadata=facts
        )
    if replaced:
        with weights.new_folder(tmp_path) as work:
            (work / "new").write_text("")
        assert [p.name for p in tmp_path.iterdir()] == ["new"]
        return
    with (
        pytest.raises(InputError, match="only a checkpoint folder that peagle wrote is replaced"),
        weights.new_folder(tmp_path),
    ):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    "files, replaced",
    [
        ({}, True),
        ({"checkpoints/step_5/weights": "x"}, False),  # somebody's checkpoints
        ({"checkpoints/5/default/x": "x"}, False),
        ({"config.json": "{}", "tokenizer.json": "{}"}, False),
        ({"head.json": "{}", "checkpoints/0/default/x": "x"}, False),
        ({"head.json": "no json", "checkpoints/0/default/x": "x"}, False),
        ({"head.json": '{"origin": {}}', "checkpoints/mine/x": "x"}, False),
        ({"head.json": '{"origin": {}}', "checkpoints/0/default/x": "x"}, True),
    ],
)
def test_folders_without_weights_of_their_own(files, replaced, tmp_path):
    """Names alone do not say who wrote them."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    before = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*"))
    if replaced:
        with weights.new_folder(tmp_path) as work:
            (work / "new").write_text("")
        assert [p.name for p in tmp_path.iterdir()] == ["new"]
        return
    with pytest.raises(InputError, match="only a checkpoint folder"), weights.new_folder(tmp_path):
        pass
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == before
