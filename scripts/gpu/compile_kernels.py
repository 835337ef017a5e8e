"""Compiles every Triton kernel to machine code for GPUs that are not here, and describes the code.

    python scripts/gpu/compile_kernels.py [--out FILE.jsonl] [--doc FILE.md] [--only NAME ...]

It takes minutes, and needs no GPU and no CUDA: the triton wheel is enough. There is a row a kernel,
shape and architecture: tensor-core instructions, registers, stack (spills), shared memory,
asynchronous loads. sm_90 is an H100 or H200, sm_100 a B200, sm_120 the RTX PRO of ml.g7e instances.
"""

import argparse
import collections
import dataclasses
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

from peagle_jax.atomic_write import write_atomically  # noqa: E402
from peagle_jax.kernels import (  # noqa: E402
    attention_triton,
    cache_write_triton,
    experts,
    experts_triton,
    fp8_matmul_triton,
    fusion_triton,
    norm_rotate_triton,
    packed_attention_triton,
    routing_triton,
    vocab_triton,
)
from peagle_jax.kernels.fp8_matmul import Fp8Matrix  # noqa: E402
from peagle_jax.kernels.launch import (  # noqa: E402
    B200,
    H200,
    PTX_VERSION,
    RTX_PRO_6000,
    Launch,
    Launcher,
    target_gpu,
)
from peagle_jax.kernels.packed_attention import AttentionIntervals  # noqa: E402
from peagle_jax.progress import ProgressReport  # noqa: E402
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


