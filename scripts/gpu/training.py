"""One training step of the Qwen3-Coder-30B-A3B head at long context: loss and gradients, with kernels and without, on random features."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gpu import steps
from peagle_jax.bench.timing import median_seconds
from peagle_jax.kernels.launch import disable_kernels
from peagle_jax.train.cod import CodConfig, cod_sample
from peagle_jax.train.hidden_states import TrainingRows, shifted
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.types import Batch

COD = CodConfig(
    num_depths=8, down_sample_ratio=0.7, down_sample_ratio_min=0.2, max_anchors=None
)  # configs/train/qwen3_coder_30b.yaml


def measure(ceilings: dict, tiny: bool) -> Iterator[dict]:
    for n in (48,) if tiny else (8192, 20000):
        yield one(n, tiny)


def one(n: int, tiny: bool) -> dict:
    """Two documents; every position supervised."""
    target, head = steps.models(steps.Case(steps.QWEN, "peagle", 7, 1, 2 if tiny else None), tiny)
    config, key = head.config, jax.random.key(0)
    dtype = config.dtype
    # of a head in training: no matrix of it is FP8
    shapes = steps.tracing.abstract_head(config).params
    params = steps.filled(shapes, key)
    batch = Batch(
        np.ones((1, n + 1), np.int32),
        (np.arange(n + 1) > n // 2).astype(np.int32)[None],
        np.ones((1, n + 1), bool),
    )
    segment_ids, loss_mask = shifted(batch)
    cod = jax.tree.map(jnp.asarray, cod_sample(loss_mask, segment_ids, COD, [0, 0]))

    def normal(i, *shape):
        return jax.random.normal(jax.random.fold_in(key, i), shape, jnp.bfloat16).astype(dtype)

    width = target.config.dim
    rows = TrainingRows(
        jax.random.randint(key, (1, n), 0, config.vocab),
        normal(1, 1, n, len(config.aux_hidden_state_layers) * width),
        normal(2, 1, n, width),
        jnp.asarray(segment_ids),
        jnp.asarray(loss_mask),
    )
    output = 0.02 * normal(3, width, config.vocab)
    packed = n + cod.anchor.shape[1]
    found: dict = {
        "part": "training",
        "shape": f"{n} tokens, {packed} packed rows",
        "ms": {},
        "temporary_gb": {},
    }
    for name, how in (("kernels", contextlib.nullcontext()), ("xla", disable_kernels())):
        try:
            with how:

                def loss(params, rows, cod, output):
                    return peagle_loss(
                        steps.Model(config, head_graph(config), None).bind(params),
                        rows,
                        cod,
                        COD.num_depths,
                        output,
                    )[0]

                step = jax.jit(jax.value_and_grad(loss)).lower(params, rows, cod, output).compile()
            memory = step.memory_analysis()
            found["temporary_gb"][name] = memory.temp_size_in_bytes / 1e9
            found["ms"][name] = 1e3 * median_seconds(
                lambda step=step: step(params, rows, cod, output), 3
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # out of memory is a result here
            found.setdefault("failed", {})[name] = str(error).splitlines()[0][:200]
    return found


def head_graph(config):
    return steps.tracing.abstract_head(config).graph
