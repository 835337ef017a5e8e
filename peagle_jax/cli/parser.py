"""What can be asked: the arguments of every command."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from peagle_jax.types import InputError


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(
            self.prog, "arguments must be as --help says", message, f"run {self.prog} --help"
        )


DTYPES = ("float32", "bfloat16", "fp8")
FP8 = "of weights and activations; fp8: matrices in float8 with scales, the rest in bfloat16"


def make_parser(commands: Mapping[str, Callable]) -> Parser:
    """The arguments of every command; `args.command` is the function of that name."""
    parser = Parser(
        prog="peagle",
        description="P-EAGLE in JAX: train draft heads, decode losslessly, export to vLLM.",
    )
    subparsers = parser.add_subparsers(dest="name", required=True, parser_class=Parser)

    def add(name, text):
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.set_defaults(command=commands[name])
        return sub

    p = add(
        "demo",
        "decodes this machine's Python source three ways, checks exactness, trains a head, exports, reports",
    )
    p.add_argument("--out", type=Path, required=True)
    p.add_argument(
        "--budget",
        choices=("smoke", "small", "full"),
        default="small",
        help="2 minutes, 10 minutes, or one GPU",
    )
    p.add_argument(
        "--from-scratch",
        action="store_true",
        help="train target and heads here instead of using the package's own",
    )
    p.add_argument("--dry-run", action="store_true", help="say what would be done")

    p = add(
        "train",
        "trains a head or a small target from a YAML config; --a.b.c VALUE overrides; resumes by itself",
    )
    p.add_argument("config", type=Path)

    p = add(
        "regenerate",
        "a target's own answers to excerpts of a corpus, as training data for its heads; resumes by itself",
    )
    p.add_argument("--target", required=True)
    p.add_argument(
        "--source",
        help="a corpus as in a run's data.source; default: this machine's Python standard library",
    )
    p.add_argument(
        "--held-out",
        type=float,
        default=0.05,
        help="share of documents never used (by name, as in training)",
    )
    p.add_argument("--answers", type=int, default=4096)
    p.add_argument("--prompt-tokens", type=int, default=32)
    p.add_argument("--new-tokens", type=int, default=224)
    p.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        help="one or more: batches take them in turn",
    )
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, required=True)

    p = add(
        "extract",
        "taps and final hidden states of a target on a corpus, to disk, in shards; resumes by itself",
    )
    p.add_argument("--target", required=True)
    p.add_argument(
        "--data",
        required=True,
        help="a corpus as in a run's data.source: a folder, a JSONL, or installed",
    )
    p.add_argument("--out", type=Path, required=True)
    p.add_argument(
        "--taps",
        help="hidden states as 2,18,33: id i is the input of layer i (default: the target's, as vLLM chooses them)",
    )
    p.add_argument(
        "--length",
        type=int,
        help="tokens a row; documents are packed and kept apart (default: 2048, or the target's context)",
    )
    p.add_argument("--batch", type=int, default=8, help="rows a forward")
    p.add_argument(
        "--rows-per-shard",
        type=int,
        help="a shard is in memory until it is written (default: as many as make 1 GiB)",
    )
    p.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="of what is stored",
    )
    p.add_argument(
        "--compute-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and activations",
    )
    p.add_argument(
        "--max-chars",
        type=int,
        help="a random choice of documents of about so many characters (default: all)",
    )
    p.add_argument(
        "--held-out",
        type=float,
        default=0.05,
        help="share of documents never used (by name, as in training)",
    )
    p.add_argument("--seed", type=int, default=0, help="of the random choice")

    p = add("generate", "continues prompts with a target, alone or with a draft head")
    p.add_argument("--target", required=True)
    p.add_argument("--drafter")
    p.add_argument("--method", choices=("peagle", "eagle3", "none"))
    p.add_argument(
        "-k",
        type=int,
        default=None,
        help="tokens drafted a step (default: what the head was trained for, at most 7)",
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt")
    source.add_argument("--prompts", type=Path)
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--greedy-drafts",
        action="store_true",
        help="with a temperature, draft argmaxes instead of samples",
    )
    p.add_argument("--ignore-eos", action="store_true")
    p.add_argument("--dtype", choices=DTYPES, default="float32", help=FP8)
    p.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="of the target's cache; auto: that of activations",
    )
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument(
        "--prefill-chunk",
        type=int,
        help="prompt tokens read at once (default: all; 512 with --sliding-cache)",
    )
    p.add_argument(
        "--sliding-cache",
        action="store_true",
        help="sliding layers keep a window and a chunk: less memory, the same text",
    )
    p.add_argument(
        "--mxfp4",
        choices=("packed", "plain"),
        default="packed",
        help="experts stored in MXFP4: kept in 4 bits, or in --dtype",
    )
    p.add_argument("--out", type=Path)

    p = add(
        "bench",
        "tokens per second, acceptance and exactness of plain and speculative decoding, in one run",
    )
    p.add_argument("--target", required=True)
    p.add_argument(
        "--drafter",
        action="append",
        required=True,
        help="once or twice: a P-EAGLE and an EAGLE-3 head",
    )
    p.add_argument(
        "--prompts", type=Path, help="default: 8 prompts of held-out standard-library source"
    )
    p.add_argument("--k", default="1,3,5,7,11")
    p.add_argument("--concurrency", default="1")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--dtype", choices=DTYPES, default="float32", help=FP8)
    p.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="of the target's cache; auto: that of activations",
    )
    p.add_argument("--out", type=Path, required=True)

    p = add(
        "convert", "a head folder or training run -> vllm, speculators or orbax; a target -> hf"
    )
    p.add_argument("src")
    p.add_argument("dst", type=Path)
    p.add_argument("--to", choices=("vllm", "speculators", "orbax", "hf"), required=True)
    p.add_argument("--k", type=int)
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    p.add_argument(
        "--target",
        help="the head's target: speculators' layout names it, and some folders leave things to it",
    )
    p.add_argument(
        "--share-embedding",
        action="store_true",
        help="leave out an embedding that is the target's; vLLM then shares it",
    )
    p.add_argument(
        "--mask-token",
        type=int,
        help="id of the mask token, where the head's config does not name it",
    )
    p.add_argument(
        "--tap-numbering",
        choices=("input", "output"),
        help="what the source's tap ids count (default: by its layout)",
    )
    p.add_argument(
        "--identity-d2t",
        action="store_true",
        help="put back the d2t of zeros that the source had; vLLM refuses the folder",
    )
    p.add_argument(
        "--max-shard-size",
        help="split the weights into files of at most so much, as 5GB or 12MB (default: one file)",
    )

    p = add("inspect", "what a folder is, its shapes, sizes and taps, and what it can be used with")
    p.add_argument("dir")
    p.add_argument("--target", help="the head's target, for a head whose config names no taps")
    p.add_argument("--json", action="store_true")

    p = add("serve-config", "the flag or variable that makes vLLM or SageMaker serve a head")
    p.add_argument("dir")
    p.add_argument("--engine", choices=("vllm", "sagemaker"), required=True)
    p.add_argument("--k", type=int)
    p.add_argument("--target", help="the target's name (default: what the folder says)")
    return parser
