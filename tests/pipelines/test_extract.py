"""Stored hidden states.

They are what transformers computes document by document.
"""

import dataclasses
import itertools
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from features import close, contents, extract, go, rows_of, watch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_jax import corpus, text, weights
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.pipelines import extract as room
from peagle_jax.train.data import pack
from peagle_jax.train.hidden_state_store import decoded, open_hidden_states, read_index, shard_path
from peagle_jax.train.hidden_states import compute_hidden_states, shifted, training_rows
from peagle_jax.types import InputError


def segments(segment_ids):
    """(row, start, stop) of every document's part in a row."""
    for row, numbers in enumerate(segment_ids):
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        yield from ((row, a, b) for a, b in zip(edges, edges[1:], strict=False) if numbers[a] >= 0)


LONG = [
    pytest.param(case, marks=pytest.mark.long)
    for case in ("llama_tied", "qwen3_moe", "qwen3_moe_raw", "gpt_oss", "gemma4", "gemma4_moe")
]


@pytest.mark.parametrize("case", ["llama", "gemma4_ple", *LONG])
def test_features_are_transformers_document_by_document(case, tmp_path):
    torch = pytest.importorskip("torch")
    from tests.targets import families

    model, folder = families.make(case)
    shutil.copytree(folder, tmp_path / "target")
    words = Tokenizer(
        models.WordLevel(
            {"<end>": 0, **{f"w{i}": i for i in range(1, families.V)}}, unk_token="<end>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(
        tmp_path / "target"
    )
    rng = np.random.default_rng(1)
    documents = [
        " ".join(f"w{i}" for i in rng.integers(1, families.V, n)) for n in (3, 30, 1, 17, 9)
    ]
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in documents)
    )

    go(
        tmp_path,
        tmp_path / "out",
        aux_hidden_state_layers=(0, 2, 4),
        seq_len=24,
        batch_size=2,
        rows_per_shard=2,
        held_out=0.0,
    )
    stored = open_hidden_states(tmp_path / "out")
    got = stored.batch(range(len(stored)))
    parts = list(segments(got.batch.segment_ids))
    assert (
        len(stored) == 3
        and stored.index.tokens == 65 == sum(b - a for _, a, b in parts)
        and len(parts) == 7
    )
    for row, a, b in parts:
        with torch.no_grad():
            states = model(
                torch.from_numpy(got.batch.tokens[row : row + 1, a:b].astype(np.int64)),
                output_hidden_states=True,
            ).hidden_states
        want = np.concatenate([states[t][0].numpy() for t in (0, 2, 4)], -1)
        np.testing.assert_allclose(got.aux_hidden_states[row, a:b], want, atol=2e-5, rtol=0)
        np.testing.assert_allclose(got.hidden[row, a:b], states[-1][0].numpy(), atol=2e-5, rtol=0)


