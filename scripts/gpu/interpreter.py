"""Triton kernels in Triton's interpreter, on NumPy memory, without torch and without a GPU.

Every array stands between guards of NaN (0xff bytes): what a kernel writes outside is found
afterwards, and a read outside is an error. Outputs begin as NaN, so that what a kernel forgets to
write shows, too.
"""

import contextlib
import dataclasses
import inspect
import mmap
import sys
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction

from gpu.inline_assembly import execute


def unusable_reason() -> str | None:
    """Why the interpreter fails with the versions that are installed; None where it does not."""
    numpy, this = (tuple(map(int, x.__version__.split(".")[:2])) for x in (np, triton))
    if this < (3, 7) and numpy >= (2, 4):
        return (
            f"that of triton {triton.__version__} needs NumPy below 2.4, this is {np.__version__}"
        )
    return None


GUARD = 1 << 16  # bytes
ONE_AT_A_TIME = threading.Lock()  # XLA calls from many threads; the interpreter keeps one grid
TYPES = {
    np.dtype(ml_dtypes.float8_e4m3fn): "fp8e4nv",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype("float16"): "fp16",
    np.dtype("float32"): "fp32",
    np.dtype("int32"): "i32",
    np.dtype("uint8"): "u8",
    np.dtype("bool"): "i1",
}


NARROW = {tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.bfloat16: ml_dtypes.bfloat16}
_convert = interpreter._convert_float


def rounded(values, source, target, mode):
    """Rounds to the nearest, ties to even, as GPUs do.

    Triton 3.9's interpreter cuts bits off, and loses the carry where it does round.
    """
    if source == tl.float32 and target in NARROW:
        bits = np.uint8 if target == tl.float8e4nv else np.uint16
        return values.view(np.float32).astype(NARROW[target]).view(bits)
    return _convert(values, source, target, mode)


interpreter._convert_float = rounded
_dot = interpreter.InterpreterBuilder.create_dot


def dot(builder, a, b, d, precision, imprecise):
    """Multiplies the numbers that bfloat16 stands for.

    Triton 3.9's interpreter multiplies their 16 bits as if they were integers.
    """

    def extend(x):
        is_bfloat16 = x.dtype.scalar == tl.bfloat16
        return builder.create_fp_ext(x, tl.float32) if is_bfloat16 else x

    return _dot(builder, extend(a), extend(b), d, precision, imprecise)


interpreter.InterpreterBuilder.create_dot = dot


@dataclasses.dataclass
class Results:
    """What `tl.inline_asm_elementwise` takes its outputs from."""

    handles: list

    def get_result(self, i: int):
        return self.handles[i]


def inline_asm(builder, text, constraints, values, types, is_pure, pack):
    """Executes assembly, which Triton's interpreter cannot."""
    stored = [np.dtype(f"u{dtype.scalar.primitive_bitwidth // 8}") for dtype in types]
    found = execute(text, constraints, [x.data for x in values], stored, pack)
    handles = [
        interpreter.TensorHandle(x, dtype.scalar) for x, dtype in zip(found, types, strict=True)
    ]
    return Results(handles)


interpreter.InterpreterBuilder.create_inline_asm = inline_asm
_load = interpreter.InterpreterBuilder.create_masked_load
_addresses: list[np.ndarray] | None = None  # of every number that is read, while somebody asks
_arrays: list["Guarded"] = []  # of the launch that is executed


def load(builder, pointers, mask, *options):
    """Reads from one of the launch's arrays and no other memory, and notes from where."""
    addresses = pointers.data[mask.data.astype(bool)].ravel()
    if addresses.size and _arrays:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        first, last = int(addresses.min()), int(addresses.max()) + size - 1
        assert any(x.data_ptr() <= first and last < x.end() for x in _arrays), (
            "a kernel reads outside its arrays"
        )
    if _addresses is not None:
        _addresses.append(addresses)
    return _load(builder, pointers, mask, *options)


interpreter.InterpreterBuilder.create_masked_load = load


class Guarded:
    """An array between guards, with what Triton's interpreter asks of a tensor."""

    def __init__(self, shape, dtype, values: np.ndarray | None = None):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.memory = np.full(size + 2 * GUARD, 0xFF, np.uint8)
        self.array = self.memory[GUARD : GUARD + size].view(dtype).reshape(shape)
        if values is not None:
            self.array[...] = values
        self.dtype, self.shape = TYPES[np.dtype(dtype)], tuple(shape)

    def is_intact(self) -> bool:
        """Whether nobody wrote to the guards."""
        return bool((self.memory[:GUARD] == 0xFF).all() and (self.memory[-GUARD:] == 0xFF).all())

    def data_ptr(self):
        return self.array.ctypes.data

    def end(self):
        """The address behind the last number."""
        return self.array.ctypes.data + self.array.nbytes

    def untyped_storage(self):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        return self

    def copy_(self, _):
        pass


@contextlib.contextmanager
def reads_only(*arrays: Guarded) -> Iterator[None]:
    """Within this context a read of any other memory is an error."""
    _arrays.extend(arrays)
    try:
        yield
    finally:
        _arrays.clear()


