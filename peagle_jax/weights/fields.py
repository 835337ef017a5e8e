"""Typed access to the keys of a config.json: a wrong value is an error that names its key."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from peagle_jax.types import InputError

LARGEST = 2**31 - 1
Default = TypeVar("Default")


class Fields:
    """A JSON object whose values are checked for their type when they are read.

    A key whose value is null counts as absent, because transformers writes null for unset options.
    Every `get_..` method returns `default` where the key is absent, and raises an InputError where
    the key is absent without a default, or where its value has another type than the method's.

    Args:
      raw: the JSON object.
      where: its file, for errors.
      description: what the object is, for errors, for example "a Qwen3 config".
    """

    REQUIRED: Any = object()  # the default of a key that must be there

    def __init__(self, raw: Mapping, where: str | Path, description: str = "the config"):
        self.raw, self.where, self.description = raw, where, description

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of a key as it stands, of whatever type.

        Raises:
          InputError: the key is absent and has no default.
        """
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is self.REQUIRED:
            raise InputError(
                self.where,
                rule=f"{self.description} needs the key {key!r}",
                got="none",
                next_step=f"take the checkpoint's own config, which has {key!r}",
            )
        return default

    def _checked(self, is_valid: bool, key: str, rule: str, value: Any, example: str) -> Any:
        """`value`, or an InputError that says what it must be."""
        if not is_valid:
            file = Path(self.where).name
            is_download = file == "config.json"
            again = f"download {file} again" if is_download else f"copy {file} from a backup"
            next_step = f"set {key}, for example to {example}, or {again}"
            raise InputError(self.where, f"{key} must be {rule}", repr(value), next_step)
        return value

    def get_int(self, key: str, default: Default = REQUIRED, *, least: int = 1) -> int | Default:
        """A whole number from `least` to 2**31 - 1."""
        value = self.get(key, default)
        is_valid = value is default or type(value) is int and least <= value <= LARGEST
        rule = f"a whole number of {least} or more"
        return self._checked(is_valid, key, rule, value, str(max(least, 32)))

    def get_float(self, key: str, default: Default = REQUIRED) -> float | Default:
        """A finite number above zero; JSON writes it with or without a decimal point."""
        value = self.get(key, default)
        is_number = type(value) in (int, float)
        is_valid = value is default or is_number and 0 < value < 1e300 and math.isfinite(value)
        self._checked(is_valid, key, "a number above 0", value, "0.5")
        return float(value) if is_number else value

    def get_bool(self, key: str, default: Any = REQUIRED) -> bool:
        """true or false; so must the default be."""
        value = self.get(key, default)
        return self._checked(isinstance(value, bool), key, "true or false", value, "false")

    def get_str(self, key: str, default: Default = REQUIRED) -> str | Default:
        """A string of printable characters."""
        value = self.get(key, default)
        is_valid = value is default or _is_printable(value)
        return self._checked(is_valid, key, "a printable text", value, '"name"')

    def get_ints(self, key: str, default: Default = REQUIRED) -> list[int] | Default:
        """A list of whole numbers from 0 to 2**31 - 1."""
        value = self.get(key, default)
        is_valid = value is default or (
            isinstance(value, list) and all(type(v) is int and 0 <= v <= LARGEST for v in value)
        )
        return self._checked(is_valid, key, "a list of whole numbers", value, "[2, 18]")

    def get_strs(self, key: str, default: Default = REQUIRED) -> list[str] | Default:
        """A list of strings of printable characters."""
        value = self.get(key, default)
        is_valid = value is default or isinstance(value, list) and all(map(_is_printable, value))
        return self._checked(is_valid, key, "a list of printable texts", value, '["name"]')

    def child(self, key: str) -> "Fields":
        """The object under a key, as Fields of its own; empty where the key is absent.

        Raises:
          InputError: the value is no object.
        """
        value = self.get(key, None)
        is_valid = value is None or isinstance(value, dict)
        self._checked(is_valid, key, "an object", value, "{}")
        return Fields(value or {}, self.where, key)

    def require(self, key: str, supported: bool | int | float | str, reason: str) -> None:
        """Refuses every value but one of a key that changes what the model computes.

        Args:
          supported: the value that is implemented here; an absent key counts as this value.
          reason: why no other value is, for the error.

        Raises:
          InputError: the key has another value.
        """
        value = self.get(key, supported)
        if value != supported or isinstance(value, bool) != isinstance(supported, bool):
            raise InputError(
                self.where,
                rule=f"{key} must be {str(supported).lower()}: {reason}",
                got=str(value).lower(),
                next_step=f"choose a checkpoint with {key}: {str(supported).lower()}; "
                "docs/targets.md and docs/checkpoints.md list what can be read",
            )


def _is_printable(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()
