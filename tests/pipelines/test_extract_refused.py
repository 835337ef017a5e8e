"""What `peagle extract` refuses, in one line.

Other settings for a folder that was begun, bad options, damaged files, and a full disk.
"""

import collections
import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from features import TEXTS, contents, go, refuse, write_corpus, write_target
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from peagle_jax import text, weights
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.pipelines import extract as room
from peagle_jax.train.data import pack
from peagle_jax.train.hidden_state_store import (
    HiddenStateIndex,
    open_hidden_states,
    read_index,
    shard_path,
)
from peagle_jax.types import InputError

# ---------------------------------------------------------------- other settings


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(aux_hidden_state_layers=(1, 2)),
            "aux_hidden_state_layers was [1, 3] when this folder was begun, and must stay so; "
            "got [1, 2]",
        ),
        (dict(aux_hidden_state_layers=None), "aux_hidden_state_layers was [1, 3]"),
        (dict(seq_len=13), "seq_len was 12 when this folder was begun, and must stay so; got 13"),
        (dict(packing="whole"), "packing was cut when this folder was begun, and must stay so"),
        (dict(batch_size=2), "batch_size was 3"),
        (dict(rows_per_shard=5), "rows_per_shard was 10"),
        (
            dict(dtype="bfloat16"),
            "dtype was float32 when this folder was begun, and must stay so; got bfloat16",
        ),
        (dict(compute_dtype="bfloat16"), "compute_dtype was float32"),
        (dict(max_chars=50), "max_chars was None"),
        (dict(held_out=0.1), "held_out was 0.2"),
        (dict(seed=5), "seed was 4"),
    ],
)
def test_other_options(changes, words, place):
    refuse(place, place / "whole", words, **changes)


def test_other_targets_and_corpora(place, tokenizer, tmp_path):
    """By their names, and by what is in them where the names are the same."""
    refuse(
        place,
        place / "whole",
        "target was target when",
        target=write_target(tmp_path / "other", tokenizer),
    )
    (tmp_path / "runs").mkdir()
    target = write_target(tmp_path / "runs" / "target", tokenizer, seed=1)
    refuse(place, place / "whole", "target_hash was ", target=target)
    same = write_target(tmp_path / "same" / "target", tokenizer)
    assert "are there" in go(place, place / "whole", target=same)[-1]
    config = json.loads((same / "config.json").read_text()) | {"rope_theta": 778.0}
    (same / "config.json").write_text(json.dumps(config))
    refuse(place, place / "whole", "target_hash was ", target=same)

    def copy(name):
        return write_corpus(tmp_path / name)

    refuse(
        place,
        place / "whole",
        "data was corpus.jsonl when this folder was begun, and must stay so; got mine.jsonl",
        source=str(copy("mine.jsonl")),
    )
    assert "are there" in go(place, place / "whole", source=str(copy("corpus.jsonl")))[-1]
    write_corpus(tmp_path / "corpus.jsonl", [*TEXTS, "more"])
    refuse(place, place / "whole", " was ", source=str(tmp_path / "corpus.jsonl"))
    write_corpus(
        tmp_path / "corpus.jsonl", answer=(3, 4, 6)
    )  # as many tokens, as many supervised: only the hash tells
    refuse(place, place / "whole", "rows_hash was ", source=str(tmp_path / "corpus.jsonl"))
    tokenizer = text.load_tokenizer(place / "target")
    tokenizer.chat_template = text.CHAT_TEMPLATE.replace(
        "'\n'", "' '", 1
    )  # another token, as many of them
    tokenizer.save_pretrained(target)
    refuse(place, place / "whole", "", target=target)


