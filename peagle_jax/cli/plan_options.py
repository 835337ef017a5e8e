"""The options of `peagle plan`."""

from pathlib import Path

from peagle_jax.cli.parser import Parser

# Names of peagle_jax.pipelines.devices.DEVICES, which is not imported here: it takes seconds.
DEVICE_NAMES = ("h100", "h200", "b200", "rtx-pro-6000", "v5p", "v6e", "this-machine")


def add_plan(parser: Parser) -> None:
    """The options of `peagle plan`."""
    parser.add_argument(
        "--target",
        metavar="CONFIG",
        required=True,
        help="a config.json, a folder with one, or a Hugging Face id; no weights are read",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        default="h200",
        help=f"one of {', '.join(DEVICE_NAMES)}; the last is measured first",
    )
    parser.add_argument(
        "--head-layers",
        formerly=["--heads"],
        metavar="N",
        type=int,
        default=4,
        help="layers of the P-EAGLE head, where --drafter names none; the EAGLE-3 head has one",
    )
    parser.add_argument(
        "--drafter",
        metavar="HEAD",
        action="append",
        default=[],
        help="a head whose shapes are taken; may be given for P-EAGLE and for EAGLE-3",
    )
    parser.add_argument(
        "--concurrency",
        metavar="N",
        default="1,8,64",
        help="sequences that are decoded together, as 1,8,64",
    )
    parser.add_argument(
        "--context", metavar="N", default="1k,8k,32k", help="tokens of each, as 1k,8k; 1k is 1,024"
    )
    parser.add_argument(
        "--acceptance",
        metavar="METHOD=RATES",
        action="append",
        default=[],
        help="for eagle3 or peagle the share of steps, in percent, that accepts the draft at each "
        "position, as peagle=63,38,23, or the results.jsonl of peagle bench; without it published "
        "rates (vLLM #32628)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "fp8", "mxfp4"),
        default="auto",
        help="of the target's weights; auto is what its config says, or bfloat16. mxfp4 is of "
        "experts. Heads are bfloat16",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of the target's cache"
    )
    parser.add_argument(
        "--routing",
        choices=("even", "alike"),
        default="even",
        help="of experts: rows choose independently, or all choose the same ones",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="folder for plan.jsonl and plan.png"
    )
