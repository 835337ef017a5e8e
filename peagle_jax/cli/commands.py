"""All commands: what each one does, its options, and the function that runs it.

Nothing here imports JAX, so that `peagle --help` answers at once.
"""

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import peagle_jax
from peagle_jax.cli import checkpoint_options, decode_options, plan_options, training_options
from peagle_jax.cli.parser import Parser, UsageError

DESCRIPTION = (
    "P-EAGLE (parallel-drafting speculative decoding) in JAX: trains draft heads, decodes without "
    "changing the target's text, and exports heads for vLLM."
)


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of `peagle`.

    Attributes:
      summary: what it does, as --help says it.
      add_options: gives the command's parser its arguments.
      module: file of peagle_jax/cli that has a function of the command's name. It takes the parsed
        arguments and returns the exit code.
    """

    summary: str
    add_options: Callable[[Parser], None]
    module: str


COMMANDS = {
    "demo": Command(
        "decodes Python source with and without draft heads, checks that the text is the same, "
        "trains and exports a head, and writes a report",
        decode_options.add_demo,
        "decode_commands",
    ),
    "train": Command(
        "trains a draft head, or a small target, from a YAML recipe",
        training_options.add_train,
        "training_commands",
    ),
    "init-config": Command(
        "writes a recipe for `peagle train` that fits a target and a corpus, with comments",
        training_options.add_init_config,
        "training_commands",
    ),
    "regenerate": Command(
        "writes a target's answers to conversations, or to excerpts of texts, as training data",
        training_options.add_regenerate,
        "training_commands",
    ),
    "show-data": Command(
        "prints what of a corpus is trained: the answers of conversations, in colour",
        training_options.add_show_data,
        "data_commands",
    ),
    "extract": Command(
        "stores a target's hidden states on a corpus, for training",
        training_options.add_extract,
        "training_commands",
    ),
    "generate": Command(
        "continues prompts with a target, alone or with a draft head",
        decode_options.add_generate,
        "decode_commands",
    ),
    "bench": Command(
        "measures speed, acceptance and exactness of plain and speculative decoding",
        decode_options.add_bench,
        "bench_commands",
    ),
    "calibrate": Command(
        "fits the confidences of a draft head to what decoding accepts of its drafts",
        checkpoint_options.add_calibrate,
        "checkpoint_commands",
    ),
    "plan": Command(
        "says from shapes alone how fast decoding will be on a device, and whether a head pays",
        plan_options.add_plan,
        "plan_commands",
    ),
    "convert": Command(
        "converts a head, a training run or a target to another format",
        checkpoint_options.add_convert,
        "checkpoint_commands",
    ),
    "inspect": Command(
        "prints what a checkpoint is and what it can be used with",
        checkpoint_options.add_inspect,
        "checkpoint_commands",
    ),
    "serve-config": Command(
        "prints how to serve a head with vLLM, SageMaker, SGLang or TensorRT-LLM",
        checkpoint_options.add_serve_config,
        "checkpoint_commands",
    ),
}


class VersionAction(argparse.Action):
    """Prints the version, which is looked up only then, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Called by argparse where it finds --version."""
        print(f"peagle {peagle_jax.__version__}")
        parser.exit()


def make_parser() -> Parser:
    """The parser of all commands. What it returns has `name`, the command's."""
    parser = Parser(prog="peagle", description=DESCRIPTION)
    parser.add_argument(
        "--version", action=VersionAction, nargs=0, help="print the version and exit"
    )
    subparsers = parser.add_subparsers(
        dest="name", required=True, parser_class=Parser, metavar="COMMAND", title="commands"
    )
    for name, command in COMMANDS.items():
        description = f"{command.summary[0].upper()}{command.summary[1:]}."
        subparser = subparsers.add_parser(name, help=command.summary, description=description)
        command.add_options(subparser)
    return parser


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Args:
      words: what was typed after `peagle`.

    Returns:
      The options of one command, with `name` (the command), `overrides` (of `train`: the words that
      name keys of the recipe) and `argv` (all words).

    Raises:
      UsageError: a command or an argument is unknown, missing, or not of its kind.
    """
    is_training = len(words) > 1 and words[0] == "train"
    reordered = _with_config_first(words) if is_training else words
    arguments, unknown = make_parser().parse_known_args(reordered)
    if unknown and arguments.name != "train":
        rule = f"unknown argument {' '.join(unknown)}"
        raise UsageError(f"{arguments.name}: {rule}; run peagle {arguments.name} --help")
    arguments.overrides = unknown
    arguments.argv = list(words)
    return arguments


def _with_config_first(words: Sequence[str]) -> list[str]:
    """The words of `peagle train`, a recipe at their end moved before the overrides.

    argparse takes the first word that is no option for the recipe, and so the value of an override
    that stands before it. Behind the recipe an override can have several values.
    """
    parser = Parser()
    training_options.add_train(parser)
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    has_overrides = not all(map(parser.understands, options))
    ends_with_config = words[1].startswith("-") and not words[-1].startswith("-")
    if has_overrides and ends_with_config:
        return [words[0], words[-1], *words[1:-1]]
    return list(words)


def run_command(arguments: argparse.Namespace) -> int:
    """Runs the function of a command.

    Args:
      arguments: from `parse_arguments`.

    Returns:
      The exit code: 0, or 1 where the command's job failed.

    Raises:
      InputError: a file or a value cannot be used.
    """
    module = importlib.import_module(f"peagle_jax.cli.{COMMANDS[arguments.name].module}")
    return getattr(module, arguments.name.replace("-", "_"))(arguments)
