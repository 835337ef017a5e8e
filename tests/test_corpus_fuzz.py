"""Lines of JSON and Parquet files with anything in them: documents, prompts, or one line."""

import json

import pytest
from fuzzing import JSON_PIECES, cases, damaged, only_input_errors
from hypothesis import given
from hypothesis import strategies as st

from peagle_jax import corpus, text
from peagle_jax.bench.sets import read_set
from peagle_jax.documents import BadRows

PIECES = (
    *JSON_PIECES,
    b"\\ud800",
    b"\\u0000",
    b"\xef\xbb\xbf",
    b"\r",
    b"\n",
    b"[]",
    b"{}",
    b'"',
    b'"turns":',
    b'"messages":[{}]',
    b'"prompt_token_ids":[-1]',
)
ROWS = (
    {"text": "def f(x):"},
    {"prompt": "hi", "response": "yes"},
    {"prompt": [{"role": "user", "content": "hi"}], "completion": "x"},
    {"prompt_token_ids": [5, 6], "output_token_ids": [7], "source": "file"},
    {"turns": ["one", "two"], "category": "writing", "question_id": 3},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1 + 1"}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
)
lines = st.lists(st.sampled_from(ROWS), min_size=1, max_size=3).flatmap(
    lambda rows: damaged(b"".join(json.dumps(row).encode() + b"\n" for row in rows), PIECES)
)


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(["<|im_start|>assistant\nyes no\n" * 40], 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzzed")


@pytest.mark.fuzz
@cases(300)
@given(content=lines)
def test_lines(folder, tokenizer, content):
    path = folder / "rows.jsonl"
    path.write_bytes(content)
    with only_input_errors():
        text.encode(tokenizer, corpus.read_corpus(path))
    skipped = BadRows("skip")
    with only_input_errors():  # every row may be bad
        text.encode(tokenizer, corpus.read_corpus(path, skipped), skipped)
    with only_input_errors():
        text.read_named_prompts(path, tokenizer)
    with only_input_errors():
        read_set(str(path))


@pytest.mark.fuzz
def test_parquet(folder):
    pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "rows.parquet"
    tables = []
    for options in ({"compression": "none"}, {"compression": "zstd", "use_dictionary": False}):
        columns = {
            "text": pyarrow.array(["a text", "é", None]),
            "turns": pyarrow.array([["one", "two"], None, []]),
            "messages": pyarrow.array([[{"role": "user", "content": "hi"}], [], None]),
        }
        parquet.write_table(pyarrow.table(columns), path, **options)
        tables.append(path.read_bytes())

    @cases(200)
    @given(st.sampled_from(tables).flatmap(damaged))
    def check(content):
        path.write_bytes(content)
        for bad_rows in (BadRows(), BadRows("skip")):
            with only_input_errors():
                corpus.read_corpus(path, bad_rows)

    check()


@pytest.mark.fuzz
def test_parquet_of_any_columns(folder):
    """Whole files whose columns are not what their names promise."""
    pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "columns.parquet"
    not_text = pyarrow.array([b"\xff\xfe", b"x"], pyarrow.binary()).view(pyarrow.string())
    far = pyarrow.array([2**62, 0], pyarrow.int64())
    columns = st.sampled_from(
        [
            not_text,
            far.view(pyarrow.timestamp("us")),
            far.view(pyarrow.timestamp("ns")),
            far.view(pyarrow.duration("us")),
            pyarrow.array([1.5, float("nan")]),
            pyarrow.array([None, None]),
            pyarrow.array([[1, -1], None]),
            pyarrow.array([[2**40], [0]]),
            pyarrow.array([{"a": {"b": [1]}}, None]),
            pyarrow.array(["x", "y"]).dictionary_encode(),
            pyarrow.array([[{"role": "user", "content": "hi"}], [{"role": None, "content": "a"}]]),
        ]
    )
    names = ["text", "messages", "turns", "conversations", "prompt", "response", "tools", "source"]
    names += ["prompt_token_ids", "output_token_ids"]

    @cases(200)
    @given(st.dictionaries(st.sampled_from(names), columns, min_size=1, max_size=4))
    def check(table):
        parquet.write_table(pyarrow.table(table), path)
        for bad_rows in (BadRows(), BadRows("skip")):
            with only_input_errors():
                corpus.read_corpus(path, bad_rows)

    check()
