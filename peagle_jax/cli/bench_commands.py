"""`peagle bench`: decoders of this package side by side, or a model that another process serves."""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from peagle_jax.cli.arguments import (
    check_at_least,
    check_groups,
    parse_numbers,
    parse_rates,
    parse_template_kwargs,
)
from peagle_jax.cli.decode_commands import precision
from peagle_jax.cli.decode_options import BENCH_KS
from peagle_jax.cli.output import print_marked, say
from peagle_jax.types import InputError, Model

if TYPE_CHECKING:
    from peagle_jax.bench.sets import Question
    from peagle_jax.bench.suite import Decoding
    from peagle_jax.openai_server import OpenAIServer
    from peagle_jax.report.records import Records

SYNTHETIC = "--synthetic-acceptance"
EXCERPTS = 8  # prompts where none are named


def bench(arguments: argparse.Namespace) -> int:
    """Measures decoders side by side, and writes rows, figures and a report."""
    _check_who_is_measured(arguments)
    check_at_least("--repeats", arguments.repeats, 1)
    if arguments.max_new_tokens < 2:
        rule = "the first token needs no draft: ask for 2 or more"
        got = arguments.max_new_tokens
        raise InputError("--max-new-tokens", rule, got, "give --max-new-tokens 128")
    if arguments.server is not None:
        return _bench_server(arguments)
    return _bench_engine(arguments)


def _check_who_is_measured(arguments: argparse.Namespace) -> None:
    """Raises InputError where options of our engine and of a server stand together."""
    if arguments.chat_template_kwargs is not None and not (arguments.prompts or arguments.sets):
        rule, next_step = "are of chats", "add --sets mt-bench, or --prompts FILE"
        raise InputError("--chat-template-kwargs", rule, "excerpts of source", next_step)
    if arguments.server is None:
        if arguments.server_model is not None:
            rule, next_step = "belongs to --server", "add --server http://localhost:8000"
            raise InputError("--server-model", rule, "no --server", next_step)
        if arguments.target is None or not arguments.drafter:
            rule = "a target and a draft head are measured, or a server"
            next_step = "give --target MODEL and --drafter HEAD, or --server URL"
            given = {"--target": arguments.target, "--drafter": arguments.drafter}
            missing = " and ".join(option for option, value in given.items() if not value)
            raise InputError("peagle bench", rule, f"no {missing}", next_step)
        return
    ours = {
        "--drafter": bool(arguments.drafter),
        "-k": arguments.k != BENCH_KS,
        "--num-tree-nodes": arguments.num_tree_nodes is not None,
        "--dtype": arguments.dtype != "float32",
        "--kv-cache-dtype": arguments.kv_cache_dtype != "auto",
        "--data-parallel-size": arguments.data_parallel_size != 1,
        "--tensor-parallel-size": arguments.tensor_parallel_size != 1,
        SYNTHETIC: bool(arguments.synthetic_acceptance),
    }
    for option, is_given in ours.items():
        if is_given:
            rule = "is of decoding in this process; a server has its own"
            next_step = f"start the server with it, and run this without {option}"
            raise InputError(option, rule, f"--server {arguments.server}", next_step)


