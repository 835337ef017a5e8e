"""The GPU suite's dry run: every row has its numbers, a second call runs what is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEP = "steps: gpt-oss-20b, 2 layers, peagle K=3, batch 2"


def suite(out: Path, *args: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        ROOT / "scripts" / "gpu_suite.py",
        "--record",
        out,
        *args,
    ]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_dry_run(tmp_path, monkeypatch):
    """Interpreters run the kernels."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from gpu.contact import GRAPHS as contact_graphs

    out = tmp_path / "rows.jsonl"
    checks = ["numerics: writes", "numerics: fusion"]
    libraries = ["losses", "library attention", "library products", "library packed attention"]
    only = ["environment", "launches", "ceilings", *checks, "numerics: mosaic", "fusion"]
    only += libraries
    done = suite(out, "--tiny", "--minutes", "60", "--seed", "7", "--only", *only)
    assert done.returncode == 0, done.stderr[-3000:]
    first = rows(out)
    done_parts = [row["done"] for row in first if "done" in row]
    assert done_parts[:3] == ["environment", "launches", "ceilings"]
    assert set(done_parts) == set(only)
    (environment,) = (row for row in first if row.get("part") == "environment")
    assert environment["versions"]["jax"] and environment["triton_kernels"] == "they run"
    assert all(name.startswith(("PATH: ", "triton: ")) for name in environment["ptxas"])
    assert str(tmp_path) not in out.read_text() and str(ROOT) not in out.read_text()
    launches = [row for row in first if row.get("part") == "launches"]
    assert [set(row["us"]) for row in launches] == 2 * [set(contact_graphs)] + [{"one call"}]
    assert not any(row["errors"] for row in launches)
    # every kernel ran beside its reference
    numerics = [row for row in first if row.get("part") == "numerics"]
    for check, kernel in zip(checks, ("cache_write", "fusion"), strict=True):
        forms = {row["form"] for row in numerics if row["unit"] == check}
        assert forms == {"reference", "triton"}, check
        assert {row["kernel"] for row in numerics if row["unit"] == check} == {kernel}
    assert all(row["right"] and row["error"] < 0.01 for row in numerics)
    assert all(row["error"] > 0 or row["kernel"] == "cache_write" for row in numerics)
    times = next(row["us"] for row in first if row.get("part") == "fusion")
    assert set(times) == {"xla bf16", "triton bf16", "triton fp8"}
    # without cuDNN its forms have a reason where the others have times
    by_library = {row["part"]: row for row in first if row.get("part") in libraries}
    assert set(by_library) == set(libraries)
    for part in ("library attention", "library packed attention"):
        row = by_library[part]
        assert set(row["us"]) == {"xla", "reference", "triton"} and set(row["not_run"]) == {"cudnn"}
        assert "cuDNN" in row["not_run"]["cudnn"]
    ours = {"xla bf16", "xla fp8", "triton blocks"}
    row = by_library["library products"]
    assert set(row["us"]) | set(row["not_run"]) == ours | {"scaled_matmul fp8"}
    assert ours <= set(row["us"])
    row = by_library["losses"]
    assert set(row["us"]) == {"xla, all logits", "chunks of 8"} and not row["not_run"]
    assert "cudnn does not run: " in " ".join(done.stdout.split())
    assert "numerics, against float64" in done.stdout

    out.write_text(out.read_text() + '{"part": "fusi')  # a kill, while a row was written
    again = suite(out, "--tiny", "--only", "ceilings", *checks, "fusion", "numerics: topk")
    assert again.returncode == 0 and "topk (" in again.stderr
    assert not any(check in again.stderr for check in checks)
    assert [row["done"] for row in rows(out) if "done" in row] == [*done_parts, "numerics: topk"]


def test_dry_run_of_steps(tmp_path):
    """Of whole models, interpreted."""
    out = tmp_path / "rows.jsonl"
    profile = "profile: qwen3-coder-30b-a3b-instruct, 2 layers, none K=0, batch 1"
    done = suite(out, "--tiny", "--minutes", "60", "--seed", "7", "--only", STEP, profile)
    assert done.returncode == 0, done.stderr[-3000:]
    assert STEP.removeprefix("steps: ")[:20] in done.stdout
    all_rows = rows(out)
    profiles = [row for row in all_rows if row.get("part") == "profile"]
    assert [row["way"] for row in profiles] == ["graphs with loops", "no graphs"]
    assert all(row["steps"] == 3 and row["kernels"] == [] for row in profiles)  # no GPU, no kernels
    steps = [row for row in all_rows if row.get("part") == "steps"]
    assert [row["routing"] for row in steps] == ["even", "alike"]
    for row in steps:  # 3 steps of 2 rows that take 1 to 4 tokens each
        assert row["synthetic_acceptance"]
        assert row["tokens_a_step"] == pytest.approx(1 + 0.63 + 0.38 + 0.23)
        assert 1 <= row["tokens_drawn"] <= 4
        assert row["tokens_per_s"] == pytest.approx(2 * row["tokens_a_step"] / row["step_us"] * 1e6)
    assert steps[0]["floor_us"] > steps[1]["floor_us"]
    assert steps[1]["experts_read"] == 4 < 6 < steps[0]["experts_read"] <= 8


