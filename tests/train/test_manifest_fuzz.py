"""Small files that commands leave beside their data, damaged: read, made anew, or one line."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
from fuzzing import JSON_PIECES, cases, changed, damaged, only_input_errors
from hypothesis import given
from hypothesis import strategies as st
from recipes import load, minimal

from peagle_jax import text
from peagle_jax.checkpoints.checksums import FILE, check_checksums, write_checksums
from peagle_jax.checkpoints.runs import config_from_json, head_json
from peagle_jax.corpus import ABOUT
from peagle_jax.decode.adaptive_k import KChooser
from peagle_jax.decode.step_times import StepTimes
from peagle_jax.pipelines.acceptance_rates import read_rates
from peagle_jax.pipelines.answer_file import (
    ANSWER_BEGINS,
    CONVERSATION_BEGINS,
    NEEDED,
    continue_file,
)
from peagle_jax.train import corpus_store, run_folder, trackers
from peagle_jax.train.corpus_store import CorpusChoice, make_store, read_store
from peagle_jax.train.data import pack
from peagle_jax.train.hidden_state_store import INDEX, HiddenStateIndex, read_index, write_index
from peagle_jax.train.metrics_log import MetricsLog


@st.composite
def content_of(draw, raw: dict, more_keys: tuple[str, ...] = ()) -> bytes:
    """JSON with another value somewhere, or its bytes damaged."""
    if draw(st.booleans()):
        return json.dumps(draw(changed(raw, more_keys))).encode()
    return draw(damaged(json.dumps(raw).encode(), JSON_PIECES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("manifests")


@pytest.mark.fuzz
def test_index_of_hidden_states(folder):
    index = HiddenStateIndex(**tiny.hidden_state_index())
    write_index(folder, index)
    raw = json.loads((folder / INDEX).read_text())
    assert read_index(folder) == index

    @cases(200)
    @given(content_of(raw, ("taps", "length")))
    def check(content):
        (folder / INDEX).write_bytes(content)
        with only_input_errors():
            read = read_index(folder)
            assert all(type(layer) is int for layer in read.aux_hidden_state_layers)
            assert read.shards == -(-read.rows // read.rows_per_shard) >= 1

    check()


@pytest.mark.fuzz
def test_head_json(folder):
    path = folder / "head.json"
    raw = json.loads(head_json(tiny.head(draft_vocab=17).config, {"source": "s"}))

    @cases(200)
    @given(content_of(raw, ("taps", "depths", "calibration")))
    def check(content):
        path.write_bytes(content)
        with only_input_errors():
            config_from_json(path)

    check()


@pytest.mark.fuzz
def test_checksums(folder):
    inside = folder / "sums"
    (inside / "d").mkdir(parents=True)
    (inside / "a").write_bytes(b"a")
    (inside / "d" / "b").write_bytes(b"bb")
    write_checksums(inside)
    raw = json.loads((inside / FILE).read_text())

    @cases(200)
    @given(content_of(raw, ("../x", "d")))
    def check(content):
        (inside / FILE).write_bytes(content)
        with only_input_errors():
            check_checksums(inside, "restore it")

    check()


@dataclasses.dataclass(frozen=True)
class Result:
    folder: object
    step: int
    tokens_per_second: float | None
    stopped_early: bool


@pytest.mark.fuzz
def test_files_of_a_training_run(folder):
    """data.json, result.json, trackers.json and metrics.jsonl."""
    out = folder / "run"
    run = load(folder, minimal("peagle", out=str(out)))
    (out / "checkpoints" / "1").mkdir(parents=True)
    rows = pack([(np.arange(20, dtype=np.int32), np.ones(20, bool))], 8)
    data = {"num_rows": len(rows), "digest": rows.digest(), "padding": 0.25}
    step = run.optimizer.steps
    result = {"folder": str(out), "step": step, "tokens_per_second": 5.0, "stopped_early": False}
    metrics = {"step": 1, "seconds": 2.5, "loss": 1.0, "accuracy": [0.5]}
    several = b"".join(json.dumps(metrics | {"step": i}).encode() + b"\n" for i in range(3))

    @cases(200)
    @given(
        data=content_of(data),
        result=content_of(result),
        ids=content_of({"wandb": "x", "trackio": "y"}),
        metrics=damaged(several, (*JSON_PIECES, b"}\n{", b"{}\n")) | content_of(metrics),
    )
    def check(data, result, ids, metrics):
        (out / run_folder.DATA_FILE).write_bytes(data)
        with only_input_errors():
            run_folder.check_same_data(run, rows)
        (out / run_folder.RESULT_FILE).write_bytes(result)
        with only_input_errors():
            read = run_folder.read_result(run, Result, lambda _: None)
            assert read is None or read.folder == out
        with only_input_errors():
            written = {"folder": out, "step": 1, "tokens_per_second": None, "stopped_early": False}
            run_folder.write_result(run, written)
        (out / trackers.RUN_IDS_FILE).write_bytes(ids)
        with only_input_errors():
            trackers.known_run(out, "wandb")
        with only_input_errors():
            trackers.remember_run(out, "wandb", "z")
        (out / "metrics.jsonl").write_bytes(metrics)
        with only_input_errors():
            MetricsLog(out / "metrics.jsonl", 2)

    check()


@pytest.mark.fuzz
def test_index_of_an_encoded_corpus(folder):
    source, out = folder / "texts.jsonl", folder / "store"
    source.write_text("".join(json.dumps({"text": f"def f{i}"}) + "\n" for i in range(6)))
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n" * 50], 300)
    choice = CorpusChoice(str(source), held_out=0.2, seed=4, bad_rows="skip")
    key = make_store(out, choice, tokenizer)
    want = read_store(out, key).order.tolist()
    raw = json.loads((out / corpus_store.INDEX).read_text())

    @cases(60)
    @given(content_of(raw, ("key", "skipped")))
    def check(content):
        (out / corpus_store.INDEX).write_bytes(content)
        with only_input_errors():
            read_store(out, key)
        # what is damaged is made anew
        assert make_store(out, choice, tokenizer, lambda _: None) == key
        assert read_store(out, key).order.tolist() == want

    check()


@pytest.mark.fuzz
@pytest.mark.parametrize("begins", NEEDED, ids=["excerpts", "conversations"])
def test_answers_that_were_begun(folder, begins):
    row = {
        ANSWER_BEGINS: {"prompt_token_ids": [1, 2], "output_token_ids": [3]},
        CONVERSATION_BEGINS: {"sample": 0, "num_tokens": 4, "messages": []},
    }[begins]
    path, lines = folder / "answers.jsonl", (json.dumps(row) + "\n").encode() * 2
    about = {"seed": 5, "part": [0, 1]}

    @cases(200, len(NEEDED))
    @given(damaged(lines, JSON_PIECES) | content_of(row), content_of(about))
    def check(content, about_content):
        path.write_bytes(content)
        path.with_name(path.name + ABOUT).write_bytes(about_content)
        with only_input_errors():
            read: list[dict] = []
            assert continue_file(path, begins, about, read.append) == len(read)
            for row in read:
                assert all(type(row[key]) is kind for key, kind in NEEDED[begins].items())
            # what is left is whole lines
            assert path.read_bytes().count(b"\n") == len(read)

    check()


@pytest.mark.fuzz
def test_step_times(folder):
    times = StepTimes({"machine": "one"}, folder)
    times.get([3], 2, 256, "greedy", lambda _: 0.5)
    (path,) = (p for p in folder.glob("*.json") if len(p.stem) == 20)
    raw = json.loads(path.read_text())

    @cases(200)
    @given(content_of(raw, ("steps", "drafts")))
    def check(content):
        path.write_bytes(content)
        again = StepTimes({"machine": "one"}, folder)
        again.count(2, 256, "greedy", 5, 1e4)
        again.recall_drafts("greedy", "head", KChooser(3))
        assert 3 in again.get([3], 2, 256, "greedy", lambda _: 1.0)

    check()


@pytest.mark.fuzz
def test_rows_of_a_benchmark(folder):
    path = folder / "results.jsonl"
    row = {"method": "peagle", "k": 3, "accepted_per_position": [0.6, 0.5, 0.1]}
    lines = (json.dumps(row) + "\n").encode() * 2

    @cases(200)
    @given(damaged(lines, JSON_PIECES) | content_of(row))
    def check(content):
        path.write_bytes(content)
        with only_input_errors():
            method, rates = read_rates("--acceptance", f"peagle={path}")
            assert method == "peagle" and all(0 <= rate <= 1 for rate in rates)

    check()
