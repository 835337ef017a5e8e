"""Pictures that are written whole or not at all."""

import io
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from peagle_jax.atomic_write import write_atomically


def save(figure: Figure, path: Path, **options: Any) -> None:
    """Writes a figure and closes it.

    Args:
      path: of the picture; its suffix says the format, PNG without one.
      options: as `Figure.savefig` takes them.

    Raises:
      OSError: it cannot be written. A picture that was there stays.
    """
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.removeprefix(".") or None, **options)
    plt.close(figure)
    write_atomically(path, data.getvalue())
