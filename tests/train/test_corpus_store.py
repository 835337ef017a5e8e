"""A corpus on disk as token ids: the rows of one in memory, kept, made again when it must be."""

import json
from pathlib import Path

import pytest
from test_packing import arrays, same

from peagle_jax import corpus, text
from peagle_jax.documents import BadRows, Document
from peagle_jax.train import corpus_store
from peagle_jax.train.corpus_store import CorpusChoice, make_store, open_corpus, read_store
from peagle_jax.train.data import pack
from peagle_jax.train.document_file import DocumentFile, DocumentWriter
from peagle_jax.types import InputError


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(["def f(x):\n    return x\n" * 50], 300)


@pytest.fixture
def source(tmp_path):
    """Texts, conversations and answers; two rows are there twice, two cannot be used."""
    rows = []
    for i in range(60):
        turns = ("user", f"f {i}"), ("assistant", "return x " * (1 + i % 5))
        messages = [{"role": role, "content": content} for role, content in turns]
        answer = {"prompt_token_ids": [i], "output_token_ids": [7, 8], "source": f"file{i % 9}"}
        rows += [{"text": f"def f{i}\n" * (1 + i % 7)}, {"messages": messages}, answer]
    rows += rows[3:5]
    rows.insert(20, {"text": 5})
    rows.insert(50, {"messages": [{"role": "user", "content": "nobody answers"}]})
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def choose(source, **changes):
    options = {"held_out": 0.2, "seed": 4, "bad_rows": "skip"} | changes
    return CorpusChoice(str(source), **options)


def in_memory(choice, tokenizer):
    """(documents, what is held out, lines about bad rows), all at once and in memory."""
    bad_rows, lines = BadRows(choice.bad_rows), []
    train, held_out = corpus.split(corpus.read_corpus(choice.source, bad_rows), choice.held_out)
    train = corpus.subsample(train, choice.max_chars, choice.seed)
    documents = text.encode(tokenizer, train, bad_rows)
    bad_rows.report(lines.append)
    return documents, held_out, lines


@pytest.mark.parametrize("max_chars", [None, 500, 10**6])
def test_the_rows_are_those_of_a_corpus_in_memory(source, tokenizer, tmp_path, max_chars):
    choice, said = choose(source, max_chars=max_chars), []
    store = open_corpus(tmp_path / "store", choice, tokenizer, said.append)
    documents, held_out, lines = in_memory(choice, tokenizer)
    assert len(store.order) == len(documents) > 10 and sorted(said) == sorted(lines)
    assert list(store.held_out) == held_out and len(held_out) > 20
    assert store.held_out[-2:] == held_out[-2:]
    for packing in ("cut", "whole"):
        got, want = store.pack(32, packing), pack(documents, 32, packing=packing)
        same(arrays(got.take(slice(None))), arrays(want.take(slice(None))))
        assert got.digest() == want.digest() and got.padding == want.padding
        for step in (0, 3, 50):
            same(arrays(got.batch(4, 9, step)), arrays(want.batch(4, 9, step)))
    if max_chars is None:
        assert len(lines) == 2 and "text must be text" in lines[0]


