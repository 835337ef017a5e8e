"""Corpora: where documents come from, and who is held out."""

import json
import os
import sysconfig
from pathlib import Path

import pytest

from peagle_jax import corpus, json_files
from peagle_jax.documents import BadRows
from peagle_jax.types import InputError


def test_standard_library_is_the_default_corpus():
    documents = corpus.read_corpus(None)
    names = {d.name for d in documents}
    assert (
        len(documents) > 500
        and "json/decoder.py" in names
        and not any("site-packages" in n for n in names)
    )


def test_broken_links_and_other_encodings_are_passed_over(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "c.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "d.py").mkdir()
    assert [d.name for d in corpus._python(tmp_path, tmp_path.rglob("*.py"))] == ["a.py"]


def test_a_folder_and_each_kind_of_line(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.md").write_text("x = 1\n")  # the same text twice
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert [d.name for d in corpus.read_corpus(tmp_path)] == ["a.py"]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    answer = {"prompt_token_ids": [5, 6], "output_token_ids": [7], "text": "not this"}
    lines = [
        {"text": "t"},
        {"prompt": "p"},
        {"messages": messages},
        {"turns": ["one", "two"]},
        answer,
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    got = corpus.read_corpus(tmp_path / "d.jsonl")
    assert (
        [d.text for d in got] == ["t", None, None, None, None]
        and (got[1].prompt, got[1].completion) == ("p", None)
        and got[2].messages == tuple(messages)
        and got[3].messages[1]["content"] == "two"
    )
    assert (got[4].prompt_ids, got[4].output_ids, got[4].size) == ((5, 6), (7,), 3)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("x.jsonl", b'{"text": 1}', "text must be text; got 1"),
        ("x.jsonl", b'{"words": 1}', "needs messages, conversations, turns, prompt"),
        ("x.jsonl", b"not json", "x.jsonl:1"),
        ("x.jsonl", b"[1]", "JSON object"),
        ("x.jsonl", b"[" * 9999, "x.jsonl:1: each line must be a JSON object"),
        ("x.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "x.jsonl:1: each line must be a JSON obj"),
        ("x.jsonl", b'{"output_token_ids": [1]}', "token ids, 0 to 2,147,483,647; got .null, .1.."),
        ("x.jsonl", b'{"prompt_token_ids": [], "output_token_ids": [true]}', "token ids"),
        ("x.jsonl", b"\xff", "UTF-8"),
        ("x.jsonl", b"", "at least one document"),
        (
            "x.json",
            b'[{"text": "a"}, 5]',
            r"x\.json, item 2: must be a list of JSON objects; got int",
        ),
        (
            "x.json",
            b'[{"text": "a"}, {"text": ',
            r"x\.json, item 2: must be a list of JSON objects",
        ),
        ("x.json", b'[{"text": "a"}', r"x\.json, item 2: must be a list of JSON objects"),
        ("x.json", b'[{"words": 1}]', "needs messages, conversations, turns, prompt"),
        ("x.json", b'[{"text": "\xff"}]', "UTF-8"),
        ("x.json", b'[{"text": "a"}]\n[{"text": "b"}]', "list of JSON objects; got more after its"),
        ("x.json", b"[" * 99999, "must be a list of JSON objects"),
        ("folder", None, "at least one document"),
    ],
)
def test_bad_corpora(name, content, words, tmp_path):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        corpus.read_corpus(path)


def test_rows_that_cannot_be_used_are_named_where_there_are_no_others(tmp_path):
    (tmp_path / "x.jsonl").write_text('no json\n{"words": 1}\n')
    with pytest.raises(
        InputError, match="one row that can be used; got 2 that cannot, first .*:1:"
    ):
        corpus.read_corpus(tmp_path / "x.jsonl", BadRows("skip"))


def test_a_list_of_rows_as_share_gpt_has_it(tmp_path, monkeypatch):
    """Read in pieces that end anywhere."""
    turns = [{"from": "human", "value": 'a, "b" [1] é\n'}, {"from": "gpt", "value": "]}, {"}]
    rows = [
        {"id": i, "conversations": [*turns, {"from": "human", "value": f"{i}"}]} for i in range(9)
    ]
    for head, indent in ((64, None), (1 << 16, 2)):
        monkeypatch.setattr(json_files, "HEAD_BYTES", head)
        path = tmp_path / "sharegpt.json"
        path.write_text("\n " + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n")
        documents = corpus.read_corpus(path)
        assert [d.name for d in documents] == [f"sharegpt.json:{i}" for i in range(1, 10)]
        assert [d.messages[2]["content"] for d in documents] == [str(i) for i in range(9)]
        assert documents[4].messages[1] == {"role": "assistant", "content": "]}, {"}
    # lines under such a name are lines
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [d.text for d in corpus.read_corpus(path)] == ["a", "b"]


def test_a_folder_of_rows_is_not_read_as_texts(tmp_path):
    """As a dataset's repository is: its card is no document."""
    (tmp_path / "README.md").write_text("# a dataset")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "data" / "train.jsonl.about.json").write_text('{"seed": 0}')
    (tmp_path / "more.json").write_text('[{"text": "c"}]')
    documents = corpus.read_corpus(tmp_path)
    assert [(d.name, d.text) for d in documents] == [
        ("data/train.jsonl:1", "a"),
        ("data/train.jsonl:2", "b"),
        ("more.json:1", "c"),
    ]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError) as caught:
        corpus.read_corpus(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: a folder has files of rows, or texts; got notes.txt beside "
        f"more.json; name {tmp_path}/more.json, or a folder that has texts alone"
    )
    (tmp_path / "notes.txt").unlink()
    # JSON that has no rows is a text, as before
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.json").write_text('[{"x": 1}]')
    assert [d.text for d in corpus.read_corpus(tmp_path / "only")] == ['[{"x": 1}]']


def test_lines_of_rows_in_a_folder_under_the_name_of_json(tmp_path):
    """They were one text once, with all that users say in it."""
    rows = [{"messages": [{"role": "user", "content": "a"}]}, {"prompt": "b"}]
    (tmp_path / "train.json").write_text("\n".join(map(json.dumps, rows)))
    documents = corpus.read_corpus(tmp_path)
    assert [d.name for d in documents] == ["train.json:1", "train.json:2"]
    long = json.dumps({"text": "b" * 70_000})
    (tmp_path / "train.json").write_text(f"{long}\n{long}x")
    with pytest.raises(InputError, match="train.json:2: each line must be a JSON object"):
        corpus.read_corpus(tmp_path)
    alone = '{"name": "x", "text": "hi"}'  # as a package.json may be
    for content in ('{"x": "text"}\n{}', '{"text": "a"', '{\n"text": "a"}', alone, f"{alone}\n"):
        (tmp_path / "train.json").write_text(content)
        assert [d.text for d in corpus.read_corpus(tmp_path)] == [content]


def test_rows_that_source_code_has_for_its_tests_are_none(tmp_path):
    (tmp_path / "tests" / "data").mkdir(parents=True)
    (tmp_path / "tests" / "data" / "x.jsonl").write_text('{"text": "a"}')
    (tmp_path / "code.py").write_text("x = 1")
    assert [d.name for d in corpus.read_corpus(tmp_path)] == ["code.py"]
    (tmp_path / "train.jsonl").write_text('{"text": "b"}')  # where a data set has it
    with pytest.raises(InputError, match="got code.py beside train.jsonl; name "):
        corpus.read_corpus(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    # texts without code are no source tree
    (tmp_path / "code.py").rename(tmp_path / "notes.txt")
    with pytest.raises(InputError, match="got notes.txt beside tests/data/x.jsonl; name "):
        corpus.read_corpus(tmp_path)


def test_answers_that_are_written_beside_their_texts(tmp_path):
    """The corpus is the texts, before and after; alone, the answers are one."""
    (tmp_path / "a.txt").write_text("mine")
    answers = tmp_path / "answers.jsonl"
    answers.touch()
    assert [d.name for d in corpus.read_corpus(tmp_path)] == ["a.txt"]
    answers.write_text('{"prompt_token_ids": [1], "output_token_ids": [2]}\n')
    (tmp_path / "answers.jsonl.about.json").write_text("{}")
    assert [d.name for d in corpus.read_corpus(tmp_path)] == ["a.txt"]
    (tmp_path / "a.txt").unlink()
    assert [d.name for d in corpus.read_corpus(tmp_path)] == ["answers.jsonl:1"]


def test_the_split_is_by_name_and_stable():
    documents = [corpus.Document(f"file{i}", "x") for i in range(1000)]
    train, held_out = corpus.split(documents, 0.1)
    assert 60 < len(held_out) < 140 and {d.name for d in train} | {d.name for d in held_out} == {
        d.name for d in documents
    }
    assert [d.name for d in corpus.split(documents[:500], 0.1)[1]] == [
        d.name for d in held_out if int(d.name[4:]) < 500
    ]


def test_what_was_made_of_a_document_is_held_out_with_it(tmp_path):
    """Answers to excerpts of one file, and samples of one conversation."""
    lines = [
        {"prompt_token_ids": [i], "output_token_ids": [j], "source": f"file{i}"}
        for j in range(5)
        for i in range(100)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    train, held_out = corpus.split(corpus.read_corpus(tmp_path / "a.jsonl"), 0.2)
    sources = [{document.source for document in side} for side in (train, held_out)]
    assert not sources[0] & sources[1] and len(held_out) == 5 * len(sources[1]) > 0
    originals = [corpus.Document(f"file{i}", "x") for i in range(100)]
    assert {d.name for d in corpus.split(originals, 0.2)[1]} == sources[1]


def test_installed_packages_come_after_the_library(monkeypatch, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "one.py").write_text("one = 1\n")
    (tmp_path / "package" / "bad.py").write_bytes(b"\xff")
    (tmp_path / "package" / "copy.py").write_text(
        (Path(sysconfig.get_paths()["stdlib"]) / "this.py").read_text()
    )
    real = sysconfig.get_paths()
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda: real | {"purelib": str(tmp_path), "platlib": str(tmp_path)}
    )
    names = [d.name for d in corpus.read_corpus("installed")]
    assert names[-1] == "package/one.py" and names[:-1] == [
        d.name for d in corpus.read_corpus(None)
    ]


def test_duplicates_are_known_across_merges(tmp_path, monkeypatch):
    """Digests in the sorted array and in the set, beside a set of texts."""
    monkeypatch.setattr(corpus, "RECENT_DIGESTS", 7)
    texts = [f"text {i * i % 91}" for i in range(200)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert [d.text for d in corpus.read_corpus(path)] == list(dict.fromkeys(texts))
    # NumPy strips zero bytes at the end of what it shows
    seen = corpus._SeenDigests()
    digests = [bytes([i]) + bytes(15) for i in range(20)] + [bytes(15) + b"\1"]
    assert [seen.add(digest) for digest in digests * 2] == [True] * 21 + [False] * 21


def test_a_corpus_is_read_line_by_line(tmp_path):
    """What comes behind a bad line is not read before it; a line that is not UTF-8 is one row."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\r\n\n{"text": "\xff"}\n{"text": "two"}')
    stream = corpus.stream_corpus(path)
    assert next(stream).text == "one"
    with pytest.raises(InputError, match=r"a.jsonl:3: must be UTF-8 text; got byte 0xff at 10"):
        next(stream)
    bad_rows = BadRows("skip")
    names = [document.name for document in corpus.stream_corpus(path, bad_rows)]
    assert names == ["a.jsonl:1", "a.jsonl:4"] and bad_rows.count == 1


def test_the_state_of_a_source_tells_changes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    before = corpus.source_state(path)
    assert corpus.source_state(tmp_path) == before
    os.utime(path, ns=(1, 2))
    assert corpus.source_state(path) != before == [(str(path), 2, before[0][2])]
    assert corpus.source_state("hf:org/name") == []
    assert len(corpus.source_state("installed")) > len(corpus.source_state(None)) > 500
