"""Training from stored hidden states, beside training with the target at work.

And a head that vLLM cannot serve, from its recipe to decoded text.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import yaml
from features import go, rows_of, write_target

from peagle_jax.checkpoints.runs import read_run
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.cli import main
from peagle_jax.decode.generate import generate
from peagle_jax.pipelines.train_head import train_head
from peagle_jax.train import train_head as train_module
from peagle_jax.train.config import TASKS, build, load_run
from peagle_jax.train.head_batches import HeadBatches
from peagle_jax.train.hidden_state_store import open_hidden_states
from peagle_jax.types import InputError

CONFIG = """
task: peagle
target_dtype: float32
seed: 9
hidden_states_dir: null
head:
  layers: 1
  mlp_dim: 20
  draft_vocab: 100
  aux_hidden_state_layers: [1, 3]
  norm_before_residual: true
cod: {num_depths: 3, down_sample_ratio: 0.8, down_sample_ratio_min: 0.2, max_anchors: 7}
placeholder: {hidden: shared_depth, token: frozen}
feature_noise: {noise: 0.1, dropout: 0.2}
loss: kl_and_total_variation
train_embedding: true
train_lm_head: true
eval: {every: null, num_prompts: 2, max_new_tokens: 6}
data: {held_out: 0.2, seq_len: 12, batch_size: 4}
optimizer: {steps: 6, peak_lr: 2e-3, warmup: 1, weight_decay: 0.1}
log_every: 1
save_every: 100
"""


def config(place, out, task="peagle", **changes) -> dict:
    """Dotted names reach inside."""
    raw = yaml.safe_load(CONFIG) | {"out": str(out), "target": str(place / "target"), "task": task}
    raw["data"]["source"] = str(place / "corpus.jsonl")
    if task != "peagle":
        for key in ("cod", "placeholder", "feature_noise"):
            raw.pop(key)
    if task == "eagle3":
        raw["ttt"] = {"steps": 2, "decay": 0.8}
    if task == "eagle":
        raw |= {"head": {"layers": 1, "mlp_dim": 20}, "num_speculative_tokens": 3}
        raw |= {"train_embedding": False, "train_lm_head": False}
    for name, value in changes.items():
        *parents, last = name.split(".")
        node = raw
        for parent in parents:
            node = node[parent]
        node[last] = value
    return raw


def train(place, out, task="peagle", **changes):
    """The result, what was said, and the rows of metrics without seconds."""
    lines = []
    result = train_head(
        build(TASKS[task], config(place, out, task, **changes), "test"), lines.append
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return result, lines, [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def features(place, tmp_path_factory):
    """Hidden states of layers 0 to 3. A head reads 1 and 3, whose columns are not adjacent."""
    folder = tmp_path_factory.mktemp("stored") / "features"
    go(place, folder, aux_hidden_state_layers=(0, 1, 2, 3), batch_size=5)
    return folder


@pytest.mark.parametrize("task, steps", [("peagle", 6), ("eagle3", 1), ("eagle", 2)])
def test_stored_features_train_the_same_head(task, steps, place, features, tmp_path):
    changes = {"optimizer.steps": steps, "optimizer.warmup": 0, "log_every": 1}
    found = {}
    for name, stored in (("plain", None), ("stored", str(features))):
        _, _, metrics = train(place, tmp_path / name, task, hidden_states_dir=stored, **changes)
        found[name] = metrics, read_run(tmp_path / name)
    (plain, a), (stored, b) = found["plain"], found["stored"]
    assert (
        [row["step"] for row in plain]
        == [row["step"] for row in stored]
        == list(range(1, steps + 1))
    )
    for x, y in zip(plain, stored, strict=True):
        np.testing.assert_allclose(
            y["loss"], x["loss"], rtol=1e-5, atol=1e-6
        )  # six digits are logged
        np.testing.assert_allclose(y["grad_norm"], x["grad_norm"], rtol=1e-4)
        np.testing.assert_allclose(y["accuracy"], x["accuracy"], atol=1e-5)
    assert len({row["loss"] for row in plain}) == steps
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a.params), jax.tree.leaves(b.params), strict=True
    ):
        np.testing.assert_allclose(y, x, atol=1e-4, rtol=0, err_msg=str(path))


def test_the_seed_order_and_epochs_are_those_of_the_rows(place, features, tokenizer):
    """A batch has the very rows that a step would run the target on, also past the first epoch."""
    run = build(
        TASKS["peagle"], config(place, place / "never", hidden_states_dir=str(features)), "test"
    )
    rows, target = (
        rows_of(place, tokenizer),
        load_target(place / "target", aux_hidden_state_layers=(1, 3)),
    )
    batches, everything = (
        HeadBatches(run, rows, target),
        HeadBatches(dataclasses.replace(run, hidden_states_dir=None), rows, target),
    )
    shards = batches.folder.batch(range(len(rows)))
    for step in (0, 3, len(rows)):
        stored, plain = batches(step), everything(step)
        assert plain.stored is None
        for a, b in zip(
            *(
                [*jax.tree.leaves(x.batch), x.segment_ids, x.loss_mask, *jax.tree.leaves(x.cod)]
                for x in (stored, plain)
            ),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
        picks = rows.indices_at(4, 9, step)
        np.testing.assert_array_equal(
            stored.stored.aux_hidden_states,
            np.concatenate(
                [
                    shards.aux_hidden_states[picks][..., 24:48],
                    shards.aux_hidden_states[picks][..., 72:96],
                ],
                axis=-1,
            ),
        )
        np.testing.assert_array_equal(stored.stored.hidden, shards.hidden[picks])


def test_fp8_is_decoded_in_the_step(place, tokenizer, tmp_path):
    """By the scales of the layers that the head reads, which are the second and the fourth."""
    folders = {}
    for dtype in ("float32", "float8_e4m3fn"):
        folders[dtype] = tmp_path / dtype
        go(place, tmp_path / dtype, dtype=dtype, aux_hidden_state_layers=(0, 1, 2, 3))
    rows = rows_of(place, tokenizer)
    target = load_target(place / "target", aux_hidden_state_layers=(1, 3))
    found = {}
    for dtype, folder in folders.items():
        raw = config(place, place / "never", hidden_states_dir=str(folder))
        batches = HeadBatches(build(TASKS["peagle"], raw, "test"), rows, target)
        found[dtype] = jax.jit(lambda batch: batch.rows(target.bind(target.params), jnp.float32))(
            batches(3)
        )
    exact, got = found["float32"], found["float8_e4m3fn"]
    for name in ("aux_hidden_states", "teacher_hidden"):
        x, y = np.asarray(getattr(got, name)), np.asarray(getattr(exact, name))
        assert x.dtype == np.float32
        off = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert 0.005 < off < 0.04, name


@pytest.mark.parametrize("task", ["peagle", "eagle3"])
def test_a_step_hands_on_what_the_run_says(task, place, features, tokenizer, monkeypatch):
    """The loss, the feature noise, and a key of its own for every step.

    Hidden states are used as stored, whatever the target would compute.
    """
    calls = []

    def called(head, rows, *args):
        calls.append((rows, args))
        return jnp.zeros(()), {"correct": jnp.ones(2), "total": jnp.full(2, 4.0)}

    monkeypatch.setattr(train_module, f"{task}_loss", called)
    run = build(
        TASKS[task], config(place, place / "never", task, hidden_states_dir=str(features)), "test"
    )
    if task == "peagle":
        weights = tuple(0.5 + depth for depth in range(run.num_depths))
        placeholder = dataclasses.replace(run.placeholder, true_tokens=0.375)
        run = dataclasses.replace(run, depth_weights=weights, placeholder=placeholder)
    rows, target = (
        rows_of(place, tokenizer),
        load_target(place / "target", aux_hidden_state_layers=(1, 3)),
    )
    head, batches = (
        tiny.head(vocab=len(tokenizer), draft_vocab=len(tokenizer), aux_hidden_state_layers=(1, 3)),
        HeadBatches(run, rows, target),
    )
    for step in (2, 3):
        batch = jax.tree.map(jnp.asarray, batches(step))
        _, counts = train_module.head_loss(
            run, target, head, head.params, batch, (target.params, {})
        )
        assert train_module.head_metrics(counts)["accuracy"].tolist() == [0.25, 0.25]
        given, args = calls[-1]
        np.testing.assert_array_equal(
            given.aux_hidden_states, batch.stored.aux_hidden_states[:, :-1]
        )
        np.testing.assert_array_equal(given.teacher_hidden, batch.stored.hidden[:, 1:])
        np.testing.assert_array_equal(given.tokens, batch.batch.tokens[:, 1:])
        assert run.compute in args
        assert "kl_and_total_variation" in args and (
            run.feature_noise in args if task == "peagle" else 0.8 in args
        )
        assert task != "peagle" or args[-2:] == (weights, 0.375)
    if task == "peagle":
        # a key for each row of each step
        *_, keys_of_rows, _, _, _, _, _ = zip(*(args for _, args in calls), strict=True)
        keys = [tuple(key) for rows in keys_of_rows for key in jax.random.key_data(rows).tolist()]
        assert len(set(keys)) == len(keys) > 2


def test_what_is_not_learned_begins_as_the_mean_of_the_targets_taps(place, features, tokenizer):
    """Of the first 8,192 tokens that the run trains on, here all, padding left out."""
    run = build(
        TASKS["peagle"],
        config(
            place,
            place / "never",
            hidden_states_dir=str(features),
            **{"placeholder.hidden": "mean_feature"},
        ),
        "test",
    )
    rows, target = (
        rows_of(place, tokenizer),
        load_target(place / "target", aux_hidden_state_layers=(1, 3)),
    )
    head = train_module.new_head(run, target, rows, tokenizer)
    first = open_hidden_states(features).batch(range(len(rows)))
    aux_hidden_state_layers = np.concatenate(
        [first.aux_hidden_states[..., 24:48], first.aux_hidden_states[..., 72:96]], axis=-1
    )[first.batch.segment_ids >= 0]
    np.testing.assert_allclose(
        head.params["mask_hidden"], aux_hidden_state_layers.mean(axis=0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(
        head.params["placeholder"]["token"],
        target.params["embed"]["table"][tokenizer.mask_token_id],
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"target": "OTHER"},
            "stored hidden states must be of the run's target, {root}/other; "
            "got those of target; run `peagle extract --target {root}/other`",
        ),
        (
            {"data.seq_len": 16},
            "stored hidden states must be of the rows that the run trains on: the same "
            "data.source, data.max_chars, data.held_out, data.seq_len, data.packing and seed; got ",
        ),
        (
            {"data.held_out": 0.5},
            "data.max_chars: null, data.held_out: 0.2, data.seq_len: 12, data.packing: cut and ",
        ),
        ({"data.packing": "whole"}, "data.packing: cut and seed: "),
        (
            {"data.max_chars": 500},
            "stored hidden states must be of the rows that the run trains on",
        ),
        (
            {"head.aux_hidden_state_layers": [1, 3, 4]},
            "every aux hidden state layer of the head must be stored: 0, 1, 2, 3 are; got 4; "
            "extract again with --aux-hidden-state-layers 1,3,4, or set head.aux_hidden_state",
        ),
        ({"hidden_states_dir": "nowhere"}, "nowhere"),
    ],
)
def test_features_of_something_else_are_refused(
    changes, words, place, features, tokenizer, tmp_path
):
    if "target" in changes:
        changes = {"target": str(write_target(tmp_path / "other", tokenizer, seed=8))}
    run = build(
        TASKS["peagle"],
        config(place, tmp_path / "run", **{"hidden_states_dir": str(features), **changes}),
        "test",
    )
    with pytest.raises(InputError) as error:
        train_head(run, lambda line: None)
    line = str(error.value)
    assert (
        words.format(root=tmp_path) in line
        and "\n" not in line
        and line.startswith(run.hidden_states_dir)
    )
    assert (
        not (tmp_path / "run" / "metrics.jsonl").exists()
        and not (tmp_path / "run" / "head.json").exists()
    )


def test_a_design_that_vllm_does_not_know_decodes_from_its_run(place, tokenizer, tmp_path, capsys):
    """It is trained, evaluated, kept as a run, and used from the command line.

    What it drafts is verified as anything else.
    """
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "def f"}\n{"prompt_token_ids": [9, 8, 7]}\n'
    )
    result, lines, _ = train(
        place,
        tmp_path / "run",
        **{
            "placeholder.hidden": "gated",
            "placeholder.token": "last_token",
            "eval.prompts": str(tmp_path / "prompts.jsonl"),
            "optimizer.steps": 3,
        },
    )
    said = "its placeholders depend on the text before them; vLLM has one pair of vectors for all"
    assert any(
        line.startswith("no folder for vLLM is written: ") and said in line for line in lines
    )
    assert result.folder == tmp_path / "run" and not (tmp_path / "run" / "head").exists()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["folder"] == str(
        tmp_path / "run"
    )
    assert result.acceptance_length >= 1 and len(result.accepted_per_position) == 3
    head = read_run(tmp_path / "run")
    assert (
        head.config.placeholder_hidden,
        head.config.placeholder_token,
        head.config.num_depths,
    ) == ("gated", "last_token", 3)
    assert np.asarray(head.params["placeholder"]["gate"]).any()  # it begins as zeros
    rows = {}
    for name, flags in (
        ("plain", ["--method", "none"]),
        ("drafted", ["--drafter", str(tmp_path / "run")]),
    ):
        out = tmp_path / f"{name}.jsonl"
        assert (
            main(
                [
                    "generate",
                    "--target",
                    str(place / "target"),
                    *flags,
                    "--prompts",
                    str(tmp_path / "prompts.jsonl"),
                    "--max-new-tokens",
                    "14",
                    "--ignore-eos",
                    "--out",
                    str(out),
                ]
            )
            == 0
        ), capsys.readouterr().err
        rows[name] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["output_token_ids"] for r in rows["drafted"]] == [
        r["output_token_ids"] for r in rows["plain"]
    ]
    assert all(r["num_draft_tokens"] == 3 * r["num_drafts"] > 0 for r in rows["drafted"])
    target = load_target(place / "target", aux_hidden_state_layers=(1, 3))
    ours = generate(
        target,
        head,
        [r["prompt_token_ids"] for r in rows["drafted"]],
        k=3,
        max_new_tokens=14,
        stop_ids=(),
    )
    assert [list(a.num_accepted_per_pos) for a in ours] == [
        r["num_accepted_per_pos"] for r in rows["drafted"]
    ]
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "vllm"]) == 2
    error = capsys.readouterr().err
    assert (
        "cannot be exported" in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"placeholder.hidden": "mean"},
            "placeholder.hidden: must be one of shared, shared_fused, per_depth, shared_depth, "
            "low_rank, last_feature, gated, mean_feature, zero, frozen_random; got mean",
        ),
        (
            {"placeholder.token": "shared"},
            "placeholder.token: must be one of mask, frozen, last_token, zero, mean; got shared",
        ),
        (
            {"loss": "kl"},
            "loss: must be one of forward_kl, cross_entropy, total_variation, "
            "kl_and_total_variation, negative_log_acceptance; got kl",
        ),
        (
            {"cod.max_anchors": 0},
            "cod.max_anchors: must be 1 or more, or null; got 0; use null for all",
        ),
        (
            {"feature_noise.dropout": 1.0},
            "feature_noise.dropout: must lie in 0..1, below 1; got 1.0; use 0.0 for none",
        ),
        ({"feature_noise.noise": -1}, "feature_noise.noise: must be 0 or more; got -1"),
        ({"placeholder.hidden": ["shared"]}, "placeholder.hidden: must be text; got ['shared']"),
        (
            {"placeholder": {"hidden": "zero", "side": 1}},
            "placeholder: known keys are hidden, token",
        ),
    ],
)
def test_values_that_are_refused(changes, words, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config(tmp_path, tmp_path / "run", **changes)))
    with pytest.raises(InputError) as error:
        load_run(path)
    line = str(error.value)
    assert line.startswith(str(path)) and words in line and "\n" not in line
    assert main(["train", str(path)]) == 2 and capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()