def interpret(launch, made: list | None = None) -> tuple:
    """Executes a `Launch` on the spot; adds to `made` the arrays that it makes of the inputs."""
    assert isinstance(launch.kernel, InterpretedFunction), (
        "TRITON_INTERPRET=1 must be set before triton is imported"
    )
    unwrap(launch.kernel)
    before = [np.asarray(x) for x in launch.inputs]
    inputs = [Guarded(x.shape, x.dtype, x) for x in before]
    if made is not None:
        made += inputs
    changed = {o: i for i, o in launch.input_output_aliases.items()}
    outputs = [
        inputs[changed[o]] if o in changed else Guarded(x.shape, x.dtype)
        for o, x in enumerate(launch.outputs)
    ]
    new_outputs = [x for o, x in enumerate(outputs) if o not in changed]
    with ONE_AT_A_TIME, reads_only(*inputs, *outputs):
        launch.kernel[launch.grid](*inputs, *new_outputs, **launch.constants)
    assert all(x.is_intact() for x in inputs + outputs), (
        f"{launch.kernel.__name__} wrote outside its arrays"
    )
    for i, (x, after) in enumerate(zip(before, inputs, strict=True)):
        if i not in changed.values():
            assert after.array.tobytes() == x.tobytes(), (
                f"{launch.kernel.__name__} wrote to an input"
            )
    return tuple(jnp.asarray(x.array) for x in outputs)


def interpret_counting(reads: list):
    """A launcher that adds to `reads`, for each launch, its kernel's name and how often it read.

    These are integers in the shape of each input: how often each of its numbers was read.
    """

    def start(launch):
        global _addresses
        _addresses, made = [], []
        try:
            result = interpret(launch, made)
            addresses = np.concatenate(_addresses)
        finally:
            _addresses = None
        counts = []
        for array in made[: len(launch.inputs)]:
            index = addresses.astype(np.int64) - array.data_ptr()
            index = index[(index >= 0) & (index < array.array.nbytes)] // array.array.itemsize
            counts.append(np.bincount(index, minlength=array.array.size).reshape(array.shape))
        reads.append((launch.kernel.__name__, counts))
        return result

    return start


class Sparse(Guarded):
    """An array of zeros that is larger than memory: only pages that are written to take any.

    Before it lies as much again, so that an offset that has wrapped around reads zeros, too.
    """

    def __init__(self, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        no_reserve = 0x4000  # of Linux: nothing is set aside for pages that nobody writes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        self.memory = np.frombuffer(mmap.mmap(-1, 2 * size, flags=flags), np.uint8)
        self.array = self.memory[size:].view(dtype).reshape(shape)
        self.dtype, self.shape = TYPES[np.dtype(dtype)], tuple(shape)


def interpret_sparse(call, *inputs) -> tuple:
    """Executes the one launch of `call(*inputs, start=...)`; some inputs may be `Sparse`.

    Nothing is copied or checked. The launch's inputs begin with these, in their order; others are
    zeros.
    """
    launches = []

    def start(launch):
        launches.append(launch)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.outputs)

    shapes = [
        jax.ShapeDtypeStruct(x.shape, (x.array if isinstance(x, Sparse) else x).dtype)
        for x in inputs
    ]
    jax.eval_shape(lambda *arrays: call(*arrays, start=start), *shapes)
    (launch,) = launches
    unwrap(launch.kernel)
    arrays = [
        x if isinstance(x, Sparse) else Guarded(x.shape, x.dtype, np.asarray(x)) for x in inputs
    ]
    for x in launch.inputs[len(inputs) :]:
        arrays.append(Guarded(x.shape, x.dtype, np.zeros(x.shape, x.dtype)))
    new_outputs = [Guarded(x.shape, x.dtype) for x in launch.new_outputs]
    with ONE_AT_A_TIME, reads_only(*arrays, *new_outputs):
        launch.kernel[launch.grid](*arrays, *new_outputs, **launch.constants)
    return tuple(jnp.asarray(x.array) for x in new_outputs)


def interpret_later(launch) -> tuple:
    """Executes a `Launch` as part of a jitted function."""

    def start(*inputs):
        return interpret(dataclasses.replace(launch, inputs=inputs))

    return tuple(jax.pure_callback(start, launch.outputs, *launch.inputs))


def unwrap(kernel: InterpretedFunction) -> None:
    """Takes the tests' type checks off the kernels of a module, and of those that it imports from.

    The interpreter rewrites their source, in their own globals.
    """
    modules, names = set(), {inspect.unwrap(kernel.fn).__module__}
    while names:
        modules |= names
        functions = [
            each
            for name in names
            for each in vars(sys.modules[name]).values()
            if isinstance(each, InterpretedFunction)
        ]
        for each in functions:
            if each.fn is not inspect.unwrap(each.fn):
                each.fn = inspect.unwrap(each.fn)
                each.rewriter = FunctionRewriter(each.fn, **each.kwargs)
        names = {each.fn.__module__ for each in functions} - modules
