"""The options of the commands that train, or that make recipes and data for training."""

from pathlib import Path

from peagle_jax.cli.parser import (
    Parser,
    add_bad_rows,
    add_held_out,
    add_parallel_sizes,
    add_server,
    add_special_tokens,
    add_split_turns,
    add_target,
    add_template_kwargs,
)

CORPUS = (
    "a JSONL, JSON or Parquet file, a folder, hf:NAME:SPLIT for a dataset of the hub, or "
    "installed, as data.source of a recipe"
)


def add_train(parser: Parser) -> None:
    """The options of `peagle train`; the keys of the recipe are read by apply_overrides."""
    parser.usage = (
        "peagle train CONFIG [-h] [--hidden-states-dir DIR] [--dry-run] [--KEY VALUE ...]"
    )
    parser.epilog = (
        "Every key of the recipe can be given as an option, for example --optimizer.steps 100; "
        "peagle_jax/train/config.py and the files of its sections, which it names, have all keys "
        "with their defaults. "
        "A run that was interrupted resumes with the same command."
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the recipe, a YAML file")
    parser.add_argument(
        "--hidden-states-dir",
        metavar="DIR",
        formerly=["--features"],
        help="read the target's hidden states from this folder of `peagle extract`; without it the "
        "target runs",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what the run of a head would take: bytes of a device, packed length, and the "
        "least time of a step; nothing is read but the target's config.json",
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        type=int,
        help="of --dry-run: so many devices in the place of the recipe's mesh",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="train with several processes, on one machine or many: where the first of them can be "
        "reached; auto: as Slurm, Open MPI or a cloud says. `mesh` of the recipe counts the "
        "devices of all processes; the output folder must be one that all of them see",
    )
    parser.add_argument(
        "--process", metavar="I/N", help="which of the N processes this is, from 1/N to N/N"
    )


def add_init_config(parser: Parser) -> None:
    """The options of `peagle init-config`."""
    add_target(parser)
    parser.add_argument(
        "--data",
        metavar="CORPUS",
        required=True,
        help=CORPUS,
    )
    parser.add_argument(
        "--task", choices=("peagle", "eagle3", "eagle"), default="peagle", help="the kind of head"
    )
    add_template_kwargs(parser)
    add_special_tokens(parser)
    add_split_turns(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        required=True,
        help="the recipe, a YAML file that is not there yet; the run's folder is its name without "
        ".yaml",
    )


def add_regenerate(parser: Parser) -> None:
    """The options of `peagle regenerate`."""
    add_target(parser, "the target that writes the answers")
    parser.add_argument(
        "--data",
        metavar="CORPUS",
        formerly=["--source"],
        help=f"{CORPUS}; without it the source of Python's standard library. Conversations and "
        "prompts are answered turn by turn, texts are continued",
    )
    add_bad_rows(parser)
    add_template_kwargs(parser)
    add_special_tokens(parser)
    add_held_out(
        parser,
        None,
        ", where a head could not be measured on their answers; without it none, or as the file "
        "was begun",
    )
    parser.add_argument(
        "--num-samples",
        metavar="N",
        type=int,
        formerly=["--answers"],
        help="conversations, or excerpts, to answer; without it every conversation once, or 4096 "
        "excerpts",
    )
    parser.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=int,
        default=32,
        help="tokens of each excerpt that the target continues",
    )
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=224,
        formerly=["--new-tokens"],
        help="tokens of an answer at most; a conversation ends before one that is longer",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        help="one or more; conversations, or answers to excerpts, take them in turn",
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=int, default=64, help="answers written together"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the target's weights, and of activations on a GPU; without it float32",
    )
    add_parallel_sizes(parser, rows="answers")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of the excerpts and of sampling"
    )
    parser.add_argument(
        "--part",
        metavar="I/N",
        default="1/1",
        help="answer the I-th of N parts of the conversations, for N processes with an --out each",
    )
    add_server(
        parser,
        "a server with OpenAI's chat completions, such as vLLM's, that writes in the target's "
        "place; --target then gives the tokenizer",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        required=True,
        help="JSONL file that the answers are appended to; the same command resumes it",
    )


def add_show_data(parser: Parser) -> None:
    """The options of `peagle show-data`."""
    add_target(parser)
    parser.add_argument(
        "--data",
        metavar="CORPUS",
        required=True,
        help=CORPUS,
    )
    add_bad_rows(parser)
    add_template_kwargs(parser)
    add_special_tokens(parser)
    add_split_turns(parser)
    parser.add_argument(
        "--limit", metavar="N", type=int, help="so many documents at most; without it all"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help='one line for each document: {"text": as rendered, "trained": the trained spans}',
    )


def add_extract(parser: Parser) -> None:
    """The options of `peagle extract`."""
    add_target(parser)
    parser.add_argument(
        "--data",
        metavar="CORPUS",
        required=True,
        help=CORPUS,
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder for the hidden states; the same command resumes it",
    )
    parser.add_argument(
        "--aux-hidden-state-layers",
        metavar="IDS",
        formerly=["--taps"],
        help="layers as 2,18,33: id i is the input of layer i, as in vLLM; without it vLLM's "
        "choice for the target",
    )
    parser.add_argument(
        "--seq-len",
        metavar="N",
        type=int,
        formerly=["--length"],
        help="tokens of a packed row; without it 2048, or the target's context if that is shorter",
    )
    parser.add_argument(
        "--packing",
        choices=("cut", "whole"),
        default="cut",
        help="documents one after another and cut where a row ends, or whole ones, with padding",
    )
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=int,
        default=8,
        formerly=["--batch"],
        help="rows in one forward of the target",
    )
    parser.add_argument(
        "--rows-per-shard",
        metavar="N",
        type=int,
        help="a shard is held in memory until it is written; without it as many as make 1 GiB",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float8_e4m3fn"),
        default="bfloat16",
        help="of the stored hidden states; float8_e4m3fn has a scale for each token and layer",
    )
    parser.add_argument(
        "--compute-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the target's weights and of products' operands, and of activations on a GPU; on a "
        "CPU activations are float32",
    )
    add_parallel_sizes(parser, rows="rows of a batch")
    parser.add_argument(
        "--max-chars",
        metavar="N",
        type=int,
        help="take a random choice of documents of about so many characters; without it all",
    )
    add_bad_rows(parser)
    add_template_kwargs(parser)
    add_special_tokens(parser)
    add_split_turns(parser)
    add_held_out(parser, 0.05)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the random choice")
