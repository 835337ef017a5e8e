"""What a device reaches: bytes, products, and the time that launching costs.

Data sheets give peaks. A copy on an H200 reached 4.3 of its 4.8 TB/s, and a large bfloat16 product
790 of its 989 TFLOP/s (docs/kernels.md). The other accelerators are taken to reach the same shares
of their data sheets. `measure_this_machine` measures the machine that it runs on.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.assembler import check_assembler
from peagle_jax.bench.timing import median_seconds, verifying_seconds
from peagle_jax.free_memory import free_bytes
from peagle_jax.layers import Rope
from peagle_jax.provenance import device_name
from peagle_jax.targets.qwen3 import Qwen3, Qwen3Config
from peagle_jax.types import InputError, Model

# Of the data sheet's peaks, what large operations reached on an H200.
BANDWIDTH_SHARE, RATE_SHARE = 4.3 / 4.8, 790 / 989
THIS_MACHINE = "this-machine"
# float32 products of matrix units that multiply in bfloat16 take six passes
FLOAT32_PASSES = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one machine.

    Attributes:
      name: for people.
      memory: bytes; None: unknown.
      bandwidth: bytes per second that reading weights reaches.
      cache_bandwidth: that reading keys and values reaches, with the attention over them; None: the
        same.
      rates: multiplications and additions per second that products reach, by the bytes of a
        number: 4, 2 or 1.
      overlaps: whether a product reads its weights while it multiplies, so that the slower of the
        two counts; on a CPU their times add up.
      layer_seconds: what a layer costs besides: launches, norms, waiting. None: nobody measured it,
        and times are floors.
      pass_seconds: what starting a forward of a draft head costs besides, and the acceptance
        after a verification; 0 where nobody measured it, as on this machine.
      source: of these numbers.
    """

    name: str
    memory: int | float | None
    bandwidth: int | float
    cache_bandwidth: float | None = None
    rates: Mapping[int, int | float]
    overlaps: bool = True
    layer_seconds: float | None = None
    pass_seconds: int | float = 0.0
    source: str

    @property
    def is_floor(self) -> bool:
        """Whether times of this device are lower bounds."""
        return self.layer_seconds is None


def _accelerator(
    name: str,
    memory: float,
    bandwidth: float,
    rates: tuple[float, float, float],
    source: str,
    layer_seconds: float | None = None,
    pass_seconds: float = 0.0,
) -> Device:
    """A device by its data sheet.

    Args:
      bandwidth: bytes per second.
      rates: dense multiplications and additions per second in float32, bfloat16 and float8.
    """
    return Device(
        name=name,
        memory=memory,
        bandwidth=bandwidth * BANDWIDTH_SHARE,
        rates={size: x * RATE_SHARE for size, x in zip((4, 2, 1), rates, strict=True)},
        layer_seconds=layer_seconds,
        pass_seconds=pass_seconds,
        source=source,
    )


# What a layer and a forward of a head cost in vLLM besides bytes and products: fitted to the steps
# of Llama 3.1 8B with EAGLE-1 on an H100 (vLLM issue 20780) by scripts/measure/validate_plan.py.
# EAGLE-3's forwards cost 0.8 ms there, when they were not in CUDA graphs yet.
VLLM = 67e-6, 0.22e-3
NVIDIA, GOOGLE = "NVIDIA's data sheet", "Google Cloud's documentation"

# The RTX's bfloat16 rate is an eighth of the data sheet's 4,000 sparse FP4 TOPS. TPUs multiply
# float8 in bfloat16; of their launches nobody has told us anything.
DEVICES = {
    "h100": _accelerator("NVIDIA H100", 80e9, 3.35e12, (67e12, 989e12, 1979e12), NVIDIA, *VLLM),
    "h200": _accelerator("NVIDIA H200", 141e9, 4.8e12, (67e12, 989e12, 1979e12), NVIDIA, *VLLM),
    "b200": _accelerator("NVIDIA B200", 192e9, 8e12, (80e12, 2250e12, 4500e12), NVIDIA, *VLLM),
    "rtx-pro-6000": _accelerator(
        "NVIDIA RTX PRO 6000 Blackwell", 96e9, 1.792e12, (125e12, 500e12, 1000e12), NVIDIA, *VLLM
    ),
    "v5p": _accelerator(
        "TPU v5p", 95e9, 2.765e12, (459e12 / FLOAT32_PASSES, 459e12, 459e12), GOOGLE
    ),
    "v6e": _accelerator(
        "TPU v6e", 32e9, 1.638e12, (918e12 / FLOAT32_PASSES, 918e12, 918e12), GOOGLE
    ),
}