def _bench_engine(arguments: argparse.Namespace) -> int:
    """Measures decoders of this process; 1 if a float32 text differs from plain decoding's."""
    from peagle_jax.bench.suite import run_suite
    from peagle_jax.decode.engine_checks import check_drafter
    from peagle_jax.decode.generate import make_drafter
    from peagle_jax.decode.requests import check_prompts
    from peagle_jax.progress import ProgressReport
    from peagle_jax.report import plots, records
    from peagle_jax.report.load_table import load_table
    from peagle_jax.report.page import write_report
    from peagle_jax.report.statements import headline

    ks, is_adaptive = _parse_ks(arguments.k)
    trees = _parse_trees(arguments.num_tree_nodes, ks)
    batch_sizes = parse_numbers("--batch-size", arguments.batch_size)
    check_groups(arguments.data_parallel_size, min(batch_sizes))
    # mistakes in options come before minutes of loading
    request_rates = parse_rates("--request-rate", arguments.request_rate)
    synthetic = _synthetic_rates(arguments)
    if trees and synthetic:
        rule, next_step = "drafts at given rates are a chain", "leave out one of the two"
        raise InputError("--num-tree-nodes", rule, f"{SYNTHETIC}, too", next_step)
    questions = _questions(arguments)
    for name in ("results.jsonl", "load.jsonl") if request_rates else ("results.jsonl",):
        records.check_records(arguments.out, name)
    target, heads = _load_heads(arguments)
    if trees and "peagle" not in heads:
        rule, next_step = "trees are drafted by P-EAGLE heads", "give one with --drafter"
        raise InputError("--num-tree-nodes", rule, ", ".join(heads), next_step)
    for k, num_nodes in itertools.product(ks, trees):
        check_drafter(make_drafter(heads["peagle"], k, "peagle"), num_nodes, adaptive_k=False)
    most = {method: max(ks, default=1) for method in heads}
    if is_adaptive:
        for method, head in heads.items():
            drafter = make_drafter(head, "auto", method)
            check_drafter(drafter, None, adaptive_k=True)
            most[method] = max(most[method], drafter.k)
    if synthetic:
        _check_synthetic_rates(synthetic, most)
    named_prompts, categories, of_sets = _bench_prompts(
        arguments, questions, target, max(batch_sizes)
    )
    names = [name for name, _ in named_prompts]
    prompts = [prompt for _, prompt in named_prompts]
    longest_draft = max(most.values())
    check_prompts(prompts, target.config, arguments.max_new_tokens, longest_draft, None, names)
    rows = records.Records(arguments.out)
    load_rows = records.Records(arguments.out, "load.jsonl") if request_rates else None
    label = {
        "name": "bench",
        "target": Path(arguments.target).name,
        "drafters": [Path(drafter).name for drafter in arguments.drafter],
        "dtype": arguments.dtype,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "data_parallel_size": arguments.data_parallel_size,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "seed": 0,
        **of_sets,
    }
    of_load = {"max_new_tokens": arguments.max_new_tokens}
    ways = len(heads) * (len(ks) + is_adaptive) + len(ks) * len(trees)
    decoders = len(batch_sizes) * (1 + ways)
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
            adaptive_k=is_adaptive,
            num_tree_nodes=trees,
            label=label,
            categories=categories,
            synthetic=synthetic,
            on_record=report_record,
            progress=report_stage,
        )
    loads = []
    if load_rows is not None:
        for rate in request_rates:
            loads += _serve(load_rows, suite.decodings, rate, label | of_load)
    pictures = plots.draw(arguments.out, suite.records, {}, [])
    page = write_report(arguments.out, suite.records, pictures=pictures, sample=None, runs=[])
    print_marked(records.table(suite.records))
    if loads:
        print_marked(load_table(loads))
    for line in headline(suite.records):
        say(line)
    say(f"report: {page}")
    return 0 if suite.lossless else 1


def _parse_ks(text: str) -> tuple[list[int], bool]:
    """(the numbers of -k, whether auto is among them)."""
    from peagle_jax.decode.generate import check_k

    parts = [part.strip() for part in text.split(",")]
    numbers = [part for part in parts if part != "auto"]
    if not numbers:
        return [], True
    ks = parse_numbers("--num-speculative-tokens", ",".join(numbers))
    check_k(max(ks))
    return ks, "auto" in parts


def _parse_trees(text: str | None, ks: Sequence[int]) -> list[int]:
    """The numbers of --num-tree-nodes."""
    from peagle_jax.decode.engine_checks import check_is_not_wider, check_num_nodes
    from peagle_jax.decode.tree import MAX_WIDTH

    if text is None:
        return []
    if not ks:
        rule = "a tree is of drafts of K positions, and auto is no number of them"
        raise InputError("--num-tree-nodes", rule, "-k auto", "give -k 7,auto")
    trees = parse_numbers("--num-tree-nodes", text)
    check_num_nodes(max(trees))
    check_is_not_wider(min(ks), max(trees), MAX_WIDTH)
    return trees


def _load_heads(arguments: argparse.Namespace) -> tuple[Model, dict[str, Model]]:
    """The target, and its heads by method: "peagle", "eagle3", "eagle"."""
    from peagle_jax.checkpoints.pair import load_drafter_for, load_pair

    options = precision(arguments)
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


