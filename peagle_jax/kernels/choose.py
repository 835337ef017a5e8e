"""Which form of a kernel runs: the one asked for by name, or for "auto" the fastest that can."""

import logging
from collections.abc import Collection

import jax

from peagle_jax.kernels import launch
from peagle_jax.kernels.launch import unavailable_reason
from peagle_jax.types import InputError

LOG = logging.getLogger(__name__)


def choose(kernel: str, form: str, forms: Collection[str], unsupported: str | None = None) -> str:
    """The form of a kernel that runs here: one of `forms`.

    Args:
      kernel: its name, for messages.
      form: one of `forms`, or "auto": Triton where it can run, otherwise the reference.
      unsupported: why the fast form (Triton, for "auto") cannot take these operands; None when it
        can.

    Raises:
      InputError: there is no such form, or it was asked for by name and cannot run.
    """
    if form != "auto" and form not in forms:
        raise InputError(
            f"kernel {kernel}",
            rule=f"its form must be auto or one of {', '.join(forms)}",
            got=form,
            next_step="use auto, which takes the fastest form that runs here",
        )
    if form == "reference":
        return form
    fast_form = "triton" if form == "auto" else form
    reason = unavailable_reason(fast_form) or unsupported or multi_device_reason()
    return _select(kernel, form, reason)


def non_16bit_reason(*arrays: jax.Array) -> str | None:
    """Why 16-bit kernels do not take these operands: "auto" must not take precision away."""
    other = sorted({x.dtype.name for x in arrays} - {"bfloat16", "float16"})
    return f"they multiply in 16 bits, and operands are {', '.join(other)}" if other else None


def multi_device_reason() -> str | None:
    """Why kernels do not run on a mesh of several devices; None where there is one device.

    XLA cannot split an operation that it does not know: it would gather all operands on every
    device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return None
    return f"they run on one device, and this runs on {mesh.size}"


def _select(kernel: str, form: str, reason: str | None) -> str:
    """The form that runs; `reason` says why the fast one cannot, or is None."""
    if form == "auto":
        _report(kernel, reason)
        return "reference" if reason else "triton"
    if reason:
        raise InputError(
            f"kernel {kernel}",
            rule=f"{form} kernels cannot run: {reason}",
            got=form,
            next_step="ask for auto or reference",
        )
    return form


_reported: set[str | None] = set()  # reasons; None stands for Triton kernels that run


def _report(kernel: str, reason: str | None) -> None:
    """On a GPU, logs that Triton kernels run; where they do not, logs each reason once.

    On other machines there is nothing to say: everything runs in plain JAX.
    """
    if reason in _reported or launch.platform() != "gpu":
        return
    _reported.add(reason)
    if reason is None:
        LOG.info("kernels: Triton")
        if untried := launch.untried_versions():
            LOG.warning("kernels: %s", untried)
    else:
        LOG.info("kernels: plain JAX for %s; of Triton kernels: %s", kernel, reason)
