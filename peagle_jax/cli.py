"""`peagle ...`: parse, call one function, print. Exit codes: 0 done, 1 the job failed, 2 bad arguments or bad input."""

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from peagle_jax import weights
from peagle_jax.types import InputError

CONSOLE = Console(width=None if sys.stdout.isatty() else 160)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(self.prog, "arguments must be as --help says", message, f"run {self.prog} --help")


def main(argv: list[str] | None = None) -> int:
    _quiet()
    try:
        args, rest = _parser().parse_known_args(argv)
        if rest and args.command is not _train:
            raise InputError(f"peagle {args.name}", "every argument must be known", " ".join(rest), f"run peagle {args.name} --help")
        return args.command(args, rest) if args.command is _train else args.command(args)
    except InputError as error:
        print(f"peagle: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("peagle: interrupted; a training run resumes with the same command", file=sys.stderr)
        return 1


def _quiet() -> None:
    """Libraries' chatter stays out of the way of one-line errors; compiled programs are kept between runs."""
    import logging
    import warnings

    import jax

    logging.getLogger("absl").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises to install PyTorch, which nothing here needs
    warnings.filterwarnings("ignore", module="orbax")
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "peagle_jax" / "xla"))
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _parser() -> Parser:
    parser = Parser(prog="peagle", description="P-EAGLE in JAX: train draft heads, decode losslessly, export to vLLM.")
    commands = parser.add_subparsers(dest="name", required=True, parser_class=Parser)

    def add(name, function, text):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=function)
        return sub

    p = add("demo", _demo, "trains a small target and both heads on this machine's Python source, decodes, exports, reports")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--budget", choices=("smoke", "small"), default="small")

    p = add("train", _train, "trains a head or a small target from a YAML config; --a.b.c VALUE overrides; resumes by itself")
    p.add_argument("config", type=Path)

    p = add("generate", _generate, "continues prompts with a target, alone or with a draft head")
    p.add_argument("--target", required=True)
    p.add_argument("--drafter")
    p.add_argument("--method", choices=("peagle", "eagle3", "none"))
    p.add_argument("-k", type=int, default=None, help="tokens drafted a step (default: what the head was trained for, at most 7)")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt")
    source.add_argument("--prompts", type=Path)
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--greedy-drafts", action="store_true", help="with a temperature, draft argmaxes instead of samples")
    p.add_argument("--ignore-eos", action="store_true")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--out", type=Path)

    p = add("bench", _bench, "tokens per second, acceptance and exactness of plain and speculative decoding, in one run")
    p.add_argument("--target", required=True)
    p.add_argument("--drafter", action="append", required=True, help="once or twice: a P-EAGLE and an EAGLE-3 head")
    p.add_argument("--prompts", type=Path, help="default: 8 prompts of held-out standard-library source")
    p.add_argument("--k", default="1,3,5,7,11")
    p.add_argument("--concurrency", default="1")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--out", type=Path, required=True)

    p = add("convert", _convert, "a head folder or training run -> vllm, speculators or orbax; a target -> hf")
    p.add_argument("src")
    p.add_argument("dst", type=Path)
    p.add_argument("--to", choices=("vllm", "speculators", "orbax", "hf"), required=True)
    p.add_argument("--k", type=int)
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    p.add_argument("--target")

    p = add("inspect", _inspect, "what a folder is, its shapes, sizes and taps, and what it can be used with")
    p.add_argument("dir")
    p.add_argument("--json", action="store_true")

    p = add("serve-config", _serve_config, "the flag or variable that makes vLLM or SageMaker serve a head")
    p.add_argument("dir")
    p.add_argument("--engine", choices=("vllm", "sagemaker"), required=True)
    p.add_argument("--k", type=int)
    p.add_argument("--target", default="TARGET")
    return parser


# ---------------------------------------------------------------- commands


def _demo(args) -> int:
    from peagle_jax.pipelines.demo import run_demo

    result = run_demo(args.out, args.budget, CONSOLE.print)
    CONSOLE.print(f"report: {result.report}")
    return 0 if result.lossless else 1


def _train(args, rest: list[str]) -> int:
    import tyro

    from peagle_jax.pipelines.train_head import train_head
    from peagle_jax.train.config import LmRun, load_run
    from peagle_jax.train.lm import train_lm

    run = load_run(args.config)
    if rest:
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                run = tyro.cli(type(run), default=run, args=rest, console_outputs=False, config=(tyro.conf.FlagConversionOff,))
        except SystemExit:
            raise InputError(
                args.config, "overrides must be keys of the config, as --optimizer.steps 100", " ".join(rest), "check the names"
            ) from None
    result = train_lm(run, CONSOLE.print) if isinstance(run, LmRun) else train_head(run, CONSOLE.print)
    _print_facts(vars(result))
    return 0


def _load(target: str, drafter: str | None, dtype: str):
    import jax.numpy as jnp

    from peagle_jax.decode.generate import check_fit
    from peagle_jax.draft.folders import load_drafter
    from peagle_jax.pipelines.convert import read_serving
    from peagle_jax.targets import load_target

    folder = weights.find_folder(target)
    if drafter is None:
        return folder, load_target(folder, taps=(), dtype=jnp.dtype(dtype)), None
    head_folder = weights.find_folder(drafter)
    loaded = load_target(folder, taps=read_serving(head_folder).taps, dtype=jnp.dtype(dtype))
    head = load_drafter(head_folder, dtype=jnp.dtype(dtype), embedding=loaded.params["embed"]["table"])
    check_fit(loaded, head, drafter)
    return folder, loaded, head