def _serve(
    file: "Records", decodings: Sequence["Decoding"], rate: float, label: dict
) -> list[dict]:
    """Measures the latency of greedy decoders; prints blocks as vLLM, adds rows to load.jsonl."""
    from peagle_jax.bench.load import load_lines, serve_case
    from peagle_jax.provenance import provenance
    from peagle_jax.report.records import NAMES, k_label

    rows = []
    for decoding in decodings:
        case = decoding.case
        if case.temperature:
            continue
        result = serve_case(decoding, rate, label["seed"])
        drawn = list(decoding.synthetic) if decoding.synthetic else None
        about = {"method": case.method, "k": case.k, "synthetic_acceptance": drawn}
        about |= {"adaptive_k": case.adaptive_k, "num_tree_nodes": case.num_tree_nodes}
        about |= {"ignore_eos": case.ignore_eos}
        rows.append(provenance() | label | {"name": "bench/load"} | about | result)
        file.add(rows[-1])
        title = f"{NAMES[case.method]}, K = {k_label(about)}, concurrency {case.batch_size}"
        title += ", SYNTHETIC acceptance" if drawn else ""
        for line in load_lines(result, f"{title}, rate {result['request_rate']}"):
            say(line)
    return rows


def _synthetic_rates(arguments: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    """The rates of --synthetic-acceptance by method; {} without it."""
    from peagle_jax.bench.suite import METHODS
    from peagle_jax.pipelines.acceptance_rates import read_rates

    texts = arguments.synthetic_acceptance
    return dict(read_rates(SYNTHETIC, text, METHODS) for text in texts)


def _check_synthetic_rates(rates: Mapping[str, tuple[float, ...]], most: Mapping[str, int]) -> None:
    """Raises InputError where heads and rates are not of the same methods, or rates are too few.

    Args:
      most: the most drafts of a step, by the heads' methods.
    """
    for method, num_drafts in most.items():
        count = len(rates.get(method, ()))
        if count < num_drafts:
            rule = f"{method} drafts up to {num_drafts} tokens, and each position needs a rate"
            raise InputError(SYNTHETIC, rule, count, f"give {SYNTHETIC} {method}=63,38,23 and -k 3")
    if strangers := sorted(rates.keys() - most.keys()):
        rule, next_step = "rates belong to heads that are measured", "give their heads, too"
        raise InputError(SYNTHETIC, rule, ", ".join(strangers), next_step)
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
) -> tuple[list[tuple[str, list[int]]], list[str], dict]:
    """(prompts with their places, their categories, keys for every row): of a file, of benchmark
    sets, or excerpts of Python source that no demo trains on.
    """
    from peagle_jax import text, weights
    from peagle_jax.bench.set_prompts import ask
    from peagle_jax.pipelines.demo import standard_prompts

    tokenizer = text.load_tokenizer(weights.find_folder(arguments.target))
    of_template = parse_template_kwargs(arguments.chat_template_kwargs, tokenizer)
    if arguments.prompts is not None:
        return text.read_named_prompts(arguments.prompts, tokenizer, of_template), [], {}
    if tokenizer is None:
        rule = "a target without a tokenizer needs prompts as token ids"
        next_step = "give a JSONL file with prompt_token_ids"
        raise InputError("--prompts", rule, "none", next_step)
    if arguments.sets is None:
        excerpts = standard_prompts(tokenizer, EXCERPTS)
        return [(f"excerpt {i}", excerpt) for i, excerpt in enumerate(excerpts, 1)], [], {}
    say(f"{len(questions)} questions; answers between turns are written by the target first")
    limits = arguments.max_new_tokens, batch_size
    asked = ask(target, tokenizer, questions, *limits, of_template)
    prompts = [(prompt.name, cast(list[int], prompt.content)) for prompt in asked.prompts]
    categories = [prompt.category for prompt in asked.prompts]
    return prompts, categories, _of_sets(arguments, questions, asked.num_cut)


def _of_sets(
    arguments: argparse.Namespace, questions: "list[Question]", num_cut: int
) -> dict[str, object]:
    """What rows say about the sets of --sets; answers that were cut are told, too."""
    if num_cut:
        say(f"{num_cut} answers between turns were cut at {arguments.max_new_tokens} tokens")
    return {
        "sets": [Path(name).name for name in arguments.sets.split(",")],
        "num_questions": len(questions),
        "num_answers_cut": num_cut,
    }


# ---------------------------------------------------------------- a server


