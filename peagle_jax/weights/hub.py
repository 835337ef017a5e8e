"""Where a folder is: on this machine, or on the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import errors, snapshot_download

from peagle_jax.types import InputError

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt")  # never a pickle
# the last two have the names of huggingface_hub 2
FAILURES = (
    OSError,
    errors.HfHubHTTPError,
    errors.HFValidationError,
    errors.LocalEntryNotFoundError,
    *(getattr(errors, name) for name in ("HTTPError", "XetDownloadError") if hasattr(errors, name)),
)


def split_revision(name: str) -> tuple[str, str | None]:
    """`owner/name@revision` -> its two parts; a local folder's name stays whole."""
    repository, _, revision = name.partition("@")
    return (name, None) if Path(name).exists() else (repository, revision or None)


def find_folder(name: str | Path, wanted: Sequence[str] = WANTED) -> Path:
    """A local folder, or a hub id `owner/name` or `owner/name@revision`, fetched, or found in the cache when offline.

    Args:
      wanted: patterns of the files to fetch.

    Raises:
      InputError: neither is to be had.
    """
    path = Path(name)
    try:
        here = path.exists()
        if here or len(path.parts) != 2 or path.is_absolute() or ".." in path.parts:
            if not path.is_dir():
                raise InputError(
                    path,
                    "this folder must exist",
                    "nothing" if not here else "a file",
                    "check the name",
                )
            next(path.iterdir(), None)  # it must be readable, too
            return path
    except OSError as error:  # a name too long, a folder that is closed to us
        raise InputError(
            path,
            "this folder must be readable",
            error.strerror,
            "check the name and its permissions",
        ) from None
    repository, revision = split_revision(str(name))
    try:
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(wanted), ignore_patterns=["*/*"]
            )
        )
    except FAILURES as error:
        reason = f"{type(error).__name__} from the hub"
        raise InputError(
            name,
            "must be a local folder, or a hub id that is online or cached",
            reason,
            "check the name and the network",
        ) from None
