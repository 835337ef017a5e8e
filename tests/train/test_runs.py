"""Whole training runs on one small target: learning, what resumes, refusals."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from peagle_jax import weights
from peagle_jax.cli import main
from peagle_jax.train import train_head
from peagle_jax.train.config import TASKS, load_run

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "train"
CORPUS = [
    "def f{0}(x):\n    return x + {0}\n",
    "class C{0}:\n    value = {0}\n\n    def get(self):\n        return self.value\n",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"m{i}.py").write_text(
            "".join(CORPUS[(i + j) % 2].format(i * j) for j in range(12))
        )
    return folder


def config(task: str, corpus: Path, out: Path, target: Path | None = None, **changes) -> dict:
    raw = yaml.safe_load((CONFIGS / f"demo_{'target' if task == 'lm' else task}.yaml").read_text())
    raw |= {"out": str(out), "log_every": 2, "save_every": 4}
    raw["data"] |= {
        "source": str(corpus),
        "max_chars": None,
        "held_out": 0.1,
        "seq_len": 48,
        "batch_size": 4,
    }
    raw["optimizer"] = raw.get("optimizer", {}) | {"steps": 12, "warmup": 2}
    if task == "lm":
        raw["model"] |= {
            "vocab": 320,
            "layers": 4,
            "dim": 32,
            "mlp_dim": 48,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 16,
        }
    else:
        raw |= {
            "target": str(target),
            "init": "random",
            "depth_schedule": [],
            "train_lm_head": task != "eagle",
        }
        raw["head"] |= {
            "layers": 2 if task == "peagle" else 1,
            "mlp_dim": None,
            "aux_hidden_state_layers": None,
            "qk_norm": False,
        }
        raw["eval"] |= {"every": 250, "prompts": None, "num_prompts": 8, "max_new_tokens": 64}
        set_depths(raw, 3)
    return {**raw, **changes}


def set_depths(raw: dict, num_depths: int) -> None:
    if raw["task"] == "peagle":
        raw["cod"]["num_depths"] = num_depths
    elif raw["task"] == "eagle":
        raw["num_speculative_tokens"] = num_depths
    else:
        raw["ttt"]["steps"] = num_depths


def write(path: Path, raw: dict) -> Path:
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module")
def target(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("target")
    raw = config("lm", corpus, out / "run")
    raw["optimizer"]["steps"] = 40
    assert main(["train", str(write(out / "lm.yaml", raw))]) == 0
    return out / "run" / "model"


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same(a: Path, b: Path) -> bool:
    x, y = weights.open_folder(a), weights.open_folder(b)
    return x.keys() == y.keys() and all(np.array_equal(x[n], y[n]) for n in x)


def test_target_learns_and_is_a_hugging_face_folder(target):
    losses = [r["loss"] for r in rows(target.parent)]
    assert losses[-1] < 0.75 * losses[0]
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoConfig.from_pretrained(target).model_type == "qwen3"
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode(tokenizer("def fé(x):")["input_ids"]) == "def fé(x):"
    assert tokenizer.mask_token_id not in tokenizer("<|draft_mas k|> def")["input_ids"]


def test_a_run_is_not_continued_with_another_configuration(corpus, target, tmp_path, capsys):
    path = write(tmp_path / "run.yaml", config("eagle3", corpus, tmp_path / "run", target))
    assert main(["train", str(path), "--optimizer.steps", "2"]) == 0
    assert rows(tmp_path / "run")[-1]["step"] == 2
    assert main(["train", str(path), "--optimizer.name", "muon"]) == 2
    error = capsys.readouterr().err
    assert "resumed only with the settings that it began with" in error
    # more steps are no difference
    assert "; got optimizer.name muon, was adamw; restore them" in error
    assert error.count("\n") == 1


def test_the_best_head_is_exported(corpus, target, tmp_path):
    """With Muon, which learns so fast here that the last evaluation is not the best."""
    changes = {"eval": {"every": 3, "num_prompts": 4, "max_new_tokens": 24, "keep": "best"}}
    raw = config("eagle3", corpus, tmp_path / "run", target, **changes)
    raw["optimizer"] = {"name": "muon", "steps": 13, "peak_lr": 0.3, "warmup": 1}
    assert main(["train", str(write(tmp_path / "run.yaml", raw))]) == 0
    measured = {
        r["step"]: r["acceptance_length"] for r in rows(tmp_path / "run") if "repeated_4grams" in r
    }
    assert list(measured) == [3, 6, 9, 12, 13]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    best = max(measured, key=lambda step: measured[step] or 0.0)
    assert result["kept_step"] == best != 13 == result["step"], measured
    assert result["acceptance_length"] == measured[best] > measured[13]
    # what is converted is the head that was kept
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "again"), "--to", "vllm"]) == 0
    assert same(tmp_path / "again", tmp_path / "run" / "head")


def test_a_run_begun_with_former_spellings_is_resumed(corpus, target, tmp_path, capsys):
    """What counts is what the recipe says, not how it is spelled or how long it is."""
    raw = config("eagle3", corpus, tmp_path / "run", target)
    path = write(tmp_path / "run.yaml", raw)
    assert main(["train", str(path), "--max_seconds", "0"]) == 0
    assert rows(tmp_path / "run")[-1]["step"] == 1
    saved = tmp_path / "run" / "config.yaml"
    former = yaml.safe_load(saved.read_text())
    assert former["eval"]["num_prompts"] == 8 and former["log_every"] == 2
    for new, old in {"eval": "measure", "init": "start", "depth_schedule": "grow"}.items():
        former[old] = former.pop(new)
    former["measure"]["count"] = former["measure"].pop("num_prompts")
    former["data"]["length"] = former["data"].pop("seq_len")
    former["optimizer"]["clip"] = former["optimizer"].pop("max_grad_norm")
    saved.write_text(yaml.safe_dump(former))
    assert main(["train", str(path), "--max_seconds", "0"]) == 0
    assert rows(tmp_path / "run")[-1]["step"] == 2
    assert main(["train", str(path), "--max_seconds", "0", "--data.length", "44"]) == 2
    assert "got data.seq_len 44, was 48; restore" in capsys.readouterr().err


@pytest.mark.parametrize("task", [pytest.param("peagle", marks=pytest.mark.long), "eagle3"])
def test_growing_depths_begin_as_a_run_of_fewer(task, corpus, target, tmp_path):
    """While only depth 0 is trained, losses are those of a run that never has more.

    Then they differ. Overrides still work.
    """
    grown = config(
        task,
        corpus,
        tmp_path / "grown",
        target,
        log_every=1,
        depth_schedule=[{"until": 4, "num_depths": 1}],
    )
    fewer = config(task, corpus, tmp_path / "fewer", target, log_every=1)
    set_depths(fewer, 1)
    for raw in (grown, fewer):
        assert (
            main(["train", str(write(tmp_path / "run.yaml", raw)), "--optimizer.steps", "6"]) == 0
        )
    a, b = ([r["loss"] for r in rows(tmp_path / name)] for name in ("grown", "fewer"))
    assert a[:4] == b[:4] and a[4] != b[4] and len(a) == 6


def test_frozen_parts_and_reduced_vocabulary(corpus, target, tmp_path):
    raw = config(
        "peagle", corpus, tmp_path / "run", target, train_embedding=False, train_lm_head=False
    )
    raw["head"] |= {"draft_vocab": 100, "qk_norm": True, "fc_norm": True}
    assert main(["train", str(write(tmp_path / "run.yaml", raw))]) == 0
    head, model = weights.open_folder(tmp_path / "run" / "head"), weights.open_folder(target)
    assert np.array_equal(head["embed_tokens.weight"], model["model.embed_tokens.weight"])
    ids = np.arange(100) + head["d2t"]
    assert head["d2t"].dtype == np.int64 and np.array_equal(np.flatnonzero(head["t2d"]), ids)
    assert np.array_equal(head["lm_head.weight"], model["lm_head.weight"][ids])
    # the run itself, trained and frozen parts together, converts to the same folder
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "again"), "--to", "vllm"]) == 0
    assert same(tmp_path / "again", tmp_path / "run" / "head")


def test_a_reduced_vocabulary_is_that_of_the_checkpoint(corpus, target, tmp_path, capsys):
    """Also where nothing else says which data a run began with; the same corpus goes on."""
    source = tmp_path / "corpus"
    shutil.copytree(corpus, source)
    raw = config("peagle", source, tmp_path / "run", target, max_seconds=0.0)
    raw["head"] |= {"draft_vocab": 60, "layers": 1}
    path = write(tmp_path / "run.yaml", raw)
    assert main(["train", str(path)]) == 0
    (tmp_path / "run" / "data.json").unlink()
    assert main(["train", str(path)]) == 0 and rows(tmp_path / "run")[-1]["step"] == 2
    (source / "new.py").write_text("zebra = quagga\n" * 200)
    (tmp_path / "run" / "data.json").unlink()
    capsys.readouterr()
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert "resumed only with the draft vocabulary that it began with; got that of ano" in error
    assert error.count("\n") == 1 and rows(tmp_path / "run")[-1]["step"] == 2


@pytest.mark.long
def test_the_assets_recipe(corpus, target, tmp_path, capsys):
    """The packaged heads' options together.

    The target's own answers as data, prompts from a file, layers from the target with a narrower
    MLP, a depth schedule, and a second run that goes on.
    """
    model = weights.open_folder(target)
    rng = np.random.default_rng(0)
    answers = [
        {
            "prompt_token_ids": rng.integers(4, 300, 5).tolist(),
            "output_token_ids": rng.integers(4, 300, 40).tolist(),
        }
        for _ in range(20)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt_token_ids": [9, 8, 7, 30]}\n{"prompt_token_ids": [50, 60]}\n'
    )
    raw = config(
        "peagle",
        corpus,
        tmp_path / "first",
        target,
        init="target",
        train_lm_head=False,
        depth_schedule=[{"until": 5, "num_depths": 1}],
    )
    raw["head"] |= {"mlp_dim": 20, "qk_norm": True, "aux_hidden_state_layers": [1, 2, 3]}
    raw["data"] |= {"source": str(tmp_path / "answers.jsonl")}
    raw["eval"] |= {
        "every": 6,
        "prompts": str(tmp_path / "prompts.jsonl"),
        "max_new_tokens": 5,
    }
    raw["optimizer"]["peak_lr"] = 1e-7  # so small that the start can still be seen
    assert main(["train", str(write(tmp_path / "run.yaml", raw))]) == 0
    head = weights.open_folder(tmp_path / "first" / "head")
    near = functools.partial(np.testing.assert_allclose, atol=1e-5)
    near(head["midlayer.self_attn.o_proj.weight"], model["model.layers.3.self_attn.o_proj.weight"])
    near(
        head["midlayer.self_attn.q_proj.weight"][:, 32:],
        model["model.layers.3.self_attn.q_proj.weight"],
    )
    assert head["layers.1.mlp.gate_proj.weight"].shape == (20, 32) and np.array_equal(
        head["lm_head.weight"], model["lm_head.weight"]
    )
    measured = [r for r in rows(tmp_path / "first") if "acceptance_length" in r]
    assert [r["step"] for r in measured] == [6, 12]
    result = json.loads((tmp_path / "first" / "result.json").read_text())
    assert result["tokens_per_second"] > 0
    assert (
        main(["train", str(tmp_path / "run.yaml")]) == 0
    )  # nothing left to train: what was measured stays
    assert (
        json.loads((tmp_path / "first" / "result.json").read_text())["tokens_per_second"]
        == result["tokens_per_second"]
    )
    origin = json.loads((tmp_path / "first" / "origin.json").read_text())
    assert origin["jax"] == jax.__version__ and origin["device"]
    raw |= {
        "out": str(tmp_path / "second"),
        "init_from": str(tmp_path / "first" / "head"),
        "depth_schedule": [],
    }
    assert main(["train", str(write(tmp_path / "run.yaml", raw))]) == 0
    second = weights.open_folder(tmp_path / "second" / "head")
    for name in head.keys() - {"d2t", "t2d"}:
        np.testing.assert_allclose(second[name], head[name], atol=1e-5, err_msg=name)
    raw["eval"] |= {"prompts": None}
    # prompts of held-out answers; or none, which is said
    for name, held_out in (("third", 0.3), ("fourth", 0.0)):
        # init_from is a training run here, not a head's folder
        raw |= {"out": str(tmp_path / name), "init_from": str(tmp_path / "second")}
        raw["data"] |= {"held_out": held_out}
        capsys.readouterr()
        assert main(["train", str(write(tmp_path / "run.yaml", raw))]) == 0
        assert ("acceptance is not measured" in " ".join(capsys.readouterr().out.split())) == (
            held_out == 0
        )
        assert (
            json.loads((tmp_path / name / "result.json").read_text())["acceptance_length"] is None
        ) == (held_out == 0)


def test_a_markov_head_is_trained_on_top_of_a_finished_head(corpus, target, tmp_path, capsys):
    """Nothing but it changes; the head's folder is in our format; the run goes on after a stop."""
    raw = config("peagle", corpus, tmp_path / "first", target)
    raw["optimizer"]["steps"] = 2
    assert main(["train", str(write(tmp_path / "run.yaml", raw))]) == 0
    first = weights.open_folder(tmp_path / "first" / "head")
    first = {name: np.array(x) for name, x in first.items()}
    raw |= {
        "out": str(tmp_path / "second"),
        "init_from": str(tmp_path / "first" / "head"),
        "markov": {"rank": 5, "train_alone": True},
        "eval": raw["eval"] | {"every": 6, "num_prompts": 2, "max_new_tokens": 8},
    }
    raw["optimizer"]["steps"] = 12
    path = write(tmp_path / "run.yaml", raw)
    assert main(["train", str(path), "--max_seconds", "0"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_head, "target_hash", lambda folder: "of another")
        assert main(["train", str(path)]) == 2
    assert "target that it began with; got one with other weights" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "first")  # the run has what it needs of it
    assert main(["train", str(path)]) == 0
    second = weights.open_folder(tmp_path / "second" / "head")
    plain = {name.replace("layers.0.", "midlayer."): x for name, x in second.items()}
    markov = {name for name in plain if name.startswith("markov_head.")}
    assert markov == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    assert plain.keys() - markov == first.keys()
    assert all(np.array_equal(plain[name], first[name]) for name in first)
    assert np.abs(second["markov_head.markov_w2.weight"]).max() > 0
    assert rows(tmp_path / "second")[-1]["step"] == 12
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "second")]) == 0
    assert "Markov head, rank" in capsys.readouterr().out


