"""Compiles every Triton kernel to machine code for GPUs that are not here, and describes the code.

    python scripts/gpu/compile_kernels.py [--out FILE.jsonl] [--doc FILE.md] [--only NAME ...]
        [--sm 90 ...]

It takes minutes, and needs no GPU and no CUDA: the triton wheel is enough. There is a row a kernel,
shape and architecture: tensor-core instructions, registers, stack (spills), shared memory,
asynchronous loads. sm_90 is an H100 or H200, sm_100 a B200, sm_120 the RTX PRO of ml.g7e instances.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

from kernel_cases import CASES, launches  # noqa: E402
from page import markdown_table, with_table  # noqa: E402

from peagle_jax.atomic_write import write_atomically  # noqa: E402
from peagle_jax.kernels.launch import (  # noqa: E402
    B200,
    H200,
    PTX_VERSION,
    RTX_PRO_6000,
    Launch,
    target_gpu,
)
from peagle_jax.progress import ProgressReport  # noqa: E402
from peagle_jax.provenance import provenance  # noqa: E402

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
    r"\b(QGMMA|HGMMA|QMMA|HMMA|IMMA|UTC\w*MMA|LDGSTS|UTMALDG|LDL|STL|F2FP\.\w+\.E4M3"
    r"|F2F(?=\.))[\w.]*"
)
# a line of nvdisasm's text: where a branch may lead, or an instruction with its operands
LABEL = re.compile(r"\s*(\.L_x_\d+):")
LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_for(launch: Launch, architecture: int) -> dict:
    """Describes the machine code of one kernel.

    Returns:
      Registers a thread; bytes of stack a thread (0: nothing spilled); bytes of shared memory a
      block; instructions by name, and how many the longest loop has; columns of Blackwell's tensor
      memory; after how many products Hopper's FP8 sums go to float32.
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
        "loop": longest_loop(code),
        "tensor_memory": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "imprecise_sums": sorted(sums),
    }


def longest_loop(code: str) -> int:
    """Instructions of the longest loop of machine code as text; 0 where there is none."""
    begins: dict[str, int] = {}
    count = longest = 0
    for line in code.splitlines():
        if label := LABEL.match(line):
            begins[label[1]] = count
        elif instruction := LINE.search(line):
            count += 1
            target = re.search(r"\.L_x_\d+", instruction[2])
            if instruction[1].startswith("BRA") and target and target[0] in begins:
                longest = max(longest, count - begins[target[0]])
    return longest


def fill(doc: Path, rows: list[dict]) -> None:
    """Writes the table between the markers `<!-- compiled -->` and `<!-- end -->`.

    It has a line a kernel and a column an architecture.
    """
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        products = [
            f"{name} {n}" for name, n in sorted(row["instructions"].items()) if "MMA" in name
        ]
        # a stack that is neither written nor read is reserved alone
        is_used = {"STL", "LDL"} & set(row["instructions"])
        spilled = f", {row['stack']} bytes spilled" if is_used else ""
        text = f"{row['registers']} registers, {row['shared'] / 1024:.0f} KB{spilled}"
        if products:
            text = f"{' '.join(products)}; {text}"
        cells.setdefault((row["kernel"], row["function"]), {})[row["sm"]] = text
    head = ["kernel", *(f"sm_{gpu.capability}" for gpu in GPUS)]
    lines = [[f"{case} ({function})", *texts.values()] for (case, function), texts in cells.items()]
    text = doc.read_text(encoding="utf-8")
    write_atomically(doc, with_table(text, "compiled", markdown_table(head, lines)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="rows as JSON lines")
    parser.add_argument("--doc", type=Path, help="a Markdown file whose table is written anew")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    all_of_them = [gpu.capability for gpu in GPUS]
    parser.add_argument(
        "--sm", nargs="+", type=int, default=all_of_them, choices=all_of_them, help="default: all"
    )
    args = parser.parse_args()
    if args.doc and set(args.sm) != set(all_of_them):
        parser.error("--doc needs every architecture: leave out --sm")
    rows = []
    with ProgressReport("compile kernels", len(args.only), unit="shapes") as progress:
        for i, name in enumerate(args.only):
            progress.update(i, note=name)
            for gpu in (gpu for gpu in GPUS if gpu.capability in args.sm):
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