def _generate(args) -> int:
    from peagle_jax import text
    from peagle_jax.pipelines.answer import answer_prompts

    if args.drafter is None and args.method not in (None, "none"):
        raise InputError("--method", f"{args.method} needs a draft head", "no --drafter", "name one, or use --method none")
    if args.out is not None:
        _check_writable(args.out)
    if args.batch_size < 1:
        raise InputError("--batch-size", "must be 1 or more", args.batch_size, "raise it")
    folder, target, head = _load(args.target, None if args.method == "none" else args.drafter, args.dtype)
    tokenizer = text.load_tokenizer(folder)
    if args.prompts is not None:
        prompts = text.read_prompts(args.prompts, tokenizer)
    else:
        prompts = [text.encode_prompt(args.prompt, tokenizer, chat=False, where="--prompt")]
    rows = answer_prompts(target, head, tokenizer, prompts, args)
    if args.out is None:
        for row in rows:
            CONSOLE.print(row.get("text", row["output_token_ids"]), markup=False, highlight=False, soft_wrap=True)
    else:
        _write_lines(args.out, rows)
    accepted, drafts = sum(r["num_accepted_tokens"] for r in rows), sum(r["num_drafts"] for r in rows)
    if drafts:
        print(f"acceptance length {1 + accepted / drafts:.3f} over {drafts} drafts", file=sys.stderr)
    return 0


def _bench(args) -> int:
    from peagle_jax import report
    from peagle_jax.bench import run_suite
    from peagle_jax.decode.generate import check_fit, check_prompts
    from peagle_jax.draft.folders import load_drafter

    ks, batches = _numbers("--k", args.k), _numbers("--concurrency", args.concurrency)
    _numbers("--repeats", str(args.repeats))
    folder, target, head = _load(args.target, args.drafter[0], args.dtype)
    heads = {}
    for name in args.drafter:
        head = load_drafter(weights.find_folder(name), dtype=head.config.dtype, embedding=target.params["embed"]["table"])
        check_fit(target, head, name)
        method = "peagle" if head.config.parallel else "eagle3"
        if method in heads:
            raise InputError(name, "one P-EAGLE and one EAGLE-3 head are measured together", f"two for {method}", "measure them apart")
        heads[method] = head
    prompts = _bench_prompts(args.prompts, folder)
    check_prompts(prompts, target.config, args.max_new_tokens, max(ks), None)
    records_file = report.Records(args.out)
    suite = run_suite(target, heads, prompts, ks=ks, batches=batches, new_tokens=args.max_new_tokens, repeats=args.repeats,
                      on_record=lambda r: (records_file.add(r), CONSOLE.print(report.one_line(r))))  # fmt: skip
    page = report.write_report(args.out, suite.records, sample=None, runs=[])
    CONSOLE.print(report.table(suite.records))
    CONSOLE.print(f"report: {page}")
    return 0 if suite.lossless or args.dtype != "float32" else 1  # exactness is a float32 rule


def _bench_prompts(path: Path | None, folder: Path) -> list[list[int]]:
    from peagle_jax import text
    from peagle_jax.pipelines.demo import standard_prompts

    tokenizer = text.load_tokenizer(folder)
    if path is not None:
        return text.read_prompts(path, tokenizer)
    if tokenizer is None:
        raise InputError("--prompts", "a target without tokenizer needs prompts as token ids", "none", "give prompt_token_ids in a JSONL")
    return standard_prompts(tokenizer)


def _convert(args) -> int:
    from peagle_jax.pipelines.convert import convert

    target = weights.find_folder(args.target) if args.target else None
    convert(weights.find_folder(args.src), args.dst, to=args.to, k=args.k, dtype=args.dtype, target=target)
    CONSOLE.print(f"{args.src} -> {args.dst} ({args.to})")
    return 0


def _inspect(args) -> int:
    from peagle_jax.pipelines.inspect import describe

    facts = describe(weights.find_folder(args.dir))
    print(json.dumps(facts, indent=2)) if args.json else _print_facts(facts)
    return 0


def _serve_config(args) -> int:
    from peagle_jax.draft.folders import serving_flags
    from peagle_jax.pipelines.convert import read_serving

    config = read_serving(weights.find_folder(args.dir))
    k = config.depths if args.k is None else args.k
    if k is None or k < 1:
        raise InputError(args.dir, "K must be 1 or more, and the folder does not say what it was trained for", k, "give it with --k")
    flags = serving_flags(config, args.dir, k)
    if args.engine == "vllm":
        print(f"vllm serve {shlex.quote(args.target)} --speculative-config {shlex.quote(flags)}")
    else:
        print(f"SM_VLLM_SPECULATIVE_CONFIG={shlex.quote(flags)}")
    return 0


# ---------------------------------------------------------------- printing


def _numbers(flag: str, value: str) -> list[int]:
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InputError(flag, "must be numbers of 1 or more, separated by commas", value, "write it as 1,3,5")
    return numbers


def _print_facts(facts: dict) -> None:
    from peagle_jax.pipelines.inspect import printable

    table = Table(show_header=False)
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), printable(value))
    CONSOLE.print(table)


def _check_writable(path: Path) -> None:
    """Before hours of work, not after."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(path, "the output file must be writable", "a folder, or none to hold it", "choose another place")


def _write_lines(path: Path, rows: list[dict]) -> None:
    work = path.with_name(f".{path.name}.tmp")
    try:
        work.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        work.replace(path)
    except OSError as error:
        raise InputError(path, "the output file must be writable", error.strerror, "choose another place") from None


if __name__ == "__main__":
    sys.exit(main())
