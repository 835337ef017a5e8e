"""Where a folder is: on this machine, or on the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from peagle_jax.types import InputError

WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt"]  # never a pickle


def find_folder(name: str | Path) -> Path:
    """A local folder, or a hub id `owner/name` or `owner/name@revision`, fetched, or found in the cache when offline.

    Raises:
      InputError: neither is to be had.
    """
    path = Path(name)
    if path.exists() or len(path.parts) != 2 or path.is_absolute() or ".." in path.parts:
        if not path.is_dir():
            raise InputError(path, "this folder must exist", "nothing" if not path.exists() else "a file", "check the name")
        return path
    repository, _, revision = str(name).partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"{type(error).__name__} from the hub"
        raise InputError(
            name, "must be a local folder, or a hub id that is online or cached", reason, "check the name and the network"
        ) from None
