"""How often rounding changes a greedy text: over many prompts, by number format and decoder.

    .venv/bin/python scripts/measure/exactness.py [--record results/exactness.jsonl]

The packaged target continues excerpts of held-out Python source. In each number format its plain
greedy texts, in batches of 8, are compared with those of plain decoding in batches of 3, and with
those of speculative decoding with the packaged heads. All of them are the argmaxes of the same
function; what differs are the shapes of its products, and with them the order of sums. A text that
differs is followed to its first other token. There a row has how far apart the target's two largest
logits are, in the format's own arithmetic: a difference is rounding's where they nearly tie.

Formats: float32; bfloat16 (weights, and operands of products); fp8 (weights in float8_e4m3fn,
everything else in bfloat16, as `--fp8` loads them).
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import corpus, generate, load_pair, text
from peagle_jax.atomic_write import append_line
from peagle_jax.bench.exact import first_gap
from peagle_jax.pipelines.demo import ASSETS, HELD_OUT
from peagle_jax.progress import ProgressReport
from peagle_jax.provenance import provenance
from peagle_jax.types import InputError, Model

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": jnp.float32},
    "bfloat16": {"dtype": jnp.bfloat16},
    "fp8": {"dtype": jnp.bfloat16, "fp8": True},
}
# name -> (packaged head or None, K, nodes of a tree or None, texts decoded together)
DECODERS: dict[str, tuple[str | None, int | None, int | None, int]] = {
    "plain, batches of 3": (None, None, None, 3),
    "EAGLE-3, batches of 8": ("eagle3", 7, None, 8),
    "P-EAGLE, batches of 8": ("peagle", 7, None, 8),
    "P-EAGLE, trees of 16, batches of 8": ("peagle", 7, 16, 8),
}
REFERENCE = (None, None, None, 8)
PROMPT_TOKENS = 48


def excerpts(count: int) -> list[list[int]]:
    """Excerpts of files that no packaged model was trained on, one behind another.

    Raises:
      InputError: there are fewer.
    """
    tokenizer = text.load_tokenizer(ASSETS / "target")
    assert tokenizer is not None
    _, held_out = corpus.split(corpus.read_corpus(None), HELD_OUT)
    texts = [document.text for document in held_out if document.text is not None]
    found = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        starts = range(0, len(ids) - PROMPT_TOKENS + 1, PROMPT_TOKENS)
        found += [ids[start : start + PROMPT_TOKENS] for start in starts]
    if len(found) < count:
        rule, next_step = f"there are {len(found)} excerpts", f"use {len(found)} or fewer"
        raise InputError("--num-prompts", rule, count, next_step)
    return [found[i * len(found) // count] for i in range(count)]


def decode(
    target: Model,
    head: Model | None,
    prompts: Sequence[list[int]],
    decoder: tuple[str | None, int | None, int | None, int],
    max_new_tokens: int,
    progress: Callable[[int], None],
) -> list[list[int]]:
    """The texts of all prompts, so many at a time as the decoder says.

    Args:
      progress: is told how many texts were written further.
    """
    _, k, num_nodes, batch_size = decoder
    options = {"k": k, "num_tree_nodes": num_nodes, "stop_ids": ()}
    answers = []
    for start in range(0, len(prompts), batch_size):
        together = prompts[start : start + batch_size]
        answers += generate(target, head, together, max_new_tokens=max_new_tokens, **options)
        progress(len(together))
    return [answer.output_token_ids for answer in answers]


def measure(
    name: str, prompts: list[list[int]], max_new_tokens: int, progress: Callable[[int], None]
) -> list[dict]:
    """The rows of one number format."""
    pairs = {
        head: load_pair(ASSETS / "target", ASSETS / head, **FORMATS[name])
        for head in ("eagle3", "peagle")
    }

    def texts_of(decoder: tuple) -> list[list[int]]:
        target, head = pairs[decoder[0] or "peagle"]
        head = head if decoder[0] else None
        return decode(target, head, prompts, decoder, max_new_tokens, progress)

    target, plain = pairs["peagle"][0], texts_of(REFERENCE)
    rows = []
    for label, decoder in DECODERS.items():
        others = texts_of(decoder)
        # all texts are of one length, so that two that are not equal differ somewhere
        gaps = [
            cast(float, first_gap(target, prompt, a, b))
            for prompt, a, b in zip(prompts, plain, others, strict=True)
            if a != b
        ]
        rows.append(
            {
                "name": "exactness",
                "format": name,
                "decoder": label,
                "num_texts": len(prompts),
                "num_tokens": sum(map(len, plain)),
                "num_different": len(gaps),
                "gaps": [round(gap, 8) for gap in sorted(gaps)],
            }
        )
    return rows


def table_of(rows: Sequence[dict]) -> Table:
    """Texts that differ, and the gaps between the two largest logits where they do."""
    table = Table("format", "decoder", "texts", "different", "median gap", "largest gap")
    for row in rows:
        gaps = row["gaps"]
        table.add_row(
            row["format"],
            row["decoder"],
            f"{row['num_texts']:,}",
            str(row["num_different"]),
            f"{np.median(gaps):.2g}" if gaps else "",
            f"{max(gaps):.2g}" if gaps else "",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--record", type=Path, help="append the rows to this JSONL")
    args = parser.parse_args()
    try:
        prompts = excerpts(args.num_prompts)
    except InputError as error:
        parser.error(str(error))
    rows, done = [], 0
    origin = provenance(" ".join(["python scripts/measure/exactness.py", *sys.argv[1:]]))
    total = len(args.formats) * (1 + len(DECODERS)) * len(prompts)
    with ProgressReport("exactness", total, unit="texts") as report:

        def progress(count: int) -> None:
            nonlocal done
            done += count
            report.update(done)

        for name in args.formats:
            of_format = measure(name, prompts, args.max_new_tokens, progress)
            rows += of_format
            if args.record is not None:  # at once: a format takes minutes
                append_line(args.record, "\n".join(json.dumps(origin | row) for row in of_format))
    Console(width=110).print(table_of(rows))


if __name__ == "__main__":
    main()
