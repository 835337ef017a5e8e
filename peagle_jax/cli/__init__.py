"""`peagle ...`: parse, call one function, print. Exit codes: 0 done, 1 the job failed, 2 bad arguments or bad input."""

import os
import sys
from pathlib import Path

from peagle_jax.cli import commands
from peagle_jax.cli.parser import make_parser
from peagle_jax.types import InputError, WeightsWarning

COMMANDS = {
    "demo": commands.demo,
    "train": commands.train,
    "regenerate": commands.regenerate,
    "extract": commands.extract,
    "generate": commands.generate,
    "bench": commands.bench,
    "convert": commands.convert,
    "inspect": commands.inspect,
    "serve-config": commands.serve_config,
}


def main(argv: list[str] | None = None) -> int:
    _quiet()
    try:
        args, rest = make_parser(COMMANDS).parse_known_args(argv)
        args.argv = sys.argv[1:] if argv is None else argv
        if rest and args.command is not commands.train:
            raise InputError(
                f"peagle {args.name}",
                "every argument must be known",
                " ".join(rest),
                f"run peagle {args.name} --help",
            )
        return args.command(args, rest) if args.command is commands.train else args.command(args)
    except InputError as error:
        print(f"peagle: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("peagle: interrupted; a training run resumes with the same command", file=sys.stderr)
        return 1


def _quiet() -> None:
    """Libraries' chatter stays out of the way of one-line errors; on a GPU kernels say which run; compiled programs are kept."""
    import logging
    import warnings

    import jax

    from peagle_jax.kernels import launch

    class OnGpu(logging.Handler):
        def emit(self, record):
            if launch.platform() == "gpu":
                print(f"peagle: {record.getMessage()}", file=sys.stderr)

    chosen = logging.getLogger("peagle_jax.kernels")
    chosen.setLevel(logging.INFO)
    chosen.handlers = [OnGpu()]
    logging.getLogger("absl").setLevel(logging.ERROR)
    os.environ.setdefault(
        "TRANSFORMERS_VERBOSITY", "error"
    )  # it advises to install PyTorch, which nothing here needs
    warnings.filterwarnings("ignore", module="orbax")
    warnings.filterwarnings("always", category=WeightsWarning)
    warnings.showwarning = lambda message, *_, **__: print(
        f"peagle: warning: {' '.join(str(message).split())}", file=sys.stderr
    )
    cache = os.environ.get(
        "JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "peagle_jax" / "xla")
    )
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
