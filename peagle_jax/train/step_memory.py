"""Whether a training step fits the memory, asked when it is compiled and before it runs."""

import jax

from peagle_jax.free_memory import free_bytes
from peagle_jax.train.config import Run
from peagle_jax.types import InputError


def lacks_memory(program: jax.stages.Compiled) -> bool:
    """Whether a compiled step takes more than is free here beside its inputs.

    Parameters and optimizer exist already, and a batch is small beside them. Where it is unknown
    what is free, everything fits. Devices that share one memory are not added up.

    Args:
      program: of a step whose state is donated.
    """
    free = free_bytes()
    return free is not None and _needed_bytes(program) > free


def does_not_fit(program: jax.stages.Compiled, run: Run) -> InputError:
    """The error of a step that does not fit, here or in another process."""
    free = free_bytes()
    rule = f"a training step takes {_gigabytes(_needed_bytes(program))} beside parameters"
    got = "an unknown size" if free is None else f"{_gigabytes(free)}"
    ways = "raise gradient_accumulation, or lower data.batch_size or data.seq_len"
    next_step = f"{ways}; peagle train --dry-run says what a step takes"
    return InputError(run.out, f"{rule} and optimizer, in every process", f"{got} free", next_step)


def _needed_bytes(program: jax.stages.Compiled) -> int:
    """What a step takes while it runs, and what it returns beside the donated state."""
    analysis = program.memory_analysis()
    if analysis is None:
        return 0
    returned = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + max(returned, 0)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
