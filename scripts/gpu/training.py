"""One training step of the Qwen3-Coder-30B-A3B head at long context, with kernels and without.

It is the loss and its gradients, on random aux hidden states.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gpu import steps
from peagle_jax.bench.timing import median_seconds
from peagle_jax.kernels.launch import disable_kernels
from peagle_jax.train.cod import CodConfig, cod_sample
from peagle_jax.train.hidden_states import TrainingRows, shifted
from peagle_jax.train.peagle_loss import peagle_loss
from peagle_jax.types import Batch, CodSample

# as configs/train/qwen3_coder_30b.yaml
COD = CodConfig(num_depths=8, down_sample_ratio=0.7, down_sample_ratio_min=0.2, max_anchors=None)


def measure(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """A row a context."""
    for n in (48,) if tiny else (8192, 20000):
        yield measure_context(n, tiny)


def sampled(n: int) -> tuple[np.ndarray, np.ndarray, CodSample]:
    """Segment ids [1 n] and loss mask [1 n] of two documents, and their COD sample."""
    batch = Batch(
        np.ones((1, n + 1), np.int32),
        (np.arange(n + 1) > n // 2).astype(np.int32)[None],
        np.ones((1, n + 1), bool),
    )
    segment_ids, loss_mask = shifted(batch)
    return segment_ids, loss_mask, cod_sample(loss_mask, segment_ids, COD, [0, 0])


def measure_context(n: int, tiny: bool) -> dict:
    """Milliseconds and temporary memory of a step on n tokens.

    They are two documents, and every position is in the loss. Running out of memory is a result.
    """
    case = steps.Case(steps.QWEN, "peagle", 7, 1, 2 if tiny else None)
    target, head = steps.models(case, tiny)
    config, key = head.config, jax.random.key(0)
    # of a head in training: no matrix of it is FP8
    abstract_head = steps.tracing.abstract_head(config)
    params = steps.filled(abstract_head.params, key)
    segment_ids, loss_mask, cod = sampled(n)
    cod = jax.tree.map(jnp.asarray, cod)

    def normal(i, *shape):
        array = jax.random.normal(jax.random.fold_in(key, i), shape, jnp.bfloat16)
        return array.astype(config.dtype)

    width = target.config.dim
    rows = TrainingRows(
        jax.random.randint(key, (1, n), 0, config.vocab),
        normal(1, 1, n, len(config.aux_hidden_state_layers) * width),
        normal(2, 1, n, width),
        jnp.asarray(segment_ids),
        jnp.asarray(loss_mask),
    )
    lm_head = 0.02 * normal(3, width, config.vocab)
    packed = n + cod.anchor.shape[1]
    result: dict = {
        "part": "training",
        "shape": f"{n} tokens, {packed} packed rows",
        "ms": {},
        "temporary_gb": {},
    }

    def run_step(name: str) -> None:
        def loss(params, rows, cod, lm_head):
            head = nnx.merge(abstract_head.graph, params)
            return peagle_loss(head, rows, cod, COD.num_depths, lm_head)[0]

        with disable_kernels() if name == "xla" else contextlib.nullcontext():
            step = jax.jit(jax.value_and_grad(loss)).lower(params, rows, cod, lm_head).compile()
        memory = step.memory_analysis()
        result["temporary_gb"][name] = memory.temp_size_in_bytes / 1e9
        result["ms"][name] = 1e3 * median_seconds(lambda: step(params, rows, cod, lm_head), 3)

    for name in ("kernels", "xla"):
        try:
            run_step(name)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            result.setdefault("failed", {})[name] = str(error).splitlines()[0][:200]
    return result
