"""The few PTX instructions that kernels have as inline assembly, executed on NumPy arrays.

Triton's interpreter has no inline assembly. What is executed here is the text that a GPU assembles.
"""

import re
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

STATEMENT = re.compile(r"(?<![.\w])([a-z][\w.]*)\s+([^;]*);")  # a declaration begins with a point


# Of each of bfloat16's bits. Made once, because code that XLA calls back runs on threads of XLA's,
# where a processor takes subnormal float32 numbers for zero.
with np.errstate(invalid="ignore"):
    BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(float)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Numbers in float64, rounded to bfloat16, whose subnormal numbers are multiples of 2^-133."""
    bits = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    is_small = np.abs(x) < 2.0**-126
    small = np.rint(np.abs(x[is_small]) * 2.0**133).astype(np.uint16)
    bits[is_small] = small | np.signbit(x[is_small]).astype(np.uint16) << 15
    return bits


def multiplied(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Both bfloat16 halves of each register, multiplied with one rounding."""
    with np.errstate(all="ignore"):  # infinity, and what is no number, are results here
        return bfloat16_bits(BFLOAT16[x.view(np.uint16)] * BFLOAT16[y.view(np.uint16)]).view(
            np.uint32
        )


def lookup(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """`lop3`: bit i of `table` is the result where the bits of a, b and c are i in binary."""
    result = np.zeros_like(a)
    for i in np.flatnonzero([int(table[0]) >> i & 1 for i in range(8)]):
        terms = [x if i >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
        result |= terms[0] & terms[1] & terms[2]
    return result


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """`prmt`: byte i of the result is the byte of a (0 to 3) or b (4 to 7) that selector names."""
    result = np.zeros_like(a)
    for i in range(4):
        source, at = divmod(int(selector[0]) >> 4 * i & 15, 4)
        assert source < 2, "bytes that repeat a sign are not needed"
        result |= (((a, b)[source] >> np.uint32(8 * at)) & np.uint32(255)) << np.uint32(8 * i)
    return result


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": np.copy,
    "cvt.u32.u16": np.uint32,
    "shl.b32": np.left_shift,
    "shr.b32": np.right_shift,
    "and.b32": np.bitwise_and,
    "lop3.b32": lookup,
    "prmt.b32": permuted,
    "mul.bf16x2": multiplied,
}


def execute(
    text: str,
    constraints: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.dtype],
    pack: int,
) -> list[np.ndarray]:
    """Runs inline assembly on `pack` neighbors at a time, which share registers.

    Args:
      text: `$0` and on are the registers of its outputs, and then of its inputs.
      constraints: LLVM's, one a register: "=r" and "r" of 32 bits, "h" of 16. With "=&r" an output
        may be written while inputs are still to be read.
      inputs: all of one shape.
      outputs: types of the outputs, which have this shape, too.

    Raises:
      NotImplementedError: an instruction is not among `OPERATIONS`.
      ValueError: the registers are not those of the constraints, or one is read too late.
    """
    sizes = [pack * dtype.itemsize // 4 for dtype in outputs]  # in registers
    registers: dict[str, np.ndarray] = {}
    kinds = constraints.split(",")
    for x in inputs:
        bits = np.dtype(f"u{min(4, pack * x.itemsize)}")
        for register in np.ascontiguousarray(x).reshape(-1, pack).view(bits).T:
            registers[f"${sum(sizes) + len(registers)}"] = register
    found_kinds = ["h" if x.itemsize == 2 else "r" for x in registers.values()]
    if len(kinds) != sum(sizes) + len(registers) or kinds[sum(sizes) :] != found_kinds:
        raise ValueError(f"{constraints} does not fit {sum(sizes)} outputs and {found_kinds}")
    given, is_written = set(registers), False
    for name, operands in STATEMENT.findall(text):
        if name not in OPERATIONS:
            raise NotImplementedError(f"inline assembly with {name}")
        target, *sources = (operand.strip() for operand in operands.split(","))
        length = len(registers[min(given)])
        values = [
            registers[x] if x in registers else np.full(length, int(x, 0), np.uint32)
            for x in sources
        ]
        if is_written and given & set(sources):
            raise ValueError(f"{name} reads an input after an output was written")
        if name != "cvt.u32.u16" and any(x.itemsize != 4 for x in values):
            raise ValueError(f"{name} reads a register of 16 bits")
        registers[target] = OPERATIONS[name](*values)
        is_written |= target.startswith("$") and "&" not in kinds[int(target[1:])]
    found, first = [], 0
    for size, dtype in zip(sizes, outputs, strict=True):
        each = np.stack([registers[f"${first + i}"] for i in range(size)], axis=1)
        found.append(each.view(dtype).reshape(inputs[0].shape))
        first += size
    return found
