"""`peagle train`, `peagle regenerate` and `peagle extract`: heads, and data to train them on."""

import argparse
from typing import cast

from peagle_jax.cli.arguments import (
    check_at_least,
    check_share,
    command_line,
    parse_numbers,
    parse_part,
)
from peagle_jax.cli.output import print_facts, say


def train(arguments: argparse.Namespace) -> int:
    """Trains a head or a small target as a recipe says, changed by what the command line says."""
    from peagle_jax.pipelines.train_head import train_head
    from peagle_jax.train.config import HeadRun, LmRun, load_run
    from peagle_jax.train.overrides import apply_overrides
    from peagle_jax.train.pretrain import train_lm

    overrides = list(arguments.overrides)
    if arguments.hidden_states_dir is not None:  # a key of the recipe with an option of its own
        overrides += ["--hidden-states-dir", arguments.hidden_states_dir]
    run = load_run(arguments.config)
    run = apply_overrides(run, overrides, str(arguments.config))
    if isinstance(run, LmRun):
        result = train_lm(run, say)
    else:
        result = train_head(cast(HeadRun, run), say)
    print_facts(vars(result))
    return 0


def regenerate(arguments: argparse.Namespace) -> int:
    """Lets a target answer conversations, or excerpts of a corpus."""
    from peagle_jax import weights
    from peagle_jax.pipelines.regenerate import RegenerationOptions, regenerate

    if arguments.num_samples is not None:
        check_at_least("--num-samples", arguments.num_samples, 1)
    check_at_least("--prompt-tokens", arguments.prompt_tokens, 1)
    check_at_least("--max-new-tokens", arguments.max_new_tokens, 1)
    check_at_least("--batch-size", arguments.batch_size, 1)
    check_at_least("--temperature", min(arguments.temperature), 0)
    check_at_least("--seed", arguments.seed, 0)
    check_share("--held-out", arguments.held_out)
    options = RegenerationOptions(
        source=arguments.data,
        held_out=arguments.held_out,
        num_samples=arguments.num_samples,
        prompt_tokens=arguments.prompt_tokens,
        max_new_tokens=arguments.max_new_tokens,
        temperatures=tuple(arguments.temperature),
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        bad_rows=arguments.bad_rows,
        part=parse_part("--part", arguments.part),
        server=arguments.server,
        server_model=arguments.server_model,
    )
    there = regenerate(weights.find_folder(arguments.target), options, arguments.out, say)
    say(f"{arguments.out}: {there.rows:,} rows, {there.tokens:,} tokens")
    return 0


def extract(arguments: argparse.Namespace) -> int:
    """Stores a target's hidden states on a corpus."""
    from peagle_jax.pipelines.extract import ExtractionOptions, extract_hidden_states

    aux_layers = None
    if arguments.aux_hidden_state_layers is not None:
        aux_layers = tuple(
            parse_numbers("--aux-hidden-state-layers", arguments.aux_hidden_state_layers, least=0)
        )
    options = ExtractionOptions(
        source=arguments.data,
        aux_hidden_state_layers=aux_layers,
        seq_len=arguments.seq_len,
        batch_size=arguments.batch_size,
        rows_per_shard=arguments.rows_per_shard,
        dtype=arguments.dtype,
        compute_dtype=arguments.compute_dtype,
        max_chars=arguments.max_chars,
        held_out=arguments.held_out,
        seed=arguments.seed,
        bad_rows=arguments.bad_rows,
    )
    result = extract_hidden_states(
        arguments.target, options, arguments.out, say, command=command_line(arguments.argv)
    )
    print_facts(vars(result))
    return 0
