"""`peagle demo`, `peagle generate` and `peagle bench`: decoding, with and without a draft head."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peagle_jax.cli.arguments import (
    check_at_least,
    check_writable,
    parse_numbers,
    parse_rates,
    write_jsonl,
)
from peagle_jax.cli.output import print_marked, say
from peagle_jax.types import InputError, Model

if TYPE_CHECKING:
    from peagle_jax.bench.sets import Question
    from peagle_jax.bench.suite import Decoding

SYNTHETIC = "--synthetic-acceptance"


def demo(arguments: argparse.Namespace) -> int:
    """Runs the whole demonstration, or prints its stages."""
    from peagle_jax.pipelines.demo import run_demo

    if arguments.dry_run:
        _print_plan(arguments.budget, arguments.out, arguments.from_scratch)
        return 0
    result = run_demo(
        arguments.out, arguments.budget, print_marked, from_scratch=arguments.from_scratch
    )
    say(f"report: {result.report}")
    return 0 if result.lossless else 1


def _print_plan(budget: str, out: Path, from_scratch: bool) -> None:
    from rich.table import Table

    from peagle_jax.pipelines.budgets import BUDGETS
    from peagle_jax.pipelines.demo import plan

    title = f"budget {budget}, minutes: {BUDGETS[budget].minutes}"
    table = Table("stage", "what", "state", title=title)
    for row in plan(budget, out, from_scratch):
        table.add_row(*row)
    print_marked(table)


# ---------------------------------------------------------------- models


def _precision(arguments: argparse.Namespace) -> dict:
    """What --dtype and --kv-cache-dtype mean to the loaders."""
    import jax.numpy as jnp

    fp8 = arguments.dtype == "fp8"
    return {
        "dtype": jnp.dtype("bfloat16" if fp8 else arguments.dtype),  # fp8: around its matrices
        "fp8": fp8,
        "kv_cache_dtype": jnp.float8_e4m3fn if arguments.kv_cache_dtype == "fp8" else None,
    }


def _load_models(arguments: argparse.Namespace) -> tuple[Model, Model | None]:
    """The target of `peagle generate`, and its head if there is one to draft with."""
    from peagle_jax.checkpoints.pair import load_pair
    from peagle_jax.checkpoints.target_io import load_target

    options = _precision(arguments) | {"mxfp4": arguments.mxfp4}
    if arguments.drafter is None or arguments.method == "none":
        return load_target(arguments.target, aux_hidden_state_layers=(), **options), None
    return load_pair(arguments.target, arguments.drafter, **options)


# ---------------------------------------------------------------- generate


def generate(arguments: argparse.Namespace) -> int:
    """Continues prompts; prints the text, or writes a row per prompt."""
    from peagle_jax import text, weights
    from peagle_jax.pipelines.generate_rows import GenerationOptions, generate_rows

    if arguments.drafter is None and arguments.method not in (None, "none"):
        rule = f"{arguments.method} needs a draft head"
        next_step = "name a head with --drafter, or use --method none"
        raise InputError("--method", rule, "no --drafter", next_step)
    if arguments.out is not None:
        check_writable(arguments.out)
        if arguments.stream:
            rule, next_step = "prints to the terminal", "leave out --out or --stream"
            raise InputError("--stream", rule, f"--out {arguments.out}", next_step)
    check_at_least("--batch-size", arguments.batch_size, 1)
    target, head = _load_models(arguments)
    tokenizer = text.load_tokenizer(weights.find_folder(arguments.target))
    if tokenizer is not None:
        text.check_vocabulary(tokenizer, target.config.vocab, arguments.target)
    if arguments.prompts is not None:
        prompts = text.read_prompts(arguments.prompts, tokenizer)
    else:
        prompts = [text.encode_prompt(arguments.prompt, tokenizer, chat=False, where="--prompt")]
    options = GenerationOptions(
        k=arguments.k,
        method=arguments.method,
        num_tree_nodes=arguments.num_tree_nodes,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        logprobs=arguments.logprobs,
        seed=arguments.seed,
        sample_drafts=not arguments.greedy_drafts,
        ignore_eos=arguments.ignore_eos,
        stop=tuple(arguments.stop),
        batch_size=arguments.batch_size,
        prefill_chunk=arguments.prefill_chunk,
        sliding_cache=arguments.sliding_cache,
    )
    if arguments.stream and tokenizer is None:
        rule, next_step = "needs a tokenizer", "copy tokenizer.json into the target's folder"
        raise InputError(arguments.target, f"--stream {rule}", "no tokenizer.json", next_step)
    on_text = _print_text if arguments.stream else None
    rows = generate_rows(target, head, tokenizer, prompts, options, on_text)
    if arguments.out is not None:
        write_jsonl(arguments.out, rows)
    elif not arguments.stream:
        for row in rows:
            say(row.get("text", row["output_token_ids"]))
    _print_acceptance_length(rows)
    failed = [i for i, row in enumerate(rows) if "error" in row]
    for i in failed:
        print(f"peagle: prompt {i}: {rows[i]['error']}", file=sys.stderr)
    return 1 if failed else 0


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def _print_acceptance_length(rows: Sequence[dict]) -> None:
    """On stderr, so that stdout has the text alone."""
    accepted = sum(row["num_accepted_tokens"] for row in rows)
    drafts = sum(row["num_drafts"] for row in rows)
    if drafts:
        length = 1 + accepted / drafts
        print(f"acceptance length {length:.3f} over {drafts} drafts", file=sys.stderr)


# ---------------------------------------------------------------- bench


def bench(arguments: argparse.Namespace) -> int:
    """Measures decoders side by side, and writes rows, figures and a report."""
    from peagle_jax.bench.suite import run_suite
    from peagle_jax.decode.requests import check_prompts
    from peagle_jax.progress import ProgressReport
    from peagle_jax.report import plots, records
    from peagle_jax.report.page import write_report
    from peagle_jax.report.statements import headline

    ks = parse_numbers("--num-speculative-tokens", arguments.k)
    batch_sizes = parse_numbers("--batch-size", arguments.batch_size)
    check_at_least("--repeats", arguments.repeats, 1)
    if arguments.max_new_tokens < 2:
        rule = "the first token needs no draft: ask for 2 or more"
        got = arguments.max_new_tokens
        raise InputError("--max-new-tokens", rule, got, "give --max-new-tokens 128")
    # mistakes in options come before minutes of loading
    request_rates = parse_rates("--request-rate", arguments.request_rate)
    synthetic = _synthetic_rates(arguments)
    questions = _questions(arguments)
    target, heads = _load_heads(arguments)
    if synthetic:
        _check_synthetic_rates(synthetic, ks, heads)
    prompts, categories, of_sets = _bench_prompts(arguments, questions, target, max(batch_sizes))
    check_prompts(prompts, target.config, arguments.max_new_tokens, max(ks), None)
    rows = records.Records(arguments.out)
    label = {
        "name": "bench",
        "target": Path(arguments.target).name,
        "drafters": [Path(drafter).name for drafter in arguments.drafter],
        "dtype": arguments.dtype,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "seed": 0,
        **of_sets,
    }
    decoders = len(batch_sizes) * (1 + len(heads) * len(ks))
    with ProgressReport("bench", decoders, unit="decoders") as progress:

        def report_stage(stage: str) -> None:
            progress.update(progress.completed, note=stage)

        def report_record(record: dict) -> None:
            rows.add(record)
            say(records.one_line(record))
            progress.update(progress.completed + 1)

        suite = run_suite(
            target,
            heads,
            prompts,
            ks=ks,
            batch_sizes=batch_sizes,
            max_new_tokens=arguments.max_new_tokens,
            repeats=arguments.repeats,
            # texts mean nothing then, and so do their ends
            ignore_eos=arguments.ignore_eos or bool(synthetic),
            label=label,
            categories=categories,
            synthetic=synthetic,
            on_record=report_record,
            progress=report_stage,
        )
    for rate in request_rates:
        _serve(arguments.out, suite.decodings, rate, label)
    pictures = plots.draw(arguments.out, suite.records, {}, [])
    page = write_report(arguments.out, suite.records, pictures=pictures, sample=None, runs=[])
    print_marked(records.table(suite.records))
    for line in headline(suite.records):
        say(line)
    say(f"report: {page}")
    # with fewer bits a batch of K + 1 tokens may round differently, and near ties then differ
    is_exact_dtype = arguments.dtype == "float32"
    return 1 if is_exact_dtype and not suite.lossless else 0


def _load_heads(arguments: argparse.Namespace) -> tuple[Model, dict[str, Model]]:
    """The target, and its heads by method: "peagle", "eagle3", "eagle"."""
    from peagle_jax.checkpoints.pair import load_drafter_for, load_pair

    options = _precision(arguments)
    first, *others = arguments.drafter
    target, head = load_pair(arguments.target, first, **options)
    heads = {head.config.method: head}
    for drafter in others:
        head = load_drafter_for(target, drafter, fp8=options["fp8"])
        method = head.config.method
        if method in heads:
            rule = "heads that are measured together draft by different methods"
            next_step = "run peagle bench once for each of the two"
            raise InputError(drafter, rule, f"two for {method}", next_step)
        heads[method] = head
    return target, heads


def _serve(out: Path, decodings: Sequence["Decoding"], rate: float, label: dict) -> None:
    """Measures the latency of greedy decoders; prints blocks as vLLM, adds rows to load.jsonl."""
    from peagle_jax.bench.load import load_lines, serve_case
    from peagle_jax.provenance import provenance
    from peagle_jax.report.records import NAMES, Records

    rows = Records(out, "load.jsonl")
    for decoding in decodings:
        case = decoding.case
        if case.temperature:
            continue
        result = serve_case(decoding, rate, label["seed"])
        drawn = list(decoding.synthetic) if decoding.synthetic else None
        about = {"method": case.method, "k": case.k, "synthetic_acceptance": drawn}
        rows.add(provenance() | label | {"name": "bench/load"} | about | result)
        title = f"{NAMES[case.method]}, K = {case.k}, concurrency {case.batch_size}"
        title += ", SYNTHETIC acceptance" if drawn else ""
        for line in load_lines(result, f"{title}, rate {result['request_rate']}"):
            say(line)


def _synthetic_rates(arguments: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    """The rates of --synthetic-acceptance by method; {} without it."""
    from peagle_jax.bench.suite import METHODS
    from peagle_jax.pipelines.acceptance_rates import read_rates

    texts = arguments.synthetic_acceptance
    return dict(read_rates(SYNTHETIC, text, METHODS) for text in texts)


def _check_synthetic_rates(
    rates: Mapping[str, tuple[float, ...]], ks: Sequence[int], heads: Mapping[str, Model]
) -> None:
    """Raises InputError where a head has no rates, or fewer than it drafts tokens."""
    for method in heads:
        count = len(rates.get(method, ()))
        if count < max(ks):
            rule = f"{method} drafts up to {max(ks)} tokens, and each position needs a rate"
            raise InputError(SYNTHETIC, rule, count, f"give {SYNTHETIC} {method}=63,38,23 and -k 3")
    say("acceptance is SYNTHETIC: drafts are accepted at the given rates, whatever they are")


def _questions(arguments: argparse.Namespace) -> "list[Question]":
    """The questions of --sets; [] without it."""
    from peagle_jax.bench.sets import read_set

    if arguments.num_prompts is not None:
        check_at_least("--num-prompts", arguments.num_prompts, 1)
        if arguments.sets is None:
            rule, next_step = "belongs to --sets", "name a set, as --sets mt-bench"
            raise InputError("--num-prompts", rule, "no --sets", next_step)
    if arguments.sets is None:
        return []
    names = arguments.sets.split(",")
    return [question for name in names for question in read_set(name, arguments.num_prompts)]


def _bench_prompts(
    arguments: argparse.Namespace, questions: "list[Question]", target: Model, batch_size: int
) -> tuple[list[list[int]], list[str], dict]:
    """(prompts, their categories, keys for every row): of a file, of benchmark sets, or excerpts of
    Python source that no demo trains on.
    """
    from peagle_jax import text, weights
    from peagle_jax.bench.set_prompts import ask
    from peagle_jax.pipelines.demo import standard_prompts

    tokenizer = text.load_tokenizer(weights.find_folder(arguments.target))
    if arguments.prompts is not None:
        return text.read_prompts(arguments.prompts, tokenizer), [], {}
    if tokenizer is None:
        rule = "a target without a tokenizer needs prompts as token ids"
        next_step = "give a JSONL file with prompt_token_ids"
        raise InputError("--prompts", rule, "none", next_step)
    if arguments.sets is None:
        return standard_prompts(tokenizer), [], {}
    say(f"{len(questions)} questions; answers between turns are written by the target first")
    asked = ask(target, tokenizer, questions, arguments.max_new_tokens, batch_size)
    if asked.num_cut:
        say(f"{asked.num_cut} answers between turns were cut at {arguments.max_new_tokens} tokens")
    of_sets = {
        "sets": [Path(name).name for name in arguments.sets.split(",")],
        "num_questions": len(questions),
        "num_answers_cut": asked.num_cut,
    }
    prompts = [prompt.token_ids for prompt in asked.prompts]
    return prompts, [prompt.category for prompt in asked.prompts], of_sets
