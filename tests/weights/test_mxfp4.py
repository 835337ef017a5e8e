"""Experts in MXFP4: read one by one, and refused where they are no such pairs.

tests/targets/test_formats.py compares their numbers with transformers'.
"""

import numpy as np
import pytest

from peagle_jax.types import InputError
from peagle_jax.weights import mxfp4
from peagle_jax.weights.tensors import LazyTensor, StackedTensor, byte_blocks, cast, stack

E, OUT, GROUPS = 3, 5, 2  # experts, outputs, groups of 32 inputs
RNG = np.random.default_rng(6)
PACKED = RNG.integers(0, 256, (E, OUT, GROUPS, 16), np.uint8)
POWERS = RNG.integers(120, 134, (E, OUT, GROUPS), np.uint8)
# e2m1: one sign, two exponent bits, one of the fraction
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def pair(blocks=PACKED, scales=POWERS):
    return {"w_blocks": blocks, "w_scales": scales, "other": np.ones(2, np.float32)}


def by_hand() -> np.ndarray:
    """[E, in, out], number by number."""
    out = np.zeros((E, 32 * GROUPS, OUT), np.float32)
    for e, o, g, i in np.ndindex(PACKED.shape):
        for half, code in enumerate((PACKED[e, o, g, i] & 15, PACKED[e, o, g, i] >> 4)):
            value = VALUES[code & 7] * (-1) ** int(code >> 3) * 2.0 ** (int(POWERS[e, o, g]) - 127)
            out[e, 32 * g + 2 * i + half, o] = value
    return out


def test_numbers_and_the_bytes_that_are_written():
    tensors = mxfp4.unpack(pair(), "x")
    whole = tensors["w"]
    assert tensors.keys() == {"w", "other"} and isinstance(whole, StackedTensor)
    assert whole.shape == (E, 64, OUT) and whole.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(whole), by_hand())
    for one, want in (
        (whole, by_hand()),
        (cast(tensors, "bfloat16")["w"], by_hand().astype("bfloat16")),
    ):
        written = b"".join(block.tobytes() for block in byte_blocks(one))
        assert written == np.ascontiguousarray(want).tobytes()


def test_one_expert_is_read_at_a_time():
    """All experts of a layer of GPT-OSS 120B take 8.5 GB in float32."""
    read = []

    def part(number):
        def compute():
            read.append(number)
            return np.full((2, 3), number, np.float32)

        return LazyTensor((2, 3), np.dtype(np.float32), compute)

    blocks = byte_blocks(stack([part(i) for i in range(4)]))
    next(blocks)
    assert read == [0]
    next(blocks)
    assert read == [0, 1]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (pair(blocks=PACKED[..., :8]), "must be .E, out, in/32, 16."),
        (pair(blocks=PACKED[0], scales=POWERS[0]), "must be .E, out, in/32, 16."),
        (pair(blocks=PACKED[:0], scales=POWERS[:0]), "must be .E, out, in/32, 16."),
        (pair(scales=POWERS[:, :4]), "must be .E, out, in/32, 16."),
        (pair(scales=POWERS.astype(np.int8)), "must be uint8; got uint8 and int8"),
        (pair(blocks=PACKED.astype(np.int32)), "must be uint8; got int32 and uint8"),
        ({"w_blocks": PACKED}, "w_blocks needs w_scales; got none"),
    ],
)
def test_no_such_pairs(tensors, said):
    with pytest.raises(InputError, match=said):
        mxfp4.unpack(tensors, "x")
