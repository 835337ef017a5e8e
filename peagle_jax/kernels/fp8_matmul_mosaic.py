"""The FP8 product in Pallas, by Mosaic GPU, for Hopper.

Weights and tokens come by TMA into a ring of tiles in shared memory, and wgmma reads them there.
Operands are swapped as in `fp8_matmul_triton`, for the same reason. Blackwell has other
instructions (tcgen05) and is served by Triton.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from peagle_jax.kernels.launch import gpu

TILE_K = 128  # bytes of a swizzled row
MAX_M = 256  # of wgmma's short axis
# With tiles of 128 outputs a thread has as many registers of sums as there are tokens, and 255 at
# most: above this ptxas spilled 32 bytes (200 tokens) to 1,208 (256).
MAX_M_OF_WIDE_TILES = 192


def unsupported(M: int, N: int, K: int, by_row: bool) -> str | None:
    """Why this kernel cannot take a product [M K] x [N K]; None when it can."""
    if not 90 <= gpu().capability < 100:
        capability = gpu().capability / 10
        return (
            "it is written for Hopper (compute capability 9), "
            f"and this GPU has compute capability {capability}"
        )
    if not by_row:
        return "it takes one scale a row, not blocks"
    if N % 64 or K % TILE_K or M > MAX_M:
        return (
            f"it takes M <= {MAX_M}, N in 64s, K in {TILE_K}s, and this product is {M} x {N} x {K}"
        )
    return None


def tile_config(M: int, N: int, K: int) -> dict[str, int]:
    """As in `fp8_matmul_triton`: splits until all multiprocessors work, as many stages as fit."""
    tile_n = 128 if N % 128 == 0 and 64 < M <= MAX_M_OF_WIDE_TILES else 64
    splits = 1
    while (
        N // tile_n * splits < gpu().num_sms
        and K % (2 * splits * TILE_K) == 0
        and K // (2 * splits) >= 512
    ):
        splits *= 2
    free_bytes = gpu().shared_memory - tile_n * M * 4 - 8192
    stages = min(6, K // splits // TILE_K, free_bytes // ((tile_n + M) * TILE_K))
    return {"tile_n": tile_n, "splits": splits, "stages": max(2, stages)}


def product(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    dtype: DTypeLike,
    *,
    interpret: Any = None,
    **overrides: int,
) -> jax.Array:
    """As `fp8_matmul.reference`, for one scale a row.

    Args:
      interpret: parameters of Mosaic GPU's interpreter (jax 0.11 and later).
      overrides: of `tile_config`, for measuring.
    """
    rows, K = x.shape
    M = -(-rows // 8) * 8
    N = w.shape[0]
    tiles = tile_config(M, N, K) | overrides
    tile_n, splits, stages = tiles["tile_n"], tiles["splits"], tiles["stages"]
    x = jnp.pad(x, [(0, M - rows), (0, 0)])
    x_scale = jnp.pad(x_scale[:, 0], (0, M - rows))
    steps = K // TILE_K // splits
    out_dtype = dtype if splits == 1 else jnp.float32

    def body(
        w_ref,
        x_ref,
        w_scale_ref,
        x_scale_ref,
        out_ref,
        w_tiles,
        x_tiles,
        ready,
        w_scales,
        x_scales,
        scales_ready,
        out_tile,
    ):
        """Program (n, split): outputs n * tile_n and on, over one split of K, for all tokens.

        The contracted axis is walked in `steps` tiles of TILE_K. Of these, `stages` lie in a ring
        of buffers in shared memory: while one is multiplied, the next ones are on their way.
        """
        outputs = pl.ds(lax.axis_index("n") * tile_n, tile_n)
        split = lax.axis_index("split")
        plgpu.copy_gmem_to_smem(w_scale_ref.at[outputs], w_scales, scales_ready)
        plgpu.copy_gmem_to_smem(x_scale_ref, x_scales, scales_ready)

        def fetch(step, buffer):
            k = pl.ds((split * steps + step) * TILE_K, TILE_K)
            plgpu.copy_gmem_to_smem(w_ref.at[outputs, k], w_tiles.at[buffer], ready.at[buffer])
            plgpu.copy_gmem_to_smem(x_ref.at[:, k], x_tiles.at[buffer], ready.at[buffer])

        for step in range(min(stages, steps)):
            fetch(step, step)

        def accumulate(acc):
            def one_step(step, _):
                buffer = lax.rem(step, stages)
                plgpu.barrier_wait(ready.at[buffer])
                plgpu.wgmma(acc, w_tiles.at[buffer], x_tiles.at[buffer].transpose((1, 0)))
                plgpu.wgmma_wait(0)  # the buffer has been read: only now may it be filled again

                @pl.when(step + stages < steps)
                def _():
                    fetch(step + stages, buffer)

                return ()

            lax.fori_loop(0, steps, one_step, ())
            return acc[...]

        accumulator = plgpu.ACC((tile_n, M), jnp.float32)  # pyright: ignore
        acc = pl.run_scoped(accumulate, accumulator)
        plgpu.barrier_wait(scales_ready)
        of_outputs = lax.broadcast_in_dim(w_scales[...], (tile_n, M), (0,))
        of_tokens = lax.broadcast_in_dim(x_scales[...], (tile_n, M), (1,))
        out_tile[...] = (acc * (of_outputs * of_tokens)).astype(out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out_ref.at[split, outputs, :])
        plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, TILE_K)), plgpu.SwizzleTransform(TILE_K))
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, N, M), out_dtype),
        scratch_types=[
            plgpu.SMEM((stages, tile_n, TILE_K), w.dtype, transforms=swizzled),
            plgpu.SMEM((stages, M, TILE_K), x.dtype, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.SMEM((tile_n,), jnp.float32),
            plgpu.SMEM((M,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.SMEM((tile_n, M), out_dtype),
        ],
        grid=(N // tile_n, splits),
        grid_names=("n", "split"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )
    out = run(w, x, w_scale, x_scale)
    y = out[0] if splits == 1 else out.sum(axis=0)
    return y.T[:rows].astype(dtype)