def test_every_flag_of_a_token_is_in_the_hash():
    first, second = np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)
    trained, partly = np.ones(3, bool), np.array([True, False])
    corpora = [
        [(first, trained), (second, partly)],
        [(np.array([9, 2, 3], np.int32), trained), (second, partly)],
        [(first, ~trained), (second, partly)],
        # the same tokens and masks, and other documents
        [(first[:2], trained[:2]), (np.array([3, 4, 5], np.int32), np.array([True, True, False]))],
    ]
    assert len({room._facts(pack(corpus, 4), 2)["rows_hash"] for corpus in corpora}) == 4


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(seq_len=3), "--seq-len: must be 4 or more; got 3; give 4 or more"),
        (dict(batch_size=0), "--batch-size: must be 1 or more"),
        (dict(rows_per_shard=0), "--rows-per-shard: must be 1"),
        (dict(max_chars=0), "--max-chars: must be 1"),
        (dict(seed=-1), "--seed: must be 0"),
        (dict(held_out=1.0), "--held-out: must lie in"),
        (dict(held_out=float("nan")), "--held-out"),
        (dict(held_out=-0.1), "--held-out"),
        (dict(dtype="int8"), "--dtype: must be one of"),
        (
            dict(compute_dtype="float16"),
            "--compute-dtype: must be one of float32, bfloat16; got float16; use --compute-dtype",
        ),
        (dict(seq_len=97), "--seq-len: must be at most the target's context of 96 tokens; got 97"),
        (dict(aux_hidden_state_layers=(3, 1)), "--aux-hidden-state-layers: must ascend"),
        (dict(aux_hidden_state_layers=(1, 1)), "--aux-hidden-state-layers: must ascend"),
        (dict(aux_hidden_state_layers=()), "--aux-hidden-state-layers: must ascend"),
        (dict(aux_hidden_state_layers=(1, 5)), "must lie in 0..4"),
        (dict(source="nowhere.jsonl"), "nowhere.jsonl: this file must exist"),
        (dict(held_out=0.9999999), "at least one document is needed"),
    ],
)
def test_options_that_make_no_sense(changes, words, place, tmp_path):
    refuse(place, tmp_path / "out", words, **changes)
    assert not (tmp_path / "out").exists()


def test_targets_that_cannot_be(place, tokenizer, tmp_path):
    out = tmp_path / "out"
    refuse(place, out, "nowhere: this folder must exist", target="nowhere")
    save_target(tiny.target(), tmp_path / "mute")
    refuse(place, out, "mute: a corpus needs the target's tokenizer", target=tmp_path / "mute")
    small = write_target(tmp_path / "small", tokenizer, vocab=len(tokenizer) - 1)
    rule = (
        f"small: the target's embedding has {len(tokenizer) - 1} rows; "
        f"got a tokenizer that needs {len(tokenizer)}; take"
    )
    refuse(place, out, rule, target=small)
    cut = shutil.copytree(place / "target", tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-9])
    refuse(place, out, "truncated", target=cut)
    (cut / "config.json").write_text("{}")
    refuse(place, out, "model_type", target=cut)
    assert not out.exists()


def test_vocabularies(tokenizer):
    text.check_vocabulary(tokenizer, len(tokenizer), "t")
    text.check_vocabulary(tokenizer, len(tokenizer) + 9, "t")
    with pytest.raises(InputError, match="^t: "):
        text.check_vocabulary(tokenizer, len(tokenizer) - 1, "t")

    holes = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    )
    assert len(holes) == 2
    text.check_vocabulary(holes, 8, "t")
    with pytest.raises(InputError, match="7 rows; got a tokenizer that needs 8"):
        text.check_vocabulary(holes, 7, "t")


def test_room_on_the_disk(place, tmp_path, monkeypatch):
    """Both numbers are said; what is missing is what counts, and it is what is then written."""
    Usage = collections.namedtuple("Usage", "total used free")
    free = 10_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free))
    with pytest.raises(InputError) as error:
        go(place, tmp_path / "a" / "out")
    config = read_index(place / "whole")
    size = sum(config.bytes_of(shard) for shard in range(config.shards))
    assert (
        f"{size:,} bytes must be free to write the hidden states; got 10,000 bytes; make room"
        in str(error.value)
        and not (tmp_path / "a").exists()
    )
    written = [shard_path(place / "whole", shard).stat().st_size for shard in range(config.shards)]
    assert all(
        config.bytes_of(shard) - 4096 < written[shard] <= config.bytes_of(shard)
        for shard in range(config.shards)
    )
    out = shutil.copytree(place / "whole", tmp_path / "out")
    shard_path(out, 0).unlink()
    free = config.bytes_of(0) - 1
    refuse(place, out, f"{config.bytes_of(0):,} bytes must be free")
    free += 1
    assert go(place, out)[1] == (
        f"{out}: {free:,} bytes to write, in 1 of {config.shards} shards; {free:,} bytes are free"
    )


