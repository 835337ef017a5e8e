"""The options of the commands that read and write checkpoints."""

from pathlib import Path

from peagle_jax.cli.parser import Parser, add_k, add_target, add_template_kwargs


def add_convert(parser: Parser) -> None:
    """The options of `peagle convert`."""
    parser.add_argument(
        "src", metavar="SRC", help="a head's folder, a training run, a target, or a hub id"
    )
    parser.add_argument(
        "dst", metavar="DST", type=Path, help="the folder to write; a file with --to gguf"
    )
    parser.add_argument(
        "--to",
        choices=("vllm", "speculators", "peagle_jax", "gguf", "orbax", "hf"),
        required=True,
        help="format of a head (vllm, speculators, peagle_jax, gguf, orbax) or of a target (hf)",
    )
    add_k(
        parser,
        type=int,
        help="tokens to draft in one step, where the format records it; without it as the source "
        "says",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; without it each keeps its own",
    )
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="the head's target: the speculators format names it, and some folders leave their "
        "embedding or layer ids to it; without it what the folder says",
    )
    parser.add_argument(
        "--share-embedding",
        action="store_true",
        help="leave out an embedding that equals the target's, which vLLM and llama.cpp then share",
    )
    parser.add_argument(
        "--mask-token",
        metavar="ID",
        type=int,
        help="id of the mask token, where the head's config does not name it; without it what the "
        "config says",
    )
    parser.add_argument(
        "--aux-layer-numbering",
        choices=("input", "output"),
        formerly=["--tap-numbering"],
        help="whether the source's aux hidden state ids count inputs or outputs of layers; without "
        "it as its format does",
    )
    parser.add_argument(
        "--identity-d2t",
        action="store_true",
        help="write the d2t of zeros that the source had; vLLM refuses such a folder",
    )
    parser.add_argument(
        "--drop-markov",
        action="store_true",
        help="leave out the Markov head, for which vLLM and speculators have no place; each draft "
        "is then chosen without the token before it (DSpark, arXiv:2607.05147: fewer are accepted)",
    )
    parser.add_argument(
        "--drop-confidence",
        action="store_true",
        help="leave out the confidence head, for which vLLM and speculators have no place; drafts "
        "stay as they are",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="split the weights into files of at most this size, as 5GB or 12MB; without it one "
        "file",
    )


def add_calibrate(parser: Parser) -> None:
    """The options of `peagle calibrate`."""
    parser.add_argument(
        "src", metavar="SRC", help="a head with a confidence head: a folder, or a training run"
    )
    parser.add_argument("dst", metavar="DST", type=Path, help="the folder to write")
    add_target(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        required=True,
        help="JSONL file as for `peagle generate`, of texts that the head was not trained on; 64 "
        "or more",
    )
    add_template_kwargs(parser)
    add_k(
        parser,
        type=int,
        help="tokens to draft in one step; without it what the head was trained for",
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=128, help="tokens of each answer"
    )


def add_inspect(parser: Parser) -> None:
    """The options of `peagle inspect`."""
    parser.add_argument("dir", metavar="DIR", help="a folder or a Hugging Face id")
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="the head's target, for a head whose config names no aux hidden state layers; without "
        "it they are not shown",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_serve_config(parser: Parser) -> None:
    """The options of `peagle serve-config`."""
    parser.add_argument("dir", metavar="DIR", help="the head's folder or Hugging Face id")
    parser.add_argument(
        "--engine",
        choices=("vllm", "sagemaker", "sglang", "tensorrt-llm"),
        required=True,
        help="print a command line of vLLM or SGLang, an environment variable for SageMaker, or an "
        "options file of TensorRT-LLM",
    )
    add_k(
        parser,
        type=int,
        help="tokens to draft in one step; without it what the head was trained for",
    )
    parser.add_argument(
        "--target", metavar="MODEL", help="the target's name; without it what the folder says"
    )
