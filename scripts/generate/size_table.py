"""docs/sizes.md: how much memory every published target takes on 1 and on 8 devices.

    .venv/bin/python scripts/generate/size_table.py --out docs/sizes.md [--only NAMES] [--cuda]

The sizes are computed from traced shapes, so nothing is allocated. Every configuration of
configs/targets is built at its full size with `jax.eval_shape`; prefill of 1,024 tokens and one
K = 7 step with a P-EAGLE head are lowered for 1 and for 8 devices. `--cuda` also compiles them
ahead of time for one H200, which needs the wheels of `jax[cuda13]` and no GPU, and reports what
they take beside weights and caches. A CPU's own analysis would be wrong, because it makes float32
copies of bfloat16 arrays.

Beside the page it writes the same numbers as docs/sizes.jsonl.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before jax starts
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from peagle_jax.atomic_write import write_atomically  # noqa: E402
from peagle_jax.draft.confidence import NO_CONFIDENCE  # noqa: E402
from peagle_jax.draft.head import HeadConfig  # noqa: E402
from peagle_jax.draft.markov import NO_MARKOV  # noqa: E402
from peagle_jax.draft.placeholders import PAPER_DESIGN  # noqa: E402
from peagle_jax.layers import Rope  # noqa: E402
from peagle_jax.pipelines import tracing  # noqa: E402
from peagle_jax.progress import ProgressReport  # noqa: E402
from peagle_jax.targets.config import TargetConfig  # noqa: E402
from peagle_jax.targets.sharding import make_mesh  # noqa: E402
from peagle_jax.types import Model  # noqa: E402

ROOT = Path(__file__).parents[2]
PROMPT, CACHE_SIZE, K = 1024, 2048, 7
# targets with a published head -> its recipe in configs/train
RECIPES = {
    "openai/gpt-oss-20b": "gpt_oss_20b",
    "openai/gpt-oss-120b": "gpt_oss_120b",
    "google/gemma-4-31b-it": "gemma4_31b",
    "qwen/qwen3-coder-30b-a3b-instruct": "qwen3_coder_30b",
}
# what XLA's compiler asks of an H200 (cudaDeviceProp)
H200 = """gpu_device_info {
 threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024
 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation"
 platform_version: "Compute Capability 9.0a" device_address_bits: 64 name: "NVIDIA H200"
 driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
 dnn_version: "9.10.0" }
 platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
 device_description_str: "NVIDIA H200" """


def head_config_of(target_name: str, config: TargetConfig) -> HeadConfig:
    """The published head's, by its recipe, or four Llama layers of the target's own attention."""
    recipe = next((r for hub, r in RECIPES.items() if hub.split("/")[1] == target_name), None)
    if recipe:
        path = ROOT / f"configs/train/{recipe}.yaml"
        _, _, head = tracing.recipe(path, ROOT / "configs/targets")
        return head.config
    return HeadConfig(
        vocab=config.vocab,
        draft_vocab=config.vocab,
        dim=config.dim,
        layers=4,
        mlp_dim=config.mlp_dim,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope=Rope.from_hf({"rope_theta": 5e5}, config.head_dim, "head"),
        norm_eps=config.norm_eps,
        context=config.context,
        target_dim=config.dim,
        aux_hidden_state_layers=config.aux_hidden_state_layers,
        mask_token=0,
        num_depths=8,
        qk_norm=False,
        attention_bias=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        **PAPER_DESIGN,
        **NO_MARKOV,
        **NO_CONFIDENCE,
        windows=(None,) * 4,
        dtype=jnp.bfloat16,
    )


def measure(path: Path, cuda_device: Any) -> list[dict]:
    """Rows for 1 and 8 devices.

    Args:
      path: a target's config.json.
      cuda_device: compiled for; None: nothing is compiled.
    """
    rows = []
    for num_devices in (1, 8):
        mesh = make_mesh(jax.devices()[:num_devices])
        target = tracing.abstract_target(path, packed=path.stem.startswith("gpt-oss"), mesh=mesh)
        head_config = head_config_of(path.stem, target.config)
        head = tracing.abstract_head(dataclasses.replace(head_config, dtype=jnp.bfloat16), mesh)
        lowered = tracing.lower(target, head, K, prompt=PROMPT, cache_size=CACHE_SIZE, mesh=mesh)
        sizes = tracing.sizes(tracing.abstract_target(path, mesh=mesh), num_devices)
        row = {
            "target": path.stem,
            "devices": num_devices,
            **dataclasses.asdict(sizes),
            "head": tracing.parameter_bytes(head.params),
            "program_bytes": [len(program.as_text()) for program in lowered],
        }
        if cuda_device is not None and num_devices == 1:
            row["temporary"] = temporary_bytes(target, head, cuda_device)
        rows.append(row)
    return rows


def cuda_device() -> Any:
    """An H200 to compile for, which need not be there."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        topology_name="", platform="cuda", target_config=H200, topology="1x1x1"
    ).devices[0]


