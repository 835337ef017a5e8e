"""What FP8 costs in quality, on the models that come with the package: perplexity of the target, acceptance of both heads.

    .venv/bin/python scripts/measure/fp8.py [--prompts 48] [--record results/fp8_quality.jsonl]         about ten minutes on 2 cores

Precisions of the target: float32, bfloat16, FP8 with a scale a row, FP8 with scales of 128 x 128 blocks (from a folder written as
released FP8 checkpoints are), each FP8 one also with keys and values in FP8. Perplexity is of held-out library source, the first
tokens of each file, read as a prompt is read in decoding, through the cache. Acceptance: greedy answers to held-out excerpts,
heads in bfloat16 and FP8; differences to bfloat16 are paired by prompt, with the standard error over prompts.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from peagle_jax import corpus, text, weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints import runs
from peagle_jax.checkpoints.head_io import to_model
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.decode.generate import generate
from peagle_jax.layers import CachedAttention
from peagle_jax.pipelines.budgets import HELD_OUT
from peagle_jax.pipelines.demo import standard_prompts
from peagle_jax.provenance import provenance
from peagle_jax.types import Model
from peagle_jax.weights import fp8

ASSETS = Path(__file__).parent.parent / "peagle_jax" / "assets"
HEADS = {"peagle": 7, "eagle3": 6}  # and K
LENGTH, BATCH = 256, 8
E4M3 = jnp.dtype(jnp.float8_e4m3fn)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument(
        "--files", type=int, default=128, help="held-out files whose beginning the perplexity is of"
    )
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    tokenizer = text.load_tokenizer(ASSETS / "target")
    prompts, rows = standard_prompts(tokenizer, args.prompts), held_out_rows(tokenizer, args.files)
    heads = {name: runs.open_head(ASSETS / name) for name in HEADS}
    aux_hidden_state_layers = heads["peagle"].config.aux_hidden_state_layers
    with tempfile.TemporaryDirectory() as folder:
        in_blocks(ASSETS / "target", Path(folder) / "target")
        targets = {
            "float32": load_target(
                ASSETS / "target", aux_hidden_state_layers=aux_hidden_state_layers
            ),
            "bfloat16": load_target(
                ASSETS / "target",
                aux_hidden_state_layers=aux_hidden_state_layers,
                dtype=jnp.bfloat16,
            ),
            "FP8 rows": load_target(
                ASSETS / "target",
                aux_hidden_state_layers=aux_hidden_state_layers,
                dtype=jnp.bfloat16,
                fp8=True,
            ),
            "FP8 blocks": load_target(
                Path(folder) / "target",
                aux_hidden_state_layers=aux_hidden_state_layers,
                dtype=jnp.bfloat16,
                fp8=True,
            ),
        }
    for name in ("FP8 rows", "FP8 blocks"):
        base = targets[name]
        targets[f"{name}, FP8 cache"] = dataclasses.replace(
            base, config=dataclasses.replace(base.config, cache_dtype=E4M3)
        )
    how = dict(dtype=jnp.bfloat16, embedding=targets["bfloat16"].params["embed"]["table"])
    models = {
        (name, kind): to_model(head, fp8=kind == "FP8", **how)
        for name, head in heads.items()
        for kind in ("bfloat16", "FP8")
    }
    found = []
    for name, target in track(targets.items(), "measuring", console=Console(stderr=True)):
        mine = {
            key: model for key, model in models.items() if key[1] == "bfloat16" or "FP8" in name
        }
        found.append(measure(name, target, mine, rows, prompts, args.new_tokens))
    show(found)
    if args.record:
        command = " ".join(["python scripts/measure/fp8.py", *sys.argv[1:]])
        facts = provenance(command) | {
            "name": "fp8_quality",
            "files": len(rows),
            "new_tokens": args.new_tokens,
        }
        lines = args.record.read_text().splitlines() if args.record.exists() else []
        write_atomically(
            args.record,
            "".join(line + "\n" for line in [*lines, *(json.dumps(facts | row) for row in found)]),
        )


def in_blocks(src: Path, out: Path) -> None:
    """The folder as a released FP8 checkpoint stores it: matrices of the layers in blocks, the rest as it is."""
    held, config = weights.open_folder(src), weights.read_json(src / "config.json")
    tensors = {}
    for name, tensor in held.items():
        if tensor.ndim == 2 and ".layers." in name:
            tensors[name], tensors[f"{name}_scale_inv"] = fp8.quantize(
                np.asarray(tensor).astype(np.float32), blocks=True
            )
        else:
            tensors[name] = tensor
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with weights.new_folder(out) as folder:
        weights.write_folder(folder, config, tensors, {})


def held_out_rows(tokenizer, files: int) -> np.ndarray:
    """The first LENGTH tokens of held-out files that have so many."""
    _, documents = corpus.split(corpus.read_corpus(None), HELD_OUT)
    rows = []
    for segment_ids in documents:
        ids = tokenizer.encode(segment_ids.text[: 8 * LENGTH]) if segment_ids.text else []
        if len(ids) >= LENGTH:
            rows.append(ids[:LENGTH])
        if len(rows) == files:
            break
    return np.array(rows[: len(rows) // BATCH * BATCH], np.int32)


def nats(target: Model, rows: np.ndarray) -> np.ndarray:
    """Mean cross entropy of each row's tokens but the first."""

    @jax.jit
    def part(params, tokens):
        model = target.bind(params)
        positions = jnp.broadcast_to(jnp.arange(LENGTH)[None], tokens.shape)
        out, _ = model(
            tokens,
            positions,
            CachedAttention(positions),
            target.config.empty_cache(len(tokens), LENGTH),
        )
        logits = jax.nn.log_softmax(model.compute_logits(out.hidden[:, :-1]).astype(jnp.float32))
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0].mean(axis=1)

    return np.concatenate(
        [part(target.params, rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)]
    )


