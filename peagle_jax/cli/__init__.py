"""The command `peagle`: reads the command line, runs one function, prints.

Exit codes: 0 means done, 1 that the job failed or was stopped, 2 that an argument or a file cannot
be used. A mistake of the user is one line on stderr.
"""

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

from peagle_jax.allocator import keep_freed_memory
from peagle_jax.atomic_write import DISK_IS_FULL
from peagle_jax.cli.bus_error import explain_bus_errors
from peagle_jax.cli.commands import COMMANDS, parse_arguments, run_command
from peagle_jax.cli.parser import UsageError
from peagle_jax.prompt_end import ends_promptly

__all__ = ["COMMANDS", "main"]

# what `errno` says of a file that was removed, of one on a server, or of its folder
FILE_IS_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
# Commands that find what an interrupted one has finished, and do the rest.
RESUMING = ("demo", "train", "regenerate", "extract")
# Commands that have temporary files while they run, as large as a corpus.
WITH_TEMPORARY_FILES = ("regenerate", "extract")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words after `peagle`; None takes those of this process. No words at all print the
        help.

    Returns:
      The exit code.

    Raises:
      SystemExit: after --help and --version.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    is_resuming = words[:1] and words[0] in RESUMING
    advice = "; the same command goes on from what is saved" if is_resuming else ""
    last_words = f"peagle: interrupted{advice}"
    if argv is None:
        explain_bus_errors()
        if words[:1] == ["train"]:
            keep_freed_memory()
    try:
        # in a program of somebody else's, Ctrl-C is its own affair
        with ends_promptly(last_words) if argv is None else contextlib.nullcontext():
            code = _run(parse_arguments(words or ["--help"]))
    except UsageError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print(last_words, file=sys.stderr, flush=True)
        code = 1
    except BrokenPipeError:
        _discard_stdout()
        return 1
    if code and argv is None:
        _leave(code)
    return code


def _run(arguments: argparse.Namespace) -> int:
    """Runs a command once its arguments are known: importing JAX takes seconds."""
    from peagle_jax.cli.libraries import configure_libraries
    from peagle_jax.types import InputError

    configure_libraries()
    try:
        with _interrupted_by_sigterm(arguments.name in WITH_TEMPORARY_FILES):
            code = run_command(arguments)
        sys.stdout.flush()  # here a closed pipe is still an exception that `main` can catch
        return code
    except InputError as error:
        return _refuse(error)
    except OSError as error:  # wherever it is noticed that a disk is full, or a file gone
        if error.errno in DISK_IS_FULL:
            where, next_step = error.filename or "the disk", "make room, and run this again"
            return _refuse(InputError(where, "must have room", error.strerror, next_step))
        if error.errno in FILE_IS_GONE and error.filename:
            rule, next_step = "must stay where it is while this runs", "run this again"
            # where it was missed, should it be our own mistake
            frame = traceback.extract_tb(error.__traceback__)[-1]
            got = f"{error.strerror} ({os.path.basename(frame.filename)}, line {frame.lineno})"
            return _refuse(InputError(error.filename, rule, got, next_step))
        raise
    except Exception as error:
        from peagle_jax.free_memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        rule, got = "arrays must fit", " ".join(str(error).split())[:200] or "no memory"
        next_step = "use smaller batches, or a device with more memory"
        return _refuse(InputError("memory", rule, got, next_step))


@contextlib.contextmanager
def _interrupted_by_sigterm(is_wanted: bool) -> Iterator[None]:
    """Lets SIGTERM do what Ctrl-C does, so that temporary files are removed."""
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _leave(code: int) -> None:
    """Ends a program that was interrupted or failed without Python's own end, which can crash.

    Threads of XLA may be compiling still, and those of a checkpoint that cannot be written call
    what is gone. Python, which remembers KeyboardInterrupt in modules that were being imported,
    would end by the signal and not with the exit code.
    """
    jax = sys.modules.get("jax")
    distributed = getattr(jax, "distributed", None)
    if distributed is not None and distributed.is_initialized():
        return  # the end tells the other processes
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _refuse(error: ValueError) -> int:
    """Prints a mistake of the user in one line, and returns its exit code."""
    print(f"peagle: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _discard_stdout() -> None:
    """Sends what is left to nowhere: the reader of the pipe, as `head`, has all that it wants.

    Without this, Python would report the closed pipe when it flushes stdout at its end.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
