"""Compiles every Triton kernel to machine code for GPUs that are not here, and says what came out.

    python scripts/gpu/compile_kernels.py [--out FILE.jsonl] [--only NAME ...]      minutes; no GPU, no CUDA: the triton wheel is enough

A row a kernel, shape and architecture: tensor-core instructions, registers, stack (spills), shared memory, asynchronous loads.
sm_90 is an H100 or H200, sm_100 a B200, sm_120 the RTX PRO of ml.g7e instances.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent.parent))

from peagle_jax.atomic_write import write_atomically  # noqa: E402
from peagle_jax.kernels import (  # noqa: E402
    attention_triton,
    cache_write_triton,
    experts,
    experts_triton,
    fp8_matmul_triton,
    fusion_triton,
    packed_attention_triton,
    vocab_triton,
)
from peagle_jax.kernels.fp8_matmul import Fp8Matrix  # noqa: E402
from peagle_jax.kernels.launch import B200, H200, RTX_PRO_6000, target_gpu  # noqa: E402
from peagle_jax.kernels.packed_attention import AttentionIntervals  # noqa: E402
from peagle_jax.provenance import provenance  # noqa: E402

F8, BF16, F32, I32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.int32
TYPES = {
    "float8_e4m3fn": "fp8e4nv",
    "bfloat16": "bf16",
    "float32": "fp32",
    "int32": "i32",
    "uint8": "u8",
    "bool": "i1",
}
GPUS = (H200, B200, RTX_PRO_6000)
INSTRUCTION = re.compile(
    r"\b(QGMMA|HGMMA|QMMA|HMMA|IMMA|UTC\w*MMA|LDGSTS|UTMALDG|LDL|STL|F2FP\.\w+\.E4M3)[\w.]*"
)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def w8a8(M, N, K, blocks=False):
    k, n = (-(-K // 128), -(-N // 128)) if blocks else (1, None)
    scale = spec(n, k) if blocks else spec(N)
    args = spec(M, K, dtype=F8), spec(M, k), spec(N, K, dtype=F8), scale
    return lambda start: jax.eval_shape(
        lambda *a: fp8_matmul_triton.product(*a, BF16, start=start), *args
    )


def raw(M, N, K):
    """Block scales, activations quantised by the kernel."""
    args = spec(M, K, dtype=BF16), spec(N, K, dtype=F8), spec(-(-N // 128), -(-K // 128))
    return lambda start: jax.eval_shape(
        lambda x, w, scale: fp8_matmul_triton.product(x, None, w, scale, BF16, start=start), *args
    )


def fusion(M, E, D, norm, fp8):
    aux_hidden_state_layers = [spec(M, E, dtype=BF16)] * 3
    w = Fp8Matrix(spec(D, 3 * E, dtype=F8), spec(D)) if fp8 else spec(3 * E, D, dtype=BF16)
    gain = None if norm == "none" else spec(3 * E, dtype=BF16)
    return lambda start: jax.eval_shape(
        lambda t, w, g: fusion_triton.fuse(t, w, g, norm, 1e-5, start=start),
        aux_hidden_state_layers,
        w,
        gain,
    )


def decode(T, heads, kv_heads, head_dim, *, kv=BF16, window=None, ring=False, batch=8, slots=4096):
    q, cache = (
        spec(batch, T, heads, head_dim, dtype=BF16),
        spec(batch, kv_heads, slots, head_dim, dtype=kv),
    )
    scale = spec(batch, kv_heads, slots) if kv == F8 else None
    args = (
        q,
        cache,
        cache,
        spec(batch, T, dtype=I32),
        spec(batch, slots, dtype=I32) if ring else None,
        scale,
    )

    def run(q, k, v, at, held, scale, start):
        return attention_triton.attend(
            q,
            k,
            v,
            at,
            held,
            window=window,
            scale=0.1,
            sinks=None,
            k_scale=scale,
            v_scale=scale,
            start=start,
        )

    return lambda start: jax.eval_shape(lambda *a: run(*a, start), *args)


def peaks(M, K, V, dtype=BF16):
    w, scale = (spec(V, K, dtype=F8), spec(V)) if dtype == F8 else (spec(K, V, dtype=dtype), None)
    return lambda start: jax.eval_shape(
        lambda x, w, scale: vocab_triton.peaks(x, w, 1, scale, by_word=dtype == F8, start=start),
        spec(M, K, dtype=BF16),
        w,
        scale,
    )


def distance(P, D, E, W):
    args = (
        spec(P, D, dtype=BF16),
        spec(D, W, dtype=BF16),
        spec(P, E, dtype=BF16),
        spec(E, W, dtype=BF16),
    )

    def both(start):
        def run(*args):
            found = vocab_triton.distance(*args, None, start=start)
            return vocab_triton.slopes(*args, None, found, 0, found.kl, found.kl, start=start)

        jax.eval_shape(run, *args)

    return both


def packed(n, P, heads, kv_heads, head_dim):
    q, kv, number = (
        spec(1, P, heads, head_dim, dtype=BF16),
        spec(1, P, kv_heads, head_dim, dtype=BF16),
        spec(1, P, dtype=I32),
    )

    def both(start):
        def total(q, k, v, *numbers):
            return (
                packed_attention_triton.attend(
                    q, k, v, AttentionIntervals(*numbers, n, 7), 0.1, start=start
                )[0]
                .astype(F32)
                .sum()
            )

        jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), q, kv, kv, number, number, number)

    return both


def quantizing(M, K, blocks):
    return lambda start: jax.eval_shape(
        lambda x: fp8_matmul_triton.quantize_rows(x, blocks=blocks, start=start),
        spec(M, K, dtype=BF16),
    )


def writing(B, T, G, H, kv=F8, slots=4096):
    new, cache = spec(B, T, G, H, dtype=BF16), spec(B, G, slots, H, dtype=kv)
    held = (cache, cache, spec(B, G, slots), spec(B, G, slots)) if kv == F8 else (cache, cache)

    def run(start):
        return lambda *a: cache_write_triton.write(*a, start=start)

    return lambda start: jax.eval_shape(run(start), new, new, spec(B, T, dtype=I32), held)


def mixture(n, k, count, K, N, kind):
    """Gate and up of a layer's experts."""
    shapes = {
        "plain": (spec(count, K, N, dtype=BF16), None),
        "row": (spec(count, N, K, dtype=F8), spec(count, N)),
        "block": (spec(count, N, K, dtype=F8), spec(count, N // 128, K // 128)),
        "mxfp4": (
            spec(count, N, K // 32, 16, dtype=jnp.uint8),
            spec(count, N, K // 32, dtype=jnp.uint8),
        ),
    }

    def run(start, x, chosen, values, scale):
        rows = experts.tile_rows(n, k, count, parts=1, few=experts.GPU_TILE, most=128)
        few = n * k <= experts_triton.SORTED and count <= experts_triton.BANKS
        sort = (
            (lambda: experts_triton.tiled(chosen, count, rows, start))
            if few
            else lambda: experts.tiled(chosen, count, rows)
        )
        tiles = experts.unsorted(chosen, count) if n == 1 else sort()
        return experts_triton.product(
            x, tiles, experts.Matrices(kind, values, scale, None), gather=True, start=start
        )

    args = spec(n, K, dtype=BF16), spec(n, k, dtype=I32), *shapes[kind]
    return lambda start: jax.eval_shape(lambda *a: run(start, *a), *args)


CASES = {
    "fp8_matmul 8x4096x4096": w8a8(8, 4096, 4096),
    "fp8_matmul 64x4096x4096": w8a8(64, 4096, 4096),
    "fp8_matmul 512x4096x4096": w8a8(512, 4096, 4096),
    "fp8_matmul 8x4096x4096 blocks": w8a8(8, 4096, 4096, blocks=True),
    "fp8_matmul 512x4096x4096 blocks": w8a8(512, 4096, 4096, blocks=True),
    "fp8_matmul 8x4096x4096 blocks, bfloat16 in": raw(8, 4096, 4096),
    "fp8_matmul 32x4096x4096 blocks, bfloat16 in": raw(32, 4096, 4096),
    "fp8_matmul 64x4096x4096 blocks": w8a8(64, 4096, 4096, blocks=True),
    "quantising 64 rows of 4096": quantizing(64, 4096, False),
    "quantising 64 rows of 21504, in groups of 128": quantizing(64, 21504, True),
    "cache writing, 8 tokens, float8": writing(1, 8, 4, 128),
    "cache writing, 8 tokens, 16 heads of 256": writing(8, 8, 16, 256, BF16),
    "experts, 1 token of 8, float8 rows": mixture(1, 8, 128, 2048, 1536, "row"),
    "experts, 8 tokens of 8, float8 blocks": mixture(8, 8, 128, 2048, 1536, "block"),
    "experts, 128 tokens of 8, bfloat16": mixture(128, 8, 128, 2048, 1536, "plain"),
    "experts, 100 tokens of 10 of 256, bfloat16": mixture(100, 10, 256, 2048, 1536, "plain"),
    "experts, 4096 tokens of 8, float8 blocks": mixture(4096, 8, 128, 2048, 1536, "block"),
    "experts, 8 tokens of 4, MXFP4": mixture(8, 4, 32, 2880, 5760, "mxfp4"),
    "experts, 4096 tokens of 4, MXFP4": mixture(4096, 4, 32, 2880, 5760, "mxfp4"),
    "experts, 8 tokens of 8, bfloat16": mixture(8, 8, 128, 2048, 1536, "plain"),
    "fusion 8": fusion(8, 2048, 2048, "none", False),
    "fusion 64, norm": fusion(64, 2048, 2048, "whole", False),
    "fusion 8, norms, float8, bfloat16 in": fusion(8, 2048, 2048, "per_tap", True),
    "fusion 64, norm, float8, bfloat16 in": fusion(64, 2048, 2048, "whole", True),
    "attention 1 token, 8 heads a group": decode(1, 32, 4, 128),
    "attention 8 tokens": decode(8, 32, 4, 128),
    "attention 17 tokens": decode(17, 32, 4, 128),
    "attention 8 tokens, float8": decode(8, 32, 4, 128, kv=F8),
    "attention 8 tokens, heads of 64, a ring of 136": decode(
        8, 64, 8, 64, window=128, ring=True, slots=136
    ),
    "attention 8 tokens, heads of 256, window": decode(8, 32, 16, 256, window=1024),
    "attention 8 tokens, heads of 512": decode(8, 32, 4, 512),
    "attention 8 tokens, heads of 96": decode(8, 32, 8, 96),
    "attention 512 tokens": decode(512, 32, 4, 128),
    "attention 512 tokens, float8": decode(512, 32, 4, 128, kv=F8),
    "attention 512 tokens, heads of 256, window": decode(512, 32, 16, 256, window=1024),
    "attention 512 tokens, heads of 512": decode(512, 32, 4, 512),
    "argmax 8 of 151936": peaks(8, 2048, 151936),
    "argmax 8 of 151936, float8": peaks(8, 2048, 151936, F8),
    "argmax 64 of 151936": peaks(64, 2048, 151936),
    "distance and slopes": distance(4096, 2048, 2048, 8192),
    "packed attention, heads of 128": packed(8192, 20480, 32, 4, 128),
    "packed attention, heads of 64": packed(8192, 20480, 64, 8, 64),
}


def launches(case) -> list:
    """What a public function would start, without starting it."""
    seen = []

    def start(launch):
        seen.append(launch)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.outputs)

    case(start)
    return seen


def compile_for(launch, architecture: int) -> dict:
    """One kernel in machine code.

    Returns:
      registers a thread, bytes of stack a thread (0: nothing spilled), bytes of shared memory a block, instructions by name; columns of
      Blackwell's tensor memory; after how many products Hopper's FP8 sums go to float32.
    """
    names = launch.kernel.arg_names
    arrays = [*launch.inputs, *launch.outputs]
    signature = {
        name: "*" + TYPES[jnp.dtype(x.dtype).name] for name, x in zip(names, arrays, strict=False)
    }
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(
        fn=launch.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(arrays))},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options=dict(num_warps=launch.warps, num_stages=launch.stages),
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()

        def run(*command):
            return subprocess.run(
                [*map(str, command), file.name], capture_output=True, text=True, check=True
            ).stdout

        code = run(TOOLS / "nvdisasm")
        usage = re.search(r"REG:(\d+) STACK:(\d+)", run(TOOLS / "cuobjdump", "-res-usage"))
    counts = collections.Counter(
        "F2FP.E4M3" if "F2FP" in one[0] else one[0].split(".")[0]
        for one in INSTRUCTION.finditer(code)
    )
    sums = {int(n) for n in re.findall(r"maxNumImpreciseAcc = (\d+)", made.asm["ttgir"])}
    return {
        "registers": int(usage[1]),
        "stack": int(usage[2]),
        "shared": made.metadata.shared,
        "instructions": dict(counts),
        "tensor_memory": getattr(made.metadata, "tmem_size", 0) or 0,
        "imprecise_sums": sorted(sums),
    }


def fill(doc: Path, rows: list[dict]) -> None:
    """The table between the markers `<!-- compiled -->` and `<!-- end -->`: a line a kernel, a column an architecture."""
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        products = [
            f"{name} {n}" for name, n in sorted(row["instructions"].items()) if "MMA" in name
        ]
        spilled = f", {row['stack']} bytes spilled" if row["stack"] else ""
        said = (
            " ".join(products)
            + "; " * bool(products)
            + f"{row['registers']} registers, {row['shared'] / 1024:.0f} KB{spilled}"
        )
        cells.setdefault((row["kernel"], row["function"]), {})[row["sm"]] = said
    head = ["kernel", *(f"sm_{gpu.capability}" for gpu in GPUS)]
    lines = [head, ["---"] * len(head)]
    lines += [
        [f"{case} ({function})" if function != "kernel" else case, *said.values()]
        for (case, function), said in cells.items()
    ]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    text = doc.read_text(encoding="utf-8")
    write_atomically(
        doc,
        re.sub(
            r"(<!-- compiled[^\n]*-->\n).*?(<!-- end -->)",
            lambda m: f"{m[1]}{table}\n{m[2]}",
            text,
            flags=re.DOTALL,
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="rows as JSON lines")
    parser.add_argument("--doc", type=Path, help="a Markdown file whose table is written anew")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    args = parser.parse_args()
    rows = []
    for name in track(args.only, "compiling", console=Console(stderr=True)):
        for gpu in GPUS:
            with target_gpu(gpu):
                made = launches(CASES[name])
            for launch in made:
                facts = {
                    "kernel": name,
                    "function": launch.kernel.__name__,
                    "sm": gpu.capability,
                    "warps": launch.warps,
                    "stages": launch.stages,
                }
                rows.append(
                    facts | compile_for(launch, gpu.capability) | {"shared_limit": gpu.shared}
                )
    table = Table(
        "kernel",
        "sm",
        "registers",
        "stack",
        "shared",
        "instructions",
        title=f"triton {triton.__version__}",
    )
    for row in rows:
        counts = " ".join(f"{name} {count}" for name, count in sorted(row["instructions"].items()))
        table.add_row(
            f"{row['kernel']}: {row['function']}",
            str(row["sm"]),
            str(row["registers"]),
            str(row["stack"]),
            f"{row['shared']:,}",
            counts,
        )
    Console().print(table)
    if args.doc:
        fill(args.doc, rows)
    if args.out:
        facts = provenance(" ".join(["python scripts/gpu/compile_kernels.py", *sys.argv[1:]])) | {
            "triton": triton.__version__
        }
        write_atomically(args.out, "".join(json.dumps(facts | row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
