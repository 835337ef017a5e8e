"""Does real llama.cpp agree? Same tokens and counters with EAGLE-3 heads in GGUF files, greedily.

    scripts/peers/install_llama_cpp.sh .venv-llama-cpp
    .venv/bin/python -m pip install -e ".[gguf]"
    .venv/bin/python scripts/peers/check_llama_cpp.py --llama-cpp .venv-llama-cpp \\
        [--target DIR] [--target-gguf FILE] [--drafter DIR ...] [--only NAME,...] [-k 4] \\
        [--num-prompts 8] [--max-new-tokens 64] [--out runs/llama_cpp] \\
        [--record results/llama_cpp.jsonl]

Without --drafter the heads are variants of the packaged EAGLE-3 head, one for each option that
llama.cpp knows (`CASES`). The packaged head itself norms queries and keys, for which llama.cpp has
no place: `peagle convert --to gguf` refuses it, and the check shows that llama.cpp would, too.

Ours and llama.cpp's counters differ in one rule, which `counted_as_llama_cpp` applies to ours: at
the end of an answer llama.cpp drafts no more tokens than may still be written. Of a head
in bfloat16 only the text must agree, because llama.cpp rounds activations to bfloat16, too.
Exit code 0: all agree. 1: something differs. 2: bad arguments.
"""

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import llama_cpp_target
import matrix_heads as heads
import numpy as np
from rich.console import Console
from rich.table import Table

from peagle_jax import text
from peagle_jax.atomic_write import append_line
from peagle_jax.bench.exact import compare
from peagle_jax.checkpoints import gguf_writing
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_reading import read_head
from peagle_jax.checkpoints.head_writing import from_model
from peagle_jax.checkpoints.pair import load_pair
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.decode.generate import generate
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.provenance import provenance
from peagle_jax.types import InputError, Model

# name -> what is changed in the packaged EAGLE-3 head
CASES: dict[str, tuple[heads.Change, ...]] = {
    "llama": (heads.llama,),
    "shared_embedding": (heads.llama, heads.shared),
    "reduced": (heads.llama, heads.reduced),
    "norm_before_residual": (heads.llama, heads.norm_before_residual),
    "norm_before_fc": (heads.llama, heads.norm_before_fc),
    "llama3": (heads.llama, functools.partial(heads.rope, "llama3")),
    "yarn": (heads.llama, functools.partial(heads.rope, "yarn")),
    "linear": (heads.llama, functools.partial(heads.rope, "linear")),
    "more_heads": (heads.llama, heads.more_heads),
    "own_kv_heads": (heads.llama, heads.own_kv_heads, heads.reduced),
    "wide": (heads.llama, heads.wide),
    "bfloat16": (heads.llama,),
}
REFUSED = "packaged"  # the packaged head, written by force
QK_NORMS = {
    f"layers.0.self_attn.{q}_norm.weight": f"blk.0.attn_{q}_norm.weight" for q in ("q", "k")
}


@dataclasses.dataclass
class Case:
    """A head to show to llama.cpp.

    Attributes:
      name: of the head.
      file: it as GGUF.
      head: it as we decode with it, float32.
      exact: whether the counters must be the same, too.
    """

    name: str
    file: Path
    head: Model
    exact: bool


def counted_as_llama_cpp(is_draft: Sequence[bool], k: int, max_new_tokens: int) -> tuple[int, int]:
    """Drafted and accepted tokens of one of our answers, as llama.cpp counts them.

    Each of its steps drafts K tokens, but at the end of an answer no more than may still be written
    beside the target's own token.

    Args:
      is_draft: which tokens of the answer are accepted drafts (`Generation.is_draft`).
      k: tokens drafted a step.
      max_new_tokens: limit of the answer.
    """
    drafted = accepted = 0
    done = 1  # the prompt's forward has written one token
    while done < max_new_tokens:
        most = min(k, max_new_tokens - done - 1)
        step = is_draft[done : done + most]
        kept = step.index(False) if False in step else most
        drafted, accepted = drafted + most, accepted + kept
        done += kept + 1
    return drafted, accepted


