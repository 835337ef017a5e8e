"""Speed beside vLLM and transformers: the newest rows of `scripts/peers/compare_speed.py`.

Its rows are in results/peers.jsonl of the repository. An installed package has none.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from peagle_jax.report.plots import STYLE

ENGINES = {"peagle_jax": "peagle_jax", "vllm": "vLLM", "transformers": "transformers"}
METHODS = {"plain": "plain decoding", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
COLORS = {"peagle_jax": "#0b6e4f", "vllm": "#8d99ae", "transformers": "#d9c27e"}


def newest(path: Path, dtype: str = "bfloat16", *, compiled: bool = False) -> list[dict]:
    """The rows of the newest comparison in `dtype`; empty where there is no file or no such row.

    Args:
      compiled: of a comparison in which vLLM ran with torch.compile, or of one where it did not.
    """
    rows = _comparisons(path, dtype, compiled)
    last = max((row["time"] for row in rows), default=None)
    return [row for row in rows if row["time"] == last]


def newest_elsewhere(path: Path, dtype: str = "bfloat16") -> list[list[dict]]:
    """The rows of the newest comparison on every other device than that of `newest`."""
    rows = _comparisons(path, dtype, compiled=False)
    last = {row["device"]: row["time"] for row in sorted(rows, key=lambda row: row["time"])}
    others = sorted(last, key=lambda device: last[device])[:-1]
    return [[r for r in rows if (r["device"], r["time"]) == (d, last[d])] for d in others]


def _comparisons(path: Path, dtype: str, compiled: bool) -> list[dict]:
    """All rows of such comparisons. Rows that do not say it have it in their command."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["dtype"] == dtype and row["method"] in METHODS]
    option = "--vllm-compile"
    return [r for r in rows if r.get("vllm_compiled", option in r["command"]) == compiled]


def ratios(rows: Sequence[dict], where: str | None = None) -> str:
    """A sentence to follow `caption`: our speed over vLLM's, at every batch size.

    It leaves out methods that were not timed at all of them.

    Args:
      where: its first words; None for the device.
    """
    speeds = {(r["batch_size"], r["engine"], r["method"]): r["tokens_per_second"] for r in rows}
    batches = sorted({row["batch_size"] for row in rows})
    parts = []
    for method in _methods(rows):
        pairs = [[speeds.get((b, e, method), 0) for e in ("peagle_jax", "vllm")] for b in batches]
        if all(map(all, pairs)):
            over = " and ".join(f"{ours / theirs:.2f}x" for ours, theirs in pairs)
            parts.append(f"{METHODS[method]} {over}")
    sizes = " and ".join(map(str, batches))
    row = rows[0]
    return (
        f"{where or 'On ' + row['device']} (commit {row['commit']}) at batch {sizes}: "
        f"{', '.join(parts)}."
    )


def table(rows: Sequence[dict]) -> list[list[str]]:
    """A header and a line for each method: tokens/s of every engine at every batch size.

    Behind our own stands the ratio to vLLM's. A cell is empty where an engine has no such method.
    """
    cases = _cases(rows)
    names = {"peagle_jax": "ours"} | {name: ENGINES[name] for name in ("vllm", "transformers")}
    first = {batch: name for batch, name in reversed(cases)}
    titles = [
        f"batch {batch}: {names[name]}" if first[batch] == name else names[name]
        for batch, name in cases
    ]
    lines = [["method", "K", *titles]]
    speeds = {(r["batch_size"], r["engine"], r["method"]): r["tokens_per_second"] for r in rows}
    for method in _methods(rows):
        k = next(row["k"] for row in rows if row["method"] == method)
        cells = []
        for batch, name in cases:
            speed, vllm = (speeds.get((batch, engine, method)) for engine in (name, "vllm"))
            ratio = f" ({speed / vllm:.2f}x)" if name == "peagle_jax" and speed and vllm else ""
            cells.append(f"{speed:,.0f}{ratio}" if speed else "")
        lines.append([METHODS[method], str(k or ""), *cells])
    return lines


def caption(rows: Sequence[dict]) -> str:
    """What was compared, on what machine."""
    row = next(row for row in rows if row["engine"] == "vllm")
    version = ".".join(row["engine_version"].split(".")[:2])
    return (
        f"Greedy tokens/s on {row['device']}, {row['dtype']}, commit {row['commit']}, "
        f"{row['time'][:10]}, in turns with vLLM {version} (uncompiled) and transformers; "
        "in brackets, our speed over vLLM's."
    )


def draw(rows: Sequence[dict], path: Path) -> None:
    """Bars of tokens/s, a panel for each batch size."""
    batches, methods = sorted({r["batch_size"] for r in rows}), _methods(rows)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(batches), figsize=(9, 3.2), squeeze=False)
        for axis, batch in zip(axes[0], batches, strict=True):
            for i, (engine, name) in enumerate(ENGINES.items()):
                chosen = [r for r in rows if (r["batch_size"], r["engine"]) == (batch, engine)]
                chosen = [r for r in chosen if r["method"] in METHODS]
                places = [methods.index(r["method"]) + 0.27 * (i - 1) for r in chosen]
                speeds = [r["tokens_per_second"] for r in chosen]
                bars = axis.bar(places, speeds, 0.25, color=COLORS[engine], label=name)
                axis.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], fontsize=8)
            axis.set_xticks(range(len(methods)), [METHODS[m] for m in methods])
            axis.set_title(f"batch {batch}: tokens/s")
            axis.grid(axis="x", visible=False)
        axes[0, 0].legend(fontsize=9, loc="upper left")
        axes[0, 0].set_ylim(top=1.3 * axes[0, 0].get_ylim()[1])
        figure.savefig(path, bbox_inches="tight")
        plt.close(figure)


def _cases(rows: Sequence[dict]) -> list[tuple[int, str]]:
    """Batch sizes and engines that have rows."""
    batches = sorted({row["batch_size"] for row in rows})
    measured = {(row["batch_size"], row["engine"]) for row in rows}
    return [(b, name) for b in batches for name in ENGINES if (b, name) in measured]


def _methods(rows: Sequence[dict]) -> list[str]:
    measured = {row["method"] for row in rows}
    return [method for method in METHODS if method in measured]
