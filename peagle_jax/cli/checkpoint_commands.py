"""`peagle convert`, `calibrate`, `inspect` and `serve-config`: checkpoints on disk."""

import argparse
import json
import shlex
import sys

from peagle_jax.cli.arguments import command_line, parse_bytes, parse_template_kwargs
from peagle_jax.cli.output import print_facts, say
from peagle_jax.types import InputError

MEGABYTE = 10**6


def convert(arguments: argparse.Namespace) -> int:
    """Converts a checkpoint into another format."""
    from peagle_jax.checkpoints.convert import convert, read_serving
    from peagle_jax.progress import ProgressReport

    max_shard_bytes = None
    if arguments.max_shard_size is not None:
        max_shard_bytes = parse_bytes("--max-shard-size", arguments.max_shard_size)
    with ProgressReport(f"write {arguments.dst.name}", None, unit="MB") as progress:

        def report_bytes(done: int, total: int) -> None:
            progress.update(done // MEGABYTE, total=total // MEGABYTE)

        convert(
            arguments.src,
            arguments.dst,
            to=arguments.to,
            k=arguments.k,
            dtype=arguments.dtype,
            target=arguments.target,
            max_shard_bytes=max_shard_bytes,
            share_embedding=arguments.share_embedding,
            mask_token=arguments.mask_token,
            aux_layer_numbering=arguments.aux_layer_numbering,
            identity_d2t=arguments.identity_d2t,
            drop_markov=arguments.drop_markov,
            drop_confidence=arguments.drop_confidence,
            command=command_line(arguments.argv),
            on_bytes=report_bytes,
        )
    say(f"{arguments.src} -> {arguments.dst} ({arguments.to})")
    if arguments.drop_markov:
        say(
            "without its Markov head the head drafts every token without the one before it. DSpark "
            "(arXiv:2607.05147) reports fewer accepted drafts so; peagle bench measures both"
        )
    if arguments.to == "gguf":
        file = shlex.quote(str(arguments.dst))
        say(
            f"llama-server --model TARGET.gguf --model-draft {file} --spec-type draft-eagle3 "
            "--spec-draft-n-max 4"
        )
    if arguments.to == "speculators" and read_serving(arguments.dst).target is None:
        say(f"it names no target, so vllm serve {arguments.dst} will not find one; give --target")
    return 0


def calibrate(arguments: argparse.Namespace) -> int:
    """Calibrates a head's confidence head."""
    from peagle_jax import text, weights
    from peagle_jax.checkpoints.runs import open_head
    from peagle_jax.checkpoints.target_io import load_target, read_facts
    from peagle_jax.pipelines.calibration import calibrate_head, check_has_confidence

    config = open_head(arguments.src, read_facts(arguments.target).layers).config
    check_has_confidence(config, arguments.src)  # before minutes of loading
    target = load_target(arguments.target, aux_hidden_state_layers=config.aux_hidden_state_layers)
    tokenizer = text.load_tokenizer(weights.find_folder(arguments.target))
    of_template = parse_template_kwargs(arguments.chat_template_kwargs, tokenizer)
    named_prompts = text.read_named_prompts(arguments.prompts, tokenizer, of_template)
    facts = calibrate_head(
        target,
        arguments.src,
        arguments.dst,
        [prompt for _, prompt in named_prompts],
        names=[name for name, _ in named_prompts],
        k=arguments.k,
        max_new_tokens=arguments.max_new_tokens,
        command=command_line(arguments.argv),
    )
    print_facts(facts)
    say(f"{arguments.src} -> {arguments.dst} (peagle_jax)")
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    """Prints what a checkpoint is."""
    from peagle_jax.checkpoints.inspect import describe, printable_rows

    facts = describe(arguments.dir, arguments.target)
    if arguments.json:
        say(json.dumps(facts, indent=2))
    else:
        print_facts(printable_rows(facts))
    return 0


def serve_config(arguments: argparse.Namespace) -> int:
    """Prints how another engine serves a head."""
    from peagle_jax import weights
    from peagle_jax.checkpoints.checkpoint_format import names_aux_layers
    from peagle_jax.checkpoints.config_writing import serving_flags, serving_notes
    from peagle_jax.checkpoints.convert import read_serving
    from peagle_jax.checkpoints.head_writing import SERVED_FORMATS
    from peagle_jax.checkpoints.inspect import ANY_LAYERS
    from peagle_jax.checkpoints.other_engines import ENGINES, check_servable_by, notes
    from peagle_jax.checkpoints.serving_checks import check_servable
    from peagle_jax.checkpoints.target_io import context_of, read_facts

    # For a head that names no aux hidden state layers vLLM makes its own choice, and the flag is
    # the same however many layers the target has. Other engines are told the layers.
    target_layers: int | None = ANY_LAYERS
    config = weights.find_folder(arguments.dir) / "config.json"
    if arguments.engine in ENGINES and config.exists():
        if not names_aux_layers(weights.read_json(config), config):
            target_layers = read_facts(arguments.target).layers if arguments.target else None
    head = read_serving(arguments.dir, target_layers=target_layers)
    if head.checkpoint_format not in SERVED_FORMATS:
        raise InputError(
            arguments.dir,
            rule=f"vLLM serves the formats {', '.join(SERVED_FORMATS)}",
            got=head.checkpoint_format,
            next_step="convert it first: peagle convert --to vllm",
        )
    check_servable(head, arguments.dir, by_vllm=arguments.engine not in ENGINES)
    k = head.config.num_depths if arguments.k is None else arguments.k
    if k is None:
        rule = "the folder does not say which K the head was trained for"
        raise InputError(arguments.dir, rule, "none", "give it with -k, for example -k 5")
    if k < 1:
        raise InputError(arguments.dir, "K must be 1 or more", k, "give -k 1 or more")
    name, revision = weights.split_revision(arguments.dir)
    target, target_revision = weights.split_revision(arguments.target or head.target or "TARGET")
    if arguments.target is None:
        target_revision = weights.read_metadata(config.parent).get("target_revision")
    if arguments.engine in ENGINES:
        check_servable_by(arguments.engine, head, arguments.dir)
        line = ENGINES[arguments.engine](head.config, name, target, k)
        advice = notes(arguments.engine, head.config, target)
    else:
        flags = shlex.quote(serving_flags(head.config, name, k, revision))
        revision_flag = f" --revision {shlex.quote(target_revision)}" if target_revision else ""
        line = f"vllm serve {shlex.quote(target)}{revision_flag} --speculative-config {flags}"
        if arguments.engine == "sagemaker":
            line = f"SM_VLLM_SPECULATIVE_CONFIG={flags}"
        advice = serving_notes(head.config, context_of(arguments.target or head.target))
    if target_revision and arguments.engine != "vllm":
        advice = [f"serve revision {target_revision} of {target}", *advice]
    if target == "TARGET" and arguments.engine != "sagemaker":
        advice = ["the head names no target: put its folder or hub id in TARGET's place", *advice]
    for sentence in advice:
        print(sentence, file=sys.stderr)
    say(line)
    return 0
