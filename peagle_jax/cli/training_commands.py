"""Heads, recipes, and data to train on: `train`, `init-config`, `regenerate` and `extract`."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from peagle_jax.cli.arguments import (
    check_at_least,
    check_groups,
    check_share,
    command_line,
    parse_numbers,
    parse_part,
    parse_template_kwargs,
)
from peagle_jax.cli.output import print_facts, say
from peagle_jax.types import InputError

if TYPE_CHECKING:
    from peagle_jax.train.config import Run

# After which a process that is not heard of is dead, and the others end.
HEARTBEAT_SECONDS = 40
# How long the first processes wait for the last.
JOIN_SECONDS = 300


def train(arguments: argparse.Namespace) -> int:
    """Trains a head or a small target as a recipe says, changed by what the command line says."""
    from peagle_jax.pipelines.train_head import train_head
    from peagle_jax.train.config import HeadRun, LmRun, load_run
    from peagle_jax.train.mesh import is_first_process
    from peagle_jax.train.overrides import apply_overrides
    from peagle_jax.train.pretrain import train_lm
    from peagle_jax.train.process_watch import ProcessDiedError, watched_processes

    if arguments.coordinator is not None or arguments.process is not None:
        join_processes(arguments.coordinator, arguments.process)
    overrides = list(arguments.overrides)
    if arguments.hidden_states_dir is not None:  # a key of the recipe with an option of its own
        overrides += ["--hidden-states-dir", arguments.hidden_states_dir]
    run = load_run(arguments.config)
    run = apply_overrides(run, overrides, str(arguments.config))
    if arguments.devices is not None and not arguments.dry_run:
        next_step = "add --dry-run, or set mesh in the recipe"
        raise InputError("--devices", "belongs to --dry-run", arguments.devices, next_step)
    if arguments.dry_run:
        return print_plan(run, arguments.devices)
    try:
        with watched_processes():
            if isinstance(run, LmRun):
                result = train_lm(run, say_once())
            else:
                result = train_head(cast(HeadRun, run), say_once())
    except ProcessDiedError:  # which was said
        return 1
    if is_first_process():
        print_facts(vars(result))
    return 0


def print_plan(run: "Run", devices: int | None) -> int:
    """Prints what a run would take.

    Raises:
      InputError: the recipe trains no head, or there is no plan of it.
    """
    from peagle_jax.pipelines.training_plan import training_plan
    from peagle_jax.train.config import HeadRun

    if not isinstance(run, HeadRun):
        rule, next_step = (
            "needs the recipe of a head",
            "name one with task: peagle, eagle3 or eagle",
        )
        raise InputError("--dry-run", rule, f"task: {run.task}", next_step)
    print_facts(training_plan(run, devices).facts())
    return 0


def init_config(arguments: argparse.Namespace) -> int:
    """Writes a recipe that fits a target and a corpus."""
    from peagle_jax.atomic_write import write_atomically
    from peagle_jax.train.new_recipe import new_recipe

    path = arguments.out
    if path.suffix not in (".yaml", ".yml"):
        raise InputError("--out", "must be a YAML file", path, f"write --out {path}.yaml")
    if path.exists():
        rule, next_step = "the recipe must be a new file", "name another, or delete it"
        raise InputError(path, rule, "one that is there", next_step)
    run_folder = path.with_suffix("")
    of_template = parse_template_kwargs(arguments.chat_template_kwargs, None)
    recipe = new_recipe(
        arguments.target,
        arguments.data,
        arguments.task,
        run_folder.as_posix(),
        say,
        of_template,
        arguments.special_tokens,
        arguments.split_turns,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, recipe)
    except OSError as error:
        rule, next_step = "the recipe must be writable", "choose another place"
        raise InputError(path, rule, error.strerror, next_step) from None
    say(f"{path}: look at it, then peagle train {path}")
    return 0


def say_once() -> Callable[[str], None]:
    """`say` in the first of several processes; the others are silent."""
    from peagle_jax.train.mesh import is_first_process

    return say if is_first_process() else lambda _: None


def join_processes(coordinator: str | None, process: str | None) -> None:
    """Makes this process one of those that train together.

    Args:
      coordinator: HOST:PORT of the first process; "auto": as Slurm, Open MPI or a cloud say.
      process: "I/N", the I-th of N processes.

    Raises:
      InputError: the two do not fit, or the others did not come.
    """
    import jax

    if coordinator is None or (coordinator != "auto") != (process is not None):
        rule = "give --coordinator HOST:PORT together with --process I/N, or --coordinator auto"
        got = f"--coordinator {coordinator}, --process {process}"
        raise InputError("--coordinator", rule, got, "use --coordinator host1:4321 --process 1/2")
    where: dict[str, Any] = {
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
        # one that is refused would otherwise wait for the others for minutes before it ends
        "shutdown_timeout_seconds": HEARTBEAT_SECONDS,
    }
    if process is not None:
        place, number = parse_part("--process", process)
        where |= {
            "coordinator_address": coordinator,
            "num_processes": number,
            "process_id": place,
            "initialization_timeout": JOIN_SECONDS,
        }
    try:
        jax.distributed.initialize(**where)
    except (RuntimeError, ValueError) as error:
        next_step = "start all processes with the same --coordinator, and N of them"
        got = str(error).partition("\n")[0]
        raise InputError("--coordinator", "all processes must come", got, next_step) from None


def regenerate(arguments: argparse.Namespace) -> int:
    """Lets a target answer conversations, or excerpts of a corpus."""
    from peagle_jax import weights
    from peagle_jax.pipelines.regenerate import RegenerationOptions, regenerate

    if arguments.num_samples is not None:
        check_at_least("--num-samples", arguments.num_samples, 1)
    check_at_least("--prompt-tokens", arguments.prompt_tokens, 1)
    check_at_least("--max-new-tokens", arguments.max_new_tokens, 1)
    check_at_least("--batch-size", arguments.batch_size, 1)
    check_groups(arguments.data_parallel_size, arguments.batch_size)
    check_at_least("--temperature", min(arguments.temperature), 0)
    check_at_least("--seed", arguments.seed, 0)
    if arguments.held_out is not None:
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
        chat_template_kwargs=parse_template_kwargs(arguments.chat_template_kwargs, None),
        special_tokens=arguments.special_tokens,
        part=parse_part("--part", arguments.part),
        server=arguments.server,
        server_model=arguments.server_model,
        dtype=arguments.dtype or "float32",
        data_parallel_size=arguments.data_parallel_size,
        tensor_parallel_size=arguments.tensor_parallel_size,
    )
    ours = {"--dtype": arguments.dtype is not None}
    ours["--data-parallel-size"] = arguments.data_parallel_size != 1
    ours["--tensor-parallel-size"] = arguments.tensor_parallel_size != 1
    for option, is_given in ours.items():
        if is_given and arguments.server is not None:
            rule, next_step = "is of a target that writes here", f"leave out {option} or --server"
            raise InputError(option, rule, f"--server {arguments.server}", next_step)
    if arguments.server_model is not None and arguments.server is None:
        rule, next_step = "is the target's name at a server", "give --server, or leave it out"
        raise InputError("--server-model", rule, "no --server", next_step)
    # where a server writes, no weights are needed
    patterns = weights.TOKENIZER_FILES if arguments.server else weights.CHECKPOINT_FILES
    folder = weights.find_folder(arguments.target, patterns)
    there = regenerate(folder, options, arguments.out, say)
    say(f"{arguments.out}: {there.rows:,} rows, {there.tokens:,} tokens")
    return 0


def extract(arguments: argparse.Namespace) -> int:
    """Stores a target's hidden states on a corpus."""
    from peagle_jax.pipelines.extract import extract_hidden_states
    from peagle_jax.pipelines.extraction_options import ExtractionOptions

    aux_layers = None
    if arguments.aux_hidden_state_layers is not None:
        aux_layers = tuple(
            parse_numbers("--aux-hidden-state-layers", arguments.aux_hidden_state_layers, least=0)
        )
    options = ExtractionOptions(
        source=arguments.data,
        aux_hidden_state_layers=aux_layers,
        seq_len=arguments.seq_len,
        packing=arguments.packing,
        batch_size=arguments.batch_size,
        rows_per_shard=arguments.rows_per_shard,
        dtype=arguments.dtype,
        compute_dtype=arguments.compute_dtype,
        data_parallel_size=arguments.data_parallel_size,
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_chars=arguments.max_chars,
        held_out=arguments.held_out,
        seed=arguments.seed,
        bad_rows=arguments.bad_rows,
        chat_template_kwargs=parse_template_kwargs(arguments.chat_template_kwargs, None),
        special_tokens=arguments.special_tokens,
        split_turns=arguments.split_turns,
    )
    result = extract_hidden_states(
        arguments.target, options, arguments.out, say, command=command_line(arguments.argv)
    )
    print_facts(vars(result))
    return 0
