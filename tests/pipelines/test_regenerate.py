"""A target's own answers as training data.

They continue documents that are not held out, can be resumed, and are read back as they were
written.
"""

import fcntl
import json
import shutil
import tempfile

import numpy as np
import pytest

from peagle_jax import corpus, file_lock, text
from peagle_jax.checkpoints.target_io import load_target, save_target
from peagle_jax.cli import main
from peagle_jax.decode.generate import generate
from peagle_jax.pipelines import regenerate as module
from peagle_jax.pipelines.regenerate import RegenerationOptions, excerpts_of, regenerate
from peagle_jax.train.document_file import DocumentWriter
from peagle_jax.types import InputError
from tests import tiny

OPTIONS = RegenerationOptions(
    source="",
    held_out=0.3,
    num_samples=6,
    prompt_tokens=3,
    max_new_tokens=5,
    temperatures=(0.0, 0.7),
    batch_size=2,
    seed=4,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("regenerate")
    (folder / "corpus").mkdir()
    for i in range(20):
        (folder / "corpus" / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 3)
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n" * 50], 300)
    tokenizer.save_pretrained(folder / "tokenizer")
    save_target(
        tiny.target(vocab=len(tokenizer)), folder / "target", tokenizer_from=folder / "tokenizer"
    )
    return folder


def options(place, **changes):
    return RegenerationOptions(**{**vars(OPTIONS), "source": str(place / "corpus"), **changes})


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokenizer_of(place):
    return text.load_tokenizer(place / "target")


def test_answers_are_the_targets_own(place, tmp_path):
    regenerate(place / "target", options(place), tmp_path / "a.jsonl", lambda s: None)
    target = load_target(place / "target", aux_hidden_state_layers=())
    got = rows(tmp_path / "a.jsonl")
    prompts = [r["prompt_token_ids"] for r in got]
    for row in got:
        source = (place / "corpus" / row["source"]).read_text()
        assert tokenizer_of(place).decode(row["prompt_token_ids"]) in source
    assert len(got) == 6 and all(len(r["output_token_ids"]) == 5 for r in got)
    greedy = [a.output_token_ids for a in generate(target, None, prompts, max_new_tokens=5)]
    warm = [
        a.output_token_ids
        for a in generate(
            target,
            None,
            prompts,
            max_new_tokens=5,
            temperature=0.7,
            seed=[4 + i for i in range(6)],
        )
    ]
    # the answers take the temperatures in turn
    expected = [(warm if i % 2 else greedy)[i] for i in range(6)]
    assert [r["output_token_ids"] for r in got] == expected
    regenerate(place / "target", options(place, batch_size=5), tmp_path / "b.jsonl", lambda s: None)
    assert rows(tmp_path / "b.jsonl") == got


def test_an_answer_ends_with_the_targets_stop_token(place, tmp_path):
    regenerate(place / "target", options(place), tmp_path / "a.jsonl", lambda s: None)
    got = rows(tmp_path / "a.jsonl")
    third = got[0]["output_token_ids"][2]
    shutil.copytree(place / "target", tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"eos_token_id": third}))
    there = regenerate(tmp_path / "target", options(place), tmp_path / "b.jsonl", lambda s: None)
    stopped = rows(tmp_path / "b.jsonl")
    for row, whole in zip(stopped, got, strict=True):
        ids = whole["output_token_ids"]
        assert row["output_token_ids"] == ids[: ids.index(third) + 1 if third in ids else 5]
    assert len(stopped[0]["output_token_ids"]) < 5
    sizes = sum(len(row["output_token_ids"]) for row in stopped)
    assert (there.rows, there.tokens) == (6, sizes)
    # answers of another target are not appended to these
    with pytest.raises(InputError, match="target was .* and must stay so"):
        regenerate(place / "target", options(place), tmp_path / "b.jsonl", lambda s: None)


