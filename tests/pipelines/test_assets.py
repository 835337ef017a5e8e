"""The models that come with the package: sizes, cards, and that target and heads fit each other."""

import importlib.util
import json
import types
from pathlib import Path

import pytest

from peagle_jax import text, weights
from peagle_jax.bench.exact import compare
from peagle_jax.checkpoints.convert import read_serving
from peagle_jax.checkpoints.pair import check_fit
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.cli import main
from peagle_jax.decode.generate import generate
from peagle_jax.decode.requests import acceptance_length
from peagle_jax.pipelines.demo import ASSETS, read_metrics, standard_prompts

KINDS = ("target", "peagle", "eagle3")
HEADS = KINDS[1:]


def test_sizes():
    shards = list(ASSETS.rglob("*.safetensors"))
    assert {p.name for p in ASSETS.iterdir()} == {*KINDS, "target_configs"}
    assert shards and all(p.stat().st_size <= 12_000_000 for p in shards)
    assert sum(p.stat().st_size for p in ASSETS.rglob("*") if p.is_file()) <= 48_000_000
    assert {
        str(t.dtype) for kind in KINDS for t in weights.open_folder(ASSETS / kind).values()
    } == {"bfloat16"}


@pytest.mark.parametrize("kind", KINDS)
def test_cards_say_where_the_model_comes_from(kind):
    card = (ASSETS / kind / "README.md").read_text()
    for words in ("peagle train configs/train/demo_", "seed", "minutes", "PSF License", "commit"):
        assert words in card, words
    assert ("bits per byte" if kind == "target" else "accepted per position") in card
    assert "/root" not in card and "/tmp" not in card


def test_transformers_computes_the_same():
    """Shards, bf16 weights and config as another library reads them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        ASSETS / "target", dtype=torch.float32
    ).eval()
    target = load_target(ASSETS / "target", aux_hidden_state_layers=())
    prompt = standard_prompts(text.load_tokenizer(ASSETS / "target"), 2)[1]
    ours = generate(target, None, [prompt], max_new_tokens=16, stop_ids=())[0].output_token_ids
    with torch.no_grad():
        answer = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert answer[0, len(prompt) :].tolist() == ours


@pytest.mark.parametrize("kind", HEADS)
def test_heads_fit_and_draft_well(kind):
    """Greedy text with the head is the target's own, and the head drafts well.

    These are trained heads on real text, in bf16 files that are read as float32.
    """
    target = load_target(
        ASSETS / "target",
        aux_hidden_state_layers=read_serving(ASSETS / kind).config.aux_hidden_state_layers,
    )
    head = load_drafter(ASSETS / kind, dtype="float32", embedding=target.params["embed"]["table"])
    check_fit(target, head)
    assert head.config.parallel == (kind == "peagle") and head.config.num_depths >= 5
    # no folder of the machine that made it
    assert read_serving(ASSETS / kind).target in (None, "peagle_jax/assets/target")
    prompts = standard_prompts(text.load_tokenizer(ASSETS / "target"), 4)
    answers = generate(target, head, prompts, k=4, max_new_tokens=48, stop_ids=())
    plain = generate(target, None, prompts, max_new_tokens=48, stop_ids=())
    texts, plain_texts = ([a.output_token_ids for a in made] for made in (answers, plain))
    assert compare(target, prompts, texts, plain_texts).lossless
    assert acceptance_length(answers) > 2.2


@pytest.mark.parametrize("kind", HEADS)
def test_training_curves_come_along(kind):
    rows = read_metrics(ASSETS / kind, "training.jsonl")
    measured = [r for r in rows if "acceptance_length" in r]
    assert len(measured) >= 5 and all(len(r["accepted_per_position"]) >= 5 for r in measured)
    assert [r["seconds"] for r in rows] == sorted(r["seconds"] for r in rows)


def test_runs_that_follow_each_other_make_one_curve(tmp_path, monkeypatch):
    """Steps and seconds are counted on from run to run.

    What a run did after its last checkpoint is left out, because the next one began there.
    """
    script = Path(__file__).parents[2] / "scripts" / "generate" / "make_assets.py"
    spec = importlib.util.spec_from_file_location("make_assets", script)
    make_assets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_assets)
    runs = []
    for name, steps, checkpoints in (("a", (2, 4, 6), (2, 4)), ("b", (2, 4), (4,))):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": s, "seconds": 10.0 * s}) for s in steps]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        for step in checkpoints:
            (tmp_path / name / "checkpoints" / str(step)).mkdir(parents=True)
        runs.append(types.SimpleNamespace(out=str(tmp_path / name), init_from=None))
    parts = [make_assets.part_of(run, None) for run in runs]
    curve = [(r["step"], r["seconds"]) for r in make_assets.joined(parts)]
    assert curve == [(2, 20), (4, 40), (6, 60), (8, 80)]
    # a first run whose folder is gone
    monkeypatch.setattr(make_assets, "ASSETS", tmp_path)
    assert not make_assets.began_from_package(runs, "a") and not make_assets.began_from_package(
        runs[:1], "a"
    )
    runs[1].init_from = str(tmp_path / "b" / ".." / "a")
    assert make_assets.began_from_package(runs, "a") and not make_assets.began_from_package(
        runs, "b"
    )
    (tmp_path / "a" / "metrics.jsonl").rename(tmp_path / "a" / "training.jsonl")
    runs[0].optimizer = types.SimpleNamespace(steps=4)  # later steps are of another run
    steps, rows = make_assets.part_of(runs[0], tmp_path / "a")
    assert steps == 4 and [row["step"] for row in rows] == [2, 4]


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ["comes with the package", "K = 1, 3, 5, 7, 11"]),
        (["--budget", "smoke"], ["K = 1, 4"]),
        (
            ["--budget", "full"],
            ["12 layers, width 768", "4 layers, K = 8", "bfloat16", "16", "to do"],
        ),
        (["--from-scratch"], ["6 layers, width 192"]),
    ],
)
def test_dry_run_says_what_would_be_done(flags, words, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "out"), "--dry-run", *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(word in said for word in words), said
    assert not (tmp_path / "out").exists()
