"""The picture of `peagle plan`: tokens per second against concurrency."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from peagle_jax.report.pictures import save
from peagle_jax.report.plots import COLORS, STYLE
from peagle_jax.report.records import NAMES

# (concurrency, tokens per second, K) of each point
Points = Sequence[tuple[int, float, int]]


def draw_plan(path: Path, title: str, panels: Mapping[str, Mapping[str, Points]]) -> None:
    """Writes a PNG with a panel for each context.

    Args:
      path: of the PNG.
      title: of the whole picture.
      panels: by the panel's title, the points of each method ("none", "eagle3", "peagle"). The best
        K stands beside every point of a head.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(1 + 4.2 * len(panels), 4.4), squeeze=False, sharey=True
        )
        for ax, (name, methods) in zip(axes[0], panels.items(), strict=True):
            for method, points in methods.items():
                xs, ys = [point[0] for point in points], [point[1] for point in points]
                ax.plot(xs, ys, "o-", color=COLORS[method], label=NAMES[method], ms=4)
                for x, y, k in points:
                    if k:
                        above = 6 if method == "peagle" else -13
                        ax.annotate(
                            f"{k}",
                            (x, y),
                            xytext=(0, above),
                            textcoords="offset points",
                            color=COLORS[method],
                            ha="center",
                            fontsize=8,
                        )
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.xaxis.set_major_formatter("{x:.0f}")
            ax.set_title(name)
            ax.set_xlabel("sequences decoded together")
        axes[0][0].set_ylabel("tokens/s, planned")
        axes[0][0].legend()
        figure.suptitle(f"{title}; numbers are the best K", fontsize=11)
        figure.tight_layout()
        save(figure, path)