def test_a_cut_file_is_completed_to_the_same_answers(place, tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    regenerate(place / "target", options(place), whole, lambda s: None)
    cut.write_text(whole.read_text()[: len(whole.read_text()) // 2])  # in the middle of a line
    regenerate(place / "target", options(place), cut, lambda s: None)
    assert cut.read_text() == whole.read_text()
    with pytest.raises(InputError, match="max_new_tokens was 5 when cut.jsonl was begun"):
        regenerate(place / "target", options(place, max_new_tokens=7), cut, lambda s: None)
    assert cut.read_text() == whole.read_text()


def test_a_longer_file_is_kept_and_a_shorter_one_goes_on(place, tmp_path):
    """Fewer answers delete nothing, and more answers begin with the same ones.

    Other excerpts are refused.
    """
    short, long = tmp_path / "short.jsonl", tmp_path / "long.jsonl"
    regenerate(place / "target", options(place, num_samples=4), short, lambda s: None)
    regenerate(place / "target", options(place, num_samples=8), long, lambda s: None)
    before = long.read_text()
    assert before.startswith(short.read_text())
    regenerate(place / "target", options(place, num_samples=4), long, lambda s: None)
    assert long.read_text() == before
    regenerate(place / "target", options(place, num_samples=8), short, lambda s: None)
    assert short.read_text() == before
    with pytest.raises(InputError, match="seed was 4 when long.jsonl was begun"):
        regenerate(place / "target", options(place, seed=5), long, lambda s: None)
    (tmp_path / "long.jsonl.about.json").unlink()  # as in files of former versions
    with pytest.raises(InputError, match="answers to other excerpts"):
        regenerate(place / "target", options(place, seed=5), long, lambda s: None)
    assert long.read_text() == before


def test_two_at_a_time(place, tmp_path):
    """Each would append its rows between the other's."""
    out = tmp_path / "a.jsonl"
    with out.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="one process writes a file at a time; got another"):
            regenerate(place / "target", options(place), out, lambda line: None)
    assert out.read_text() == ""


def test_the_file_of_one_that_began_in_the_same_moment_is_left_alone(place, tmp_path, monkeypatch):
    """It was not there when this process looked, and another has it when this one wants it."""
    out = tmp_path / "new" / "a.jsonl"
    monkeypatch.setattr(file_lock, "try_lock", lambda file: False)
    with pytest.raises(InputError, match="one process writes a file at a time; got another"):
        regenerate(place / "target", options(place), out, lambda line: None)
    assert out.read_text() == ""


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"a": 1}\n', "[1]\n"])
def test_a_file_of_something_else_is_left_alone(content, place, tmp_path):
    (tmp_path / "notes").write_text(content)
    with pytest.raises(InputError, match="a file of something else"):
        regenerate(place / "target", options(place), tmp_path / "notes", lambda s: None)
    assert (tmp_path / "notes").read_text() == content


def test_no_excerpt_is_of_a_held_out_file(place, tmp_path):
    names = {path.name for path in (place / "corpus").iterdir()}
    train, held_out = corpus.split(corpus.read_corpus(place / "corpus"), 0.3)
    assert held_out
    many = options(place, num_samples=40, max_new_tokens=1)
    regenerate(place / "target", many, tmp_path / "a.jsonl", lambda s: None)
    sources = {row["source"] for row in rows(tmp_path / "a.jsonl")}
    assert len(sources) > 5 and sources <= names - {document.name for document in held_out}


def test_excerpts_are_of_all_texts(place):
    tokenizer = text.load_tokenizer(place / "target")
    documents = corpus.read_corpus(place / "corpus")
    found = excerpts_of(tokenizer, documents, options(place, num_samples=200))
    texts = [tokenizer.decode(ids) for ids in found]
    assert all(len(ids) == 3 for ids in found) and len(set(texts)) > 20
    assert all(any(t in d.text for d in documents) for t in texts)
    with pytest.raises(InputError, match="more than 99999 tokens"):
        excerpts_of(tokenizer, documents, options(place, prompt_tokens=99999))


def test_answers_become_rows_supervised_on_the_answer(place, tmp_path):
    code = main(
        [
            "regenerate",
            "--target",
            str(place / "target"),
            "--data",
            str(place / "corpus"),
            "--num-samples",
            "2",
            "--prompt-tokens",
            "3",
            "--max-new-tokens",
            "5",
            "--temperature",
            "0",
            "--out",
            str(tmp_path / "a.jsonl"),
        ]
    )
    assert code == 0
    tokenizer = text.load_tokenizer(place / "target")
    documents = corpus.read_corpus(tmp_path / "a.jsonl")
    (ids, loss_mask), _ = text.encode(tokenizer, documents)
    first = rows(tmp_path / "a.jsonl")[0]
    assert ids.tolist() == first["prompt_token_ids"] + first["output_token_ids"]
    np.testing.assert_array_equal(loss_mask, [False] * 3 + [True] * 5)
    foreign = corpus.Document("x", None, (), (1,), (len(tokenizer),))
    with pytest.raises(InputError, match="token ids must lie in"):
        text.encode(tokenizer, [foreign])


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--answers", "0"], "--num-samples: must be 1 or more; got 0"),  # its former name
        (["--temperature", "-1"], "--temperature: must be 0 or more"),
        (["--seed", "-1"], "--seed: must be 0 or more"),
        (["--held-out", "1"], "must lie in 0..1"),
        (["--data", "nowhere"], "nowhere"),
        (["--out", "/proc/x"], "must be writable"),
        (["--prompt-tokens", "20", "--max-new-tokens", "90"], "fit the target's context"),
    ],
)
def test_refusals(place, tmp_path, capsys, flags, words):
    base = [
        "regenerate",
        "--target",
        str(place / "target"),
        "--data",
        str(place / "corpus"),
        "--out",
        str(tmp_path / "a.jsonl"),
        "--max-new-tokens",
        "9",
    ]
    assert main([*base, *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, words",
    [
        ("excerpts", "truncated"),
        ("conversations", "truncated"),
        ("bad row", "rows.jsonl:2"),
        ("no disk", "must fit the folder for temporary files"),
        ("too long", "must fit the target's context"),
    ],
)
def test_nothing_is_left_after_an_error(kind, words, place, tmp_path, monkeypatch):
    """No folder of temporary files, no empty file, no new folder; what was there before stays."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    source, out = str(place / "corpus"), tmp_path / "sub" / "a.jsonl"
    if kind not in ("excerpts", "too long"):
        source = str(tmp_path / "rows.jsonl")
        row = '{"turns": ["def f"]}\n'
        (tmp_path / "rows.jsonl").write_text(row + ('{"turns": 5}\n' if kind == "bad row" else ""))
    if kind == "no disk":
        monkeypatch.setattr(DocumentWriter, "add", no_room)
    damaged = tmp_path / "damaged"  # noticed after the corpus was read
    shutil.copytree(place / "target", damaged)
    content = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[:-4])
    limit = 10_000 if kind == "too long" else 9
    asked = options(place, source=source, held_out=0.0, max_new_tokens=limit)
    with pytest.raises(InputError, match=words):
        regenerate(damaged, asked, out, lambda line: None)
    assert not list(temporary.iterdir()) and not out.parent.exists()
    out.parent.mkdir()
    out.write_text("")
    with pytest.raises(InputError):
        regenerate(damaged, asked, out, lambda line: None)
    assert out.name in [path.name for path in out.parent.iterdir()]


def no_room(*_):
    raise OSError(28, "No space left on device")


def test_answers_are_written_in_one_dtype(place, tmp_path):
    """A file is of one dtype; those of before there was a choice are in float32."""
    out, whole = tmp_path / "a.jsonl", tmp_path / "whole.jsonl"
    few = options(place, num_samples=4, dtype="bfloat16")
    regenerate(place / "target", few, out, lambda line: None)
    assert json.loads((tmp_path / "a.jsonl.about.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(InputError, match="dtype was bfloat16 when a.jsonl was begun"):
        regenerate(place / "target", options(place, num_samples=6), out, lambda line: None)
    regenerate(place / "target", options(place, num_samples=4), whole, lambda line: None)
    about = tmp_path / "whole.jsonl.about.json"
    former = {key: v for key, v in json.loads(about.read_text()).items() if key != "dtype"}
    about.write_text(json.dumps(former))
    regenerate(place / "target", options(place, num_samples=5), whole, lambda line: None)
    assert len(rows(whole)) == 5
    with pytest.raises(InputError, match="dtype was float32 when whole.jsonl was begun"):
        regenerate(place / "target", few, whole, lambda line: None)


def test_the_dtype_is_the_weights(place, tmp_path, monkeypatch):
    seen = []
    real = module.load_target

    def load(folder, **options):
        seen.append(options["dtype"])
        return real(folder, **options)

    monkeypatch.setattr(module, "load_target", load)
    for dtype in ("bfloat16", "float32"):
        asked = options(place, num_samples=2, dtype=dtype)
        regenerate(place / "target", asked, tmp_path / f"{dtype}.jsonl", lambda line: None)
    assert [str(dtype) for dtype in seen] == ["bfloat16", "float32"]
