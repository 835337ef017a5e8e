"""Which form of a kernel runs: the one asked for by name, or for "auto" the fastest that can serve here."""

import functools
import logging
from collections.abc import Collection

import jax

from peagle_jax.kernels.launch import unavailable_reason
from peagle_jax.types import InputError

LOG = logging.getLogger(__name__)


def choose(kernel: str, form: str, forms: Collection[str], unsupported: str | None = None) -> str:
    """A name of `forms`.

    Args:
      form: one of them, or "auto": Triton where it can serve, otherwise the reference.
      unsupported: why the fast form (Triton, for "auto") does not take these operands; None when it does.

    Raises:
      InputError: the form does not exist, or was asked for by name and cannot serve.
    """
    if form != "auto" and form not in forms:
        raise InputError(
            f"kernel {kernel}",
            f"its form must be auto or one of {', '.join(forms)}",
            form,
            "choose one of them",
        )
    if form == "reference":
        return form
    return _serving(
        kernel,
        form,
        unavailable_reason("triton" if form == "auto" else form)
        or unsupported
        or multi_device_reason(),
    )


def non_16bit_reason(*arrays: jax.Array) -> str | None:
    """Why kernels that multiply in 16 bits do not take these operands: "auto" must not take precision away."""
    other = sorted({x.dtype.name for x in arrays} - {"bfloat16", "float16"})
    return f"they multiply in 16 bits, and operands are {', '.join(other)}" if other else None


def multi_device_reason() -> str | None:
    """Why kernels do not run on a mesh: XLA cannot split what it does not know, and would gather everything on every device."""
    mesh = jax.sharding.get_abstract_mesh()
    return (
        None
        if mesh.empty or mesh.size == 1
        else f"they run on one device, and this runs on {mesh.size}"
    )


@functools.cache  # and so said once
def _serving(kernel: str, form: str, wrong: str | None) -> str:
    if form != "auto":
        if wrong:
            raise InputError(
                f"kernel {kernel}",
                f"{form} kernels cannot serve: {wrong}",
                form,
                "ask for auto or reference",
            )
        return form
    chosen = "reference" if wrong else "triton"
    LOG.info("%s: %s%s", kernel, chosen, f", because of triton kernels {wrong}" if wrong else "")
    return chosen
