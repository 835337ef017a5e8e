"""Makes the folders of peagle_jax/assets from training runs: bf16, small shards, model cards.

    make=".venv/bin/python scripts/generate/make_assets.py"
    $make target configs/train/demo_target.yaml
    $make peagle configs/train/demo_peagle{,_longer}.yaml
    $make eagle3 configs/train/demo_eagle3{,_greedy}.yaml

With several recipes, each run began where the one before had stopped. Where the second began from
the packaged folder itself (`init_from`), the first run's folder is not needed any more: its metrics
are in the package. The target is made first, because heads are trained on its folder here, whose
weights are rounded to bf16. The card says what trained the model, on what, for how long, and what
was measured on held-out files. The metrics of the training are written beside it as training.jsonl.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.flax import load_file, save_file

from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.inspect import describe, printable, printable_rows
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.train.config import load_run
from peagle_jax.train.settings import differences

ROOT = ASSETS.parent.parent
SHARD = 12_000_000  # bytes
CORPUS = (
    "The source code of the Python {python} standard library, its tests included, exact\n"
    "duplicates removed; 5 % of the files, by a hash of their name, held out. Its license is the\n"
    "PSF License Agreement (https://docs.python.org/3/license.html)."
)
USES = {
    "target": "peagle generate --target {path} --prompt 'def main(' --max-new-tokens 64",
    "peagle": "peagle generate --target {assets}/target --drafter {path} -k 7 --prompt 'def main('",
    "eagle3": "peagle generate --target {assets}/target --drafter {path} -k 3 --prompt 'def main('",
}
TITLES = {
    "target": "Qwen3, 14M parameters, Python source: the target of peagle_jax's demonstration",
    "peagle": "P-EAGLE head for peagle_jax's demonstration target",
    "eagle3": "EAGLE-3 head for peagle_jax's demonstration target",
}


def main(kind: str, *configs: str) -> None:
    runs = [load_run(Path(config)) for config in configs]
    is_packaged = {run.out: run is runs[0] and began_from_package(runs, kind) for run in runs}
    for config, run in zip(configs, runs, strict=True):
        if is_packaged[run.out]:
            continue
        if changed := differences(load_run(Path(run.out) / "config.yaml"), run):
            raise SystemExit(f"{config} is not what trained {run.out}: {'; '.join(changed)}")
    last, out = Path(runs[-1].out), ASSETS / kind
    result = json.loads((last / "result.json").read_text())
    parts = [part_of(run, ASSETS / kind if is_packaged[run.out] else None) for run in runs]
    rows = joined(parts)
    with tempfile.TemporaryDirectory(dir=ASSETS.parent) as work:
        work = Path(work) / kind
        if kind == "target":
            convert(last / "model", work, to="hf", dtype="bfloat16", max_shard_bytes=SHARD)
        else:
            convert(
                last / "head",
                work,
                to="vllm",
                dtype="bfloat16",
                target=ASSETS / "target",
                max_shard_bytes=SHARD,
                share_embedding=not runs[-1].train_embedding,
            )
            name_target(work / "model.safetensors")
        (work / "training.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
        result |= {
            "step": rows[-1]["step"],
            "minutes": round(rows[-1]["seconds"] / 60, 1),
        }
        (work / "README.md").write_text(
            card(kind, work, out, configs, runs, parts, result), encoding="utf-8"
        )
        shutil.rmtree(out, ignore_errors=True)
        work.rename(out)
    size = sum(p.stat().st_size for p in ASSETS.rglob("*") if p.is_file())
    print(f"{out}: {sum(p.stat().st_size for p in out.iterdir()):,} bytes; all assets {size:,}")


def name_target(file: Path) -> None:
    """The metadata name the target by its place in the project, not by a folder of this machine."""
    with safe_open(file, "flax") as opened:
        metadata = opened.metadata()
    metadata["target"] = (ASSETS / "target").relative_to(ROOT).as_posix()
    save_file(load_file(file), file, metadata)


def began_from_package(runs, kind: str) -> bool:
    """Whether the second run began from the packaged folder."""
    return len(runs) > 1 and Path(runs[1].init_from or "").resolve() == (ASSETS / kind).resolve()


def part_of(run, packaged: Path | None) -> tuple[int, list[dict]]:
    """The steps of a run up to its last checkpoint, and their metrics.

    Those of a run that is `packaged` are the first ones there.
    """
    if packaged is not None:
        steps, file = run.optimizer.steps, packaged / "training.jsonl"
    else:
        checkpoints = (Path(run.out) / "checkpoints").glob("[0-9]*")
        steps, file = max(int(path.name) for path in checkpoints), Path(run.out) / "metrics.jsonl"
    return steps, [row for row in read_lines(file) if row["step"] <= steps]


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def joined(parts: list[tuple[int, list[dict]]]) -> list[dict]:
    """The metrics of all runs as of one: steps and seconds run on."""
    rows: list[dict] = []
    step, seconds = 0, 0.0
    for steps, of_run in parts:
        rows += [
            row | {"step": step + row["step"], "seconds": round(seconds + row["seconds"], 3)}
            for row in of_run
        ]
        step, seconds = step + steps, rows[-1]["seconds"]
    return rows


def card(kind: str, folder: Path, out: Path, configs, runs, parts, result: dict) -> str:
    origin = json.loads((Path(runs[-1].out) / "origin.json").read_text())
    path = out.relative_to(ROOT)
    facts = printable_rows(describe(folder))
    numbers = {
        key: round(value, 3) if isinstance(value, float) else printable(value)
        for key, value in result.items()
        if value is not None
    }
    # the facts have the folder's own number of parameters
    for key in ("folder", "tokens_per_second", "parameters"):
        numbers.pop(key, None)

    def table(rows):
        return "".join(f"| {key.replace('_', ' ')} | {value} |\n" for key, value in rows.items())

    commands = ",\nthen ".join(
        f"`peagle train {config}` ({steps:,} steps)"
        for config, (steps, _) in zip(configs, parts, strict=True)
    )
    corpus = CORPUS.format(python=origin["python"])
    if sources := sorted({run.data.source for run in runs if run.data.source}):
        names = " and ".join(f"`{name}`" for name in sources)
        corpus = (
            f"What the target itself wrote after excerpts of its own corpus\n({names}; "
            f"`peagle regenerate`).\n{corpus}"
        )
    return (
        f"---\nlicense: apache-2.0\nlibrary_name: peagle_jax\n---\n# {TITLES[kind]}\n\n"
        f"Trained by {commands},\nseed {runs[0].seed}, on {origin['device']}; "
        f"jax {origin['jax']}, flax {origin['flax']}, commit {origin['commit']}.\n\n{corpus}\n\n"
        "It is small, knows only Python, and is meant for demonstrations and tests.\n"
        "It is stored in bfloat16, to be computed in float32.\n\n"
        f"```\n{USES[kind].format(path=path, assets=path.parent)}\n```\n\n"
        f"| measured | |\n| --- | --- |\n{table(numbers)}\n"
        f"| what it is | |\n| --- | --- |\n{table(facts)}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