def test_special_tokens_that_texts_spell_are_told_or_read(source, tokenizer, tmp_path):
    rows = [
        {"text": "a <|im_start|>user"},
        {"text": "b"},
        {"prompt": "x", "completion": "<|im_end|>"},
    ]
    talk = [{"role": role, "content": "<|im_end|> c"} for role in ("user", "assistant")]
    rows.append({"messages": talk})
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    for special_tokens in (False, True):
        choice, said = choose(source, held_out=0.0, special_tokens=special_tokens), []
        store = open_corpus(tmp_path / "store", choice, tokenizer, said.append)
        tokens = store.tokens.tolist()
        # the conversation, through its template, has such tokens all the same
        assert [tokens.count(i) for i in ids] == [2 + special_tokens, 4 + special_tokens]
        told = [line for line in said if line.startswith("2 texts spell special tokens, which")]
        assert len(told) == (not special_tokens)
        told = [line for line in said if "conversations spell special tokens" in line]
        first = f"{source.name}:4 with <|im_end|>"
        assert len(told) == 1 and told[0].startswith("1 conversations") and first in told[0]
    # also what somebody thinks; but not in a document whose messages spell none
    talk = [{"role": role, "content": "c"} for role in ("user", "assistant")]
    thinking = [talk[0], talk[1] | {"reasoning_content": "<|im_start|>"}]
    source.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (talk, thinking)))
    said = []
    open_corpus(tmp_path / "store", choose(source, held_out=0.0), tokenizer, said.append)
    (told,) = (line for line in said if "special tokens" in line)
    assert told.startswith("1 conv") and f"{source.name}:2 with <|im_start|>" in told
    # answers of one conversation, read apart; and rows that were written anew of one source
    two = [{"role": "user", "content": "<|im_end|>"}, talk[1], talk[0], talk[1] | {"content": "d"}]
    rows = [{"messages": two}, {"messages": [two[0], two[3]], "source": "elsewhere.jsonl:7"}]
    rows.append({"messages": [two[0], talk[1] | {"content": "e"}], "source": "elsewhere.jsonl:7"})
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split_turns in (False, True):
        said, choice = [], choose(source, held_out=0.0, split_turns=split_turns)
        open_corpus(tmp_path / "store", choice, tokenizer, said.append)
        (told,) = (line for line in said if "special tokens" in line)
        assert told.startswith("3 conv") and f"{source.name}:1 with <|im_end|>" in told


def refuse_to_read(monkeypatch):
    def stream(*args):
        raise AssertionError("the corpus was read")

    monkeypatch.setattr(corpus, "stream_corpus", stream)


def contents(folder: Path):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_is_kept(source, tokenizer, tmp_path, monkeypatch):
    first, again = [], []
    open_corpus(tmp_path / "store", choose(source), tokenizer, first.append)
    before = contents(tmp_path / "store")
    refuse_to_read(monkeypatch)
    # the seed chooses nothing here
    store = open_corpus(tmp_path / "store", choose(source, seed=5), tokenizer, again.append)
    assert again == first and len(store.order) > 10
    assert contents(tmp_path / "store") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "store"]


@pytest.mark.parametrize("name", [*corpus_store.FILES, "index.json"])
@pytest.mark.parametrize("damage", ["cut", "edited", "gone"])
def test_a_damaged_store_is_made_again(source, tokenizer, tmp_path, name, damage):
    folder, said = tmp_path / "store", []
    open_corpus(folder, choose(source), tokenizer, said.append)
    before, path = contents(folder), folder / name
    said.clear()
    whole = path.read_bytes()
    middle = len(whole) // 2
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            whole[:-3]
            if damage == "cut"
            else whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        )
    open_corpus(folder, choose(source), tokenizer, said.append)
    assert contents(folder) == before
    if name != "index.json":
        assert said[0] == f"{path} is not what was written: the corpus is encoded again"


def test_it_is_made_again_for_another_corpus(source, tokenizer, tmp_path):
    def digest(tokenizer=tokenizer, **changes):
        store = open_corpus(tmp_path / "store", choose(source, **changes), tokenizer, said.append)
        return store.pack(16).digest()

    said = []
    digests = [digest(), digest(held_out=0.4), digest(max_chars=500)]
    digests.append(digest(max_chars=500, seed=5))
    digests.append(digest(text.train_tokenizer(["class C:\n    pass\n" * 50], 290)))
    assert len(set(digests)) == 5 and digest() == digests[0]
    digests.append(digest(held_out=0.0))
    source.write_text(source.read_text() + '{"text": "one more"}\n')
    assert digest(held_out=0.0) not in digests
    # as long as before
    source.write_text(source.read_text().replace("one more", "two more"))
    assert len({digest(held_out=0.0), *digests}) == 7
    assert all(line.startswith("skipped: ") for line in said)


