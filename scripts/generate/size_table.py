"""What every published target takes on 1 and 8 devices, by arithmetic on traced shapes: docs/sizes.md. Allocates nothing.

    .venv/bin/python scripts/generate/size_table.py --out docs/sizes.md [--only gpt-oss-20b] [--cuda]

Every configuration of configs/targets is built at its full size with `jax.eval_shape`; prefill of 1,024 tokens and one
K = 7 step with a P-EAGLE head are lowered for 1 and for 8 devices. `--cuda` also compiles them ahead of time for one
H200, which needs the wheels of `jax[cuda13]` and no GPU, and says what they take beside weights and caches. (A CPU's own
analysis would be wrong: it makes float32 copies of bfloat16.)
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before jax starts
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402

from peagle_jax.atomic_write import write_atomically  # noqa: E402
from peagle_jax.draft.head import HeadConfig  # noqa: E402
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.layers import Rope  # noqa: E402
from peagle_jax.pipelines import tracing  # noqa: E402
from peagle_jax.targets.config import TargetConfig  # noqa: E402
from peagle_jax.targets.sharding import make_mesh  # noqa: E402

ROOT = Path(__file__).parent.parent
PROMPT, SLOTS, K = 1024, 2048, 7
RECIPES = {
    "openai/gpt-oss-20b": "gpt_oss_20b",
    "openai/gpt-oss-120b": "gpt_oss_120b",
    "google/gemma-4-31b-it": "gemma4_31b",
    "qwen/qwen3-coder-30b-a3b-instruct": "qwen3_coder_30b",
}
# H200, device facts that XLA's compiler asks for (cudaDeviceProp)
H200 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES } registers_per_core_limit: 65536
 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
 device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a" device_address_bits: 64 name: "NVIDIA H200"
 driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" }
 platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200" """


def head_of(name: str, config: TargetConfig) -> HeadConfig:
    """The published head's recipe, or four Llama layers of the target's own attention."""
    recipe = next((r for hub, r in RECIPES.items() if hub.split("/")[1] == name), None)
    if recipe:
        return tracing.recipe(ROOT / f"configs/train/{recipe}.yaml", ROOT / "configs/targets")[
            2
        ].config
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
        windows=(None,) * 4,
        dtype=jnp.bfloat16,
    )


def measure(path: Path, cuda) -> list[dict]:
    rows = []
    for parts in (1, 8):
        mesh = make_mesh(jax.devices()[:parts])
        target = tracing.abstract_target(path, packed=path.stem.startswith("gpt-oss"), mesh=mesh)
        config = dataclasses.replace(head_of(path.stem, target.config), dtype=jnp.bfloat16)
        head = tracing.abstract_head(config, mesh)
        lowered = tracing.lower(target, head, K, prompt=PROMPT, cache_size=SLOTS, mesh=mesh)
        sizes = tracing.sizes(tracing.abstract_target(path, mesh=mesh), parts)
        rows.append(
            {
                "target": path.stem,
                "devices": parts,
                **dataclasses.asdict(sizes),
                "head": tracing.parameter_bytes(head.params),
                "program_bytes": [len(program.as_text()) for program in lowered],
            }
        )
        if cuda is not None and parts == 1:
            rows[-1]["temporary"] = [temporary_bytes(target, head, i, cuda) for i in range(2)]
    return rows


def cuda_device():
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        topology_name="", platform="cuda", target_config=H200, topology="1x1x1"
    ).devices[0]


def temporary_bytes(target, head, which: int, device) -> int:
    """Of prefill (0) or a step (1), compiled for `device`: what its buffers take beside arguments and results."""
    compiled = tracing.lower(target, head, K, prompt=PROMPT, cache_size=SLOTS, device=device)[
        which
    ].compile()
    return compiled.memory_analysis().temp_size_in_bytes


def page(rows: list[dict], cuda: bool) -> str:
    def gb(n):
        return "" if n is None else f"{n / 1e9:.2f}"

    def mb(n):
        return f"{n / 1e6:.1f}"

    lines = [
        "# What the published targets take",
        "",
        "Bytes on the fullest device, by arithmetic on the shapes of configs/targets; nothing of this was run. Written by",
        "`python scripts/generate/size_table.py --out docs/sizes.md`. FP8: every matrix in one byte a number and a bf16 scale a column.",
        "MXFP4: experts in 4.25 bits a number, the rest in bf16. Cache: bf16, one row, a thousand tokens; in a row of 100,000",
        "tokens whose sliding layers keep a ring (`sliding_cache`), a thousand of them take the next column. KV heads that the",
        "devices do not divide lie on each. The head lies whole on each: of the four published heads by their recipe in",
        "configs/train, else four layers of the target's attention and MLP.",
        "",
        "| target | devices | parameters, billions | bf16, GB | FP8, GB | MXFP4, GB | cache, MB | in rings, MB | head, GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r['target']} | {r['devices']} | {r['parameters'] / 1e9:.2f} | {gb(r['bf16'])} | {gb(r['fp8'])} | {gb(r['mxfp4'])} "
        f"| {mb(r['cache'])} | {mb(r['ring_cache'])} | {gb(r['head'])} |"
        for r in rows
    ]
    if cuda:
        lines += [
            "",
            f"Compiled ahead of time for one H200 (bf16; GPT-OSS's experts packed), cache of {SLOTS:,} tokens, batch 1: what the",
            "program's buffers take beside weights, cache and results. Without autotuning, as no GPU was there.",
            "",
            f"| target | prefill of {PROMPT:,} tokens, MB | one K = {K} step, MB |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| {r['target']} | {mb(r['temporary'][0])} | {mb(r['temporary'][1])} |"
            for r in rows
            if "temporary" in r
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", help="names of configs/targets, with commas; others keep what --out's .jsonl says"
    )
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    kept, wanted = args.out.with_suffix(".jsonl"), args.only and args.only.split(",")
    known = (
        {(r["target"], r["devices"]): r for r in map(json.loads, kept.read_text().splitlines())}
        if kept.exists()
        else {}
    )
    device = cuda_device() if args.cuda else None
    paths = [
        p
        for p in sorted((ROOT / "configs/targets").glob("*.json"))
        if not wanted or p.stem in wanted
    ]
    for path in track(paths, console=Console(stderr=True), description="tracing"):
        for row in measure(path, device):
            old = known.get((row["target"], row["devices"]), {})
            known[row["target"], row["devices"]] = {
                key: old[key] for key in ("temporary",) if key in old
            } | row
        rows = [known[key] for key in sorted(known)]
        write_atomically(kept, "".join(json.dumps(row) + "\n" for row in rows))
        write_atomically(args.out, page(rows, any("temporary" in row for row in rows)))
    Console().print(f"{args.out}: {len(known)} rows")


if __name__ == "__main__":
    main()
