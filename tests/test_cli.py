"""The command line: what it prints and writes, and that every mistake is one line, exit code 2, nothing half-written."""

import json
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny

from peagle_jax import text
from peagle_jax.checkpoints.head_io import save_drafter
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.cli import main
from peagle_jax.decode import generate as generate_module

VOCAB = 300


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with a tokenizer, and heads that fit it or not."""
    root = tmp_path_factory.mktemp("cli")
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n" * 50], VOCAB)
    tokenizer.save_pretrained(root / "tokenizer")
    vocab = len(tokenizer)
    save_target(
        tiny.target(vocab=vocab, context=300), root / "target", tokenizer_from=root / "tokenizer"
    )
    save_target(tiny.target(vocab=43), root / "few_rows", tokenizer_from=root / "tokenizer")
    save_drafter(tiny.head(vocab=vocab, draft_vocab=vocab), root / "peagle")
    save_drafter(tiny.head(vocab=vocab, draft_vocab=vocab, mask_token=None), root / "eagle3")
    save_drafter(tiny.head(vocab=vocab, draft_vocab=vocab, target_dim=25), root / "wide")
    save_drafter(tiny.head(vocab=43, draft_vocab=43), root / "other_vocab")
    save_drafter(
        tiny.head(vocab=vocab, draft_vocab=vocab, aux_hidden_state_layers=(1, 2, 9)),
        root / "high_tap",
    )
    (root / "prompts.jsonl").write_text(
        '{"prompt": "def f"}\n{"prompt_token_ids": [9, 8, 7]}\n{"turns": ["hi"]}\n'
    )
    return root


def run(capsys, *args) -> tuple[int, str, str]:
    code = main([str(a) for a in args])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_generate_writes_rows(folders, capsys, tmp_path):
    rows = {}
    for method, extra in {"none": [], "peagle": ["-k", 3], "eagle3": ["-k", 3]}.items():
        out = tmp_path / f"{method}.jsonl"
        drafter = [] if method == "none" else ["--drafter", folders / "peagle"]
        code, _, err = run(
            capsys,
            "generate",
            "--target",
            folders / "target",
            *drafter,
            "--method",
            method,
            "--prompts",
            folders / "prompts.jsonl",
            "--max-new-tokens",
            12,
            "--batch-size",
            2,
            "--out",
            out,
            *extra,
        )
        assert code == 0, err
        rows[method] = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows["none"]) == 3 and rows["none"][1]["prompt_token_ids"] == [9, 8, 7]
    for method in ("peagle", "eagle3"):
        assert [r["output_token_ids"] for r in rows[method]] == [
            r["output_token_ids"] for r in rows["none"]
        ]
    row = rows["peagle"][0]
    assert (
        row["num_draft_tokens"] == 3 * row["num_drafts"] and len(row["accepted_per_position"]) == 3
    )
    assert row["acceptance_length"] == pytest.approx(
        1 + row["num_accepted_tokens"] / row["num_drafts"]
    )
    assert (
        isinstance(row["text"], str)
        and row["finish_reason"] == "length"
        and rows["none"][0]["acceptance_length"] is None
    )


def test_generate_in_fp8(folders, capsys, tmp_path, monkeypatch):
    """The flags reach the model, the head and the cache."""
    seen = []
    real = generate_module.run

    def watch(program, target, draft, *rest):
        return seen.append((program.target_config.cache_dtype, target, draft)) or real(
            program, target, draft, *rest
        )

    monkeypatch.setattr(generate_module, "run", watch)
    code, _, err = run(
        capsys,
        "generate",
        "--target",
        folders / "target",
        "--drafter",
        folders / "peagle",
        "-k",
        2,
        "--prompt",
        "def f",
        "--max-new-tokens",
        6,
        "--dtype",
        "fp8",
        "--kv-cache-dtype",
        "fp8",
        "--out",
        tmp_path / "out.jsonl",
    )
    assert code == 0, err
    cache, target, head = seen[0]
    assert (
        np.dtype(cache).itemsize == 1
        and target["blocks"][0]["attn"]["q"]["values"].dtype.itemsize == 1
    )
    assert (
        head["lm_head"]["values"].dtype.itemsize == 1
        and target["embed"]["table"].dtype == "bfloat16"
    )
    assert len(json.loads((tmp_path / "out.jsonl").read_text())["output_token_ids"]) == 6


def test_generate_prints_text_and_samples_by_seed(folders, capsys):
    ask = [
        "generate",
        "--target",
        folders / "target",
        "--drafter",
        folders / "peagle",
        "-k",
        2,
        "--prompt",
        "def f",
        "--max-new-tokens",
        8,
        "--temperature",
        1.0,
        "--top-k",
        50,
        "--top-p",
        0.95,
    ]
    first, second, other = (run(capsys, *ask, "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == second != other
    assert run(capsys, *ask, "--seed", 1, "--greedy-drafts", "--dtype", "bfloat16")[0] == 0


def test_one_device_program_and_no_second_compilation(folders, monkeypatch):
    """The host is not asked between steps, and the same shapes compile nothing the second time."""
    calls, compiled = [], []
    real = generate_module.run
    monkeypatch.setattr(generate_module, "run", lambda *args: calls.append(1) or real(*args))
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )

    def ask(prompts):
        return generate_module.generate(
            tiny.target(), tiny.head(), prompts, k=5, max_new_tokens=30, cache_size=64
        )

    ask([[1, 2, 3], [4]])
    compiled.clear()
    answers = ask([[7, 8], [9, 1, 2, 3, 4]])
    assert not compiled and len(calls) == 2
    assert (
        sum(len(a.output_token_ids) for a in answers) == 60
    )  # two calls of one program for 120 tokens


def test_inspect_and_serve_config(folders, capsys):
    code, out, _ = run(capsys, "inspect", folders / "peagle", "--json")
    facts = json.loads(out)
    assert (
        code == 0
        and facts["kind"] == "draft head"
        and facts["layout"] == "vllm"
        and facts["mask token"] == 5
    )
    assert (
        facts["taps, vLLM numbering (input of layer i)"] == [1, 2, 3]
        and facts["missing tensors"] == "none"
        and facts["trained for K"] == 6
    )
    assert json.loads(run(capsys, "inspect", folders / "target", "--json")[1])["kind"] == "target"
    assert "one by one (EAGLE-3)" in run(capsys, "inspect", folders / "eagle3")[1]
    for engine in ("vllm", "sagemaker"):
        words = shlex.split(
            run(capsys, "serve-config", folders / "peagle", "--engine", engine, "--k", 4)[1]
        )
        flags = json.loads(words[-1].removeprefix("SM_VLLM_SPECULATIVE_CONFIG="))
        assert flags == {
            "method": "eagle3",
            "model": str(folders / "peagle"),
            "num_speculative_tokens": 4,
            "parallel_drafting": True,
        }
    assert (
        json.loads(
            shlex.split(run(capsys, "serve-config", folders / "peagle", "--engine", "vllm")[1])[-1]
        )["num_speculative_tokens"]
        == 6
    )


def test_bench_records_and_reports(folders, capsys, tmp_path):
    code, out, err = run(
        capsys,
        "bench",
        "--target",
        folders / "target",
        "--drafter",
        folders / "peagle",
        "--drafter",
        folders / "eagle3",
        "--prompts",
        folders / "prompts.jsonl",
        "--k",
        "1,3",
        "--concurrency",
        "2",
        "--max-new-tokens",
        8,
        "--repeats",
        1,
        "--out",
        tmp_path / "out",
    )
    assert code == 0, err
    records = [
        json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    ]
    assert [(r["method"], r["k"]) for r in records] == [
        ("none", 0),
        ("eagle3", 1),
        ("eagle3", 3),
        ("peagle", 1),
        ("peagle", 3),
    ]
    assert all(
        r["lossless"] and r["draft_seconds"] > 0 and r["break_even"] > 0 for r in records[1:]
    )
    assert {"commit", "command", "device", "jax", "time"} <= records[0].keys()
    assert "EAGLE-3" in (tmp_path / "out" / "report.html").read_text()


def test_convert_what_a_folder_leaves_open(folders, capsys, tmp_path):
    """Flags for what a config does not say, a warning of one line for NaN, and the command in the metadata without anybody's paths."""
    from checkpoints.folder_edits import edit

    from peagle_jax import weights

    def change(tensors):
        vocab = len(tensors["embed_tokens.weight"])
        norm = tensors["norm.weight"].copy()
        norm[3] = float("nan")
        return tensors | {"d2t": np.zeros(vocab, np.int64), "norm.weight": norm}

    edit(folders / "peagle", tmp_path / "a", change, mask_token_id=..., ptd_token_id=...)
    code, out, err = run(
        capsys,
        "convert",
        tmp_path / "a",
        tmp_path / "b",
        "--to",
        "vllm",
        "--mask-token",
        7,
        "--tap-numbering",
        "output",
        "--identity-d2t",
        "--k",
        3,
    )
    assert (
        code == 0
        and err == "peagle: warning: model.safetensors: norm.weight holds NaN or infinite numbers\n"
        and "-> " in out
    )
    facts = json.loads(run(capsys, "inspect", tmp_path / "b", "--json")[1])
    assert (
        facts["mask token"] == 7
        and facts["taps, vLLM numbering (input of layer i)"] == [2, 3, 4]
        and facts["trained for K"] == 3
    )
    assert facts["vocabulary tables"] == ["d2t"] and facts["file says: source"] == "a"
    assert weights.read_metadata(tmp_path / "b")["command"].startswith("peagle ") and str(
        tmp_path
    ) not in str(weights.read_metadata(tmp_path / "b"))


