"""Fits constants of `peagle plan` to steps that were measured.

Every step is foretold by constants that were fitted to the other steps of its group, never more
than two. Which ones is the group's choice: those of an engine (`layer_seconds`, `pass_seconds`)
where the device's data sheet is known, those of the machine (`bandwidth`, `rate`) elsewhere.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from peagle_jax.pipelines.decoding_plan import plan_step
from peagle_jax.pipelines.devices import Device
from peagle_jax.pipelines.model_costs import ModelCosts

MAX_CONSTANTS = 2
GOOD = 0.15  # of a step: as near as a plan should come
# Where the search for a constant begins, and the least it may be.
BEGINNINGS = {
    "bandwidth": 1.0,
    "rate": 1.0,
    "cache_bandwidth": 10e9,
    "layer_seconds": 1e-4,
    "pass_seconds": 5e-4,
}
LEAST = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step that somebody measured.

    Attributes:
      label: for people.
      target: costs.
      head: likewise; None for plain decoding.
      method: that drafts.
      k: tokens drafted.
      length: tokens that a sequence gained, on average.
      concurrency: sequences.
      context: tokens of each.
      seconds: of the step.
    """

    label: str
    target: ModelCosts
    head: ModelCosts | None
    method: str
    k: int
    length: float
    concurrency: int
    context: int
    seconds: float

    def planned(self, device: Device) -> float:
        """Seconds of the step on a device, by the plan."""
        choice = plan_step(
            self.target,
            self.head,
            device,
            method=self.method,
            k=self.k,
            length=self.length,
            concurrency=self.concurrency,
            context=self.context,
        )
        return choice.step_seconds


def with_constants(device: Device, constants: dict[str, float]) -> Device:
    """A device with some constants. `bandwidth` and `rate` are factors to the device's own."""
    changes: dict = {
        name: value for name, value in constants.items() if name not in ("bandwidth", "rate")
    }
    if "bandwidth" in constants:
        changes["bandwidth"] = device.bandwidth * constants["bandwidth"]
    if "rate" in constants:
        factor = constants["rate"]
        changes["rates"] = {size: rate * factor for size, rate in device.rates.items()}
    return dataclasses.replace(device, **changes)


def fit(device: Device, steps: Sequence[Step], names: Sequence[str]) -> dict[str, float]:
    """The constants with which the relative errors of the steps have the least squares.

    Raises:
      ValueError: there are more constants than `MAX_CONSTANTS`.
    """
    if len(names) > MAX_CONSTANTS:
        raise ValueError(f"at most {MAX_CONSTANTS} constants are fitted; got {list(names)}")
    beginnings = np.array([BEGINNINGS[name] for name in names])

    def constants(logs: np.ndarray) -> dict[str, float]:
        values = np.maximum(beginnings * np.exp(logs), LEAST)
        return dict(zip(names, values.tolist(), strict=True))

    def errors(logs: np.ndarray) -> np.ndarray:
        fitted = with_constants(device, constants(logs))
        return np.array([step.planned(fitted) / step.seconds - 1 for step in steps])

    found = least_squares(errors, np.zeros(len(names)), bounds=(-12, 12))
    return constants(found.x)


def errors_left_out(device: Device, steps: Sequence[Step], names: Sequence[str]) -> list[float]:
    """For each step, by what share it is foretold wrongly by constants fitted to all others."""
    errors = []
    for number, step in enumerate(steps):
        others = [*steps[:number], *steps[number + 1 :]]
        fitted = with_constants(device, fit(device, others, names))
        errors.append(step.planned(fitted) / step.seconds - 1)
    return errors
