"""Typed access to the keys of a config.json: a wrong value is an error that names its key."""

import math
from collections.abc import Mapping
from typing import Any

from peagle_jax.types import InputError

LARGEST = 2**31 - 1


class Fields:
    """A JSON object whose values must be what the reader expects.

    null counts as absent, as transformers writes it. Without `default` a key must be there.
    """

    MUST: Any = object()

    def __init__(self, raw: Mapping, where, what: str = "the config"):
        self.raw, self.where, self.what = raw, where, what

    def get(self, key: str, default=MUST):
        value = self.raw.get(key)
        if value is None and default is self.MUST:
            raise InputError(
                self.where,
                f"{self.what} needs the key {key!r}",
                "none",
                "take the checkpoint's own config",
            )
        return default if value is None else value

    def _expect(self, good: bool, key: str, rule: str, value):
        if not good:
            raise InputError(self.where, f"{key} must be {rule}", repr(value), "mend the config")
        return value

    def get_int(self, key: str, default=MUST, *, least: int = 1):
        value = self.get(key, default)
        good = value is default or type(value) is int and least <= value <= LARGEST
        return self._expect(good, key, f"a whole number of {least} or more", value)

    def get_float(self, key: str, default=MUST):
        """Above zero, and finite."""
        value = self.get(key, default)
        good = (
            value is default
            or type(value) in (int, float)
            and 0 < value < 1e300
            and math.isfinite(value)
        )
        return self._expect(good, key, "a number above 0", value)

    def get_bool(self, key: str, default=MUST) -> bool:
        value = self.get(key, default)
        return self._expect(isinstance(value, bool), key, "true or false", value)

    def get_str(self, key: str, default=MUST):
        value = self.get(key, default)
        return self._expect(
            value is default or isinstance(value, str) and value.isprintable(),
            key,
            "a printable text",
            value,
        )

    def get_ints(self, key: str, default=MUST):
        """A list of whole numbers of 0 or more."""
        value = self.get(key, default)
        good = (
            value is default
            or isinstance(value, list)
            and all(type(v) is int and 0 <= v <= LARGEST for v in value)
        )
        return self._expect(good, key, "a list of whole numbers", value)

    def get_strs(self, key: str, default=MUST):
        value = self.get(key, default)
        good = (
            value is default
            or isinstance(value, list)
            and all(isinstance(v, str) and v.isprintable() for v in value)
        )
        return self._expect(good, key, "a list of printable texts", value)

    def child(self, key: str) -> "Fields":
        """An object in the object; empty where there is none."""
        value = self.get(key, None)
        self._expect(value is None or isinstance(value, dict), key, "an object", value)
        return Fields(value or {}, self.where, key)

    def require(self, key: str, default, reason: str) -> None:
        """Raises unless a key that changes the model has the one value that is computed here."""
        value = self.get(key, default)
        if value != default or isinstance(value, bool) != isinstance(default, bool):
            raise InputError(
                self.where,
                f"{key} must be {str(default).lower()}: {reason}",
                str(value).lower(),
                "use another checkpoint",
            )