def test_serve_config_names_what_the_folder_names(folders, capsys, tmp_path):
    assert (
        run(
            capsys,
            "convert",
            folders / "peagle",
            tmp_path / "b",
            "--to",
            "speculators",
            "--target",
            folders / "target",
        )[0]
        == 0
    )
    assert (
        f"vllm serve {folders / 'target'} --spec"
        in run(capsys, "serve-config", tmp_path / "b", "--engine", "vllm")[1]
    )
    assert (
        "vllm serve other --spec"
        in run(capsys, "serve-config", tmp_path / "b", "--engine", "vllm", "--target", "other")[1]
    )
    assert (
        "vllm serve TARGET --spec"
        in run(capsys, "serve-config", folders / "peagle", "--engine", "vllm")[1]
    )


def test_serve_config_refuses_what_vllm_would(folders, capsys, tmp_path):
    from checkpoints.folder_edits import edit

    cases = {
        "identity": (
            lambda t: t | {"d2t": np.zeros(len(t["embed_tokens.weight"]), np.int64)},
            {},
            "refuses d2t at full vocabulary",
        ),
        "windows": (
            None,
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
            "all layers have one sliding window",
        ),
        "lacking": (
            lambda t: {n: x for n, x in t.items() if n != "norm.weight"},
            {},
            "missing: norm.weight",
        ),
        "automodel": (
            None,
            {"architectures": ["LlamaEagle3DraftModel"]},
            "serves the layouts vllm, speculators; got automodel",
        ),
    }
    for name, (change, keys, words) in cases.items():
        source = edit(folders / "peagle", tmp_path / name, change, **keys)
        code, out, err = run(capsys, "serve-config", source, "--engine", "vllm")
        assert code == 2 and words in err and not out, (name, err)


