"""Text files that appear whole or not at all, whenever the process is killed."""

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes UTF-8 under a temporary name beside `path`, then renames it.

    Args:
      path: the file; one that is there is replaced.
      text: all of its contents.

    Raises:
      OSError: the folder cannot be written to; the caller knows what to tell the user.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
