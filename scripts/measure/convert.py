"""Memory and speed of `peagle convert` on a folder of 4 GB, beside a plain copy of its bytes, in turns.

    .venv/bin/python scripts/measure/convert.py [--gigabytes 4] [--rounds 3] [--work runs/convert] [--out results/convert.jsonl]

The head is of GPT-OSS-20B's shape (width 2880, vocabulary 201,088; layers until the size is reached), the target a Qwen3 of the same bytes.
Each conversion is a process of its own: seconds are wall time without its imports; memory is the peak of its resident set beyond what
the imports take, and the part of it that is its own (anonymous), both from /proc.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

CHILD = """
import sys, threading, time
from pathlib import Path
from peagle_jax.checkpoints.convert import convert
import jax; jax.devices()
def kilobytes(key):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key)).split()[1])
before = kilobytes("RssAnon"), kilobytes("VmRSS")
most, done = [before[0], before[1]], threading.Event()
def watch():
    while not done.wait(0.005):
        most[0], most[1] = max(most[0], kilobytes("RssAnon")), max(most[1], kilobytes("VmRSS"))
threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], **eval(sys.argv[4]))
seconds = time.perf_counter() - start
done.set()
print(seconds, (most[0] - before[0]) * 1024, (most[1] - before[1]) * 1024)
"""


def make_head(folder: Path, size: int) -> None:
    from flax import nnx

    from peagle_jax import weights
    from peagle_jax.checkpoints import config_writing, param_mapping
    from peagle_jax.draft.head import DraftHead, HeadConfig
    from peagle_jax.draft.placeholders import PAPER_DESIGN
    from peagle_jax.layers import Rope

    def config(layers):
        return HeadConfig(
            vocab=201_088,
            draft_vocab=201_088,
            dim=2880,
            layers=layers,
            mlp_dim=17_280,
            heads=64,
            kv_heads=8,
            head_dim=64,
            rope=Rope.from_hf({"rope_theta": 150000.0}, 64, ""),
            norm_eps=1e-5,
            context=4096,
            target_dim=2880,
            aux_hidden_state_layers=(2, 12, 21),
            mask_token=201_020,
            num_depths=10,
            qk_norm=False,
            attention_bias=False,
            norm_before_residual=False,
            norm_before_fc=False,
            fc_norm=False,
            norm_output=False,
            **PAPER_DESIGN,
            windows=(None,) * layers,
            dtype=np.dtype(ml_dtypes.bfloat16),
        )

    def shapes(layers):
        cfg = config(layers)
        _, state = nnx.split(nnx.eval_shape(lambda: DraftHead(cfg, rngs=nnx.Rngs(0))))
        return cfg, weights.export_params(nnx.to_pure_dict(state), param_mapping.table(cfg))

    layers = next(n for n in range(1, 99) if sum(t.nbytes for t in shapes(n)[1].values()) >= size)
    cfg, tensors = shapes(layers)
    _write(folder, config_writing.vllm_config(cfg, "bfloat16", 10), tensors)


def make_target(folder: Path, size: int) -> None:
    from flax import nnx

    from peagle_jax import weights
    from peagle_jax.layers import Rope
    from peagle_jax.targets import qwen3

    def config(layers):
        return qwen3.Qwen3Config(
            vocab=151_936,
            layers=layers,
            dim=2560,
            mlp_dim=9728,
            heads=32,
            kv_heads=8,
            head_dim=128,
            rope=Rope.from_hf({"rope_theta": 1e6}, 128, ""),
            norm_eps=1e-6,
            attention_bias=False,
            tied_embeddings=True,
            windows=(None,) * layers,
            context=40_960,
            aux_hidden_state_layers=(),
            dtype=ml_dtypes.bfloat16,
            stop_ids=(0,),
            source=None,
        )

    def shapes(layers):
        cfg = config(layers)
        _, state = nnx.split(nnx.eval_shape(lambda: qwen3.Qwen3(cfg, rngs=nnx.Rngs(0))))
        return cfg, weights.export_params(nnx.to_pure_dict(state), qwen3.table(cfg))

    layers = next(n for n in range(1, 99) if sum(t.nbytes for t in shapes(n)[1].values()) >= size)
    cfg, tensors = shapes(layers)
    _write(folder, qwen3.to_hf(cfg, "bfloat16"), tensors)


def _write(folder: Path, config: dict, tensors: dict) -> None:
    """Random numbers under the names and shapes of `tensors`, one tensor at a time."""
    from peagle_jax import weights

    folder.mkdir(parents=True)
    some = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(ml_dtypes.bfloat16)

    def fill(t):
        return lambda: np.resize(some, t.shape)

    weights.write_folder(
        folder,
        config,
        {n: weights.LazyTensor(t.shape, some.dtype, fill(t)) for n, t in tensors.items()},
        {},
    )


def copy(source: Path, out: Path) -> tuple[float, float, float]:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, out], check=True)
    return time.perf_counter() - start, 0.0, 0.0


def convert(source: Path, out: Path, to: str, **options) -> tuple[float, float, float]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, source, out, to, repr(options)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return tuple(map(float, done.stdout.split()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/convert"))
    parser.add_argument("--out", type=Path, default=Path("results/convert.jsonl"))
    args = parser.parse_args()
    from peagle_jax import weights
    from peagle_jax.provenance import provenance

    shutil.rmtree(args.work, ignore_errors=True)
    for kind, make in (("head", make_head), ("target", make_target)):
        source, out = args.work / kind, args.work / "out"
        make(source, int(args.gigabytes * 1e9))
        tensors = weights.open_folder(source)
        size, largest = (
            (source / "model.safetensors").stat().st_size,
            max(t.nbytes for t in tensors.values()),
        )
        ways = {
            "copy": copy,
            "same dtype": lambda s, o, to="speculators" if kind == "head" else "hf": convert(
                s, o, to
            ),
            "shards of 1 GB": lambda s, o, to="vllm" if kind == "head" else "hf": convert(
                s, o, to, max_shard_bytes=10**9
            ),
            "float16": lambda s, o, to="vllm" if kind == "head" else "hf": convert(
                s, o, to, dtype="float16"
            ),
        }
        found: dict[str, list] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                os.sync()  # so that nobody writes back what another wrote
                found[name].append(way(source, out))
                shutil.rmtree(out)
        plain = statistics.median(seconds for seconds, _, _ in found["copy"])
        for name, runs in found.items():
            seconds = statistics.median(r[0] for r in runs)
            row = provenance("python scripts/measure/convert.py " + " ".join(sys.argv[1:])) | {
                "name": "convert",
                "kind": kind,
                "way": name,
                "bytes": size,
                "largest_tensor": largest,
                "seconds": [r[0] for r in runs],
                "bytes_per_second": size / seconds,
                "of_a_copy": plain / seconds,
                "peak_own_bytes": max(r[1] for r in runs),
                "peak_resident_bytes": max(r[2] for r in runs),
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            own, resident = row["peak_own_bytes"] / 1e6, row["peak_resident_bytes"] / 1e6
            print(
                f"{kind:7} {name:15} {seconds:6.2f} s {size / seconds / 1e9:5.2f} GB/s, {plain / seconds:4.2f} of a copy's speed; "
                f"peak {own:7.1f} MB own, {resident:7.1f} MB resident; largest tensor {largest / 1e6:.0f} MB",
                flush=True,
            )
        shutil.rmtree(source)
    shutil.rmtree(args.work)


if __name__ == "__main__":
    main()