def answer_of_llama_cpp(env: Path, job: dict, out: Path) -> dict:
    """llama.cpp's answer to a job of llama_cpp_generate.py; {"error"} where it stops."""
    job_file, answer_file = out / "job.json", out / "answer.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    answer_file.unlink(missing_ok=True)
    script = Path(__file__).with_name("llama_cpp_generate.py")
    done = subprocess.run(
        [env / "bin/python", script, job_file, answer_file], capture_output=True, text=True
    )
    if done.returncode or not answer_file.exists():
        said = [line for line in done.stderr.splitlines() if "error loading" in line]
        lines = said or done.stderr.splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"error": lines[0].partition("llama_model_load: ")[2] or lines[0]}
    return json.loads(answer_file.read_text(encoding="utf-8"))


def write_case(name: str, out: Path) -> Case:
    """A variant of the packaged head, as a GGUF file."""
    head = heads.change(name, "eagle3", CASES[name])
    dtype = "float32"
    if name == "bfloat16":  # rounded here already, so that both have the same numbers
        dtype = "bfloat16"
        params = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), head.params)
        head = dataclasses.replace(head, params=params)
    file = out / f"{name}.gguf"
    own_embedding = heads.shared not in CASES[name]
    gguf_writing.write_gguf(
        from_model(head), file, dtype=dtype, metadata={}, own_embedding=own_embedding
    )
    return Case(name, file, head, exact=dtype == "float32")


def given_case(target: Path, folder: Path, out: Path) -> Case:
    """A head that somebody has, as a GGUF file in float32."""
    file = out / f"{folder.name}.gguf"
    convert(folder, file, to="gguf", dtype="float32", target=target)
    _, head = load_pair(target, folder, dtype=np.float32)
    return Case(folder.name, file, head, exact=True)


def check(case: Case, target: Model, theirs: dict, prompts: list[list[int]], k: int) -> dict:
    """A result row: our answers beside llama.cpp's."""
    new = len(theirs["outputs"][0])
    answers = generate(target, case.head, prompts, k=k, max_new_tokens=new, stop_ids=())
    ours = [answer.output_token_ids for answer in answers]
    comparison = compare(target, prompts, ours, theirs["outputs"])
    counts = [counted_as_llama_cpp(answer.is_draft, k, new) for answer in answers]
    their_counts = list(zip(theirs["num_draft_tokens"], theirs["num_accepted_tokens"], strict=True))
    # counters are only comparable where the texts are the same
    same_counters = [
        count == their_count
        for count, their_count, text_of_ours, text_of_theirs in zip(
            counts, their_counts, ours, theirs["outputs"], strict=True
        )
        if text_of_ours == text_of_theirs
    ]
    agrees = comparison.lossless and comparison.same > 0
    return {
        "name": "llama_cpp_agreement",
        "drafter": case.name,
        "k": k,
        "num_prompts": len(prompts),
        "max_new_tokens": new,
        "agrees": agrees and (all(same_counters) or not case.exact),
        "same": comparison.same,
        "near_ties": comparison.near_ties,
        "different": comparison.different,
        "same_counters": sum(same_counters),
        "ours": {
            "num_draft_tokens": sum(drafted for drafted, _ in counts),
            "num_accepted_tokens": sum(accepted for _, accepted in counts),
        },
        "llama_cpp": {
            "num_draft_tokens": sum(drafted for drafted, _ in their_counts),
            "num_accepted_tokens": sum(accepted for _, accepted in their_counts),
        },
        "version": theirs["version"],
    }


