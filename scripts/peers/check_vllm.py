"""Does real vLLM agree? Same tokens, same counters, for every head given, in float32 and greedily.

    scripts/peers/install_vllm.sh .venv-vllm
    .venv/bin/python scripts/peers/check_vllm.py --vllm .venv-vllm --target DIR \\
        --drafter DIR [--drafter DIR ...] [-k 4] --prompts FILE.jsonl [--max-new-tokens 64] \\
        [--record results/vllm_agreement.jsonl]

A prompt whose first differing token is a near tie of the target (its two largest logits are within
1e-4) is counted apart.
Exit code 0: all agree. 1: something differs. 2: bad arguments.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import text
from peagle_jax.bench.exact import compare
from peagle_jax.checkpoints.pair import load_pair
from peagle_jax.checkpoints.runs import open_head
from peagle_jax.checkpoints.target_io import read_facts
from peagle_jax.decode.generate import generate
from peagle_jax.provenance import append_rows
from peagle_jax.types import InputError

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_per_pos")


def answers_of_vllm(env: Path, jobs: list[dict]) -> list[dict]:
    """vLLM's answers to the jobs of vllm_generate.py, in their order.

    A job that vLLM refuses gives {"error": message}.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs_file, answers_file = Path(folder) / "jobs.json", Path(folder) / "answers.jsonl"
        jobs_file.write_text(json.dumps(jobs))
        script = Path(__file__).with_name("vllm_generate.py")
        done = subprocess.run(
            [env / "bin/python", script, jobs_file, answers_file], capture_output=True, text=True
        )
        lines = answers_file.read_text().splitlines() if answers_file.exists() else []
        answers = [json.loads(line) for line in lines]
        is_complete = len(answers) == len(jobs)
        if done.returncode or not is_complete or any("error" in answer for answer in answers):
            print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        if not is_complete:
            raise SystemExit(f"vLLM ended after {len(answers)} of {len(jobs)} jobs")
        return answers


def our_answers(target, head, prompts, k: int, new: int) -> tuple[list[list[int]], dict]:
    """Our own greedy texts, and the counters that vLLM keeps too."""
    options = {"k": k} if head else {}
    answers = generate(target, head, prompts, max_new_tokens=new, stop_ids=(), **options)
    return [a.output_token_ids for a in answers], {
        "num_drafts": sum(a.num_drafts for a in answers),
        "num_draft_tokens": sum(a.num_draft_tokens for a in answers),
        "num_accepted_tokens": sum(a.num_accepted_tokens for a in answers),
        "num_accepted_per_pos": np.sum([a.num_accepted_per_pos for a in answers], axis=0).tolist(),
    }


def check(
    env: Path,
    target_folder: Path,
    drafters: Sequence[Path],
    k: int,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[dict]:
    """A result row for each head, and a printed table of them.

    Args:
      env: vLLM's environment.
      target_folder: the target.
      drafters: folders of its heads.
      k: tokens drafted per step.
      prompts: token ids.
      max_new_tokens: of every answer.
    """
    table = Table(
        "drafter",
        "k",
        "same tokens",
        "near ties",
        "counters (drafts, draft tokens, accepted tokens)",
        "per position",
        "agrees",
    )
    target_layers = read_facts(target_folder).layers
    configs = [open_head(folder, target_layers).config for folder in drafters]
    jobs = [
        {
            "target": str(target_folder),
            "drafter": str(folder),
            "k": k,
            "parallel": config.parallel,
            # P-EAGLE is EAGLE-3 with parallel drafting there
            "method": "eagle" if config.predicts_features else "eagle3",
            "prompts": prompts,
            "max_new_tokens": max_new_tokens,
        }
        for folder, config in zip(drafters, configs, strict=True)
    ]
    rows = []
    for folder, theirs in zip(drafters, answers_of_vllm(env, jobs), strict=True):
        if "error" in theirs:
            raise SystemExit(f"vLLM failed on {folder}: {theirs['error']}")
        target, head = load_pair(target_folder, folder, dtype=np.float32)
        answers, counted = our_answers(target, head, prompts, k, max_new_tokens)
        comparison = compare(target, prompts, answers, theirs["outputs"])
        # counters are only comparable where the texts are the same
        same_counters = all(counted[c] == theirs[c] for c in COUNTERS)
        agrees = comparison.lossless and (comparison.near_ties > 0 or same_counters)
        rows.append(
            {
                "name": "vllm_agreement",
                "peer_version": theirs["version"],
                "drafter": folder.name,
                "k": k,
                "num_prompts": len(prompts),
                "agrees": agrees,
                "same": comparison.same,
                "near_ties": comparison.near_ties,
                "different": comparison.different,
                "ours": counted,
                "vllm": {c: theirs[c] for c in COUNTERS},
            }
        )
        numbers = "/".join(str(counted[c]) for c in COUNTERS[:3])
        if not agrees:
            numbers += " against vLLM's " + "/".join(str(theirs[c]) for c in COUNTERS[:3])
        table.add_row(
            folder.name,
            str(k),
            f"{comparison.same}/{len(prompts)}",
            str(comparison.near_ties),
            numbers,
            " ".join(map(str, theirs["num_accepted_per_pos"])),
            "yes" if agrees else "NO",
        )
    Console(width=130).print(table)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", type=Path, required=True, help="environment made by scripts/peers/install_vllm.sh"
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, action="append", required=True)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    # `--out` is the former spelling, here and in the other scripts that append rows
    parser.add_argument("--record", "--out", type=Path, help="append a row for each head")
    args = parser.parse_args()
    try:
        prompts = text.read_prompts(args.prompts, text.load_tokenizer(args.target))
        rows = check(args.vllm, args.target, args.drafter, args.k, prompts, args.max_new_tokens)
    except InputError as error:
        print(f"check_vllm: {error}", file=sys.stderr)
        return 2
    if args.record:
        append_rows(args.record, rows, "scripts/peers/check_vllm.py")
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
