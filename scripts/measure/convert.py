"""Memory and speed of `peagle convert` on a folder of 4 GB, beside a plain copy of its bytes.

    .venv/bin/python scripts/measure/convert.py [--gigabytes 4] [--rounds 3] [--work runs/convert]
        [--record results/convert.jsonl]

Copies and conversions alternate in each round. The head is of GPT-OSS-20B's shape (width 2880,
vocabulary 201,088) with as many layers as the size asks for; the target is a Qwen3 of the same
size. Each conversion is a process of its own. Seconds are wall time without its imports. Memory is
the peak beyond what the imports take, of its resident set and of the anonymous part of that, both
from /proc.
"""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

# arguments: source, output, format, further arguments of `convert` as JSON
CHILD = """
import json, sys, time
from peagle_jax.checkpoints.convert import convert
from scripts.measure.peak_memory import PeakMemory
import jax; jax.devices()

peak = PeakMemory(seconds=0.005)
start = time.perf_counter()
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], **json.loads(sys.argv[4]))
seconds = time.perf_counter() - start
print(seconds, *peak.stop())
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One copy or conversion; bytes are 0 for a copy, whose memory is not measured."""

    seconds: float
    own_bytes: float
    resident_bytes: float


def make_head(folder: Path, size: int) -> None:
    """A head of `size` bytes or a little more."""
    from flax import nnx

    from peagle_jax import weights
    from peagle_jax.checkpoints import config_writing, param_mapping
    from peagle_jax.draft.confidence import NO_CONFIDENCE
    from peagle_jax.draft.head import DraftHead, HeadConfig
    from peagle_jax.draft.markov import NO_MARKOV
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
            **NO_MARKOV,
            **NO_CONFIDENCE,
            windows=(None,) * layers,
            dtype=np.dtype(ml_dtypes.bfloat16),
        )

    def shapes(layers):
        cfg = config(layers)
        _, state = nnx.split(nnx.eval_shape(lambda: DraftHead(cfg, rngs=nnx.Rngs(0))))
        return cfg, weights.export_params(nnx.to_pure_dict(state), param_mapping.table(cfg))

    cfg, tensors = first_of_size(shapes, size)
    _write(folder, config_writing.vllm_config(cfg, "bfloat16", 10), tensors)


def first_of_size(shapes: Callable[[int], tuple], size: int) -> tuple:
    """`shapes(layers)` of the fewest layers whose tensors have `size` bytes."""
    for layers in range(1, 99):
        cfg, tensors = shapes(layers)
        if sum(t.nbytes for t in tensors.values()) >= size:
            return cfg, tensors
    raise SystemExit(f"98 layers have less than {size:,} bytes: give fewer --gigabytes")


def make_target(folder: Path, size: int) -> None:
    """A target of `size` bytes or a little more."""
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

    cfg, tensors = first_of_size(shapes, size)
    _write(folder, qwen3.to_hf(cfg, "bfloat16"), tensors)


def _write(folder: Path, config: dict, tensors: dict) -> None:
    """Random numbers under the names and shapes of `tensors`, one tensor at a time."""
    from peagle_jax import weights

    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(ml_dtypes.bfloat16)

    def random_tensor(shape: tuple[int, ...]) -> weights.LazyTensor:
        return weights.LazyTensor(shape, numbers.dtype, lambda: np.resize(numbers, shape))

    random_tensors = {name: random_tensor(tuple(t.shape)) for name, t in tensors.items()}
    weights.write_folder(folder, config, random_tensors, {})


def copy(source: Path, out: Path) -> Run:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, out], check=True)
    return Run(time.perf_counter() - start, 0.0, 0.0)


def convert(source: Path, out: Path, to: str, **options) -> Run:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, source, out, to, json.dumps(options)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return Run(*map(float, done.stdout.split()))


def measure(kind: str, source: Path, out: Path, rounds: int) -> dict[str, list[Run]]:
    """Runs by what was done: a plain copy, and three conversions.

    Args:
      kind: "head" or "target".
    """
    same_format, other_format = ("vllm", "speculators") if kind == "head" else ("hf", "hf")
    actions: dict[str, Callable[[], Run]] = {
        "copy": functools.partial(copy, source, out),
        "same dtype": functools.partial(convert, source, out, other_format),
        "shards of 1 GB": functools.partial(
            convert, source, out, same_format, max_shard_bytes=10**9
        ),
        "float16": functools.partial(convert, source, out, same_format, dtype="float16"),
    }
    runs: dict[str, list[Run]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            os.sync()  # so that no run writes to disk what the one before it wrote
            runs[name].append(action())
            shutil.rmtree(out)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/convert"))
    parser.add_argument(
        "--record",
        "--out",  # the former spelling
        type=Path,
        default=Path("results/convert.jsonl"),
        help="append a row for each conversion",
    )
    args = parser.parse_args()
    from peagle_jax import weights
    from peagle_jax.atomic_write import append_line
    from peagle_jax.provenance import provenance

    command = "python scripts/measure/convert.py " + " ".join(sys.argv[1:])
    shutil.rmtree(args.work, ignore_errors=True)
    for kind, make in (("head", make_head), ("target", make_target)):
        source, out = args.work / kind, args.work / "out"
        make(source, int(args.gigabytes * 1e9))
        size = (source / "model.safetensors").stat().st_size
        largest = max(t.nbytes for t in weights.open_folder(source).values())
        all_runs = measure(kind, source, out, args.rounds)
        copy_seconds = statistics.median(run.seconds for run in all_runs["copy"])
        for name, runs in all_runs.items():
            seconds = statistics.median(run.seconds for run in runs)
            row = provenance(command) | {
                "name": "convert",
                "kind": kind,
                "way": name,
                "bytes": size,
                "largest_tensor": largest,
                "seconds": [run.seconds for run in runs],
                "bytes_per_second": size / seconds,
                "of_a_copy": copy_seconds / seconds,
                "peak_own_bytes": max(run.own_bytes for run in runs),
                "peak_resident_bytes": max(run.resident_bytes for run in runs),
            }
            args.record.parent.mkdir(parents=True, exist_ok=True)
            append_line(args.record, json.dumps(row))
            print(describe(row, seconds), flush=True)
        shutil.rmtree(source)
    shutil.rmtree(args.work)


def describe(row: dict, seconds: float) -> str:
    """A line for the terminal."""
    speed = f"{row['bytes_per_second'] / 1e9:5.2f} GB/s, {row['of_a_copy']:4.2f} of a copy's speed"
    own, resident = row["peak_own_bytes"] / 1e6, row["peak_resident_bytes"] / 1e6
    return (
        f"{row['kind']:7} {row['way']:15} {seconds:6.2f} s {speed}; "
        f"peak {own:7.1f} MB own, {resident:7.1f} MB resident; "
        f"largest tensor {row['largest_tensor'] / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