def _bench_server(arguments: argparse.Namespace) -> int:
    """Measures a served model by the client of `--request-rate`; rows go to load.jsonl."""
    from peagle_jax.bench.load import CLOSED
    from peagle_jax.bench.served_model import ServedModel, measure
    from peagle_jax.openai_server import OpenAIServer
    from peagle_jax.provenance import provenance
    from peagle_jax.report.load_table import load_table
    from peagle_jax.report.records import Records, check_records

    batch_sizes = parse_numbers("--batch-size", arguments.batch_size)
    check_records(arguments.out, "load.jsonl")
    rates = parse_rates("--request-rate", arguments.request_rate) or [CLOSED]
    questions = _questions(arguments)
    next_step = "look at the server's log, and run the same command again"
    server = OpenAIServer(arguments.server, arguments.server_model, next_step)
    requests, of_sets = _server_requests(arguments, questions, server, max(batch_sizes))
    file, rows = Records(arguments.out, "load.jsonl"), []
    label = {
        "name": "bench/load",
        "server": server.root,
        "engine": server.engine(),
        "model": server.model,
        "target": Path(arguments.target).name if arguments.target else None,
        "max_new_tokens": arguments.max_new_tokens,
        "ignore_eos": arguments.ignore_eos,
        "seed": 0,
        **of_sets,
    }
    for batch_size in batch_sizes:
        model = ServedModel(server, batch_size)
        some = [requests[i % len(requests)] for i in range(max(len(requests), batch_size))]
        model.run(some[:batch_size])  # a server that was started just now is slow at first
        # how many requests an open loop has under way, --batch-size does not say: once is enough
        for rate in rates if batch_size == batch_sizes[-1] else [r for r in rates if r == CLOSED]:
            for number in range(arguments.repeats):
                result, failure = measure(server, model, some, rate, label["seed"])
                if result:
                    about = {"method": None, "round": number}
                    rows.append(provenance() | label | about | result)
                    file.add(rows[-1])
                if failure is not None:
                    _print_failure(rows, len(some), file.path)
                    raise failure
    print_marked(load_table(rows))
    say(f"rows: {file.path}")
    return 0


def _print_failure(rows: Sequence[dict], num_requests: int, path: Path) -> None:
    """What a server that failed had done before."""
    from peagle_jax.report.load_table import load_table

    if not rows:
        say("nothing was measured")
        return
    print_marked(load_table(rows))
    say(
        f"the last line is of {rows[-1]['completed']} of {num_requests} requests, where the "
        f"server failed; what was measured is kept in {path}"
    )


def _server_requests(
    arguments: argparse.Namespace,
    questions: "list[Question]",
    server: "OpenAIServer",
    batch_size: int,
) -> tuple[list, dict]:
    """(requests of a server, keys for every row).

    With --target they have the token ids that decoding here would read; without it the texts or
    the messages of a chat, which the server encodes.
    """
    from peagle_jax import text, weights
    from peagle_jax.bench.served_model import ServedModel, ServerRequest
    from peagle_jax.bench.set_prompts import ask_server
    from peagle_jax.pipelines.demo import standard_prompts

    tokenizer, of_sets = None, {}
    if arguments.target is not None:
        folder = weights.find_folder(arguments.target, weights.TOKENIZER_FILES)
        tokenizer = text.load_tokenizer(folder)
        if tokenizer is None:
            rule, next_step = "must have a tokenizer", "copy tokenizer.json into this folder"
            raise InputError(arguments.target, rule, "none", next_step)
    of_template = parse_template_kwargs(arguments.chat_template_kwargs, tokenizer)
    if arguments.prompts is not None and tokenizer is not None:
        prompts = text.read_named_prompts(arguments.prompts, tokenizer, of_template)
    elif arguments.prompts is not None:
        prompts = text.read_plain_prompts(arguments.prompts, of_template)
    elif questions:
        model, new = ServedModel(server, batch_size), arguments.max_new_tokens
        say(f"{len(questions)} questions; answers between turns are written by the server first")
        asked = ask_server(model, tokenizer, questions, new, of_template)
        prompts = [(prompt.name, prompt.content) for prompt in asked.prompts]
        of_sets = _of_sets(arguments, questions, asked.num_cut)
    elif tokenizer is not None:
        prompts = [("", ids) for ids in standard_prompts(tokenizer, EXCERPTS)]
    else:
        rule = "without it there must be prompts: excerpts are cut by the target's tokenizer"
        next_step = "give --target MODEL, --prompts FILE or --sets mt-bench"
        raise InputError("--target", rule, "none of the three", next_step)
    options = arguments.max_new_tokens, arguments.ignore_eos
    return [ServerRequest(prompt, *options, name) for name, prompt in prompts], of_sets
