"""What FP8 costs in quality, on the models that come with the package.

    .venv/bin/python scripts/measure/fp8.py [--prompts 48] [--record results/fp8_quality.jsonl]

It takes about ten minutes on 2 cores, and measures the target's perplexity and the acceptance of
both heads. Precisions of the target: float32, bfloat16, FP8 with a scale a row, FP8 with scales of
128 x 128 blocks (from a folder written as released FP8 checkpoints are), each FP8 one also with
keys and values in FP8. Perplexity is of held-out library source, the first tokens of each file,
read as a prompt is read in decoding, through the cache. Acceptance: greedy answers to held-out
excerpts, heads in bfloat16 and FP8; differences to bfloat16 are paired by prompt, with the standard
error over prompts.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import corpus, text, weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints import runs
from peagle_jax.checkpoints.head_reading import to_model
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.decode.generate import generate
from peagle_jax.layers import CachedAttention
from peagle_jax.pipelines.budgets import HELD_OUT
from peagle_jax.pipelines.demo import standard_prompts
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import provenance
from peagle_jax.types import Model
from peagle_jax.weights import fp8

ASSETS = Path(__file__).parents[2] / "peagle_jax" / "assets"
HEADS = {"peagle": 7, "eagle3": 6}  # and K
LENGTH, BATCH = 256, 8
E4M3 = jnp.dtype(jnp.float8_e4m3fn)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=48)
    # `--new-tokens` is the former spelling
    parser.add_argument("--max-new-tokens", "--new-tokens", type=int, default=96)
    parser.add_argument(
        "--files", type=int, default=128, help="held-out files whose beginning the perplexity is of"
    )
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    tokenizer = text.load_tokenizer(ASSETS / "target")
    prompts, rows = standard_prompts(tokenizer, args.prompts), held_out_rows(tokenizer, args.files)
    heads = {name: runs.open_head(ASSETS / name) for name in HEADS}
    targets = load_targets(heads["peagle"].config.aux_hidden_state_layers)
    options = dict(dtype=jnp.bfloat16, embedding=targets["bfloat16"].params["embed"]["table"])
    models = {
        (name, precision): to_model(head, fp8=precision == "FP8", **options)
        for name, head in heads.items()
        for precision in ("bfloat16", "FP8")
    }
    results = []
    with ProgressReport("measure FP8", len(targets), unit="precisions") as progress:
        for name, target in targets.items():
            progress.update(len(results), note=name)
            # heads in FP8 go with targets in FP8
            fitting = {
                key: model for key, model in models.items() if key[1] == "bfloat16" or "FP8" in name
            }
            results.append(measure(name, target, fitting, rows, prompts, args.max_new_tokens))
    show(results)
    if args.record:
        command = " ".join(["python scripts/measure/fp8.py", *sys.argv[1:]])
        facts = provenance(command) | {
            "name": "fp8_quality",
            "files": len(rows),
            "max_new_tokens": args.max_new_tokens,
        }
        lines = args.record.read_text().splitlines() if args.record.exists() else []
        lines += [json.dumps(facts | row) for row in results]
        write_atomically(args.record, "".join(line + "\n" for line in lines))


def load_targets(aux_hidden_state_layers: Sequence[int]) -> dict[str, Model]:
    """The target in every precision."""

    def load(path, dtype=jnp.bfloat16, fp8=False):
        return load_target(
            path, aux_hidden_state_layers=aux_hidden_state_layers, dtype=dtype, fp8=fp8
        )

    with tempfile.TemporaryDirectory() as folder:
        in_blocks = Path(folder) / "target"
        write_in_blocks(ASSETS / "target", in_blocks)
        targets = {
            "float32": load(ASSETS / "target", jnp.float32),
            "bfloat16": load(ASSETS / "target"),
            "FP8 rows": load(ASSETS / "target", fp8=True),
            "FP8 blocks": load(in_blocks, fp8=True),
        }
    for name in ("FP8 rows", "FP8 blocks"):
        config = dataclasses.replace(targets[name].config, cache_dtype=E4M3)
        targets[f"{name}, FP8 cache"] = dataclasses.replace(targets[name], config=config)
    return targets


def write_in_blocks(src: Path, out: Path) -> None:
    """Writes the folder as a released FP8 checkpoint stores it.

    Matrices of the layers are FP8 with a scale a block; the rest is as it was.
    """
    source, config = weights.open_folder(src), weights.read_json(src / "config.json")
    tensors = {}
    for name, tensor in source.items():
        if tensor.ndim == 2 and ".layers." in name:
            matrix = np.asarray(tensor).astype(np.float32)
            tensors[name], tensors[f"{name}_scale_inv"] = fp8.quantize(matrix, blocks=True)
        else:
            tensors[name] = tensor
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with weights.new_folder(out) as folder:
        weights.write_folder(folder, config, tensors, {})


def held_out_rows(tokenizer, files: int) -> np.ndarray:
    """The first LENGTH tokens of held-out files that have so many."""
    _, documents = corpus.split(corpus.read_corpus(None), HELD_OUT)
    rows = []
    for document in documents:
        ids = tokenizer.encode(document.text[: 8 * LENGTH]) if document.text else []
        if len(ids) >= LENGTH:
            rows.append(ids[:LENGTH])
        if len(rows) == files:
            break
    return np.array(rows[: len(rows) // BATCH * BATCH], np.int32)


def mean_nats(target: Model, rows: np.ndarray) -> np.ndarray:
    """Mean cross entropy of each row's tokens but the first."""

    @jax.jit
    def of_batch(params, tokens):
        model = target.bind(params)
        positions = jnp.broadcast_to(jnp.arange(LENGTH)[None], tokens.shape)
        cache = target.config.empty_cache(len(tokens), LENGTH)
        out, _ = model(tokens, positions, CachedAttention(positions), cache)
        logits = model.compute_logits(out.hidden[:, :-1]).astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0].mean(axis=1)

    starts = range(0, len(rows), BATCH)
    return np.concatenate([of_batch(target.params, rows[i : i + BATCH]) for i in starts])


