"""Float8 and MXFP4 numbers as bfloat16, in Triton: integer operations on two numbers at a time.

Triton converts float8 to bfloat16 with one conversion instruction for each number (F2F), which
special units run, and MXFP4 took ten instructions a number by way of float32: decoding took longer
than reading (docs/kernels.md). Both formats have bfloat16's fields in its order: sign, exponent,
mantissa. So the fields are moved to their places, and one product corrects the exponent, whose bias
differs; it is exact, and makes subnormal numbers normal ones. Such products need compute capability
9.0 (PTX ISA, `mul` for bf16x2). vLLM's Marlin kernels decode in this way, too.
"""

# Kernels are written in Triton's language, whose tensors and loops pyright takes for Python's.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

# Two E4M3 numbers in $1. Exponents of bfloat16 are larger by 120; 0x7B80 is 2^120.
FLOAT8_PAIR = tl.constexpr(
    """
    {
        .reg .b32 pair, sign, times;
        mov.b32 times, 0x7B807B80;
        cvt.u32.u16 pair, $1;
        prmt.b32 pair, pair, 0, 0x1404;
        and.b32 sign, pair, 0x80008000;
        shr.b32 pair, pair, 4;
        lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;
        mul.bf16x2 $0, pair, times;
    }
    """
)
# the same of four in $2
FLOAT8_FOUR = tl.constexpr(
    """
    {
        .reg .b32 pair, sign, times;
        mov.b32 times, 0x7B807B80;
        prmt.b32 pair, $2, 0, 0x1404;
        and.b32 sign, pair, 0x80008000;
        shr.b32 pair, pair, 4;
        lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;
        mul.bf16x2 $0, pair, times;
        prmt.b32 pair, $2, 0, 0x3424;
        and.b32 sign, pair, 0x80008000;
        shr.b32 pair, pair, 4;
        lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;
        mul.bf16x2 $1, pair, times;
    }
    """
)
# Two words of four E2M1 numbers each in $4, and bits of what they are multiplied by in $5.
MXFP4 = tl.constexpr(
    """
    {
        .reg .b32 sign, rest, bits;
        shl.b32 sign, $4, 12;
        and.b32 sign, sign, 0x80008000;
        shl.b32 rest, $4, 6;
        lop3.b32 bits, rest, 0x01C001C0, sign, 0xEA;
        mul.bf16x2 $0, bits, $5;
        shl.b32 sign, $4, 8;
        and.b32 sign, sign, 0x80008000;
        shl.b32 rest, $4, 2;
        lop3.b32 bits, rest, 0x01C001C0, sign, 0xEA;
        mul.bf16x2 $1, bits, $5;
        shl.b32 sign, $4, 4;
        and.b32 sign, sign, 0x80008000;
        shr.b32 rest, $4, 2;
        lop3.b32 bits, rest, 0x01C001C0, sign, 0xEA;
        mul.bf16x2 $2, bits, $5;
        and.b32 sign, $4, 0x80008000;
        shr.b32 rest, $4, 6;
        lop3.b32 bits, rest, 0x01C001C0, sign, 0xEA;
        mul.bf16x2 $3, bits, $5;
    }
    """
)
# What is missing from decoded MXFP4 numbers: exponents of bfloat16 are larger by 126, and 64 of
# that are in the products already. So numbers with scales from 2^-63 to 2^63 are exact; smaller
# ones lose digits, and with larger scales they are infinite, or no numbers where they were zero.
MXFP4_TIMES = tl.constexpr(2.0**62)


@triton.jit
def as_multiplied(x, DTYPE: tl.constexpr, NEIGHBORS: tl.constexpr):
    """A tile as tensor cores multiply it with numbers of DTYPE, of 16 bits or more.

    Float8 (E4M3) becomes bfloat16, exactly. What is no number becomes 480, or -480: caches have
    NaN in their scales, and of NaN in weights one is warned when they are loaded.

    Args:
      NEIGHBORS: that stand in one register, if x is float8: 2 where tensor cores take x itself, 4
        where they take it from shared memory, or transposed (counted in machine code for sm_90).
    """
    if x.dtype == tl.float8e4nv:
        if NEIGHBORS == 4:
            x = tl.inline_asm_elementwise(
                FLOAT8_FOUR, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            x = tl.inline_asm_elementwise(
                FLOAT8_PAIR, "=r,h", [x], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    return x.to(DTYPE)


@triton.jit
def mxfp4_as_multiplied(x, DTYPE: tl.constexpr):
    """A tile of `mxfp4` as tensor cores multiply it; in other types than bfloat16 times 2^62."""
    if DTYPE == tl.bfloat16:
        return x
    return (x.to(tl.float32) * MXFP4_TIMES).to(DTYPE)


@triton.jit
def mxfp4(word, exponent, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Four tiles [ROWS COLUMNS/4] in bfloat16, to be multiplied by MXFP4_TIMES in float32.

    The i-th has column 4 * k + i of each word k.

    Args:
      word: uint16 [ROWS COLUMNS/4], four E2M1 numbers each, the first in the lowest bits.
      exponent: uint8 [ROWS COLUMNS/32], of powers of two, 127 too large.
    """
    scale = ((tl.minimum(exponent.to(tl.int32), 191) + 64) << 7).to(tl.uint16)
    scale = tl.broadcast_to(scale[:, :, None], (ROWS, COLUMNS // 32, 8))
    scale = tl.reshape(scale, (ROWS, COLUMNS // 4))
    return tl.inline_asm_elementwise(
        MXFP4,
        "=&r,=&r,=&r,=&r,r,r",
        [word, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
