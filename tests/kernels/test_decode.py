"""Every float8 and MXFP4 number as bfloat16, by the assembly that a GPU runs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from gpu.inline_assembly import execute
from gpu.interpreter import interpret

from peagle_jax.kernels.decode_triton import MXFP4_TIMES, as_multiplied, mxfp4
from peagle_jax.kernels.launch import Launch
from peagle_jax.layers.moe import E2M1_VALUES


@triton.jit
def float8_kernel(x_ptr, y_ptr, NEIGHBORS: tl.constexpr):
    """256 float8 numbers, decoded."""
    i = tl.arange(0, 16)
    at = 16 * i[:, None] + i[None, :]
    tl.store(y_ptr + at, as_multiplied(tl.load(x_ptr + at), tl.float32, NEIGHBORS))


@triton.jit
def mxfp4_kernel(word_ptr, exponent_ptr, y_ptr):
    """Two rows of 64 numbers, decoded: [4 2 16]."""
    row, k, group = tl.arange(0, 2)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 2)[None, :]
    word = tl.load(word_ptr.to(tl.pointer_type(tl.uint16)) + 16 * row + k)
    y0, y1, y2, y3 = mxfp4(word, tl.load(exponent_ptr + 2 * row + group), 2, 64)
    at = y_ptr + 16 * row + k
    tl.store(at, y0.to(tl.float32) * MXFP4_TIMES)
    tl.store(at + 32, y1.to(tl.float32) * MXFP4_TIMES)
    tl.store(at + 64, y2.to(tl.float32) * MXFP4_TIMES)
    tl.store(at + 96, y3.to(tl.float32) * MXFP4_TIMES)


@pytest.mark.parametrize("neighbors", [2, 4])
def test_every_float8_number_is_exact(neighbors):
    x = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    launch = Launch(
        kernel=float8_kernel,
        inputs=(jnp.asarray(x),),
        outputs=(jax.ShapeDtypeStruct((256,), jnp.float32),),
        grid=(1,),
        constants=dict(NEIGHBORS=neighbors),
    )
    (got,) = interpret(launch)
    want = x.astype(np.float32)
    # what is no number
    want[0x7F], want[0xFF] = 480, -480
    np.testing.assert_array_equal(got, want)
    assert np.signbit(got[0x80])  # -0


def decoded(numbers: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Rows [2 64] of codes, with the exponents [2 2] of their groups, by the kernel."""
    stored = (numbers[:, 0::2] | numbers[:, 1::2] << 4).astype(np.uint8)
    launch = Launch(
        kernel=mxfp4_kernel,
        inputs=(jnp.asarray(stored), jnp.asarray(exponents, jnp.uint8)),
        outputs=(jax.ShapeDtypeStruct((4, 2, 16), jnp.float32),),
        grid=(1,),
        constants={},
    )
    (got,) = interpret(launch)
    return np.asarray(got).transpose(1, 2, 0).reshape(2, 64)


