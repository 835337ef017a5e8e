"""One function a command: it calls into the library, prints, and returns the exit code."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from peagle_jax import weights
from peagle_jax.atomic_write import write_atomically
from peagle_jax.types import InputError

CONSOLE = Console(width=None if sys.stdout.isatty() else 160)


def demo(args) -> int:
    from peagle_jax.pipelines.budgets import BUDGETS
    from peagle_jax.pipelines.demo import plan, run_demo

    if args.dry_run:
        table = Table(
            "stage",
            "what",
            "state",
            title=f"budget {args.budget}, minutes: {BUDGETS[args.budget].minutes}",
        )
        for row in plan(args.budget, args.out, args.from_scratch):
            table.add_row(*row)
        CONSOLE.print(table)
        return 0
    result = run_demo(args.out, args.budget, CONSOLE.print, from_scratch=args.from_scratch)
    CONSOLE.print(f"report: {result.report}")
    return 0 if result.lossless else 1


def train(args, rest: list[str]) -> int:
    import tyro

    from peagle_jax.pipelines.train_head import train_head
    from peagle_jax.train.config import LmRun, load_run
    from peagle_jax.train.pretrain import train_lm

    run = load_run(args.config)
    if rest:
        try:
            with (
                contextlib.redirect_stderr(io.StringIO()),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                run = tyro.cli(
                    type(run),
                    default=run,
                    args=rest,
                    console_outputs=False,
                    config=(tyro.conf.FlagConversionOff,),
                )
        except SystemExit:
            raise InputError(
                args.config,
                "overrides must be keys of the config, as --optimizer.steps 100",
                " ".join(rest),
                "check the names",
            ) from None
        except ValueError as error:
            raise InputError(
                args.config,
                "overrides must make sense with the rest of the config",
                error,
                "mend them",
            ) from None
    result = (
        train_lm(run, CONSOLE.print) if isinstance(run, LmRun) else train_head(run, CONSOLE.print)
    )
    _print_facts(vars(result))
    return 0


def regenerate(args) -> int:
    from peagle_jax.pipelines.regenerate import Regeneration, regenerate

    for flag in ("answers", "prompt_tokens", "new_tokens", "batch_size"):
        _numbers(f"--{flag.replace('_', '-')}", str(getattr(args, flag)))
    if not 0 <= args.held_out < 1 or min(*args.temperature, args.seed) < 0:
        got = f"{args.held_out}, {args.temperature}, {args.seed}"
        raise InputError(
            "peagle regenerate",
            "--held-out must lie in 0..1, and no --temperature or --seed below 0",
            got,
            "mend them",
        )
    how = Regeneration(
        source=args.source,
        held_out=args.held_out,
        answers=args.answers,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        temperatures=tuple(args.temperature),
        batch_size=args.batch_size,
        seed=args.seed,
    )
    tokens = regenerate(weights.find_folder(args.target), how, args.out, CONSOLE.print)
    CONSOLE.print(f"{args.out}: {args.answers:,} answers, {tokens:,} tokens")
    return 0


def extract(args) -> int:
    from peagle_jax.pipelines.extract import Extraction, extract_hidden_states

    how = Extraction(
        source=args.data,
        aux_hidden_state_layers=None
        if args.aux_hidden_state_layers is None
        else tuple(_numbers("--taps", args.aux_hidden_state_layers, least=0)),
        length=args.length,
        batch=args.batch,
        rows_per_shard=args.rows_per_shard,
        dtype=args.dtype,
        compute_dtype=args.compute_dtype,
        max_chars=args.max_chars,
        held_out=args.held_out,
        seed=args.seed,
    )

    def say(line):
        return CONSOLE.print(
            line, markup=False, highlight=False, soft_wrap=True
        )  # a path may hold brackets

    columns = (
        TextColumn("rows"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, disable=not sys.stderr.isatty(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", total=None, speed=0.0)
        done = extract_hidden_states(
            args.target,
            how,
            args.out,
            say,
            command=_command(args.argv),
            on_rows=lambda done, total, speed: bar.update(
                task, completed=done, total=total, speed=speed
            ),
        )
    _print_facts(vars(done))
    return 0


def _load(args, drafter: str | None, mxfp4: str = "packed"):
    """(folder, target, head or None) in the precision that was asked for: `--dtype fp8` has bfloat16 around its matrices."""
    import jax.numpy as jnp

    from peagle_jax.checkpoints.target_io import load_target, read_facts

    folder, fp8 = weights.find_folder(args.target), args.dtype == "fp8"
    dtype, aux_hidden_state_layers = jnp.dtype(jnp.bfloat16 if fp8 else args.dtype), ()
    if drafter is not None:
        from peagle_jax.checkpoints.runs import open_head

        aux_hidden_state_layers = open_head(
            drafter, read_facts(folder).layers
        ).config.aux_hidden_state_layers
    target = load_target(
        folder, aux_hidden_state_layers=aux_hidden_state_layers, dtype=dtype, fp8=fp8, mxfp4=mxfp4
    )
    if args.kv_cache_dtype == "fp8":
        target = dataclasses.replace(
            target,
            config=dataclasses.replace(target.config, cache_dtype=jnp.dtype(jnp.float8_e4m3fn)),
        )
    return folder, target, None if drafter is None else _load_head(drafter, target, dtype, fp8)


def _load_head(drafter: str, target, dtype, fp8: bool):
    from peagle_jax.checkpoints.head_io import to_model
    from peagle_jax.checkpoints.runs import open_head
    from peagle_jax.decode.generate import check_fit

    head = to_model(
        open_head(drafter, target.config.layers),
        dtype=dtype,
        embedding=target.params["embed"]["table"],
        fp8=fp8,
    )
    check_fit(target, head, drafter)
    return head


def generate(args) -> int:
    from peagle_jax import text
    from peagle_jax.pipelines.generate_rows import answer_prompts

    if args.drafter is None and args.method not in (None, "none"):
        raise InputError(
            "--method",
            f"{args.method} needs a draft head",
            "no --drafter",
            "name one, or use --method none",
        )
    if args.out is not None:
        _check_writable(args.out)
    if args.batch_size < 1:
        raise InputError("--batch-size", "must be 1 or more", args.batch_size, "raise it")
    folder, target, head = _load(args, None if args.method == "none" else args.drafter, args.mxfp4)
    tokenizer = text.load_tokenizer(folder)
    if tokenizer is not None:
        text.check_vocabulary(tokenizer, target.config.vocab, args.target)
    if args.prompts is not None:
        prompts = text.read_prompts(args.prompts, tokenizer)
    else:
        prompts = [text.encode_prompt(args.prompt, tokenizer, chat=False, where="--prompt")]
    rows = answer_prompts(target, head, tokenizer, prompts, args)
    if args.out is None:
        for row in rows:
            CONSOLE.print(
                row.get("text", row["output_token_ids"]),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    else:
        _write_lines(args.out, rows)
    accepted, drafts = (
        sum(r["num_accepted_tokens"] for r in rows),
        sum(r["num_drafts"] for r in rows),
    )
    if drafts:
        print(
            f"acceptance length {1 + accepted / drafts:.3f} over {drafts} drafts", file=sys.stderr
        )
    return 0


def bench(args) -> int:
    from peagle_jax.bench.suite import run_suite
    from peagle_jax.decode.generate import check_prompts
    from peagle_jax.report import plots, records
    from peagle_jax.report.page import write_report

    ks, batches = _numbers("--k", args.k), _numbers("--concurrency", args.concurrency)
    _numbers("--repeats", str(args.repeats))
    if args.max_new_tokens < 2:
        raise InputError(
            "--max-new-tokens",
            "the first token needs no draft: ask for 2 or more",
            args.max_new_tokens,
            "raise it",
        )
    folder, target, first = _load(args, args.drafter[0])
    heads = {}
    for i, name in enumerate(args.drafter):
        head = _load_head(name, target, first.config.dtype, args.dtype == "fp8") if i else first
        method = "peagle" if head.config.parallel else "eagle3"
        if method in heads:
            raise InputError(
                name,
                "one P-EAGLE and one EAGLE-3 head are measured together",
                f"two for {method}",
                "measure them apart",
            )
        heads[method] = head
    prompts = _bench_prompts(args.prompts, folder)
    check_prompts(prompts, target.config, args.max_new_tokens, max(ks), None)
    records_file = records.Records(args.out)
    names = {"target": Path(args.target).name, "drafters": [Path(d).name for d in args.drafter]}
    label = {
        "name": "bench",
        **names,
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "seed": 0,
    }
    suite = run_suite(
        target,
        heads,
        prompts,
        ks=ks,
        batches=batches,
        new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        label=label,
        on_record=lambda r: (records_file.add(r), CONSOLE.print(records.one_line(r))),
    )
    pictures = plots.draw(args.out, suite.records, {}, [])
    page = write_report(args.out, suite.records, pictures=pictures, sample=None, runs=[])
    CONSOLE.print(records.table(suite.records))
    CONSOLE.print(f"report: {page}")
    return 0 if suite.lossless or args.dtype != "float32" else 1  # exactness is a float32 rule


def _bench_prompts(path: Path | None, folder: Path) -> list[list[int]]:
    from peagle_jax import text
    from peagle_jax.pipelines.demo import standard_prompts

    tokenizer = text.load_tokenizer(folder)
    if path is not None:
        return text.read_prompts(path, tokenizer)
    if tokenizer is None:
        raise InputError(
            "--prompts",
            "a target without tokenizer needs prompts as token ids",
            "none",
            "give prompt_token_ids in a JSONL",
        )
    return standard_prompts(tokenizer)


def convert(args) -> int:
    from peagle_jax.checkpoints.convert import convert

    size = None if args.max_shard_size is None else _bytes("--max-shard-size", args.max_shard_size)
    with Progress(
        *Progress.get_default_columns(),
        DownloadColumn(),
        TransferSpeedColumn(),
        disable=not sys.stderr.isatty(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(Path(args.dst).name, total=None)
        convert(
            args.src,
            args.dst,
            to=args.to,
            k=args.k,
            dtype=args.dtype,
            target=args.target,
            max_shard_bytes=size,
            share_embedding=args.share_embedding,
            mask_token=args.mask_token,
            tap_numbering=args.tap_numbering,
            identity_d2t=args.identity_d2t,
            command=_command(args.argv),
            on_bytes=lambda done, total: bar.update(task, completed=done, total=total),
        )
    CONSOLE.print(f"{args.src} -> {args.dst} ({args.to})", highlight=False, soft_wrap=True)
    return 0


def _command(argv: list[str]) -> str:
    """What was typed, with the names of local folders alone: a checkpoint need not tell where somebody's files lie."""

    def bare(word):
        return Path(word).name if word.startswith(("/", "~", ".")) else word

    words = [
        flag + equals + bare(value)
        for flag, equals, value in (word.rpartition("=") for word in argv)
    ]
    return shlex.join(["peagle", *words])


