"""Settings of the libraries underneath: quiet, and with a cache of compiled programs."""

import hashlib
import logging
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import jax

from peagle_jax.types import WeightsWarning
from peagle_jax.user_cache import user_cache

# of /proc/cpuinfo: a processor's name and what it can do, on x86 and on ARM
PROCESSOR_LINES = ("model name", "flags", "CPU part", "Features")


class KernelHandler(logging.Handler):
    """Prints what peagle_jax/kernels/choose.py says: on a GPU, which kernels are in use."""

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging` for each message."""
        print(f"peagle: {record.getMessage()}", file=sys.stderr)


def configure_libraries() -> None:
    """Keeps the libraries' own messages away from the one-line messages of `peagle`.

    Compiled programs are kept on disk (`cache_folder`), so that a second run of a command starts
    sooner. The environment variable JAX_COMPILATION_CACHE_DIR chooses another place, and
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS from how many seconds on a program is kept (0.5).
    """
    kernel_log = logging.getLogger("peagle_jax.kernels")
    kernel_log.setLevel(logging.INFO)
    kernel_log.handlers = [KernelHandler()]
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax also raises what it logs
    # transformers advises to install PyTorch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module="orbax")
    warnings.filterwarnings("always", category=WeightsWarning)
    warnings.showwarning = _print_warning
    sys.unraisablehook = _print_unraisable
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache_folder()))
    jax.config.update("jax_compilation_cache_dir", cache)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def cache_folder(processors: Path = Path("/proc/cpuinfo")) -> Path:
    """Where compiled programs are kept, of this kind of processor.

    XLA compiles for the processor at hand, and machines with others may share a home folder.

    Args:
      processors: what Linux says of them; other systems say less.
    """
    try:
        lines = processors.read_text().splitlines()
    except OSError:
        lines = []
    kinds = {x for x in lines if x.partition("\t")[0].strip() in PROCESSOR_LINES}
    name = "\n".join(sorted(kinds)) or platform.processor() or platform.machine()
    kind = hashlib.sha256(name.encode()).hexdigest()[:8]
    return user_cache(f"xla-{kind}")


def _print_unraisable(failure: Any) -> None:
    """Stands in for `sys.unraisablehook`.

    Where one array cannot be written, Orbax raises that and closes its event loop. TensorStore
    calls the loop for every other array all the same, and cannot raise what it is answered.
    Ctrl-C within a library's callback cannot be raised either; prompt_end.py then ends the process.
    """
    is_interrupt = failure.exc_type is KeyboardInterrupt
    if not is_interrupt and str(failure.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(failure)


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Stands in for `warnings.showwarning`, which prints a file, a line number and source."""
    print(f"peagle: warning: {' '.join(str(message).split())}", file=sys.stderr)