@pytest.mark.parametrize("first", [64, 65, 126, 127, 187])
def test_mxfp4_numbers_are_exact(first):
    """All 16 in every place of a word and a register; scales from 2^-63 to 2^63."""
    k = np.arange(64)
    rows = (k // 8 + 8 * (k % 2) + np.array([[0], [8]])) % 16
    seen = set()
    for shift in range(8):
        numbers, exponents = np.roll(rows, shift, axis=1), first + np.arange(4).reshape(2, 2)
        seen |= set(zip(numbers.ravel().tolist(), np.tile(k % 8, 2).tolist(), strict=True))
        want = np.asarray(E2M1_VALUES)[numbers] * 2.0 ** np.repeat(exponents - 127, 32, axis=1)
        np.testing.assert_array_equal(decoded(numbers, exponents), want.astype(np.float32))
    assert len(seen) == 16 * 8


@pytest.mark.parametrize("exponent", [0, 30])
def test_scales_that_are_too_small_give_nearly_nothing(exponent):
    numbers = np.tile(np.arange(16), (2, 4))
    got = decoded(numbers, np.full((2, 2), exponent))
    assert np.abs(got).max() <= 6 * 2.0 ** (exponent - 127) * 1.01


@pytest.mark.parametrize("exponent", [191, 254, 255])
def test_scales_that_are_too_large_become_infinite(exponent):
    """They are seen, where a wrapped exponent would not be."""
    numbers = np.tile(np.arange(16), (2, 4))
    got = decoded(numbers, np.full((2, 2), exponent))
    assert not np.isfinite(got).any()


@pytest.mark.parametrize(
    "text, constraints, error",
    [
        ("add.f16x2 $0, $1, $1;", "=r,r", "inline assembly with add.f16x2"),
        ("shl.b32 $0, $1, 1;", "=r,r,r", "does not fit 1 outputs"),
        ("shl.b32 $0, $1, 1;", "=r,h", "does not fit 1 outputs"),
        ("mov.b32 $0, $1; shl.b32 $0, $1, 1;", "=r,r", "after an output was written"),
    ],
)
def test_other_assembly_is_refused(text, constraints, error):
    one = [np.zeros(4, np.uint16)]
    with pytest.raises((NotImplementedError, ValueError), match=error):
        execute(text, constraints, one, [np.dtype(np.uint16)], 2)


def test_a_register_of_16_bits_is_converted_first():
    text, one = "shl.b32 $0, $1, 1;", [np.zeros(4, np.uint8)]
    with pytest.raises(ValueError, match="reads a register of 16 bits"):
        execute(text, "=r,h", one, [np.dtype(np.uint16)], 2)


@pytest.mark.parametrize(
    "text, want",
    [
        ("lop3.b32 $0, $1, $2, 0xF0F0F0F0, 0x96;", lambda a, b: a ^ b ^ 0xF0F0F0F0),
        ("prmt.b32 $0, $1, $2, 0x7043;", lambda a, b: prmt(a, b, (3, 4, 0, 7))),
        ("shl.b32 $0, $1, 5; shr.b32 $0, $0, 3;", lambda a, _: (a << 5 & 0xFFFFFFFF) >> 3),
    ],
)
def test_assembly(text, want):
    a, b = np.random.default_rng(0).integers(0, 2**16, (2, 8), dtype=np.uint16)
    (got,) = execute(text, "=r,r,r", [a, b], [np.dtype(np.uint16)], 2)
    registers = [x.view(np.uint32).tolist() for x in (a, b)]
    expected = [want(*pair) for pair in zip(*registers, strict=True)]
    assert got.view(np.uint32).tolist() == expected


def prmt(a: int, b: int, places: tuple[int, ...]) -> int:
    """The bytes of b and a at these places, the first one lowest."""
    both = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(both[place] for place in places), "little")


@pytest.mark.parametrize("on_xla_thread", [False, True])
@pytest.mark.parametrize(
    "a, b, product",
    [
        (0x0040, 0x7E80, 0x3F00),  # 2^-127, which is subnormal, times 2^126
        (0x81C0, 0x7E80, 0xC0C0),  # -1.5 x 2^-124
        (0x0001, 0x4000, 0x0002),
        (0x81C0, 0x3E00, 0x8060),  # a subnormal result
        (0x3F81, 0x3FC0, 0x3FC2),  # between 0x3FC1 and 0x3FC2: to the even one
        (0x7F00, 0x4000, 0x7F80),  # infinite
        (0x8000, 0x3F80, 0x8000),
    ],
)
def test_products_of_bfloat16(a, b, product, on_xla_thread):
    """In both halves of a register; subnormal numbers on threads of XLA's, too, which drop them."""

    def multiply(x, y):
        register = [np.dtype(np.uint16)]
        return execute("mul.bf16x2 $0, $1, $2;", "=r,r,r", [*map(np.asarray, (x, y))], register, 2)

    one, other = np.full(2, a, np.uint16), np.array([b, 0x3F80], np.uint16)
    if on_xla_thread:
        result = [jax.ShapeDtypeStruct((2,), np.uint16)]
        (got,) = jax.jit(lambda *pair: jax.pure_callback(multiply, result, *pair))(one, other)
    else:
        (got,) = multiply(one, other)
    assert got.tolist() == [product, a]
