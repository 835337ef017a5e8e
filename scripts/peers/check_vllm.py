"""Does real vLLM agree? Same tokens, same counters, for every head given, in float32 and greedily.

    scripts/peers/install_vllm.sh .venv-vllm
    .venv/bin/python scripts/peers/check_vllm.py --vllm .venv-vllm --target DIR --drafter DIR [--drafter DIR ...] [-k 4] \
        --prompts FILE.jsonl [--max-new-tokens 64] [--out results/vllm_agreement.jsonl]

A prompt whose first differing token is a near tie of the target (top two logits within 1e-4) is counted apart.
Exit code 0: all agree. 1: something differs. 2: bad arguments.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import text
from peagle_jax.bench.exact import compare
from peagle_jax.checkpoints.head_io import load_drafter
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.decode.generate import generate
from peagle_jax.provenance import provenance
from peagle_jax.types import InputError

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position")


def by_vllm(env: Path, jobs: list[dict]) -> list[dict]:
    """vLLM's answers to the jobs of vllm_generate.py, in their order; a job that vLLM refuses gives {"error"}."""
    with tempfile.TemporaryDirectory() as folder:
        ask, answer = Path(folder) / "jobs.json", Path(folder) / "answers.jsonl"
        ask.write_text(json.dumps(jobs))
        script = Path(__file__).with_name("vllm_generate.py")
        done = subprocess.run(
            [env / "bin/python", script, ask, answer], capture_output=True, text=True
        )
        lines = answer.read_text().splitlines() if answer.exists() else []
        if (
            done.returncode
            or len(lines) != len(jobs)
            or any("error" in json.loads(line) for line in lines)
        ):
            print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        if len(lines) != len(jobs):
            raise SystemExit(f"vLLM ended after {len(lines)} of {len(jobs)} jobs")
        return [json.loads(line) for line in lines]


def ours(target, head, prompts, k: int, new: int):
    answers = generate(target, head, prompts, k=k, max_new_tokens=new, stop_ids=())
    return [a.output_token_ids for a in answers], {
        "num_drafts": sum(a.num_drafts for a in answers),
        "num_draft_tokens": sum(a.num_draft_tokens for a in answers),
        "num_accepted_tokens": sum(a.num_accepted_tokens for a in answers),
        "accepted_per_position": np.sum(
            [a.accepted_per_position for a in answers], axis=0
        ).tolist(),
    }


def check(args) -> bool:
    prompts = text.read_prompts(args.prompts, text.load_tokenizer(args.target))
    table = Table(
        "drafter",
        "k",
        "same tokens",
        "near ties",
        "counters (drafts, drafted, accepted)",
        "per position",
        "agrees",
    )
    agrees, rows = True, []
    plain = load_target(args.target)
    embedding, layers = plain.params["embed"]["table"], plain.config.layers
    heads = [
        load_drafter(folder, dtype=np.float32, embedding=embedding, target_layers=layers)
        for folder in args.drafter
    ]
    jobs = [
        {
            "target": str(args.target),
            "drafter": str(folder),
            "k": args.k,
            "parallel": head.config.parallel,
            "prompts": prompts,
            "max_new_tokens": args.max_new_tokens,
        }
        for folder, head in zip(args.drafter, heads, strict=True)
    ]
    for folder, head, theirs in zip(args.drafter, heads, by_vllm(args.vllm, jobs), strict=True):
        if "error" in theirs:
            raise SystemExit(f"vLLM failed on {folder}: {theirs['error']}")
        target = load_target(
            args.target, aux_hidden_state_layers=head.config.aux_hidden_state_layers
        )
        mine, counted = ours(target, head, prompts, args.k, args.max_new_tokens)
        seen = compare(target, prompts, mine, theirs["outputs"])
        rows.append(
            provenance("python scripts/peers/check_vllm.py " + " ".join(sys.argv[1:]))
            | {
                "name": "vllm_agreement",
                "drafter": Path(folder).name,
                "k": args.k,
                "prompts": len(prompts),
                "same": seen.same,
                "near_ties": seen.near_ties,
                "different": seen.different,
                "ours": counted,
                "vllm": {c: theirs[c] for c in COUNTERS},
            }
        )
        # counters are only comparable where the texts are the same
        good = seen.lossless and (
            seen.near_ties > 0 or all(counted[c] == theirs[c] for c in COUNTERS)
        )
        agrees &= good
        numbers = "/".join(str(counted[c]) for c in COUNTERS[:3])
        if not good:
            numbers += " against vLLM's " + "/".join(str(theirs[c]) for c in COUNTERS[:3])
        table.add_row(
            Path(folder).name,
            str(args.k),
            f"{seen.same}/{len(prompts)}",
            str(seen.near_ties),
            numbers,
            " ".join(map(str, theirs["accepted_per_position"])),
            "yes" if good else "NO",
        )
    Console(width=130).print(table)
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return agrees


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
    parser.add_argument("--out", type=Path, help="append a record for each head")
    try:
        return 0 if check(parser.parse_args()) else 1
    except InputError as error:
        print(f"check_vllm: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