def measure(
    name: str, target: Model, heads: dict, rows: np.ndarray, prompts, new_tokens: int
) -> dict:
    def answers(head, k):
        return [
            answer
            for i in range(0, len(prompts), BATCH)
            for answer in generate(
                target, head, prompts[i : i + BATCH], k=k, max_new_tokens=new_tokens, stop_ids=()
            )
        ]

    plain = answers(None, None)
    row = {"target": name, "nats": [float(x) for x in nats(target, rows)], "heads": {}}
    for (method, kind), head in heads.items():
        mine = answers(head, HEADS[method])
        row["heads"][f"{method} {kind}"] = {
            "k": HEADS[method],
            "equal_texts": sum(
                a.output_token_ids == b.output_token_ids for a, b in zip(mine, plain, strict=True)
            ),
            "drafts": [a.num_drafts for a in mine],
            "accepted": [sum(a.accepted_per_position) for a in mine],
            "by_position": [
                int(x) for x in np.sum([a.accepted_per_position for a in mine], axis=0)
            ],
        }
    return row


def show(found: list[dict]) -> None:
    base = next(row for row in found if row["target"] == "bfloat16")
    table = Table("target", "perplexity", "change, %", title="perplexity on held-out source")
    for row in found:
        change = np.array(row["nats"]) - np.array(base["nats"])
        error = change.std(ddof=1) / len(change) ** 0.5
        table.add_row(
            row["target"],
            f"{np.exp(np.mean(row['nats'])):.4f}",
            f"{100 * np.expm1(change.mean()):+.2f} ± {100 * error:.2f}",
        )
    Console().print(table)
    table = Table(
        "target",
        "head",
        "acceptance length",
        "change",
        "equal to plain",
        title="greedy drafts, change against all in bfloat16",
    )

    def lengths(one):
        return 1 + np.array(one["accepted"]) / np.array(one["drafts"])

    for row in found:
        for name, one in row["heads"].items():
            change = lengths(one) - lengths(base["heads"][name.replace("FP8", "bfloat16")])
            whole = 1 + sum(one["accepted"]) / sum(one["drafts"])
            error = change.std(ddof=1) / len(change) ** 0.5
            equal = f"{one['equal_texts']} of {len(change)}"
            table.add_row(
                row["target"], name, f"{whole:.3f}", f"{change.mean():+.3f} ± {error:.3f}", equal
            )
    Console().print(table)


if __name__ == "__main__":
    main()