def test_convert_a_target(folders, capsys, tmp_path):
    assert (
        run(
            capsys,
            "convert",
            folders / "target",
            tmp_path / "t",
            "--to",
            "hf",
            "--dtype",
            "bfloat16",
        )[0]
        == 0
    )
    facts = json.loads(run(capsys, "inspect", tmp_path / "t", "--json")[1])
    assert facts["dtypes"] == ["bfloat16"] and facts["tokenizer"]


def bad_cases(folders, tmp_path):
    target, peagle, prompts = folders / "target", folders / "peagle", folders / "prompts.jsonl"
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    (tmp_path / "file").write_text("")
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": ["a"]}\n')
    (tmp_path / "turns.jsonl").write_text('{"turns": "hello"}\n')
    cut = tmp_path / "cut"
    cut.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (cut / name).write_bytes((target / name).read_bytes())
    (cut / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes()[:-100])
    raw = folders.parent / "run.yaml"
    raw.write_text("task: lm\nout: x\nspeed: 3\n")
    lacking = folders.parent / "lacking.yaml"
    lacking.write_text("task: lm\nout: x\n")
    odd = folders.parent / "odd.yaml"
    odd.write_text("task: chess\n")
    ask = ["generate", "--target", target]
    return {
        "missing checkpoint": (
            ["generate", "--target", "nowhere", "--prompt", "x"],
            ["nowhere", "must exist"],
        ),
        "truncated checkpoint": (
            ["generate", "--target", cut, "--prompt", "x"],
            ["cut/model.safetensors", "truncated"],
        ),
        "tokenizer too large": (
            ["generate", "--target", folders / "few_rows", "--prompt", "x"],
            ["few_rows", "has 43 rows", "a tokenizer that needs"],
        ),
        "no chunk": (
            [*ask, "--prompt", "x", "--prefill-chunk", "0"],
            ["prefill_chunk", "at least one token"],
        ),
        "unknown key": (["train", raw], ["run.yaml", "unknown speed", "remove"]),
        "missing key": (["train", lacking], ["lacking.yaml", "no seed", "add it"]),
        "unknown task": (["train", odd], ["odd.yaml", "got chess"]),
        "no config": (["train", tmp_path / "no.yaml"], ["no.yaml", "must exist"]),
        "drafter of another width": (
            [*ask, "--drafter", folders / "wide", "--prompt", "x"],
            ["wide", "width 24; got 25"],
        ),
        "drafter of another vocabulary": (
            [*ask, "--drafter", folders / "other_vocab", "--prompt", "x"],
            ["other_vocab", "got 43"],
        ),
        "drafter with taps too high": (
            [*ask, "--drafter", folders / "high_tap", "--prompt", "x"],
            ["0..4", "[9]"],
        ),
        "drafter is a target": (
            [*ask, "--drafter", target, "--prompt", "x"],
            ["target", "must be a draft head"],
        ),
        "target is a drafter": (
            ["generate", "--target", peagle, "--prompt", "x"],
            ["peagle/config.json", "must be a target's config"],
        ),
        "parallel drafting without placeholders": (
            [*ask, "--drafter", folders / "eagle3", "--method", "peagle", "--prompt", "x"],
            ["mask token"],
        ),
        "method without drafter": (
            [*ask, "--method", "peagle", "--prompt", "x"],
            ["--method", "no --drafter"],
        ),
        "prompt longer than the context": ([*ask, "--prompt", "x " * 200], ["prompt 0", "300"]),
        "K below 1": ([*ask, "--drafter", peagle, "-k", 0, "--prompt", "x"], ["K", "got 0"]),
        "no new tokens": (
            [*ask, "--prompt", "x", "--max-new-tokens", 0],
            ["max_new_tokens", "got 0"],
        ),
        "empty prompt": ([*ask, "--prompt", ""], ["at least one token"]),
        "temperature below 0": (
            [*ask, "--prompt", "x", "--temperature", -1],
            ["temperature", "-1"],
        ),
        "temperature not a number": (
            [*ask, "--prompt", "x", "--temperature", "nan"],
            ["temperature", "nan"],
        ),
        "seed below 0": (
            [*ask, "--prompt", "x", "--temperature", 1, "--seed", -1],
            ["--seed", "-1"],
        ),
        "token ids of another kind": (
            [*ask, "--prompts", tmp_path / "ids.jsonl"],
            ["ids.jsonl:1", "whole numbers"],
        ),
        "turns of another kind": (
            [*ask, "--prompts", tmp_path / "turns.jsonl"],
            ["turns.jsonl:1", "turns"],
        ),
        "prompts below a file": (
            [*ask, "--prompts", tmp_path / "file" / "x"],
            ["file/x", "readable"],
        ),
        "output is a folder": ([*ask, "--prompt", "x", "--out", cut], ["cut", "writable"]),
        "over a folder of runs": (
            ["convert", peagle, folders, "--to", "vllm"],
            ["only a checkpoint folder is replaced"],
        ),
        "serve with K of 0": (
            ["serve-config", peagle, "--engine", "vllm", "--k", 0],
            ["K must be 1"],
        ),
        "no repeats": (
            [
                "bench",
                "--target",
                target,
                "--drafter",
                peagle,
                "--repeats",
                0,
                "--out",
                tmp_path / "b",
            ],
            ["--repeats", "0"],
        ),
        "two heads of a kind": (
            [
                "bench",
                "--target",
                target,
                "--drafter",
                peagle,
                "--drafter",
                peagle,
                "--out",
                tmp_path / "b",
            ],
            ["two for peagle"],
        ),
        "config is a folder": (["train", tmp_path], ["readable"]),
        "empty prompt file": (
            [*ask, "--prompts", tmp_path / "empty.jsonl"],
            ["empty.jsonl", "at least one prompt"],
        ),
        "not UTF-8": (
            [*ask, "--prompts", tmp_path / "latin.jsonl"],
            ["latin.jsonl", "UTF-8", "0xe9"],
        ),
        "no prompt file": ([*ask, "--prompts", tmp_path / "no.jsonl"], ["no.jsonl", "must exist"]),
        "unwritable output": (
            [*ask, "--prompt", "x", "--max-new-tokens", 4, "--out", tmp_path / "file" / "x"],
            ["file/x", "writable"],
        ),
        "unwritable folder": (
            ["convert", peagle, tmp_path / "file" / "x", "--to", "vllm"],
            ["file/x", "writable"],
        ),
        "output is a file": (
            ["convert", peagle, tmp_path / "file", "--to", "vllm"],
            ["file", "must be a folder"],
        ),
        "unwritable demo": (["demo", "--out", tmp_path / "file" / "x"], ["file/x", "writable"]),
        "K for a target": (
            ["convert", target, tmp_path / "x", "--to", "hf", "--k", 3],
            ["--k", "has no use for it"],
        ),
        "target for a target": (
            ["convert", target, tmp_path / "x", "--to", "hf", "--target", target],
            ["--target", "has no use for it"],
        ),
        "sharing without a target": (
            ["convert", peagle, tmp_path / "x", "--to", "vllm", "--share-embedding"],
            ["--share-embedding", "needs the --target"],
        ),
        "shards without a unit": (
            ["convert", peagle, tmp_path / "x", "--to", "vllm", "--max-shard-size", "12"],
            ["--max-shard-size", "5GB"],
        ),
        "one new token": (
            [
                "bench",
                "--target",
                target,
                "--drafter",
                peagle,
                "--max-new-tokens",
                1,
                "--out",
                tmp_path / "b",
            ],
            ["ask for 2 or more"],
        ),
        "onto itself": (["convert", peagle, peagle, "--to", "vllm"], ["another folder"]),
        "unknown flag": ([*ask, "--prompt", "x", "--speed", 9], ["--speed 9"]),
        "unknown choice": (["convert", peagle, tmp_path / "x", "--to", "onnx"], ["onnx", "--help"]),
        "bad list of K": (
            [
                "bench",
                "--target",
                target,
                "--drafter",
                peagle,
                "--prompts",
                prompts,
                "--k",
                "1,x",
                "--out",
                tmp_path / "b",
            ],
            ["--k", "1,x"],
        ),
        "inspect nothing": (["inspect", tmp_path / "file"], ["must exist", "a file"]),
        "serve a target": (["serve-config", target, "--engine", "vllm"], ["must be a draft head"]),
    }


