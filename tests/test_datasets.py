"""Parquet files and Hugging Face datasets: the same documents as the same rows in a JSONL."""

import datetime
import json
import sys

import pytest

from peagle_jax import corpus, dataset_rows
from peagle_jax.documents import BadRows
from peagle_jax.types import InputError

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CALL = [{"function": {"name": "add", "arguments": {"a": 1}}}]
ROWS = [
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "1 + 1"},
            {"role": "assistant", "content": "", "tool_calls": CALL},
        ]
    },
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "p", "response": "r"},
    {"prompt": "p", "completion": " c"},
    {"turns": ["one", "two"]},
    {"prompt_token_ids": [5, 6], "output_token_ids": [7], "source": "file"},
    {"text": "a text"},
    {"text": "a text"},  # the same again
    {"messages": [{"role": "user", "content": "hi"}], "system": "be kind"},
]


def table(rows):
    """All columns of all rows, null where a row lacks one."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return pyarrow.table({key: [row.get(key) for row in rows] for key in columns})


def contents(documents):
    """Documents without their names, which tell the file."""
    return [{key: x for key, x in vars(d).items() if key != "name"} for d in documents]


@pytest.fixture(scope="module")
def want(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return contents(corpus.read_corpus(path))


def test_a_parquet_file_is_a_jsonl(tmp_path, want, monkeypatch):
    monkeypatch.setattr(dataset_rows, "PARQUET_BATCH", 3)
    other = {"id": 3, "time": datetime.datetime(2026, 1, 1), "picture": b"\xff"}
    parquet.write_table(table([row | other for row in ROWS]), tmp_path / "rows.parquet")
    documents = corpus.read_corpus(tmp_path / "rows.parquet")
    assert contents(documents) == want and len(want) == len(ROWS) - 1
    assert [d.name for d in documents][:2] == ["rows.parquet:1", "rows.parquet:2"]
    assert documents[-1].name == "rows.parquet:10"  # the row before it is dropped, not renumbered


def test_a_folder_of_parquet_files(tmp_path, want):
    (tmp_path / "data").mkdir()
    parquet.write_table(table(ROWS[:4]), tmp_path / "data" / "a.parquet")
    parquet.write_table(table(ROWS[4:]), tmp_path / "data" / "b.parquet")
    (tmp_path / "README.md").write_text("what this is")
    documents = corpus.read_corpus(tmp_path)
    assert contents(documents) == want
    assert [documents[3].name, documents[4].name] == ["data/a.parquet:4", "data/b.parquet:1"]
    (tmp_path / "script.py").write_text("x = 1\n")
    with pytest.raises(InputError, match="Parquet files, or texts; got script.py beside data/a"):
        corpus.read_corpus(tmp_path)


def test_what_datasets_saved_and_one_split_of_it(tmp_path, want):
    whole = datasets.Dataset(table(ROWS))
    whole.save_to_disk(tmp_path / "saved")
    documents = corpus.read_corpus(tmp_path / "saved")
    assert contents(documents) == want and documents[2].name == "saved:3"
    splits = datasets.DatasetDict(train=whole, test=whole.select([0]))
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match="got the splits test, train; name it as hf:.*/splits:"):
        corpus.read_corpus(tmp_path / "splits")
    documents = corpus.read_corpus(f"hf:{tmp_path / 'splits'}:test")
    assert contents(documents) == want[:1] and documents[0].name == "splits:test:1"


def test_a_split_as_a_stream(tmp_path, want):
    """As from the hub: the library finds splits by the names of files."""
    parquet.write_table(table(ROWS), tmp_path / "train-00000-of-00001.parquet")
    parquet.write_table(table(ROWS[:2]), tmp_path / "test-00000-of-00001.parquet")
    documents = corpus.read_corpus(f"hf:{tmp_path}")
    assert contents(documents) == want
    assert documents[0].name == f"{tmp_path.name}:train:1"
    assert contents(corpus.read_corpus(f"hf:{tmp_path}:test")) == want[:2]
    assert contents(corpus.read_corpus(f"hf:{tmp_path}:default:test")) == want[:2]
    with pytest.raises(InputError, match=r"datasets. can read; got .*none.*check the name"):
        corpus.read_corpus(f"hf:{tmp_path}:none")


def test_names_of_datasets():
    assert corpus._hub_parts("hf:a/b") == ("a/b", None, "train")
    assert corpus._hub_parts("hf:a/b:test") == ("a/b", None, "test")
    assert corpus._hub_parts("hf:a/b:large:test") == ("a/b", "large", "test")
    for name in ("hf:", "hf:a:", "hf:a:b:c:d"):
        with pytest.raises(InputError, match="hf:NAME:SPLIT"):
            corpus.read_corpus(name)


def test_a_dataset_of_the_hub_without_a_network(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as error:
        corpus.read_corpus("hf:nobody/no-such-dataset")
    assert "\n" not in str(error.value) and "give a Parquet file" in str(error.value)


def test_rows_of_the_wrong_type_are_named_or_counted(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(table([{"text": 1.5}, {"text": 2.5}, {"prompt": "p"}]), path)
    with pytest.raises(InputError, match=r"rows.parquet:1: text must be text; got 1.5"):
        corpus.read_corpus(path)
    bad_rows = BadRows("skip")
    assert [d.name for d in corpus.read_corpus(path, bad_rows)] == ["rows.parquet:3"]
    assert bad_rows.count == 2 and str(bad_rows.errors[1]).startswith(f"{path}:2: ")
    parquet.write_table(table([{"words": "a"}]), path)
    with pytest.raises(InputError, match=r"rows.parquet:1: a row needs .*; got .'words'."):
        corpus.read_corpus(path)


def test_what_is_no_parquet_file(tmp_path):
    path = tmp_path / "rows.parquet"
    with pytest.raises(InputError, match="this file must exist"):
        corpus.read_corpus(path)
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(InputError, match="must be a whole Parquet file"):
        corpus.read_corpus(path)
    parquet.write_table(table(ROWS), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="must be a whole Parquet file"):
        corpus.read_corpus(path)


def test_without_the_library(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    parquet.write_table(table(ROWS), path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"got no datasets; pip install 'peagle-jax\[data\]'"):
        corpus.read_corpus(path)


def test_a_parameter_that_is_called_content(tmp_path):
    """A table gives it to all calls; only a message has content where there is nothing."""
    others = [{"function": {"name": "say", "arguments": {"content": "x"}}}]
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]}
        for calls in (CALL, others)
    ]
    parquet.write_table(table(rows), tmp_path / "rows.parquet")
    documents = corpus.read_corpus(tmp_path / "rows.parquet")
    calls = [document.messages[1]["tool_calls"] for document in documents]
    assert calls == [CALL, others]