def test_rows_are_those_of_training(place, tokenizer):
    """All of them, without what only fills up batches and shards, and without held-out documents.

    Padding is zero.
    """
    rows, stored = rows_of(place, tokenizer), open_hidden_states(place / "whole")
    batch = rows.take(slice(None))
    assert (
        len(rows) % 10
        and 10 % 3
        and len(stored) == len(rows)
        and stored.index.shards == -(-len(rows) // 10) > 3
    )
    got = stored.batch(range(len(rows)))
    for name in ("tokens", "segment_ids", "loss_mask"):
        want = getattr(batch, name)
        assert getattr(got.batch, name).dtype == want.dtype
        np.testing.assert_array_equal(getattr(got.batch, name), want)
    assert (
        stored.index.tokens == (batch.segment_ids >= 0).sum()
        and 0 < stored.index.num_loss_tokens == batch.loss_mask.sum() < stored.index.tokens
    )
    everything = pack(text.encode(tokenizer, corpus.read_corpus(place / "corpus.jsonl")), 12)
    assert len(everything) > len(rows) + 1
    model = load_target(place / "target", aux_hidden_state_layers=(1, 3))
    compute = jax.jit(lambda params, batch: compute_hidden_states(model.bind(params), batch))
    aux_hidden_states, hidden = compute(model.params, batch)
    real = (batch.segment_ids >= 0)[..., None]
    assert not real.all()
    close(got.aux_hidden_states, np.where(real, aux_hidden_states, 0))
    close(got.hidden, np.where(real, hidden, 0))
    assert not got.aux_hidden_states[~real[..., 0]].any() and not got.hidden[~real[..., 0]].any()
    assert got.aux_hidden_states.shape == (*batch.tokens.shape, 48) and got.hidden.shape == (
        *batch.tokens.shape,
        24,
    )
    compute_logits = model.bind(model.params).compute_logits
    close(compute_logits(jnp.asarray(got.hidden)), compute_logits(hidden) * real)


def test_batches_are_filled_up_with_nothing(tokenizer, place):
    rows = rows_of(place, tokenizer)
    tokens, segment_ids = room._padded(rows, range(40, len(rows)), 16)
    assert (
        tokens.shape == segment_ids.shape == (16, 12)
        and not tokens[len(rows) - 40 :].any()
        and (segment_ids[len(rows) - 40 :] == -1).all()
    )
    np.testing.assert_array_equal(tokens[: len(rows) - 40], rows.take(range(40, len(rows))).tokens)


def test_a_head_can_learn_from_them(place):
    """Shifted, they are what training computes online."""
    model, stored = (
        load_target(place / "target", aux_hidden_state_layers=(1, 3)),
        open_hidden_states(place / "whole").batch([4, 0]),
    )
    rows = jax.jit(lambda params, *args: training_rows(model.bind(params), *args))
    online = rows(model.params, stored.batch, *shifted(stored.batch))
    close(stored.aux_hidden_states[:, :-1], online.aux_hidden_states)
    close(stored.hidden[:, 1:], online.teacher_hidden)


def test_rows_in_any_order_from_any_shard(place):
    stored = open_hidden_states(str(place / "whole"))
    everything, some = stored.batch(range(len(stored))), [len(stored) - 1, 0, 10, 9, 10]
    got = stored.batch(np.array(some))
    for picked, all_of_it in zip(jax.tree.leaves(got), jax.tree.leaves(everything), strict=True):
        assert type(picked) is np.ndarray and picked.flags.writeable  # no view of a file
        np.testing.assert_array_equal(picked, all_of_it[some])
    for wrong in ([], [len(stored)], [-1]):
        with pytest.raises(
            InputError, match=f"whole: a batch is one or more rows of 0..{len(stored) - 1}"
        ):
            stored.batch(wrong)
    with pytest.raises(TypeError):
        stored.batch([1.5])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_dtypes(dtype, place, tmp_path):
    go(place, tmp_path / "out", dtype=dtype)
    got, exact = (
        open_hidden_states(folder).batch([0, 12, 31])
        for folder in (tmp_path / "out", place / "whole")
    )
    for name in ("aux_hidden_states", "hidden"):
        assert getattr(got, name).dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(
            getattr(got, name), getattr(exact, name).astype(jnp.dtype(dtype))
        )
    sizes = {
        shard_path(tmp_path / "out", 0).stat().st_size
        - len(header(shard_path(tmp_path / "out", 0)))
    }
    assert sizes == {10 * (12 * (9 + 72 * 2) + 4)}  # a checksum for each of 10 rows


def header(path):
    content = path.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


def test_fp8_with_a_scale_for_each_token_and_layer(place, tmp_path):
    go(place, tmp_path / "out", dtype="float8_e4m3fn")
    stored = open_hidden_states(tmp_path / "out")
    got, exact = stored.batch([0, 12, 31]), open_hidden_states(place / "whole").batch([0, 12, 31])
    assert got.aux_hidden_states.dtype == got.hidden.dtype == jnp.float8_e4m3fn
    assert got.aux_scales.shape == (3, 12, 2) and got.hidden_scales.shape == (3, 12, 1)
    for name, parts in (("aux_hidden_states", 2), ("hidden", 1)):
        scales = got.aux_scales if parts == 2 else got.hidden_scales
        x = np.asarray(decoded(getattr(got, name), scales, jnp.float32)).reshape(3, 12, parts, 24)
        y = getattr(exact, name).reshape(3, 12, parts, 24)
        # three bits behind the point, and steps of 2**-9 below the smallest normal number
        limit = np.abs(y) / 16 + scales[..., None] * 2.0**-10
        assert (np.abs(x - y) <= limit * 1.001).all()
        assert np.abs(x - y).max() > 0
        largest = np.abs(y).max(axis=-1)
        np.testing.assert_allclose(np.abs(x).max(axis=-1), largest, rtol=1e-6)
        np.testing.assert_allclose(scales, np.where(largest > 0, largest / 448, 1), rtol=1e-6)
    size = shard_path(tmp_path / "out", 0).stat().st_size
    assert size - len(header(shard_path(tmp_path / "out", 0))) == 10 * (12 * (9 + 72 + 12) + 4)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_a_byte_that_changed_is_named_by_shard_and_row(place, tmp_path, dtype):
    go(place, tmp_path / "out", dtype=dtype)
    path = shard_path(tmp_path / "out", 2)
    content = path.read_bytes()
    names = open_hidden_states(tmp_path / "out").index.tensors_of(2)
    spans = json.loads(header(path)[8:])
    for name in names:
        begin, end = spans[name]["data_offsets"]
        place_in_row_3 = len(header(path)) + begin + (end - begin) * 3 // 10 + 1
        damaged = bytearray(content)
        damaged[place_in_row_3] ^= 1  # also of the first boolean of a loss mask
        path.write_bytes(damaged)
        stored = open_hidden_states(tmp_path / "out")
        stored.batch([20, 22, 24, 5])
        words = r"shard-00002.safetensors: row 23 must have the checksum [0-9a-f]{8} with which"
        for _ in range(2):  # it is not forgotten
            with pytest.raises(InputError, match=words):
                stored.batch([5, 23])
    path.write_bytes(content)
    stored = open_hidden_states(tmp_path / "out")
    stored.batch([23])
    path.write_bytes(damaged)
    stored.batch([23])  # a row is looked at once
    path.write_bytes(content[:-7])
    with pytest.raises(InputError, match="shard-00002.safetensors: .*truncated"):
        open_hidden_states(tmp_path / "out")


def test_computed_in_bfloat16(place, tmp_path):
    go(place, tmp_path / "out", compute_dtype="bfloat16")
    got, exact = (
        open_hidden_states(folder).batch(range(5)) for folder in (tmp_path / "out", place / "whole")
    )
    off = np.abs(got.hidden - exact.hidden).max() / np.abs(exact.hidden).max()
    assert 1e-4 < off < 0.1
    # on a CPU products have bfloat16 operands, and activations are float32
    assert not np.array_equal(got.hidden, got.hidden.astype(jnp.bfloat16).astype(np.float32))


def test_what_the_files_say(place):
    index = json.loads((place / "whole" / "index.json").read_text())
    expected = {
        "format_version": 3,
        "target": "target",
        "aux_hidden_state_layers": [1, 3],
        "aux_width": 48,
        "hidden_width": 24,
        "dtype": "float32",
        "seq_len": 12,
        "batch_size": 3,
        "rows_per_shard": 10,
        "data": "corpus.jsonl",
    }
    assert {key: index[key] for key in expected} == expected
    assert index["command"] == "peagle extract" and "jax" in index["versions"]
    assert str(place) not in json.dumps(index)
    facts = json.loads(header(shard_path(place / "whole", 1))[8:])["__metadata__"]
    assert (
        facts["shard"] == f"2 of {index['shards']}"
        and facts["rows_hash"] == index["rows_hash"]
        and facts["aux_hidden_state_layers"] == "1,3"
    )
    assert sorted(contents(place / "whole")) == [
        "index.json",
        *(f"shard-{i:05}.safetensors" for i in range(index["shards"])),
    ]


def test_tokens_a_second(place, tokenizer, tmp_path, monkeypatch):
    """Tokens without padding, by a clock that moves a second whenever it is read.

    It is read once to begin, and once for each batch.
    """
    ticks = itertools.count(100)
    monkeypatch.setattr(room, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    reports, rows = watch(monkeypatch), rows_of(place, tokenizer)
    result = extract(place, tmp_path / "out", rows_per_shard=30)
    tokens = (rows.take(slice(None)).segment_ids >= 0).sum(axis=1)
    expected = []
    for i, n in enumerate([*range(3, len(rows), 3), len(rows)]):
        speed = round(float(tokens[:n].sum()) / (i + 1), 1)
        expected.append((n, len(rows), f"{speed:,} tokens per second"))
    assert reports == expected
    assert result.tokens_per_second == round(float(tokens.sum()) / (len(reports) + 1), 1)
    assert result.tokens == tokens.sum() < len(rows) * 12


def test_what_is_not_said_is_the_targets(place, tmp_path):
    """Layers and length; and shards of whole batches, with about as many bytes as are meant."""
    go(place, tmp_path / "out", aux_hidden_state_layers=None, seq_len=None, rows_per_shard=None)
    config = read_index(tmp_path / "out")
    assert (
        config.aux_hidden_state_layers == (1, 2, 3)
        and config.seq_len == 96
        and config.shards == 1
        and config.rows_per_shard % 3 == 0
    )
    row = 96 * (9 + 4 * 24 * 4)
    assert room.SHARD_BYTES - 3 * row < config.rows_per_shard * row <= room.SHARD_BYTES


def test_a_choice_of_documents(place, tokenizer, tmp_path):
    go(place, tmp_path / "out", max_chars=200)
    train, _ = corpus.split(corpus.read_corpus(place / "corpus.jsonl"), 0.2)
    want = pack(text.encode(tokenizer, corpus.subsample(train, 200, 4)), 12).take(slice(None))
    stored = open_hidden_states(tmp_path / "out")
    np.testing.assert_array_equal(stored.batch(range(len(stored))).batch.tokens, want.tokens)
    assert len(want.tokens) < read_index(place / "whole").rows


def test_whole_documents(place, tokenizer, tmp_path):
    """Another packing of the same documents; padding is said, and a former index means `cut`."""
    said = go(place, tmp_path / "out", packing="whole")
    train, _ = corpus.split(corpus.read_corpus(place / "corpus.jsonl"), 0.2)
    want = pack(text.encode(tokenizer, train), 12, packing="whole")
    stored = open_hidden_states(tmp_path / "out")
    got = stored.batch(range(len(stored))).batch
    np.testing.assert_array_equal(got.tokens, want.take(slice(None)).tokens)
    assert stored.index.packing == "whole" and stored.index.rows_hash == want.digest()
    assert f"{want.padding:.2%} of them padding" in said[0] and want.padding > 0.01
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    del index["packing"]
    (tmp_path / "out" / "index.json").write_text(json.dumps(index))
    assert read_index(tmp_path / "out").packing == "cut"


def version_1(folder):
    """Rewrites a folder as it was written before the names were those of docs/glossary.md."""
    index = json.loads((folder / "index.json").read_text())
    for name, former in {
        "aux_hidden_state_layers": "taps",
        "aux_width": "tap_width",
        "num_loss_tokens": "supervised",
        "seq_len": "length",
        "batch_size": "batch",
    }.items():
        index[former] = index.pop(name)
    (folder / "index.json").write_text(json.dumps(index | {"format_version": 1}, indent=2) + "\n")
    former = {"segment_ids": "document", "loss_mask": "supervised", "aux_hidden_states": "taps"}
    for shard in folder.glob("*.safetensors"):
        tensors = {n: np.array(x) for n, x in weights.open_safetensors(shard).items()}
        del tensors["checksums"]
        weights.write_safetensors(shard, {former.get(n, n): x for n, x in tensors.items()}, {})


def test_folders_of_version_1(place, tmp_path):
    """They are read, and completed: the shards that are missing have today's names."""
    old = shutil.copytree(place / "whole", tmp_path / "old")
    version_1(old)
    index, content = read_index(old), (old / "index.json").read_bytes()
    assert b'"taps"' in content and b"seq_len" not in content
    assert index == dataclasses.replace(read_index(place / "whole"), format_version=2)
    numbers = range(len(rows := open_hidden_states(place / "whole")))
    for x, y in zip(
        jax.tree.leaves(open_hidden_states(old).batch(numbers)),
        jax.tree.leaves(rows.batch(numbers)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
    shard_path(old, 1).unlink()
    assert "in 1 of 5 shards" in go(place, old)[1]
    new, whole = (weights.open_safetensors(shard_path(x, 1)) for x in (old, place / "whole"))
    assert whole.keys() - new.keys() == {"checksums"}  # a folder stays of one kind
    for name in new:
        np.testing.assert_array_equal(new[name], whole[name])
    assert (old / "index.json").read_bytes() == content
    assert "are there" in go(place, old)[-1]
