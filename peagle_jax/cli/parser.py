"""A parser whose options can have former spellings, and the options that several commands share.

Nothing here imports JAX, so that `peagle --help` answers at once.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

DTYPES = ("float32", "bfloat16", "fp8")


class UsageError(ValueError):
    """The words on the command line are not a command. The message is one line."""


class WideHelpFormatter(argparse.HelpFormatter):
    """Help with room for long options beside their descriptions."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors and takes former spellings of options."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", WideHelpFormatter)
        super().__init__(**options)

    def add_argument(
        self, *spellings: str, formerly: Sequence[str] = (), **options: Any
    ) -> argparse.Action:
        """Adds an argument; its help ends with its default, or with "(required)".

        Args:
          spellings: those that --help lists.
          formerly: spellings that go on working and that --help does not list. Messages name the
            listed ones.
          options: as for `argparse.ArgumentParser.add_argument`.
        """
        default = options.get("default")
        if options.get("required"):
            options["help"] = f"{options['help']} (required)"
        elif options.get("action") == "store_true":
            options["help"] = f"{options['help']} (default: off)"
        elif default is not None and default is not argparse.SUPPRESS:
            options["help"] = f"{options['help']} (default: {default_text(default)})"
        action = super().add_argument(*spellings, **options)
        for spelling in formerly:
            self._option_string_actions[spelling] = action
        return action

    def understands(self, option: str) -> bool:
        """Whether argparse takes a word for one of the options, by a former or shortened name."""
        return any(spelling.startswith(option) for spelling in self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Raises the mistake instead of printing the usage, so that `main` prints one line.

        Raises:
          UsageError: always.
        """
        command = self.prog.removeprefix("peagle").strip()
        where = f"{command}: " if command else ""
        raise UsageError(f"{where}{message}; run {self.prog} --help")


def default_text(default: Any) -> str:
    """A default as it would be typed: the items of a list with spaces between them."""
    if isinstance(default, list | tuple):
        return " ".join(map(str, default))
    return str(default)


# ---------------------------------------------------------------- options of several commands


def add_target(parser: Parser, what: str = "the target", *, required: bool = True) -> None:
    """The target of a command."""
    help = f"{what}: a folder or a Hugging Face id"
    parser.add_argument("--target", metavar="MODEL", required=required, help=help)


def add_server(parser: Parser, help: str) -> None:
    """A server with OpenAI's API, and the name of a model there."""
    parser.add_argument("--server", metavar="URL", help=help)
    parser.add_argument(
        "--server-model",
        metavar="NAME",
        help="the target's name there; without it the first that the server lists",
    )


def add_k(parser: Parser, help: str, **options: Any) -> None:
    """K, with the spelling of vLLM's option; `options` as for `Parser.add_argument`."""
    parser.add_argument(
        "-k",
        "--num-speculative-tokens",
        dest="k",
        metavar="K",
        formerly=["--k"],
        help=help,
        **options,
    )


def add_held_out(parser: Parser, default: float | None, why: str = "") -> None:
    """The share of a corpus that is left out, as training leaves it out; `why` ends its help."""
    parser.add_argument(
        "--held-out",
        metavar="SHARE",
        type=float,
        default=default,
        help=f"share of the documents that is left out, chosen by their names as in training{why}",
    )


def add_bad_rows(parser: Parser) -> None:
    """What becomes of lines of a corpus that cannot be used."""
    parser.add_argument(
        "--bad-rows",
        choices=("refuse", "skip"),
        default="refuse",
        help="lines that cannot be used: refuse the first, or skip and count them",
    )


def add_template_kwargs(parser: Parser) -> None:
    """Options of the target's chat template."""
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="options of the target's chat template, as '{\"enable_thinking\": false}'; what a row "
        "sets in a column of this name wins",
    )


def add_special_tokens(parser: Parser) -> None:
    """How texts are read that were rendered already."""
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="read special tokens that texts spell as these tokens, as in conversations that were "
        "rendered already; without it they are plain text",
    )


def add_parallel_sizes(parser: Parser, rows: str = "prompts") -> None:
    """The devices of a command that reads a target.

    Args:
      rows: what groups of devices share.
    """
    parser.add_argument(
        "--data-parallel-size",
        metavar="N",
        type=int,
        default=1,
        help=f"share the {rows} among so many groups of --tensor-parallel-size devices, of which "
        "each has the whole target",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        metavar="N",
        type=int,
        default=1,
        help="devices over which the target's heads, MLPs, experts and vocabulary are spread",
    )


def add_split_turns(parser: Parser) -> None:
    """Whether the answers of a conversation are read at once."""
    parser.add_argument(
        "--split-turns",
        action="store_true",
        help="each answer of a conversation apart, after the turns before it as the target saw "
        "them: with its reasoning, which templates drop later; without it all answers at once",
    )


def add_precision(parser: Parser) -> None:
    """The dtypes of a command that decodes."""
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of weights, and of activations on a GPU; on a CPU activations are float32. fp8 "
        "stores matrices in float8 with scales and the rest in bfloat16",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="of the target's KV cache; auto: that of the weights, and on a CPU without a C++ "
        "compiler, or with AMX, float32",
    )