def test_a_disk_that_fills_up(place, tmp_path, monkeypatch):
    real = weights.write_safetensors

    def full(path, tensors, metadata):
        real(path, tensors, metadata)
        if "00001" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "write_safetensors", full)
    with pytest.raises(
        InputError,
        match="out: the hidden states must be written to the end; "
        "got No space left on device; make room",
    ):
        go(place, tmp_path / "out")
    assert sorted(contents(tmp_path / "out")) == ["index.json", "shard-00000.safetensors"]


def test_folders_of_something_else(place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refuse(place, tmp_path / "file", "must be writable")
    refuse(place, tmp_path / "file" / "x", "must be writable")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("")
    refuse(
        place,
        tmp_path / "notes",
        "notes: must be a new folder, or one that `peagle extract` began: with index.json; "
        "got a.txt without it",
    )
    lost = shutil.copytree(place / "whole", tmp_path / "lost")
    (lost / "index.json").unlink()
    refuse(place, lost, "got shard-00000.safetensors without it")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".index.json.tmp").write_text("half")
    go(place, tmp_path / "new")
    assert open_hidden_states(tmp_path / "new").index.rows == read_index(place / "whole").rows
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: collections.namedtuple("Usage", "free")(10**9)
    )
    refuse(place, type(place)("/proc/x"), "/proc/x: the output folder must be writable")