def check_refused(env: Path, job: dict, out: Path) -> dict:
    """A result row: the packaged head is refused by us, and written by force by llama.cpp."""
    ours, file = "", out / f"{REFUSED}.gguf"
    head = read_head(ASSETS / "eagle3")
    try:
        gguf_writing.write_gguf(head, file, dtype="float32", metadata={})
    except InputError as error:
        ours = str(error)
    lacks, names = gguf_writing.LLAMA_CPP_LACKS, gguf_writing.TENSORS
    qk_norm = lacks.pop("qk_norm")
    try:
        names.update(QK_NORMS)
        gguf_writing.write_gguf(head, file, dtype="float32", metadata={})
    finally:
        lacks["qk_norm"] = qk_norm
        for name in QK_NORMS:
            names.pop(name, None)
    theirs = answer_of_llama_cpp(env, job | {"drafter": str(file)}, out)
    return {
        "name": "llama_cpp_refusal",
        "drafter": REFUSED,
        "agrees": "norm queries and keys" in ours and "wrong number of tensors" in str(theirs),
        "ours": ours.partition("; got ")[2],
        "llama_cpp": theirs.get("error", "served"),
    }


def show(rows: Sequence[dict]) -> None:
    """Prints the rows as a table."""
    table = Table(
        "drafter", "same text", "near ties", "drafted", "accepted", "same counters", "agrees"
    )
    for row in rows:
        agrees = "yes" if row["agrees"] else "NO"
        if row["name"] == "llama_cpp_refusal":
            table.add_row(row["drafter"], "refused by both", "", "", "", "", agrees)
            continue
        numbers = [
            f"{row['ours'][key]} / {row['llama_cpp'][key]}"
            for key in ("num_draft_tokens", "num_accepted_tokens")
        ]
        table.add_row(
            row["drafter"],
            f"{row['same']}/{row['num_prompts']}",
            str(row["near_ties"]),
            *numbers,
            f"{row['same_counters']}/{row['same']}",
            agrees,
        )
    Console(width=110).print("ours / llama.cpp's", table)


def run(args: argparse.Namespace) -> Iterator[dict]:
    """The result rows of all heads, each as soon as it is there."""
    args.out.mkdir(parents=True, exist_ok=True)
    target_file = args.target_gguf or args.out / "target.gguf"
    if args.target_gguf is None:
        llama_cpp_target.write(args.target, target_file)
    if args.drafter:
        cases = [given_case(args.target, folder, args.out) for folder in args.drafter]
    else:
        names = args.only or [*CASES, REFUSED]
        cases = [write_case(name, args.out) for name in names if name != REFUSED]
    prompts = standard_prompts(text.load_tokenizer(args.target), args.num_prompts)
    job = {"target": str(target_file), "k": args.k, "prompts": prompts}
    job["max_new_tokens"] = args.max_new_tokens
    for case in cases:
        layers = case.head.config.aux_hidden_state_layers
        target = load_target(args.target, aux_hidden_state_layers=layers, dtype=np.float32)
        theirs = answer_of_llama_cpp(args.llama_cpp, job | {"drafter": str(case.file)}, args.out)
        if "error" in theirs:
            raise SystemExit(f"llama.cpp failed on {case.name}: {theirs['error']}")
        yield check(case, target, theirs, prompts, args.k)
    if not args.drafter and REFUSED in names:
        yield check_refused(args.llama_cpp, job, args.out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        required=True,
        help="environment made by scripts/peers/install_llama_cpp.sh",
    )
    parser.add_argument("--target", type=Path, default=ASSETS / "target")
    parser.add_argument(
        "--target-gguf", type=Path, help="the target as GGUF in float32; without it, it is made"
    )
    parser.add_argument("--drafter", type=Path, action="append", default=[])
    parser.add_argument("--only", type=lambda names: names.split(","))
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("runs/llama_cpp"))
    parser.add_argument("--record", type=Path, help="append a row for each head")
    args = parser.parse_args()
    origin = provenance("python scripts/peers/check_llama_cpp.py " + " ".join(sys.argv[1:]))
    rows = []
    try:
        for row in run(args):
            rows.append(row)
            print(f"{row['drafter']}: {'agrees' if row['agrees'] else 'DIFFERS'}", flush=True)
            if args.record:
                append_line(args.record, json.dumps(origin | row))
    except InputError as error:
        print(f"check_llama_cpp: {error}", file=sys.stderr)
        return 2
    show(rows)
    return 0 if rows and all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
