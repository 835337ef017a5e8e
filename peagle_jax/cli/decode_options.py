"""The options of the commands that decode."""

import argparse
from pathlib import Path

from peagle_jax.cli.parser import (
    Parser,
    add_k,
    add_parallel_sizes,
    add_precision,
    add_server,
    add_target,
    add_template_kwargs,
)

BENCH_KS = "1,3,5,7,11"


def add_demo(parser: Parser) -> None:
    """The options of `peagle demo`."""
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder for results, report and heads; what is there already is not done again",
    )
    parser.add_argument(
        "--budget",
        choices=("smoke", "small", "full"),
        default="small",
        help="smoke takes about 2 minutes and small about 10 on two CPU cores; full is for a GPU",
    )
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="train the target and its heads instead of using those that come with the package",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the stages and run none of them"
    )


def add_generate(parser: Parser) -> None:
    """The options of `peagle generate`."""
    add_target(parser)
    parser.add_argument(
        "--drafter",
        metavar="HEAD",
        help="the draft head: a folder, a training run or a Hugging Face id; without it the target "
        "decodes alone",
    )
    parser.add_argument(
        "--method",
        choices=("peagle", "eagle3", "eagle", "none"),
        help="how the head drafts, in parallel or one token at a time; without it as the head was "
        "made for",
    )
    add_k(
        parser,
        type=number_or_auto,
        help="tokens drafted in one step; without it what the head was trained for, at most 7; "
        "auto chooses while decoding, by acceptance and by step times that are measured first",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt")
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="JSONL file; each line has prompt, messages, turns or prompt_token_ids",
    )
    add_template_kwargs(parser)
    parser.add_argument(
        "--num-tree-nodes",
        metavar="N",
        type=int,
        help="P-EAGLE: verify a tree of N drafts in one forward, in the place of a chain of K",
    )
    parser.add_argument(
        "-n", metavar="N", type=int, default=1, help="answers to each prompt, for sampling"
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=128, help="tokens of each answer"
    )
    parser.add_argument(
        "--min-tokens",
        metavar="N",
        type=int,
        default=0,
        help="before so many tokens neither a stop token nor --stop ends an answer",
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="of sampling; 0 is greedy"
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that make up this probability; 1 is no filter",
    )
    parser.add_argument(
        "--top-k",
        metavar="N",
        type=int,
        default=0,
        help="sample from this many of the likeliest tokens; 0 is no filter",
    )
    parser.add_argument(
        "--min-p",
        metavar="P",
        type=float,
        default=0.0,
        help="sample from tokens that have this share of the likeliest one's probability",
    )
    parser.add_argument(
        "--repetition-penalty",
        metavar="X",
        type=float,
        default=1.0,
        help="above 1 makes tokens of the prompt and the answer less likely",
    )
    parser.add_argument(
        "--presence-penalty",
        metavar="X",
        type=float,
        default=0.0,
        help="subtracted from the logits of tokens that the answer has",
    )
    parser.add_argument(
        "--frequency-penalty",
        metavar="X",
        type=float,
        default=0.0,
        help="likewise, for every time that the answer has them",
    )
    parser.add_argument(
        "--logit-bias",
        metavar="ID=X",
        action="append",
        default=[],
        help="added to the logit of a token, given by its id; may be given several times",
    )
    parser.add_argument(
        "--logprobs",
        action="store_true",
        help="with --out: add the log-probabilities of the answer's tokens",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="answers are numbered over all prompts; number i samples with seed + i",
    )
    parser.add_argument(
        "--greedy-drafts",
        action="store_true",
        help="at a temperature above 0, draft the likeliest token, or tree, instead of sampling "
        "drafts",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="decode on through end-of-sequence tokens"
    )
    parser.add_argument(
        "--stop-ids",
        metavar="IDS",
        help="tokens that end an answer, as 2,7; without it the target's end-of-sequence tokens",
    )
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="an answer ends before this text; may be given several times",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="print the text as it is written, one prompt after the other",
    )
    add_precision(parser)
    add_parallel_sizes(parser)
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=int,
        default=8,
        help="prompts decoded together; others begin as soon as one is done",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        help="threads that decode at the same time, each a part of the batch; without it one for "
        "each core of a CPU, up to four, where the weights are small enough for that to pay",
    )
    parser.add_argument(
        "--prefill-chunk",
        metavar="N",
        type=int,
        default=512,
        help="tokens of each prompt in one forward",
    )
    parser.add_argument(
        "--sliding-cache",
        action="store_true",
        help="layers with a sliding window keep a ring cache: less memory, the same text",
    )
    parser.add_argument(
        "--mxfp4",
        choices=("packed", "plain"),
        default="packed",
        help="experts stored in MXFP4 stay in 4 bits, or become --dtype",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="JSONL file for token ids, text and counters; without it the text is printed",
    )


def number_or_auto(value: str) -> int | str:
    """What -k takes."""
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, or auto; got {value!r}") from None


def add_bench(parser: Parser) -> None:
    """The options of `peagle bench`."""
    add_target(parser, required=False)
    parser.add_argument(
        "--drafter",
        metavar="HEAD",
        action="append",
        default=[],
        help="a draft head; given twice, a P-EAGLE and an EAGLE-3 head are compared",
    )
    add_server(
        parser,
        "in the place of --drafter, measure what a server with OpenAI's API serves, such as vLLM; "
        "with --target it is sent the token ids that would be decoded here, without it texts",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="JSONL file as for `peagle generate`; without it 8 excerpts of the standard library",
    )
    prompts.add_argument(
        "--sets",
        metavar="NAME",
        help="benchmark questions with all of their turns: humaneval, mt-bench, gsm8k and others "
        "of the hub, or JSONL files with turns; several with commas between them",
    )
    add_template_kwargs(parser)
    parser.add_argument(
        "--num-prompts",
        metavar="N",
        type=int,
        help="of every set, the first N questions (default: all)",
    )
    add_k(
        parser,
        default=BENCH_KS,
        help="numbers of tokens drafted in one step, as 3,7; auto among them is a number that is "
        "chosen while decoding",
    )
    parser.add_argument(
        "--num-tree-nodes",
        metavar="N",
        help="P-EAGLE: measure trees of so many drafts at every K, too, as 8,32",
    )
    parser.add_argument(
        "--batch-size",
        metavar="N",
        default="1",
        formerly=["--concurrency"],
        help="numbers of prompts decoded together, as 1,8; others begin as soon as one is done",
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=128, help="tokens of each answer"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="decode on through end-of-sequence tokens"
    )
    parser.add_argument(
        "--request-rate",
        metavar="R",
        action="append",
        default=[],
        help="measure latency under load, too: R requests a second at random times, or inf for as "
        "many at a time as --batch-size says (closed loop, which a server is measured in without "
        "this option); may be given several times",
    )
    parser.add_argument(
        "--synthetic-acceptance",
        metavar="METHOD=RATES",
        action="append",
        default=[],
        help="to measure speed only: drafts are accepted at these rates by position, in percent, "
        "as peagle=63,38,23, whatever they are; once for every head. Rows and report say so",
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=3,
        help="rounds; the table shows their medians, and of a server every round",
    )
    add_precision(parser)
    add_parallel_sizes(parser)
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder for results.jsonl, load.jsonl, report.html and its figures",
    )