def test_a_target_is_resumed_with_its_own_documents(corpus, tmp_path, capsys):
    """With more of them it is refused, and nothing changes; without them it goes on."""
    source, run = tmp_path / "corpus", tmp_path / "run"
    shutil.copytree(corpus, source)
    raw = config("lm", source, run, max_seconds=0.0)
    path = write(tmp_path / "lm.yaml", raw)
    assert main(["train", str(path)]) == 0
    before = (run / "tokenizer" / "tokenizer.json").read_text()
    (source / "new.py").write_text("zebra = quagga\n" * 20)
    assert main(["train", str(path)]) == 2
    assert "a run is resumed only with the data that it began with" in capsys.readouterr().err
    assert rows(run)[-1]["step"] == 1
    (source / "new.py").unlink()
    assert main(["train", str(path)]) == 0
    assert (run / "model" / "tokenizer.json").read_text() == before
    assert rows(run)[-1]["step"] == 2


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_load(path):
    assert isinstance(load_run(path), tuple(TASKS.values()))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"out": "FILE/x"}, "output folder must be writable"),
        ({"log_every": 0}, "log_every: must be 1 or more; got 0; use 50"),
        ({"data.seq_len": 0}, "data.seq_len: must be 4 or more; got 0; use 2048"),
        ({"optimizer.steps": 0}, "optimizer.steps: must be 1 or more"),
        ({"cod.num_depths": 0}, "cod.num_depths: must be 1 or more"),
        (
            {"head.aux_hidden_state_layers": [3, 2, 1]},
            "head.aux_hidden_state_layers: must ascend, as vLLM collects them; got [3, 2, 1]; "
            "write [1, 2, 3]",
        ),
        ({"head.mask_token": 99999}, "head.mask_token: must lie in 0.."),
        ({"head.draft_vocab": 99999}, "head.draft_vocab: must lie in 1.."),
        ({"head.head_dim": 32}, "the target's rotary embedding is for a head_dim of 16; got 32"),
        ({"head.heads": 3, "head.kv_heads": 2}, "head.heads: must be a multiple of kv_heads, 2"),
        ({"target": "nowhere"}, "nowhere"),
        ({"seed": "four"}, "seed: must be a whole number"),
        ({"seed": -1}, "seed: must be 0 or more"),
        ({"eval.max_new_tokens": 5000}, "must fit the target's context"),
        ({"data.seq_len": 5000}, "data.seq_len: must be at most the target's context of 4,096"),
        ({"depth_schedule": [{"until": 5, "num_depths": 3}]}, "depth_schedule: must ascend"),
        (
            {"depth_schedule": [{"until": 5, "num_depths": 1}, {"until": 5, "num_depths": 2}]},
            "depth_schedule: must ascend",
        ),
        (
            {"depth_schedule": [{"until": 5}]},
            "depth_schedule[0]: num_depths must be given; got no num_depths",
        ),
        ({"init": "lukewarm"}, "init: must be one of random, target"),
        (
            {"init": "target", "head.mlp_dim": 64},
            "the head's mlp_dim must be at most the target's, 48",
        ),
        (
            {"depth_schedule": [{"until": 12, "num_depths": 1}]},
            "depth_schedule: must end before the last of 12 steps",
        ),
        ({"init_from": "nowhere"}, "nowhere"),
        (
            {"markov": {"rank": 321}},
            "markov.rank: the Markov head's rank must lie in 1..320, the draft vocabulary; got 321",
        ),
        ({"eval.num_prompts": 0}, "eval.num_prompts: must be 1 or more; got 0; use 16"),
        ({"eval.prompts": "nowhere.jsonl"}, "nowhere.jsonl: this file must exist"),
    ],
)
def test_bad_values_are_refused_before_training(change, words, corpus, target, tmp_path, capsys):
    (tmp_path / "FILE").write_text("")
    raw = config("peagle", corpus, tmp_path / "run", target)
    for key, value in change.items():
        *parents, last = key.split(".")
        node = raw
        for p in parents:
            node = node[p]
        node[last] = str(tmp_path / value) if key == "out" else value
    assert main(["train", str(write(tmp_path / "run.yaml", raw))]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_refused_run_leaves_the_old_one_alone(corpus, target, tmp_path, capsys):
    raw = config("eagle3", corpus, tmp_path / "run", target)
    raw["optimizer"]["steps"] = 2
    path = write(tmp_path / "run.yaml", raw)
    assert main(["train", str(path)]) == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert main(["train", str(path), "--head.norm_before_residual", "True"]) == 2
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    capsys.readouterr()