@dataclasses.dataclass(frozen=True)
class Case:
    """A public function of a kernel, with the shapes of its arrays.

    Attributes:
      call: takes `args` and a launcher `start`.
    """

    call: Callable
    args: tuple

    def trace(self, start: Launcher) -> None:
        """Traces the function, whose launches `start` gets."""
        jax.eval_shape(functools.partial(self.call, start=start), *self.args)

    def lower(self, start: Launcher) -> str:
        """The function lowered for CUDA, as StableHLO text."""
        traced = jax.jit(functools.partial(self.call, start=start)).trace(*self.args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def w8a8(M, N, K, blocks=False):
    """A product of quantized activations; scales by row, or by blocks."""
    k, n = (-(-K // 128), -(-N // 128)) if blocks else (1, None)
    scale = spec(n, k) if blocks else spec(N)
    args = spec(M, K, dtype=F8), spec(M, k), spec(N, K, dtype=F8), scale

    def call(x, x_scale, w, w_scale, start):
        return fp8_matmul_triton.product(x, x_scale, w, w_scale, BF16, start=start)

    return Case(call, args)


def raw(M, N, K, dtype=BF16):
    """A product with block scales, whose activations the kernel quantizes."""
    args = spec(M, K, dtype=dtype), spec(N, K, dtype=F8), spec(-(-N // 128), -(-K // 128))

    def call(x, w, scale, start):
        return fp8_matmul_triton.product(x, None, w, scale, BF16, start=start)

    return Case(call, args)


def joint(M, K, *Ns):
    """Products of one block of activations with several matrices, with scales of blocks."""
    ws = [Fp8Matrix(spec(N, K, dtype=F8), spec(N // 128, K // 128)) for N in Ns]

    def call(x, ws, start):
        return fp8_matmul_triton.joint_product(x, None, ws, BF16, start=start)

    return Case(call, (spec(M, K, dtype=BF16), ws))


def fusion(M, E, D, norm, fp8):
    """Fusion of three layers."""
    aux_hidden_states = [spec(M, E, dtype=BF16)] * 3
    w = Fp8Matrix(spec(D, 3 * E, dtype=F8), spec(D)) if fp8 else spec(3 * E, D, dtype=BF16)
    gain = None if norm == "none" else spec(3 * E, dtype=BF16)

    def call(aux_hidden_states, w, gain, start):
        return fusion_triton.fuse(aux_hidden_states, w, gain, norm, 1e-5, start=start)

    return Case(call, (aux_hidden_states, w, gain))


def decode(T, heads, kv_heads, head_dim, *, kv=BF16, window=None, ring=False, batch=8, slots=4096):
    """Cached attention of T tokens a row; with float8 keys and values, scales."""
    cache = spec(batch, kv_heads, slots, head_dim, dtype=kv)
    scale = spec(batch, kv_heads, slots) if kv == F8 else None
    args = (
        spec(batch, T, heads, head_dim, dtype=BF16),
        cache,
        cache,
        spec(batch, T, dtype=I32),
        spec(batch, slots, dtype=I32) if ring else None,
        scale,
    )

    def call(q, k, v, positions, kv_positions, scale, start):
        return attention_triton.attend(
            q,
            k,
            v,
            positions,
            kv_positions,
            window=window,
            scale=0.1,
            sinks=None,
            k_scale=scale,
            v_scale=scale,
            start=start,
        )

    return Case(call, args)


def argmax(M, K, V, dtype=BF16):
    """The largest logit of each row."""
    fp8 = dtype == F8
    w, scale = (spec(V, K, dtype=F8), spec(V)) if fp8 else (spec(K, V, dtype=dtype), None)

    def call(x, w, scale, start):
        return vocab_triton.topk(x, w, 1, scale, vocab_first=fp8, start=start)

    return Case(call, (spec(M, K, dtype=BF16), w, scale))


def distill_losses(P, D, E, W):
    """Losses of a student and a teacher, and the gradient in the student's logits."""
    args = (
        spec(P, D, dtype=BF16),
        spec(D, W, dtype=BF16),
        spec(P, E, dtype=BF16),
        spec(E, W, dtype=BF16),
    )

    def call(*args, start):
        losses = vocab_triton.distill_losses(*args, None, start=start)
        weight = losses.kl
        return vocab_triton.logit_grads(*args, None, losses, 0, weight, weight, start=start)

    return Case(call, args)


def packed(n, P, heads, kv_heads, head_dim):
    """Training attention of P rows over n depth-0 keys, forward and backward."""
    q = spec(1, P, heads, head_dim, dtype=BF16)
    kv = spec(1, P, kv_heads, head_dim, dtype=BF16)
    number = spec(1, P, dtype=I32)

    def call(q, k, v, *numbers, start):
        def total(q, k, v):
            intervals = AttentionIntervals(*numbers, n, 7)
            y, _ = packed_attention_triton.attend(q, k, v, intervals, 0.1, start=start)
            return y.astype(F32).sum()

        return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

    return Case(call, (q, kv, kv, number, number, number))


def quantizing(M, K, blocks):
    """Activations in float8."""

    def call(x, start):
        return fp8_matmul_triton.quantize_rows(x, blocks=blocks, start=start)

    return Case(call, (spec(M, K, dtype=BF16),))


def writing(B, T, G, H, kv=F8, slots=4096):
    """New keys and values of T tokens a row."""
    new, array = spec(B, T, G, H, dtype=BF16), spec(B, G, slots, H, dtype=kv)
    scale = spec(B, G, slots)
    cache = (array, array, scale, scale) if kv == F8 else (array, array)
    return Case(cache_write_triton.write, (new, new, spec(B, T, dtype=I32), cache))


def mixture(n, k, count, K, N, kind):
    """Gate and up of a layer's experts, N in all; with SiLU in between where that fits."""
    shapes = {
        "plain": (spec(count, K, N, dtype=BF16), None),
        "row": (spec(count, N, K, dtype=F8), spec(count, N)),
        "block": (spec(count, N, K, dtype=F8), spec(count, N // 128, K // 128)),
        "mxfp4": (
            spec(count, N, K // 32, 16, dtype=jnp.uint8),
            spec(count, N, K // 32, dtype=jnp.uint8),
        ),
    }

    def tiles_of(topk_ids, start):
        """As `experts_triton.mixture` makes them."""
        if n == 1:
            return experts.tiles_of_one_token(topk_ids, count)
        rows = experts.tile_rows(n, k, count, num_shards=1, least=experts.MIN_GPU_TILE, most=128)
        few_pairs = n * k <= experts_triton.MAX_SORTED_PAIRS
        if few_pairs and count <= experts_triton.MAX_SORTED_EXPERTS:
            return experts_triton.make_tiles(topk_ids, count, rows, start)
        return experts.make_tiles(topk_ids, count, rows)

    def call(x, topk_ids, values, scale, start):
        matrices = experts.StoredMatrices(kind, values, scale, None)
        tiles = tiles_of(topk_ids, start)
        gated = experts_triton.can_gate(kind, tiles.rows)
        rule = dict(gather=True, gated=gated, one_token=n == 1)
        return experts_triton.product(x, tiles, matrices, **rule, start=start)

    return Case(call, (spec(n, K, dtype=BF16), spec(n, k, dtype=I32), *shapes[kind]))


def routing(M, D, E, k, bias):
    """A router's product, softmax and largest."""
    args = spec(M, D, dtype=BF16), spec(D, E, dtype=BF16), spec(E, dtype=BF16) if bias else None

    def call(x, w, bias, start):
        return routing_triton.route(x, w, bias, k, normalized=True, start=start)

    return Case(call, args)


def rotating(n, N, G, H):
    """Norms and rotation of n tokens' queries and keys."""
    q, k, gain = spec(n, N, H, dtype=BF16), spec(n, G, H, dtype=BF16), spec(H, dtype=BF16)
    call = functools.partial(norm_rotate_triton.rotate, eps=1e-6, scale=1.0)
    return Case(call, (q, k, gain, gain, spec(n, dtype=I32), spec(H // 2)))


CASES = {
    "fp8_matmul 8x4096x4096": w8a8(8, 4096, 4096),
    "fp8_matmul 64x4096x4096": w8a8(64, 4096, 4096),
    "fp8_matmul 512x4096x4096": w8a8(512, 4096, 4096),
    "fp8_matmul 8x4096x4096 blocks": w8a8(8, 4096, 4096, blocks=True),
    "fp8_matmul 512x4096x4096 blocks": w8a8(512, 4096, 4096, blocks=True),
    "fp8_matmul 8x4096x4096 blocks, bfloat16 in": raw(8, 4096, 4096),
    "fp8_matmul 32x4096x4096 blocks, bfloat16 in": raw(32, 4096, 4096),
    "fp8_matmul 32x4096x4096 blocks, float32 in": raw(32, 4096, 4096, F32),
    "fp8_matmul 64x4096x4096 blocks": w8a8(64, 4096, 4096, blocks=True),
    "joint fp8_matmul 8x(4096,512,512)x2048": joint(8, 2048, 4096, 512, 512),
    "joint fp8_matmul 32x(4096,512,512)x2048": joint(32, 2048, 4096, 512, 512),
    "quantizing 64 rows of 4096": quantizing(64, 4096, False),
    "quantizing 64 rows of 21504, in groups of 128": quantizing(64, 21504, True),
    "cache writing, 8 tokens, float8": writing(1, 8, 4, 128),
    "cache writing, 8 tokens, 16 heads of 256": writing(8, 8, 16, 256, BF16),
    "experts, 1 token of 8, float8 rows": mixture(1, 8, 128, 2048, 1536, "row"),
    "experts, 8 tokens of 8, float8 blocks": mixture(8, 8, 128, 2048, 1536, "block"),
    "experts, 128 tokens of 8, bfloat16": mixture(128, 8, 128, 2048, 1536, "plain"),
    "experts, 100 tokens of 10 of 256, bfloat16": mixture(100, 10, 256, 2048, 1536, "plain"),
    "experts, 512 tokens of 8, float8 blocks": mixture(512, 8, 128, 2048, 1536, "block"),
    "experts, 4096 tokens of 8, float8 blocks": mixture(4096, 8, 128, 2048, 1536, "block"),
    "experts, 8 tokens of 4, MXFP4": mixture(8, 4, 32, 2880, 5760, "mxfp4"),
    "experts, 4096 tokens of 4, MXFP4": mixture(4096, 4, 32, 2880, 5760, "mxfp4"),
    "experts, 8 tokens of 8, bfloat16": mixture(8, 8, 128, 2048, 1536, "plain"),
    "routing 8 tokens to 8 of 128": routing(8, 2048, 128, 8, False),
    "routing 64 tokens to 8 of 256": routing(64, 2048, 256, 8, False),
    "routing 1 token to 4 of 32": routing(1, 2880, 32, 4, True),
    "rotating 8 tokens, 32 and 4 heads of 128": rotating(8, 32, 4, 128),
    "fusion 8": fusion(8, 2048, 2048, "none", False),
    "fusion 64, norm": fusion(64, 2048, 2048, "whole", False),
    "fusion 8, norms, float8, bfloat16 in": fusion(8, 2048, 2048, "per_layer", True),
    "fusion 64, norm, float8, bfloat16 in": fusion(64, 2048, 2048, "whole", True),
    "attention 1 token, 8 heads a group": decode(1, 32, 4, 128),
    "attention 8 tokens": decode(8, 32, 4, 128),
    "attention 17 tokens": decode(17, 32, 4, 128),
    "attention 8 tokens, float8": decode(8, 32, 4, 128, kv=F8),
    "attention 17 tokens, float8": decode(17, 32, 4, 128, kv=F8),
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
    "argmax 8 of 151936": argmax(8, 2048, 151936),
    "argmax 8 of 151936, float8": argmax(8, 2048, 151936, F8),
    "argmax 64 of 151936": argmax(64, 2048, 151936),
    "distillation losses and their gradient": distill_losses(4096, 2048, 2048, 8192),
    "packed attention, heads of 128": packed(8192, 20480, 32, 4, 128),
    "packed attention, heads of 64": packed(8192, 20480, 64, 8, 64),
}


def launches(case: Case) -> list[Launch]:
    """What a public function would launch, without running it."""
    started = []

    def start(launch):
        started.append(launch)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.outputs)

    case.trace(start)
    return started


def compile_for(launch: Launch, architecture: int) -> dict:
    """Describes the machine code of one kernel.

    Returns:
      Registers a thread; bytes of stack a thread (0: nothing spilled); bytes of shared memory a
      block; instructions by name; columns of Blackwell's tensor memory; after how many products
      Hopper's FP8 sums go to float32.
    """
    names = launch.kernel.arg_names
    arrays = [*launch.inputs, *launch.new_outputs]
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
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options=dict(num_warps=launch.warps, num_stages=launch.stages, ptx_version=PTX_VERSION),
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def run(*command):
            return subprocess.run(
                [*map(str, command), file.name], capture_output=True, text=True, check=True
            ).stdout

        code = run(TOOLS / "nvdisasm")
        usage = re.search(r"REG:(\d+) STACK:(\d+)", run(TOOLS / "cuobjdump", "-res-usage"))
    counts = collections.Counter(
        "F2FP.E4M3" if "F2FP" in match[0] else match[0].split(".")[0]
        for match in INSTRUCTION.finditer(code)
    )
    sums = {int(n) for n in re.findall(r"maxNumImpreciseAcc = (\d+)", compiled.asm["ttgir"])}
    return {
        "registers": int(usage[1]),
        "stack": int(usage[2]),
        "shared": compiled.metadata.shared,
        "instructions": dict(counts),
        "tensor_memory": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "imprecise_sums": sorted(sums),
    }


def fill(doc: Path, rows: list[dict]) -> None:
    """Writes the table between the markers `<!-- compiled -->` and `<!-- end -->`.

    It has a line a kernel and a column an architecture.
    """
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        products = [
            f"{name} {n}" for name, n in sorted(row["instructions"].items()) if "MMA" in name
        ]
        spilled = f", {row['stack']} bytes spilled" if row["stack"] else ""
        text = f"{row['registers']} registers, {row['shared'] / 1024:.0f} KB{spilled}"
        if products:
            text = f"{' '.join(products)}; {text}"
        cells.setdefault((row["kernel"], row["function"]), {})[row["sm"]] = text
    head = ["kernel", *(f"sm_{gpu.capability}" for gpu in GPUS)]
    lines = [head, ["---"] * len(head)]
    lines += [
        [f"{case} ({function})" if function != "kernel" else case, *texts.values()]
        for (case, function), texts in cells.items()
    ]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    text = doc.read_text(encoding="utf-8")
    markers = re.compile(r"(<!-- compiled[^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
    write_atomically(doc, markers.sub(lambda m: f"{m[1]}{table}\n{m[2]}", text))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="rows as JSON lines")
    parser.add_argument("--doc", type=Path, help="a Markdown file whose table is written anew")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    args = parser.parse_args()
    rows = []
    with ProgressReport("compile kernels", len(args.only), unit="shapes") as progress:
        for i, name in enumerate(args.only):
            progress.update(i, note=name)
            for gpu in GPUS:
                with target_gpu(gpu):
                    started = launches(CASES[name])
                for launch in started:
                    row = {
                        "kernel": name,
                        "function": launch.kernel.__name__,
                        "sm": gpu.capability,
                        "warps": launch.warps,
                        "stages": launch.stages,
                    }
                    row |= compile_for(launch, gpu.capability)
                    rows.append(row | {"shared_limit": gpu.shared_memory})
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
        command = " ".join(["python scripts/gpu/compile_kernels.py", *sys.argv[1:]])
        facts = provenance(command) | {"triton": triton.__version__}
        write_atomically(args.out, "".join(json.dumps(facts | row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
