"""Loss and accuracy on held-out documents, beside the decoding of prompts."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import test_runs
import yaml

from peagle_jax import corpus as corpora
from peagle_jax import text
from peagle_jax.cli import main
from peagle_jax.train import held_out
from peagle_jax.train.config import load_run
from peagle_jax.train.corpus_store import CorpusChoice, open_corpus
from peagle_jax.train.held_out import evaluation_run, held_out_rows, make_measure
from peagle_jax.train.train_head import head_denominators, head_loss
from peagle_jax.types import InputError
from tests import tiny

corpus, target = test_runs.corpus, test_runs.target  # fixtures
EVAL = {"every": 3, "num_prompts": 2, "max_new_tokens": 4}


def recipe(task, corpus, out, target):
    """Noise, parts, stages, and true tokens: nothing of it may reach what is measured."""
    raw = test_runs.config(task, corpus, out, target, eval=EVAL)
    raw["optimizer"]["steps"] = 6
    raw |= {"gradient_accumulation": 2}
    if task != "eagle":
        raw["depth_schedule"] = [{"until": 4, "num_depths": 1}]
    if task == "peagle":
        raw["feature_noise"] = {"noise": 0.7, "dropout": 0.2}
        raw["placeholder"] = {"true_tokens": 0.5}
    return raw


@pytest.mark.parametrize("task", ["peagle", "eagle3", "eagle"])
def test_a_run_logs_them_at_every_evaluation(task, corpus, target, tmp_path):
    out = tmp_path / "run"
    path = test_runs.write(tmp_path / "run.yaml", recipe(task, corpus, out, target))
    assert main(["train", str(path)]) == 0
    measured = [row for row in test_runs.rows(out) if "held_out_loss" in row]
    assert [row["step"] for row in measured] == [3, 6]
    for row in measured:
        assert row["acceptance_length"] >= 1  # in the same line
        accuracy = row["held_out_accuracy"]
        # of all depths, also where the schedule trains one alone
        assert len(accuracy) == (1 if task == "eagle" else 3)
        assert 0 < row["held_out_loss"] < 20 and all(0 <= a <= 1 for a in accuracy)
        if task == "eagle":
            assert "expected_acceptance_length" not in row
        else:
            expected = 1 + sum(np.prod(accuracy[: d + 1]) for d in range(3))
            assert row["expected_acceptance_length"] == pytest.approx(expected, abs=1e-4)
    losses = [row["held_out_loss"] for row in measured]
    assert losses[1] < losses[0]
    # the same again where the run goes on from its first checkpoint
    raw = yaml.safe_load(path.read_text()) | {"out": str(tmp_path / "again")}
    again = test_runs.write(tmp_path / "again.yaml", raw)
    assert main(["train", str(again), "--optimizer.steps", "6", "--max_seconds", "0"]) == 0
    assert main(["train", str(again), "--max_seconds", "null"]) == 0
    repeated = [row for row in test_runs.rows(tmp_path / "again") if "held_out_loss" in row]
    keys = ("step", "held_out_loss", "held_out_accuracy")
    assert [[row[key] for key in keys] for row in repeated] == [
        [row[key] for key in keys] for row in measured
    ]


def test_what_is_measured_is_what_will_be_used(corpus, tmp_path):
    raw = recipe("peagle", corpus, tmp_path / "run", tmp_path)
    run = evaluation_run(load_run(test_runs.write(tmp_path / "a.yaml", raw)))
    assert (run.data.batch_size, run.gradient_accumulation) == (1, 1)
    assert run.depth_weights is None
    assert [run.num_depths_at(step) for step in (0, 5)] == [3, 3]
    assert (run.feature_noise.noise, run.feature_noise.dropout) == (0, 0)
    assert run.placeholder.true_tokens == 0
    raw = recipe("eagle", corpus, tmp_path / "run", tmp_path)
    assert load_run(test_runs.write(tmp_path / "b.yaml", raw)).regression.noise > 0
    assert evaluation_run(load_run(tmp_path / "b.yaml")).regression.noise == 0


def test_counts_are_pooled_over_held_out_rows(corpus, tmp_path, monkeypatch):
    """Each batch counts by its elements; the rows are of documents that are not trained on."""
    monkeypatch.setattr(held_out, "MOST_ROWS", 6)
    raw = recipe("eagle3", corpus, tmp_path / "run", tmp_path)
    run = evaluation_run(load_run(test_runs.write(tmp_path / "a.yaml", raw)))
    train, kept = corpora.split(corpora.read_corpus(corpus), 0.1)
    tokenizer = text.train_tokenizer([d.text for d in train], 320)
    rows = held_out_rows(run, tokenizer, kept)
    assert rows is not None and 6 <= len(rows) <= 12
    spelled = tokenizer.decode(rows.take(range(len(rows))).tokens.reshape(-1))
    assert kept[0].text.strip()[:40] in spelled and train[0].text.strip()[:40] not in spelled

    def loss(params, batch, frozen, denominators):
        first = batch.batch.tokens[:, 1].sum() % 5
        counts = {"correct": jnp.stack([first, 1, 0]), "total": jnp.stack([first + 5, 4, 0])}
        return params["w"] * frozen * (first + 1.0) / denominators, counts

    measure = make_measure(run, rows, loss, lambda batch: len(batch.loss_mask) / 2, 2.0, None)
    indices = [rows.indices_at(1, run.seed, i) for i in range(6)]
    seen = [int(rows.take(i).tokens[:, 1].sum() % 5) for i in indices]
    assert len(set(seen)) > 1
    measured = measure({"w": jnp.float32(3.0)})
    assert measured["held_out_loss"] == pytest.approx(6 * (np.sum(seen) + 6) / 3)
    accuracy = [sum(seen) / (sum(seen) + 30), 0.25, 0.0]
    assert measured["held_out_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    expected = 1 + accuracy[0] + accuracy[0] * 0.25
    assert measured["expected_acceptance_length"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("task", ["peagle", "eagle3", "eagle"])
def test_rows_that_are_read_together_count_as_if_alone(task, corpus, tmp_path, monkeypatch):
    """Also the last ones, which do not fill a batch; their elements of COD are the same."""
    monkeypatch.setattr(held_out, "MOST_ROWS", 5)
    raw = recipe(task, corpus, tmp_path / "run", tmp_path)
    run = evaluation_run(load_run(test_runs.write(tmp_path / "a.yaml", raw)))
    train, kept = corpora.split(corpora.read_corpus(corpus), 0.1)
    tokenizer = text.train_tokenizer([d.text for d in train], 320)
    rows = held_out_rows(run, tokenizer, kept)
    reads = tiny.FINAL if task == "eagle" else {}
    target = tiny.target(vocab=len(tokenizer), **reads)
    changes = {"vocab": len(tokenizer), "draft_vocab": len(tokenizer), "num_depths": run.num_depths}
    if task == "eagle":
        changes |= tiny.EAGLE
    if task == "eagle3":
        changes["mask_token"] = None
    head = tiny.head(**changes)
    measured = []
    for size in (1, 3, 8):
        data = dataclasses.replace(run.data, batch_size=size)
        together = dataclasses.replace(run, data=data)
        loss = functools.partial(head_loss, together, target, head)
        denominators = functools.partial(head_denominators, together)
        frozen = (target.params, {})
        measure = make_measure(together, rows, loss, denominators, frozen, None)
        measured.append(measure(head.params))
    assert 0 < measured[0]["held_out_loss"] < 50
    for other in measured[1:]:
        assert other["held_out_loss"] == pytest.approx(measured[0]["held_out_loss"], rel=1e-5)
        assert other["held_out_accuracy"] == measured[0]["held_out_accuracy"]


def test_without_anything_to_train_there_is_nothing_to_measure(tmp_path, corpus):
    raw = recipe("eagle3", corpus, tmp_path / "run", tmp_path)
    run = load_run(test_runs.write(tmp_path / "a.yaml", raw))
    tokenizer = text.train_tokenizer(["x y"], 300)
    question = corpora.Document("a", None, ({"role": "user", "content": "x"},))
    assert held_out_rows(run, tokenizer, [question]) is None
    assert held_out_rows(run, tokenizer, []) is None


@pytest.mark.parametrize("key, value", [("keep", "best"), ("patience", 2)])
def test_what_needs_prompts_is_refused_without_them(key, value, corpus, target, tmp_path, capsys):
    """`keep: best` would keep the last without a word."""
    raw = recipe("eagle3", corpus, tmp_path / "run", target)
    raw["data"] |= {"held_out": 1e-9}
    raw["eval"] = EVAL | {key: value}
    assert main(["train", str(test_runs.write(tmp_path / "a.yaml", raw))]) == 2
    message = capsys.readouterr().err
    assert "eval: " in message and "needs prompts to measure with" in message
    assert "data.held_out higher" in message
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_store_has_only_held_out_documents_that_can_be_used(tmp_path):
    """One that cannot be encoded is named like any other, and not when a run evaluates."""
    tokenizer = text.train_tokenizer(["user x assistant"], 300)
    end = tokenizer.eos_token
    rows = [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]}
        for content in [*(f"a{i}" for i in range(40)), *(f"{end}{i}" for i in range(40))]
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice = CorpusChoice(str(path), held_out=0.5, bad_rows="skip")
    store = open_corpus(tmp_path / "store", choice, tokenizer, [].append)
    contents = [document.messages[1]["content"] for document in store.held_out]
    assert contents and not any(end in content for content in contents)
    refusing = dataclasses.replace(choice, bad_rows="refuse")
    with pytest.raises(InputError, match="end-of-sequence"):
        open_corpus(tmp_path / "other", refusing, tokenizer, [].append)
