"""`peagle demo` and `peagle generate`: decoding, with and without a draft head."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from peagle_jax.cli.arguments import (
    check_at_least,
    check_groups,
    check_writable,
    parse_numbers,
    parse_template_kwargs,
    write_jsonl,
)
from peagle_jax.cli.output import print_marked, say
from peagle_jax.types import InputError, Model


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


def precision(arguments: argparse.Namespace) -> dict:
    """What --dtype, --kv-cache-dtype and the numbers of devices mean to the loaders."""
    import jax.numpy as jnp

    from peagle_jax.targets.sharding import parallel_mesh

    fp8 = arguments.dtype == "fp8"
    return {
        "dtype": jnp.dtype("bfloat16" if fp8 else arguments.dtype),  # fp8: around its matrices
        "fp8": fp8,
        "kv_cache_dtype": jnp.float8_e4m3fn if arguments.kv_cache_dtype == "fp8" else None,
        "mesh": parallel_mesh(arguments.tensor_parallel_size, arguments.data_parallel_size),
    }


def _load_models(arguments: argparse.Namespace) -> tuple[Model, Model | None]:
    """The target of `peagle generate`, and its head if there is one to draft with."""
    from peagle_jax.checkpoints.pair import load_pair
    from peagle_jax.checkpoints.target_io import load_target

    options = precision(arguments) | {"mxfp4": arguments.mxfp4}
    if arguments.drafter is None or arguments.method == "none":
        return load_target(arguments.target, aux_hidden_state_layers=(), **options), None
    return load_pair(arguments.target, arguments.drafter, **options)


# ---------------------------------------------------------------- generate


def generate(arguments: argparse.Namespace) -> int:
    """Continues prompts; prints the text, or writes a row per prompt."""
    from peagle_jax import text, weights
    from peagle_jax.pipelines.generate_rows import GenerationOptions, generate_rows

    _check_options(arguments)
    target, head = _load_models(arguments)
    tokenizer = text.load_tokenizer(weights.find_folder(arguments.target))
    if tokenizer is not None:
        text.check_vocabulary(tokenizer, target.config.vocab, arguments.target)
    of_template = parse_template_kwargs(arguments.chat_template_kwargs, tokenizer)
    if arguments.prompts is not None:
        named_prompts = text.read_named_prompts(arguments.prompts, tokenizer, of_template)
    else:
        ids = text.encode_prompt(arguments.prompt, tokenizer, "--prompt")
        named_prompts = [("--prompt", ids)]
    names, prompts = zip(*named_prompts, strict=True)
    stop_ids = None
    if arguments.stop_ids is not None:
        stop_ids = tuple(parse_numbers("--stop-ids", arguments.stop_ids, least=0))
    options = GenerationOptions(
        k=arguments.k,
        method=arguments.method,
        num_tree_nodes=arguments.num_tree_nodes,
        n=arguments.n,
        max_new_tokens=arguments.max_new_tokens,
        min_tokens=arguments.min_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        logit_bias=_logit_bias(arguments.logit_bias),
        logprobs=arguments.logprobs,
        seed=arguments.seed,
        sample_drafts=not arguments.greedy_drafts,
        ignore_eos=arguments.ignore_eos,
        stop_ids=stop_ids,
        stop=tuple(arguments.stop),
        batch_size=arguments.batch_size,
        prefill_chunk=arguments.prefill_chunk,
        sliding_cache=arguments.sliding_cache,
        num_threads=arguments.threads,
        donate_models=True,
    )
    if arguments.stream and tokenizer is None:
        rule, next_step = "needs a tokenizer", "copy tokenizer.json into the target's folder"
        raise InputError(arguments.target, f"--stream {rule}", "no tokenizer.json", next_step)
    on_text = _print_text if arguments.stream else None
    rows = generate_rows(target, head, tokenizer, prompts, options, on_text, names)
    if arguments.out is not None:
        write_jsonl(arguments.out, rows)
    elif not arguments.stream:
        for row in rows:
            if "error" not in row:
                say(row.get("text", row["output_token_ids"]))
    _print_acceptance_length(rows)
    of_rows = [name for name in names for _ in range(arguments.n)]
    pairs = zip(of_rows, rows, strict=True)
    errors = [(name, row["error"]) for name, row in pairs if "error" in row]
    for name, error in dict.fromkeys(errors):  # one line where all answers of a prompt fail alike
        # a prompt that cannot be served is named by its error already
        print(f"peagle: {error if error.startswith(name) else f'{name}: {error}'}", file=sys.stderr)
    return 1 if errors else 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises InputError for options of `peagle generate` that do not go together."""
    if arguments.drafter is None and arguments.method not in (None, "none"):
        rule = f"{arguments.method} needs a draft head"
        next_step = "name a head with --drafter, or use --method none"
        raise InputError("--method", rule, "no --drafter", next_step)
    if arguments.out is not None:
        check_writable(arguments.out)
        if arguments.prompts is not None and arguments.out.resolve() == arguments.prompts.resolve():
            rule, next_step = "answers must not replace the prompts", "name another file with --out"
            raise InputError("--out", rule, f"--prompts {arguments.prompts}", next_step)
        if arguments.stream:
            rule, next_step = "prints to the terminal", "leave out --out or --stream"
            raise InputError("--stream", rule, f"--out {arguments.out}", next_step)
    elif arguments.logprobs:
        rule, next_step = "are written to a file", "name one with --out, or leave out --logprobs"
        raise InputError("--logprobs", rule, "no --out", next_step)
    if arguments.chat_template_kwargs is not None and arguments.prompts is None:
        rule, next_step = "are of chats", "give them as messages in a file of --prompts"
        raise InputError("--chat-template-kwargs", rule, "a text to continue", next_step)
    of_heads = {
        "-k": arguments.k is not None,
        "--num-tree-nodes": arguments.num_tree_nodes is not None,
        "--greedy-drafts": arguments.greedy_drafts,
    }
    for option, is_given in of_heads.items():
        if is_given and (arguments.drafter is None or arguments.method == "none"):
            rule, got = "tokens are drafted by a head", "plain decoding"
            next_step = f"name a head with --drafter, or leave out {option}"
            raise InputError(option, rule, got, next_step)
    for size in ("tensor_parallel_size", "data_parallel_size"):
        number = getattr(arguments, size)
        if arguments.threads not in (None, 1) and number > 1:
            rule, next_step = "is of a target on one device", "leave out one of the two"
            got = f"--{size.replace('_', '-')} {number}"
            raise InputError("--threads", rule, got, next_step)
    if arguments.stop_ids is not None and arguments.ignore_eos:
        rule, next_step = "take the place of end-of-sequence tokens", "leave out --ignore-eos"
        raise InputError("--stop-ids", rule, "--ignore-eos, too", next_step)
    check_at_least("--batch-size", arguments.batch_size, 1)
    if arguments.stream:  # one prompt after the other
        check_groups(arguments.data_parallel_size, 1, "leaving out --stream")
    check_groups(arguments.data_parallel_size, arguments.batch_size)
    if arguments.threads is not None:
        check_at_least("--threads", arguments.threads, 1)


def _logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """Token id -> what is added to its logit, from texts like 50256=-100."""
    bias = {}
    for pair in pairs:
        token, _, number = pair.partition("=")
        try:
            bias[int(token)] = float(number)
        except ValueError:
            rule, next_step = "must be a token's id and a number", "give --logit-bias 11=-100"
            raise InputError("--logit-bias", rule, pair, next_step) from None
    return bias


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def _print_acceptance_length(rows: Sequence[dict]) -> None:
    """On stderr, so that stdout has the text alone."""
    accepted = sum(row["num_accepted_tokens"] for row in rows)
    drafts = sum(row["num_drafts"] for row in rows)
    if drafts:
        length = 1 + accepted / drafts
        print(f"acceptance length {length:.3f} over {drafts} steps", file=sys.stderr)