def inspect(args) -> int:
    from peagle_jax.checkpoints.inspect import describe

    facts = describe(args.dir, args.target)
    print(json.dumps(facts, indent=2)) if args.json else _print_facts(facts)
    return 0


def serve_config(args) -> int:
    from peagle_jax.checkpoints.config_writing import serving_flags
    from peagle_jax.checkpoints.convert import read_serving
    from peagle_jax.checkpoints.head_io import CHECKPOINT_FORMATS, check_servable
    from peagle_jax.checkpoints.inspect import ANY_LAYERS

    # of a head that names no taps vLLM takes its own choice: the flag is the same whatever the number of layers
    head = read_serving(args.dir, target_layers=ANY_LAYERS)
    if head.checkpoint_format not in CHECKPOINT_FORMATS:
        raise InputError(
            args.dir,
            f"vLLM serves the layouts {', '.join(CHECKPOINT_FORMATS)}",
            head.checkpoint_format,
            "peagle convert --to vllm first",
        )
    check_servable(head, args.dir)
    k = head.config.num_depths if args.k is None else args.k
    if k is None or k < 1:
        rule = "K must be 1 or more" + (
            ", and the folder does not say what it was trained for" if k is None else ""
        )
        raise InputError(args.dir, rule, k, "give it with --k")
    name, revision = weights.split_revision(args.dir)
    flags = serving_flags(head.config, name, k, revision)
    if args.engine == "vllm":
        print(
            f"vllm serve {shlex.quote(args.target or head.target or 'TARGET')} --speculative-config {shlex.quote(flags)}"
        )
    else:
        print(f"SM_VLLM_SPECULATIVE_CONFIG={shlex.quote(flags)}")
    return 0


# ---------------------------------------------------------------- printing


def _numbers(flag: str, value: str, least: int = 1) -> list[int]:
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise InputError(
            flag,
            f"must be numbers of {least} or more, separated by commas",
            value,
            "write it as 1,3,5",
        )
    return numbers


def _bytes(flag: str, value: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", value, re.IGNORECASE)
    if not found or (size := int(float(found[1]) * units[found[2].upper()])) < 1:
        raise InputError(
            flag, f"must be a number and one of {', '.join(units)}", value, "write it as 5GB"
        )
    return size


def _print_facts(facts: dict) -> None:
    from peagle_jax.checkpoints.inspect import printable

    table = Table(show_header=False)
    for key, value in facts.items():
        table.add_row(escape(key.replace("_", " ")), escape(printable(value)))
    CONSOLE.print(table)


def _check_writable(path: Path) -> None:
    """Before hours of work, not after."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(
            path,
            "the output file must be writable",
            "a folder, or none to hold it",
            "choose another place",
        )


def _write_lines(path: Path, rows: list[dict]) -> None:
    try:
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise InputError(
            path, "the output file must be writable", error.strerror, "choose another place"
        ) from None
