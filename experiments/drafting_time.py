"""How does drafting time grow with K, and where does a step's time go against the bytes and arithmetic it needs?

    python -m experiments.drafting_time [--layers 8 --dim 512 --repeats 7] [--out results/drafting_time.jsonl]

Random weights: a Qwen3 target, a P-EAGLE head of 2 layers, an EAGLE-3 head of 1; batch 1, a cache of 256 tokens, float32. A drafting
takes in two committed tokens; "all accepted" is the one after a step that accepted all K.
Expects: P-EAGLE at K = 16 over K = 1 at most 3.5 on a CPU, EAGLE-3 about 16; 3 minutes on 2 cores.
Result:  see LOG.md, 2026-11-20, and results/drafting_time.jsonl.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from peagle_jax.bench import timing
from peagle_jax.decode.drafters import SHORT
from peagle_jax.decode.generate import make_drafter
from peagle_jax.draft.head import DraftHead, HeadConfig
from peagle_jax.draft.placeholders import PAPER_DESIGN
from peagle_jax.layers import Rope
from peagle_jax.provenance import provenance
from peagle_jax.targets.config import default_aux_layers
from peagle_jax.targets.qwen3 import Qwen3, Qwen3Config
from peagle_jax.types import Model

KS, CONTEXT, VOCAB, STEPS = (1, 2, 4, 8, 11, 16), 256, 4096, 20


def make_target(layers: int, dim: int) -> Model:
    config = Qwen3Config(
        vocab=VOCAB,
        layers=layers,
        dim=dim,
        mlp_dim=3 * dim,
        heads=dim // 64,
        kv_heads=max(1, dim // 128),
        head_dim=64,
        rope=Rope.from_hf({"rope_theta": 1e4}, 64, ""),
        norm_eps=1e-6,
        attention_bias=False,
        tied_embeddings=False,
        windows=(None,) * layers,
        context=4096,
        aux_hidden_state_layers=default_aux_layers(layers),
        dtype=jnp.float32,
        stop_ids=(),
        source=None,
    )
    return Model.of(Qwen3(config, rngs=nnx.Rngs(0)), config)


def make_head(target: Model, layers: int, parallel: bool) -> Model:
    t = target.config
    config = HeadConfig(
        vocab=t.vocab,
        draft_vocab=t.vocab,
        dim=t.dim,
        layers=layers,
        mlp_dim=t.mlp_dim,
        heads=t.heads,
        kv_heads=t.kv_heads,
        head_dim=t.head_dim,
        rope=t.rope,
        norm_eps=t.norm_eps,
        context=t.context,
        target_dim=t.dim,
        aux_hidden_state_layers=t.aux_hidden_state_layers,
        mask_token=1 if parallel else None,
        num_depths=16,
        qk_norm=False,
        attention_bias=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        **PAPER_DESIGN,
        windows=(None,) * layers,
        dtype=t.dtype,
    )
    return Model.of(DraftHead(config, rngs=nnx.Rngs(1)), config)


def machine(repeats: int) -> tuple[float, float]:
    """(bytes a second of reading weights by matrix-vector products, FLOP a second of a large matrix product), measured here."""
    matrices = [
        jax.random.normal(jax.random.key(i), (1024, 2048)) for i in range(16)
    ]  # 134 MB: larger than the caches
    x = jax.random.normal(jax.random.key(99), (1, 1024))
    read = jax.jit(lambda x, ws: sum((x @ w).sum() for w in ws))
    bandwidth = sum(w.nbytes for w in matrices) / timing.median_seconds(
        functools.partial(read, x, matrices), repeats
    )
    square = jax.random.normal(jax.random.key(1), (1536, 1536))
    product = jax.jit(lambda a: a @ a)
    return bandwidth, 2 * 1536**3 / timing.median_seconds(
        functools.partial(product, square), repeats
    )


def matmul_weights(head: Model) -> tuple[int, int, int]:
    """Parameters in the matrix products of (fusion, layers, lm_head)."""

    def size(part):
        return sum(x.size for x in jax.tree.leaves(part) if x.ndim == 2)

    return size(head.params["fusion"]), size(head.params["layers"]), size(head.params["lm_head"])


def floor(head: Model, k: int, bandwidth: float, flops: float) -> dict:
    """What one P-EAGLE drafting must at least do: read each weight once, multiply 2 + K-1 rows (K through lm_head)."""
    fusion, layers, lm_head = matmul_weights(head)
    arithmetic = 2 * (2 * fusion + (k + 1) * layers + k * lm_head)
    size = 4 * (fusion + layers + lm_head)
    return {
        "bytes": size,
        "flop": arithmetic,
        "bytes_seconds": size / bandwidth,
        "flop_seconds": arithmetic / flops,
    }


def products(head: Model, k: int, repeats: int) -> dict:
    """Seconds of the matrix products alone, at the rows that drafting gives them: fusion, layers, lm_head."""
    taken = SHORT if k > SHORT else k + 1

    def kernels(tree):
        return [x for x in jax.tree.leaves(tree) if x.ndim == 2]

    work = {
        "fusion": (taken, kernels(head.params["fusion"])),
        "layers": (taken + k - 1, kernels(head.params["layers"])),
        "lm_head": (k, kernels(head.params["lm_head"])),
    }

    @functools.partial(jax.jit, static_argnums=1)
    def multiply(matrices, rows):
        def body(_, total):  # the scale depends on the last round, so no round can be dropped
            return sum(((1 + 0 * total) * jnp.ones((rows, w.shape[0])) @ w).sum() for w in matrices)

        return jax.lax.fori_loop(0, STEPS, body, 0.0)

    return {
        name: timing.median_seconds(functools.partial(multiply, ws, rows), repeats) / STEPS
        for name, (rows, ws) in work.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results/drafting_time.jsonl"))
    args = parser.parse_args()
    target = make_target(args.layers, args.dim)
    heads = {"peagle": make_head(target, 2, True), "eagle3": make_head(target, 1, False)}
    bandwidth, flops = machine(args.repeats)
    plain = timing.verifying_seconds(
        target, 0, batch=1, context=CONTEXT, repeats=args.repeats, steps=STEPS
    )
    where = provenance(
        f"python -m experiments.drafting_time --layers {args.layers} --dim {args.dim} --repeats {args.repeats}"
    )
    rows, first = [], {}
    for k in KS:
        verify = timing.verifying_seconds(
            target, k, batch=1, context=CONTEXT, repeats=args.repeats, steps=STEPS
        )
        for method, head in heads.items():
            seconds = timing.drafting_seconds(
                head,
                make_drafter(head, k, method),
                batch=1,
                context=CONTEXT,
                repeats=args.repeats,
                steps=STEPS,
            )
            first.setdefault(method, seconds)
            row = {
                "name": "drafting_time",
                "method": method,
                "k": k,
                "draft_seconds": seconds,
                "over_k1": seconds / first[method],
                "verify_seconds": verify,
                "plain_step_seconds": plain,
                "break_even": (seconds + verify) / plain,
            }
            if method == "peagle":
                drafter = make_drafter(head, k, method)
                row["draft_seconds_after_all_accepted"] = timing.drafting_seconds(
                    head,
                    drafter,
                    batch=1,
                    context=CONTEXT,
                    committed=k + 1,
                    repeats=args.repeats,
                    steps=STEPS,
                )
                row |= {
                    "floor": floor(head, k, bandwidth, flops),
                    "matmul_seconds": products(head, k, args.repeats),
                }
            rows.append(where | row | {"bandwidth": bandwidth, "flops": flops, **_shape(target)})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    Console(width=150).print(
        f"{bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s; plain step {1e3 * plain:.2f} ms",
        _table(rows),
    )


def _shape(target: Model) -> dict:
    config = {f.name: getattr(target.config, f.name) for f in dataclasses.fields(target.config)}
    return {"target": {key: config[key] for key in ("layers", "dim", "mlp_dim", "vocab")}}


def _table(rows: list[dict]) -> Table:
    titles = (
        "method",
        "K",
        "draft ms",
        "over K=1",
        "all accepted ms",
        "floor ms: bytes, arithmetic",
        "products ms: fusion, layers, lm_head",
    )
    table = Table(*titles, "rest ms", "verify ms", "break-even AL")
    for r in rows:
        milli = [f"{1e3 * r['draft_seconds']:.2f}", f"{r['over_k1']:.2f}", "", "", "", ""]
        if r["method"] == "peagle":
            low, products = r["floor"], r["matmul_seconds"].values()
            milli[2] = f"{1e3 * r['draft_seconds_after_all_accepted']:.2f}"
            milli[3] = f"{1e3 * low['bytes_seconds']:.2f} , {1e3 * low['flop_seconds']:.2f}"
            milli[4] = " , ".join(f"{1e3 * s:.2f}" for s in products)
            milli[5] = f"{1e3 * (r['draft_seconds'] - sum(products)):.2f}"
        table.add_row(
            r["method"],
            str(r["k"]),
            *milli,
            f"{1e3 * r['verify_seconds']:.2f}",
            f"{r['break_even']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
