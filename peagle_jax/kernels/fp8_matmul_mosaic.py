"""The FP8 product in Pallas, by Mosaic GPU, for Hopper: weights and tokens come by TMA into a ring of tiles, wgmma reads them there.

Operands are swapped as in `fp8_matmul_triton`, for the same reason. Blackwell has other instructions (tcgen05) and is served by Triton.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from peagle_jax.kernels.launch import gpu

TILE_K = 128  # bytes of a swizzled row
LARGEST_M = 256  # of wgmma's short axis


def unsupported(M: int, N: int, K: int, by_row: bool) -> str | None:
    """Why this kernel cannot take a product; None when it can."""
    if not 90 <= gpu().capability < 100:
        return f"it is written for Hopper (compute capability 9), and this GPU has {gpu().capability / 10}"
    if not by_row:
        return "it takes one scale a row, not blocks"
    if N % 64 or K % TILE_K or M > LARGEST_M:
        return f"it takes M <= {LARGEST_M}, N in 64s, K in {TILE_K}s, and this product is {M} x {N} x {K}"
    return None


def tiles(M: int, N: int, K: int) -> dict:
    """As in `fp8_matmul_triton`: splits until every multiprocessor has work, stages as many as fit."""
    tile_n = 128 if N % 128 == 0 and M > 64 else 64
    splits = 1
    while (
        N // tile_n * splits < gpu().cores
        and K % (2 * splits * TILE_K) == 0
        and K // (2 * splits) >= 512
    ):
        splits *= 2
    room = gpu().shared - tile_n * M * 4 - 8192
    return {
        "tile_n": tile_n,
        "splits": splits,
        "stages": max(2, min(6, K // splits // TILE_K, room // ((tile_n + M) * TILE_K))),
    }


def product(x, x_scale, w, w_scale, dtype, *, interpret=None, **overrides) -> jax.Array:
    """As `fp8_matmul.reference`, for one scale a row.

    Args:
      interpret: parameters of Mosaic GPU's interpreter (jax 0.11 and later).
      overrides: of `tiles`, for measuring.
    """
    rows, K = x.shape
    M, N = -(-rows // 8) * 8, w.shape[0]
    how = tiles(M, N, K) | overrides
    tile_n, splits, stages = how["tile_n"], how["splits"], how["stages"]
    x, x_scale = jnp.pad(x, [(0, M - rows), (0, 0)]), jnp.pad(x_scale[:, 0], (0, M - rows))
    steps = K // TILE_K // splits
    kept = dtype if splits == 1 else jnp.float32

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
        here = pl.ds(lax.axis_index("n") * tile_n, tile_n)
        split = lax.axis_index("split")
        plgpu.copy_gmem_to_smem(w_scale_ref.at[here], w_scales, scales_ready)
        plgpu.copy_gmem_to_smem(x_scale_ref, x_scales, scales_ready)

        def fetch(step, slot):
            at = pl.ds((split * steps + step) * TILE_K, TILE_K)
            plgpu.copy_gmem_to_smem(w_ref.at[here, at], w_tiles.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(x_ref.at[:, at], x_tiles.at[slot], ready.at[slot])

        for step in range(min(stages, steps)):
            fetch(step, step)

        def add(acc):
            def one(step, _):
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(ready.at[slot])
                plgpu.wgmma(acc, w_tiles.at[slot], x_tiles.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(0)  # the slot is read: only then may it be filled again

                @pl.when(step + stages < steps)
                def _():
                    fetch(step + stages, slot)

                return ()

            lax.fori_loop(0, steps, one, ())
            return acc[...]

        acc = pl.run_scoped(add, plgpu.ACC((tile_n, M), jnp.float32))
        plgpu.barrier_wait(scales_ready)
        scale = lax.broadcast_in_dim(w_scales[...], (tile_n, M), (0,)) * lax.broadcast_in_dim(
            x_scales[...], (tile_n, M), (1,)
        )
        out_tile[...] = (acc * scale).astype(kept)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out_ref.at[split, here, :])
        plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, TILE_K)), plgpu.SwizzleTransform(TILE_K))
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, N, M), kept),
        scratch_types=[
            plgpu.SMEM((stages, tile_n, TILE_K), w.dtype, transforms=swizzled),
            plgpu.SMEM((stages, M, TILE_K), x.dtype, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.SMEM((tile_n,), jnp.float32),
            plgpu.SMEM((M,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.SMEM((tile_n, M), kept),
        ],
        grid=(N // tile_n, splits),
        grid_names=("n", "split"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )
    out = run(w, x, w_scale, x_scale)
    return (out[0] if splits == 1 else out.sum(axis=0)).T[:rows].astype(dtype)