def measure(
    name: str,
    target: Model,
    heads: Mapping[tuple[str, str], Model],
    rows: np.ndarray,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> dict:
    """A row of results for the target in one precision, with each head."""

    def answer(head, k):
        answers = []
        for i in range(0, len(prompts), BATCH):
            batch = prompts[i : i + BATCH]
            answers += generate(
                target, head, batch, k=k, max_new_tokens=max_new_tokens, stop_ids=()
            )
        return answers

    plain = answer(None, None)
    row = {"target": name, "nats": [float(x) for x in mean_nats(target, rows)], "heads": {}}
    for (method, precision), head in heads.items():
        answers = answer(head, HEADS[method])
        is_equal = [
            a.output_token_ids == b.output_token_ids for a, b in zip(answers, plain, strict=True)
        ]
        accepted = np.array([a.num_accepted_per_pos for a in answers])
        row["heads"][f"{method} {precision}"] = {
            "k": HEADS[method],
            "equal_texts": sum(is_equal),
            "num_drafts": [a.num_drafts for a in answers],
            "num_accepted_tokens": [a.num_accepted_tokens for a in answers],
            "num_accepted_per_pos": [int(x) for x in accepted.sum(axis=0)],
        }
    return row


def show(results: list[dict]) -> None:
    """Prints perplexities and acceptance lengths, with their differences to bfloat16."""
    base = next(row for row in results if row["target"] == "bfloat16")
    table = Table("target", "perplexity", "change, %", title="perplexity on held-out source")
    for row in results:
        change = np.array(row["nats"]) - np.array(base["nats"])
        table.add_row(
            row["target"],
            f"{np.exp(np.mean(row['nats'])):.4f}",
            f"{100 * np.expm1(change.mean()):+.2f} ± {100 * standard_error(change):.2f}",
        )
    Console().print(table)
    headers = "target", "head", "acceptance length", "change", "equal to plain"
    table = Table(*headers, title="greedy drafts, change against all in bfloat16")
    for row in results:
        for name, head in row["heads"].items():
            base_head = base["heads"][name.replace("FP8", "bfloat16")]
            change = acceptance_lengths(head) - acceptance_lengths(base_head)
            pooled = 1 + sum(head["num_accepted_tokens"]) / sum(head["num_drafts"])
            table.add_row(
                row["target"],
                name,
                f"{pooled:.3f}",
                f"{change.mean():+.3f} ± {standard_error(change):.3f}",
                f"{head['equal_texts']} of {len(change)}",
            )
    Console().print(table)


def acceptance_lengths(head: dict) -> np.ndarray:
    """Of each prompt."""
    return 1 + np.array(head["num_accepted_tokens"]) / np.array(head["num_drafts"])


def standard_error(differences: np.ndarray) -> float:
    """Of the mean of paired differences."""
    return differences.std(ddof=1) / len(differences) ** 0.5


if __name__ == "__main__":
    main()