def find_device(name: str) -> Device:
    """A device by its name in DEVICES, or this machine, which is measured.

    Raises:
      InputError: nobody knows it. The message has the list.
    """
    if name == THIS_MACHINE:
        return measure_this_machine()
    if name not in DEVICES:
        known = ", ".join([*DEVICES, THIS_MACHINE])
        raise InputError("--device", f"must be one of {known}", name, "give --device h200")
    return DEVICES[name]


# ---------------------------------------------------------------- this machine

READ_NUMBERS = 2**26  # of float32: more than processors' caches hold
PRODUCT_ROWS, PRODUCT_DIM = 256, 2048
LAYERS = 2, 10  # of two tiny models; the difference of their times is that of layers
CONTEXTS = 64, 4096  # of the larger one; the difference is that of its keys and values


def measure_this_machine(repeats: int = 5) -> Device:
    """Measures bandwidth, products and the cost of a layer of the default device. Takes seconds.

    Args:
      repeats: timed runs of each, of which the median counts.

    Raises:
      InputError: nothing can be compiled for the device.
    """
    check_assembler()
    array = jnp.ones(READ_NUMBERS, jnp.float32)
    reading = median_seconds(functools.partial(jax.jit(jnp.sum), array), repeats)
    rates = {}
    for size, dtype in ((4, jnp.float32), (2, jnp.bfloat16)):
        x = jnp.ones((PRODUCT_ROWS, PRODUCT_DIM), dtype)
        w = jnp.ones((PRODUCT_DIM, PRODUCT_DIM), dtype)
        seconds = median_seconds(functools.partial(jax.jit(jnp.matmul), x, w), repeats)
        rates[size] = 2 * PRODUCT_ROWS * PRODUCT_DIM**2 / seconds
    small, large = (_tiny_target(layers) for layers in LAYERS)
    timed = functools.partial(verifying_seconds, k=0, batch=1, repeats=repeats)
    few, many = timed(small, context=CONTEXTS[0]), timed(large, context=CONTEXTS[0])
    c = large.config
    cached = 2 * c.layers * c.kv_heads * c.head_dim * 4 * (CONTEXTS[1] - CONTEXTS[0])
    attention = max(timed(large, context=CONTEXTS[1]) - many, cached / (array.nbytes / reading))
    return Device(
        name=device_name(),
        memory=free_bytes(),
        bandwidth=array.nbytes / reading,
        cache_bandwidth=cached / attention,
        # a number of one byte is decoded, and multiplied like one of two
        rates={**rates, 1: rates[2]},
        overlaps=jax.default_backend() != "cpu",
        layer_seconds=max(0.0, (many - few) / (LAYERS[1] - LAYERS[0])),
        source="measured now; memory is what is free",
    )


def _tiny_target(layers: int) -> Model:
    """A model whose weights take no time to read: what a step of it takes is overhead."""
    config = Qwen3Config(
        vocab=64,
        layers=layers,
        dim=64,
        mlp_dim=128,
        heads=2,
        kv_heads=1,
        head_dim=32,
        rope=Rope.from_hf({"rope_theta": 1e4}, 32, "a tiny model"),
        norm_eps=1e-6,
        attention_bias=False,
        tied_embeddings=True,
        windows=(None,) * layers,
        context=2 * CONTEXTS[1],
        aux_hidden_state_layers=(),
        dtype=jnp.float32,
        stop_ids=(),
        source=None,
    )
    graph, state = nnx.split(Qwen3(config, rngs=nnx.Rngs(0)))
    return Model(config, graph, nnx.to_pure_dict(state))
