"""Tests that `make test` leaves to `make test-all`, by node id, each with what it costs.

Seconds are of one run on two cores with a warm compilation cache (docs/testing.md). A test belongs
here when it costs more than a few seconds and `make test` keeps another one for the same promise.
"""

import fnmatch

SLOW: dict[str, str] = {}


def is_slow(node_id: str) -> bool:
    """Whether a pattern of SLOW covers a test: its file, itself, or one of its parameters."""
    plain = node_id.replace("[", "(").replace("]", ")")  # brackets mean something to fnmatch
    patterns = (pattern.replace("[", "(").replace("]", ")") for pattern in SLOW)
    return any(fnmatch.fnmatchcase(plain, pattern) for pattern in patterns)
