"""Training runs -> the folders of peagle_jax/assets: bf16, shards of at most 12 MB, model cards.

    .venv/bin/python scripts/make_assets.py target runs/assets/target configs/train/demo_target.yaml
    .venv/bin/python scripts/make_assets.py peagle runs/assets/peagle configs/train/demo_peagle.yaml
    .venv/bin/python scripts/make_assets.py eagle3 runs/assets/eagle3 configs/train/demo_eagle3.yaml

The target first: heads are trained on its folder here, whose weights bf16 has rounded. The card says what trained the model, on what,
for how long, and what was measured on files held out; the metrics of the training go beside it as training.jsonl.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from peagle_jax.bench.origin import provenance
from peagle_jax.pipelines.convert import convert
from peagle_jax.pipelines.demo import ASSETS
from peagle_jax.pipelines.inspect import describe, printable

SHARD = 12_000_000  # bytes
CORPUS = (
    "The source code of the Python {python} standard library, its tests included ({source}), exact duplicates removed;\n"
    "5 % of the files, by a hash of their name, held out. Its licence is the PSF License Agreement\n"
    "(https://docs.python.org/3/license.html)."
)
USES = {
    "target": "peagle generate --target {path} --prompt 'def main(' --max-new-tokens 64",
    "peagle": "peagle generate --target {assets}/target --drafter {path} -k 7 --prompt 'def main('",
    "eagle3": "peagle generate --target {assets}/target --drafter {path} -k 3 --prompt 'def main('",
}
TITLES = {
    "target": "Qwen3, 14M parameters, Python source: the target of peagle_jax's demonstration",
    "peagle": "P-EAGLE head for peagle_jax's demonstration target", "eagle3": "EAGLE-3 head for peagle_jax's demonstration target",
}  # fmt: skip


def main(kind: str, run: str, config: str) -> None:
    run, out = Path(run), ASSETS / kind
    result = json.loads((run / "result.json").read_text())
    shutil.rmtree(out, ignore_errors=True)
    if kind == "target":
        convert(run / "model", out, to="hf", dtype="bfloat16", max_shard_bytes=SHARD)
    else:
        shared = kind == "eagle3"  # its training leaves the target's embedding alone; P-EAGLE's has the mask token's row to learn
        convert(run / "head", out, to="vllm", dtype="bfloat16", target=ASSETS / "target", max_shard_bytes=SHARD, share_embedding=shared)
    shutil.copy(run / "metrics.jsonl", out / "training.jsonl")
    (out / "README.md").write_text(card(kind, out, config, yaml.safe_load((run / "config.yaml").read_text()), result), encoding="utf-8")
    size = sum(p.stat().st_size for p in ASSETS.rglob("*") if p.is_file())
    print(f"{out}: {sum(p.stat().st_size for p in out.iterdir()):,} bytes; all assets {size:,}")


def card(kind: str, out: Path, config: str, settings: dict, result: dict) -> str:
    origin = provenance(f"peagle train {config}")
    path = out.relative_to(ASSETS.parent.parent)
    facts = {key: printable(value) for key, value in describe(out).items()}
    numbers = {key: round(value, 3) if isinstance(value, float) else printable(value) for key, value in result.items() if value is not None}
    numbers = {key: value for key, value in numbers.items() if key != "folder"} | {"hours": round(result["minutes"] / 60, 2)}
    table = lambda rows: "".join(f"| {key.replace('_', ' ')} | {value} |\n" for key, value in rows.items())  # noqa: E731
    regenerated = settings["data"]["source"]
    source = "a random choice of it" if settings["data"]["max_chars"] else "all of it"
    corpus = CORPUS.format(python=origin["python"], source=source)
    if regenerated:
        corpus = f"What the target itself wrote after excerpts of its own corpus (`{regenerated}`, by `peagle regenerate`). " + corpus
    return (
        f"---\nlicense: apache-2.0\nlibrary_name: peagle_jax\n---\n# {TITLES[kind]}\n\n"
        f"Trained by `peagle train {config}`, seed {settings['seed']}, on {origin['device']};\n"
        f"jax {origin['jax']}, flax {origin['flax']}, commit {commit()}.\n\n{corpus}\n\n"
        "It is small, knows only Python, and is meant for demonstrations and tests. Stored in bfloat16, to be computed in float32.\n\n"
        f"```\n{USES[kind].format(path=path, assets=path.parent)}\n```\n\n| measured | |\n| --- | --- |\n{table(numbers)}\n"
        f"| what it is | |\n| --- | --- |\n{table(facts)}"
    )


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main(*sys.argv[1:])
