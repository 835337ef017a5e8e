"""Whether a training step fits the memory, checked when it is compiled and before it runs."""

import jax

from peagle_jax.free_memory import free_bytes
from peagle_jax.train.config import Run
from peagle_jax.types import InputError


def check_fits(program: jax.stages.Compiled, run: Run) -> None:
    """Checks a compiled step against what is free beside the parameters, which exist already.

    Args:
      program: whose inputs are on the device, and whose state is donated.
      run: whose step it is.

    Raises:
      InputError: the device has less memory free than the step takes besides its inputs. Where
        that is unknown nothing is checked.
    """
    analysis, free = program.memory_analysis(), free_bytes()
    if analysis is None or free is None:
        return
    # what it returns lies in the donated state, but for a few metrics
    returned = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    needed = analysis.temp_size_in_bytes + max(returned, 0)
    if needed > free:
        rule = f"a training step takes {_gigabytes(needed)} beside parameters and optimizer"
        ways = "raise gradient_accumulation, or lower data.batch_size or data.seq_len"
        next_step = f"{ways}; peagle train --dry-run says what a step takes"
        raise InputError(run.out, rule, f"{_gigabytes(free)} free", next_step)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