def test_every_mistake_is_one_line(folders, capsys, tmp_path):
    before = None
    for name, (args, words) in bad_cases(folders, tmp_path).items():
        if before is None:
            before = sorted(p for p in tmp_path.rglob("*"))
        code, out, err = run(capsys, *args)
        assert code == 2, f"{name}: exit code {code}\n{err}"
        assert err.startswith("peagle: ") and err.count("\n") == 1, f"{name}: {err!r}"
        assert all(w in err for w in words), f"{name}: {err!r} should have {words}"
    assert sorted(p for p in tmp_path.rglob("*")) == before, "something was left behind"


def test_as_a_program(folders):
    """The installed entry point, in a process of its own."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "peagle_jax.cli",
            "generate",
            "--target",
            "nowhere",
            "--prompt",
            "x",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("platform, said", [("gpu", 1), ("cpu", 0)])
def test_kernels_say_on_a_gpu_which_run(platform, said, capsys, monkeypatch):
    from peagle_jax.kernels import choose, launch

    run(capsys, "inspect", "nowhere")
    monkeypatch.setattr(launch, "platform", lambda: platform)
    choose._serving.cache_clear()
    for _ in range(2):  # once is enough
        choose.choose("attention", "auto", ("reference", "triton"), "they are tired")
    err = capsys.readouterr().err
    assert (
        err.count("peagle: attention: reference, because of triton kernels ")
        == said
        == err.count("\n")
    )


def test_overrides_must_be_keys(folders, capsys, tmp_path):
    from pathlib import Path

    config = Path(__file__).parent.parent / "configs" / "train" / "demo_target.yaml"
    code, _, err = run(capsys, "train", config, "--optimizer.speed", "3")
    assert code == 2 and "--optimizer.speed 3" in err and err.count("\n") == 1
    code, _, err = run(
        capsys,
        "train",
        config.with_name("demo_peagle.yaml"),
        "--out",
        tmp_path / "x",
        "--optimizer.steps",
        "4000",
    )
    assert code == 2 and err.count("\n") == 1 and not (tmp_path / "x").exists(), err
