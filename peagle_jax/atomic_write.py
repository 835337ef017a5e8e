"""Text files that appear whole or not at all, whenever the process is killed."""

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes UTF-8 under a temporary name beside `path`, then renames it. OSError is the caller's to explain."""
    work = path.with_name(f".{path.name}.tmp")
    work.write_text(text, encoding="utf-8")
    work.replace(path)