def test_a_profile_tells_kernels_apart(monkeypatch, tmp_path):
    """By name and grid; other lines of a trace repeat the same times, and hosts have none."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from types import SimpleNamespace as Fake

    from gpu import profiling

    def event(name, grid, start, duration):
        details = [("kernel_details", f"regs:40 static_shared:0 grid:{grid},1,1 block:128,1,1")]
        return Fake(name=name, start_ns=start, duration_ns=duration, stats=details)

    events = [event("kernel", 3, 0, 2000), event("kernel", 9, 3000, 500)]
    events.append(event("kernel", 3, 5000, 1000))
    lines = [Fake(name="Stream #7(Compute)", events=events), Fake(name="XLA Ops", events=events)]
    planes = [Fake(name="/device:GPU:0", lines=lines), Fake(name="/host:CPU", lines=lines)]
    (tmp_path / "a.xplane.pb").touch()
    loader = Fake(from_file=lambda path: Fake(planes=planes))
    monkeypatch.setattr(profiling.jax.profiler, "ProfileData", loader)
    kernels, span = profiling.read(tmp_path)
    assert kernels == {
        "kernel regs:40 grid:3,1,1 block:128,1,1": (2, 3000),
        "kernel regs:40 grid:9,1,1 block:128,1,1": (1, 500),
    }
    assert span == 6000


def test_rows_have_no_folders_of_a_machine(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from gpu import contact

    def first_line(path, *_, last):
        return {"/opt/cuda/bin/ptxas": "Build cuda_13.0.r13.0"}.get(path, "cuda_12.9")

    monkeypatch.setattr(contact.shutil, "which", lambda name: f"/opt/cuda/bin/{name}")
    monkeypatch.setattr(contact, "first_line", first_line)
    found = contact.assemblers()
    assert found.pop("PATH: ptxas") == "13.0"
    assert all(name.startswith("triton: ptxas") and found[name] == "12.9" for name in found)


def test_needs_a_gpu(tmp_path):
    done = suite(tmp_path / "rows.jsonl")
    assert done.returncode == 2 and "needs a GPU, and JAX runs on cpu" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "method, want", [("peagle", [0.63, 0.63 * 38 / 63]), ("eagle3", [0.71, 0.49])]
)
def test_rates_are_the_published_ones(method, want, monkeypatch):
    """A chance is of a draft whose predecessor was accepted; products are rates of all drafts."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import numpy as np
    from gpu import steps

    share = np.cumprod(np.asarray(steps.chances(method, 11)))
    np.testing.assert_allclose(share[:2], want, rtol=1e-5)
    np.testing.assert_allclose(share[8:] / share[7:-1], 0.6, rtol=1e-5)


def test_speedups_are_of_whole_targets_and_of_the_best_eagle3(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_suite

    case = {
        "part": "steps",
        "target": "t",
        "batch": 1,
        "routing": "even",
        "experts_read": 3.5,
        "step_us": 2000.0,
        "floor_us": 500.0,
    }
    speeds = [
        ("none", None, 100.0),
        ("eagle3", None, 200.0),
        ("eagle3", None, 250.0),
        ("peagle", None, 400.0),
        ("peagle", 6, 999.0),
    ]
    gpu_suite.show(
        [
            case | {"case": f"{m} {n} {t}", "method": m, "layers": n, "tokens_per_s": t}
            for m, n, t in speeds
        ]
    )
    out = capsys.readouterr().out
    whole = next(line for line in out.splitlines() if "peagle None" in line)
    assert all(number in whole for number in ("4.00", "1.60", "2.00"))  # of plain, of EAGLE-3; ms
    six_layers = next(line for line in out.splitlines() if "peagle 6" in line)
    assert "999.00" in six_layers and "9.99" not in six_layers


def test_what_the_code_is_decides_what_is_run_again(monkeypatch, tmp_path):
    """Not what git has committed; a file of results changes nothing."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_suite

    for name in (
        "scripts/gpu_suite.py",
        "scripts/gpu/speed.py",
        "peagle_jax/kernels/vocab.py",
        "results/gpu.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(gpu_suite, "__file__", str(tmp_path / "scripts/gpu_suite.py"))
    fingerprints = [gpu_suite.fingerprint()]
    for name in ("results/gpu.jsonl", "peagle_jax/kernels/vocab.py", "scripts/gpu/speed.py"):
        (tmp_path / name).write_text("two")
        fingerprints.append(gpu_suite.fingerprint())
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == 3