DAMAGE = {
    "half": (lambda s: s[:40], "index.json: the file must be JSON"),
    "a list": (lambda s: "[]", "index.json: the file must be a JSON object"),
    "of something else": (
        lambda s: "{}",
        "index.json: must be the index of `peagle extract`, format_version 3; got None",
    ),
    "newer": (
        lambda s: s.replace('"format_version": 3', '"format_version": 4'),
        "format_version 3; got 4",
    ),
    "a key less": (
        lambda s: s.replace('  "seq_len": 12,\n', ""),
        "index.json: seq_len must be given; got no seq_len; copy index.json from",
    ),
    "a key more": (
        lambda s: s.replace('"seq_len": 12', '"seq_len": 12, "speed": 3'),
        "got unknown speed",
    ),
    "a word for a number": (
        lambda s: s.replace('"seq_len": 12', '"seq_len": "12"'),
        "seq_len: must be a whole number; got '12'; copy index.json from a backup",
    ),
    "no batch": (
        lambda s: s.replace('"batch_size": 3', '"batch_size": 0'),
        "batch_size: must be 1 or more; got 0; copy index.json from a backup, or extract again",
    ),
    "no layers": (
        lambda s: re.sub(
            r'"aux_hidden_state_layers": \[[^\]]*\]', '"aux_hidden_state_layers": []', s
        ),
        "aux_hidden_state_layers: must name a layer",
    ),
    "fewer shards": (
        lambda s: s.replace('"shards": 5', '"shards": 4'),
        "shards: must follow from rows and rows_per_shard: 5; got 4",
    ),
    "another width": (
        lambda s: s.replace('"aux_width": 48', '"aux_width": 49'),
        "aux_width: must follow from the layers and hidden_width: 48; got 49",
    ),
    "another dtype": (
        lambda s: s.replace('"dtype": "float32"', '"dtype": "float64"', 1),
        "dtype: must be one of float32, bfloat16, float16, float8_e4m3fn; got float64",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index(name, place, tmp_path):
    out = shutil.copytree(place / "whole", tmp_path / "out")
    change, words = DAMAGE[name]
    before = (out / "index.json").read_text()
    (out / "index.json").write_text(change(before))
    assert (out / "index.json").read_text() != before
    refuse(place, out, words)
    with pytest.raises(InputError) as error:
        open_hidden_states(out)
    assert words in str(error.value)


def test_damaged_shards(place, tmp_path):
    """Writing refuses and says what to do; reading refuses too, unless only the numbers differ."""
    whole, other = shard_path(place / "whole", 1), tmp_path / "other"
    tensors = {name: np.array(t) for name, t in weights.open_safetensors(whole).items()}
    changed = {
        "cut": (whole.read_bytes()[:-7], "shard-00001.safetensors: a shard must be complete; got"),
        "empty": (b"", "a shard must be complete"),
        "of another shape": (
            tensors | {"aux_hidden_states": tensors["aux_hidden_states"][:, :, :47]},
            "aux_hidden_states must be float32 [10, 12, 48], as index.json says; "
            "got float32 [10, 12, 47]",
        ),
        "of fewer rows": (
            {n: t[:9] for n, t in tensors.items()},
            "aux_hidden_states must be float32 [10, 12, 48], as index.json says; "
            "got float32 [9, 12, 48]",
        ),
        "of another dtype": (
            tensors | {"hidden": tensors["hidden"].astype(np.float16)},
            "hidden must be float32 [10, 12, 24]",
        ),
        "without hidden": (
            {n: t for n, t in tensors.items() if n != "hidden"},
            "hidden must be float32 [10, 12, 24], as index.json says; got nothing",
        ),
        "with more": (tensors | {"more": tensors["tokens"]}, "more must be nothing"),
    }
    out = shutil.copytree(place / "whole", tmp_path / "out")
    for name, (content, words) in changed.items():
        if isinstance(content, dict):
            weights.write_safetensors(other, content, {})
            content = other.read_bytes()
        shard_path(out, 1).write_bytes(content)
        refuse(place, out, words)
        with pytest.raises(InputError) as error:
            go(place, out)
        assert "shard-00001.safetensors" in str(error.value) and "delete it" in str(error.value), (
            name
        )
        with pytest.raises(InputError, match="shard-00001.safetensors"):
            open_hidden_states(out)
    for name in ("tokens", "segment_ids", "loss_mask"):
        weights.write_safetensors(
            other, tensors | {name: tensors[name] ^ np.ones((), tensors[name].dtype)}, {}
        )
        shard_path(out, 1).write_bytes(other.read_bytes())
        refuse(
            place,
            out,
            "shard-00001.safetensors: must contain the rows that index.json names; "
            f"got other {name}; delete it",
        )
    stored = open_hidden_states(out)
    shard_path(out, 1).unlink()
    stored.batch([0, 20])
    with pytest.raises(InputError, match="shard-00001.safetensors: shard 2 of 5 must be there"):
        stored.batch([0, 10])
    with pytest.raises(InputError, match=r"index.json: this file must exist"):
        open_hidden_states(tmp_path / "none")


@pytest.mark.filterwarnings("ignore::peagle_jax.types.WeightsWarning")
def test_numbers_that_do_not_fit(place, tokenizer, tmp_path):
    """Residual streams of real models exceed float16's 65504; NaN is no number at all."""
    model = tiny.target(vocab=len(tokenizer))
    for factor, words in {
        1e6: "float16 must hold every number; got",
        float("nan"): "got nan in aux_hidden_states",
    }.items():
        folder = tmp_path / str(factor)
        params = {**model.params, "embed": {"table": model.params["embed"]["table"] * factor}}
        save_target(type(model)(model.config, model.graph, params), folder)
        tokenizer.save_pretrained(folder)
        with pytest.raises(InputError, match=words):
            go(place, tmp_path / f"out{factor}", target=folder, dtype="float16")
        assert sorted(contents(tmp_path / f"out{factor}")) == ["index.json"]
    go(place, tmp_path / "fits", target=tmp_path / "1000000.0", dtype="bfloat16")


def test_config_is_of_one_piece():
    """Rows of a shard, and sizes, of the last one too."""
    said = tiny.hidden_state_index()
    config = HiddenStateIndex(**said)
    assert [list(config.rows_of(s)) for s in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert config.bytes_of(2) == 4096 + 4 * (9 + 16 * 2) and config.tensors_of(0)[
        "aux_hidden_states"
    ] == (
        (3, 4, 8),
        jnp.dtype("bfloat16"),
    )