def temporary_bytes(target: Model, head: Model, device: Any) -> list[int]:
    """What the buffers of prefill and of a step take beside their arguments and results."""
    programs = tracing.lower(target, head, K, prompt=PROMPT, cache_size=CACHE_SIZE, device=device)
    return [p.compile().memory_analysis().temp_size_in_bytes for p in programs]


def gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f}"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


INTRODUCTION = """\
# Memory of the published targets

The table says how many bytes the fullest device holds. The numbers are computed from the shapes of
configs/targets; nothing of this was run. `python scripts/generate/size_table.py --out
docs/sizes.md` writes this page.

- FP8: every matrix in one byte per number, with a bf16 scale for each output.
- MXFP4: experts in 4.25 bits per number, everything else in bf16.
- Cache: keys and values in bf16, of one row of a thousand tokens. With `sliding_cache`, layers with
  a sliding window store only their window and one chunk (ring caches); the next column is then the
  share of a thousand tokens in a row of 100,000.
- Key-value heads that the number of devices does not divide are stored on each device.
- The head is stored whole on each device. It is that of the published recipe in configs/train for
  the four targets that have one, and otherwise four layers of the target's own attention and MLP.
"""


def size_table(rows: list[dict]) -> list[str]:
    columns = (
        "target",
        "devices",
        "parameters, billions",
        "bf16, GB",
        "FP8, GB",
        "MXFP4, GB",
        "cache, MB",
        "in rings, MB",
        "head, GB",
    )
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in rows:
        cells = (
            row["target"],
            str(row["devices"]),
            f"{row['parameters'] / 1e9:.2f}",
            gigabytes(row["bf16"]),
            gigabytes(row["fp8"]),
            gigabytes(row["mxfp4"]),
            megabytes(row["cache"]),
            megabytes(row["ring_cache"]),
            gigabytes(row["head"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def compiled_table(rows: list[dict]) -> list[str]:
    """What was compiled for an H200, with an introduction; nothing if nothing was."""
    compiled = [row for row in rows if "temporary" in row]
    if not compiled:
        return []
    return [
        "",
        "The next table was compiled ahead of time for one H200, in bf16 with GPT-OSS's experts",
        f"packed, for batch 1 and a cache of {CACHE_SIZE:,} tokens. It says what the program's",
        "buffers take beside weights, cache and results. No GPU was there, so nothing was",
        "autotuned.",
        "",
        f"| target | prefill of {PROMPT:,} tokens, MB | one K = {K} step, MB |",
        "| --- | --- | --- |",
        *(
            f"| {row['target']} | {' | '.join(megabytes(n) for n in row['temporary'])} |"
            for row in compiled
        ),
    ]


def page(rows: list[dict]) -> str:
    return "\n".join([INTRODUCTION, *size_table(rows), *compiled_table(rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the page to write")
    parser.add_argument(
        "--only",
        help="names in configs/targets, separated by commas; other rows stay as they are",
    )
    parser.add_argument("--cuda", action="store_true", help="also compile for an H200")
    args = parser.parse_args()
    rows_file = args.out.with_suffix(".jsonl")
    known = {}
    if rows_file.exists():
        for row in map(json.loads, rows_file.read_text().splitlines()):
            known[row["target"], row["devices"]] = row
    device = cuda_device() if args.cuda else None
    paths = sorted((ROOT / "configs/targets").glob("*.json"))
    if args.only:
        paths = [path for path in paths if path.stem in args.only.split(",")]
    with ProgressReport("trace", len(paths), unit="targets") as progress:
        for done, path in enumerate(paths, 1):
            for row in measure(path, device):
                key = row["target"], row["devices"]
                if "temporary" in known.get(key, {}):  # stays where nothing is compiled now
                    row = {"temporary": known[key]["temporary"]} | row
                known[key] = row
            rows = [known[key] for key in sorted(known)]
            write_atomically(rows_file, "".join(json.dumps(row) + "\n" for row in rows))
            write_atomically(args.out, page(rows))
            progress.update(done, note=path.stem)
    print(f"{args.out}: {len(known)} rows")


if __name__ == "__main__":
    main()
