"""Where a folder is: on this machine, or on the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path

from peagle_jax.types import InputError

# The files that a checkpoint needs. Pickles are never fetched, because they can run code.
TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer*", "merges.txt")  # and the configuration
CHECKPOINT_FILES = (*TOKENIZER_FILES, "*.safetensors")


def failures() -> tuple[type[Exception], ...]:
    """What `huggingface_hub` raises where something is not there, not allowed or not reachable."""
    from huggingface_hub import errors

    in_release_2 = ("HTTPError", "XetDownloadError")
    return (
        OSError,
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        *(getattr(errors, name) for name in in_release_2 if hasattr(errors, name)),
    )


def split_revision(name: str) -> tuple[str, str | None]:
    """`owner/name@revision` -> its two parts; a local folder's name stays whole."""
    repository, _, revision = name.partition("@")
    return (name, None) if Path(name).exists() else (repository, revision or None)


def find_folder(name: str | Path, patterns: Sequence[str] = CHECKPOINT_FILES) -> Path:
    """The local folder of a checkpoint, which is fetched from the hub where necessary.

    Args:
      name: a local folder, or a hub id `owner/name` or `owner/name@revision`. A hub id is found in
        the hub's cache when the machine is offline.
      patterns: of the files to fetch.

    Raises:
      InputError: there is neither such a folder nor such a repository, or it cannot be read.
    """
    path = Path(name)
    try:
        exists = path.exists()
        is_hub_id = len(path.parts) == 2 and not path.is_absolute() and ".." not in path.parts
        if exists or not is_hub_id:
            if not path.is_dir():
                got = "a file" if exists else "nothing"
                raise InputError(path, "this folder must exist", got, "check the name")
            next(path.iterdir(), None)  # it must be readable, too
            return path
    except OSError as error:  # a name too long, a folder without permission to read
        raise InputError(
            path,
            rule="this folder must be readable",
            got=error.strerror,
            next_step="check the name and its permissions",
        ) from None
    from huggingface_hub import snapshot_download

    repository, revision = split_revision(str(name))
    try:
        snapshot = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
        )
    except failures() as error:
        raise InputError(
            name,
            rule="must be a local folder, or a hub id that is online or cached",
            got=f"{type(error).__name__} from the hub",
            next_step="check the name and the network",
        ) from None
    return Path(snapshot)