def test_nothing_is_left_of_a_corpus_that_is_refused(source, tokenizer, tmp_path):
    with pytest.raises(InputError, match="text must be text"):
        open_corpus(tmp_path / "store", choose(source, bad_rows="refuse"), tokenizer)
    (tmp_path / "none.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(InputError, match="at least one document is needed"):
        open_corpus(tmp_path / "store", choose(tmp_path / "none.jsonl", held_out=0.0), tokenizer)
    bare = text.train_tokenizer(["a"], 290)
    bare.chat_template = None
    # no row's fault, so that none is skipped
    with pytest.raises(InputError, match="conversations need a chat template"):
        open_corpus(tmp_path / "store", choose(source), bare)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="must be written to disk as token ids"):
        open_corpus(tmp_path / "file" / "store", choose(source), tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "file", "none.jsonl"]


def test_nothing_of_others_is_replaced(source, tokenizer, tmp_path):
    """A folder of that name with other files; and a run that would lie in its own corpus."""
    store = tmp_path / "run" / "corpus"
    store.mkdir(parents=True)
    (store / "letters.txt").write_text("a letter")
    with pytest.raises(InputError, match="must hold nothing else; got letters.txt; move that"):
        open_corpus(store, choose(source), tokenizer)
    # the very folder that is read
    with pytest.raises(InputError, match="must hold nothing else"):
        open_corpus(store, choose(store), tokenizer)
    assert (store / "letters.txt").read_text() == "a letter"
    with pytest.raises(InputError, match="must not lie in its corpus; got .*choose an `out`"):
        open_corpus(tmp_path / "run" / "other", choose(tmp_path / "run"), tokenizer)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["corpus"]


def test_what_a_killed_process_left_is_removed(source, tokenizer, tmp_path):
    left = tmp_path / ".store.tmp"
    left.mkdir()
    (left / "tokens.bin").write_bytes(b"half")
    open_corpus(tmp_path / "store", choose(source), tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "store"]


def test_a_link_to_another_disk_is_kept(source, tokenizer, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "corpus").symlink_to(tmp_path / "disk" / "store")
    first = open_corpus(tmp_path / "run" / "corpus", choose(source), tokenizer)
    again = open_corpus(tmp_path / "run" / "corpus", choose(source, held_out=0.5), tokenizer)
    assert len(first.order) > len(again.order) > 0
    assert (tmp_path / "run" / "corpus").is_symlink() and (tmp_path / "disk" / "store").is_dir()


def test_documents_in_a_file(tmp_path):
    calls = [{"function": {"name": "f", "arguments": {"a": [1, None]}}}]
    documents = [
        Document("a", "text\n"),
        Document("b", None, ({"role": "assistant", "content": None, "tool_calls": calls},)),
        Document("c", None, prompt_ids=(1, 2), output_ids=(3,), source="file"),
        Document("d", None, ({"role": "user", "content": "é"},), tools=({"name": "f"},)),
        Document("e", None, prompt="p", completion=""),
    ]
    with DocumentWriter(tmp_path / "d") as writer:
        for document in documents:
            writer.add(document)
    got = DocumentFile(tmp_path / "d")
    assert list(got) == documents and got[-1] == documents[-1] and got[1:3] == documents[1:3]
    assert [d.digest() for d in got] == [d.digest() for d in documents]
    with pytest.raises(IndexError):
        got[5]
    with DocumentWriter(tmp_path / "d"):
        pass
    assert len(DocumentFile(tmp_path / "d")) == 0


def test_another_process_reads_what_the_first_has_made(source, tokenizer, tmp_path):
    """It needs no corpus, and refuses a folder that is of something else, or on another disk."""
    folder = tmp_path / "store"
    key = make_store(folder, choose(source), tokenizer, lambda line: None)
    made = open_corpus(folder, choose(source), tokenizer, lambda line: None)
    source.unlink()
    store = read_store(folder, key)
    same(*(arrays(x.pack(16).take(slice(None))) for x in (store, made)))
    for path, other, got in (
        (folder, "0", "that of another corpus"),
        (tmp_path / "x", key, "none"),
    ):
        with pytest.raises(InputError) as caught:
            read_store(path, other)
        message = str(caught.value)
        assert message.startswith(f"{path}: the encoded corpus must be seen by all processes")
        assert f"got {got}; set out to a folder on a disk that all of them share" in message
