"""Where a user's files are that may be deleted at any time."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """The folder of that name for this package: in $XDG_CACHE_HOME, or else in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "peagle_jax" / name
