"""Speed beside vLLM and transformers: the newest rows of `scripts/peers/compare_speed.py`.

Its rows are in results/peers.jsonl of the repository. An installed package has none.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from peagle_jax.report.pictures import save
from peagle_jax.report.plots import STYLE

ENGINES = {"peagle_jax": "peagle_jax", "vllm": "vLLM", "transformers": "transformers"}
METHODS = {
    "plain": "plain decoding",
    "prompt_lookup": "prompt lookup",  # transformers' drafts without a head: n-grams of the text
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
}
# What is compared in the README: other prompts, targets and lengths may be recorded beside it.
STANDARD = {"target": "target", "num_prompts": 8, "max_new_tokens": 128}
COLORS = {"peagle_jax": "#0b6e4f", "vllm": "#8d99ae", "transformers": "#d9c27e"}


def newest(path: Path, dtype: str = "bfloat16") -> list[dict]:
    """The rows of the newest comparison in `dtype` with vLLM at its best, with torch.compile.

    Empty where there is no file or no such row.
    """
    return next(iter(newest_of_devices(path, dtype).values()), [])


def newest_of_devices(
    path: Path, dtype: str = "bfloat16", *, stream: bool = False
) -> dict[str, list[dict]]:
    """Device -> the rows of its newest comparison; that of the newest of all is the first.

    Where vLLM has run on a device with what it says to preload, comparisons without that do not
    count.

    Args:
      stream: those in which the host got the tokens of every step, or those of whole answers.
    """
    rows = sorted(_comparisons(path, dtype, stream), key=lambda row: row["time"])
    found = {}
    for device in dict.fromkeys(row["device"] for row in reversed(rows)):
        of_device = [row for row in rows if row["device"] == device]
        preloaded = {row["time"] for row in of_device if row.get("vllm_preload")}
        last = max(preloaded or {row["time"] for row in of_device})
        found[device] = [row for row in of_device if row["time"] == last]
    return found


def _comparisons(path: Path, dtype: str, stream: bool) -> list[dict]:
    """All rows of comparisons as the README's, with vLLM, and that with torch.compile.

    Rows that do not say it have it in their command.
    """
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["dtype"] == dtype and row["method"] in METHODS]
    rows = [row for row in rows if STANDARD.items() <= row.items()]
    rows = [row for row in rows if row.get("stream", False) == stream]
    rows = [row for row in rows if not row.get("continuous")]
    with_vllm = {(row["device"], row["time"]) for row in rows if row["engine"] == "vllm"}
    rows = [row for row in rows if (row["device"], row["time"]) in with_vllm]
    option = "--vllm-compile"
    return [row for row in rows if row.get("vllm_compiled", option in row["command"])]


def ratios(
    rows: Sequence[dict], where: str | None = None, beside: Sequence[dict] | None = None
) -> str:
    """A sentence to follow `caption`: our speed over vLLM's, at every batch size.

    It leaves out methods that were not timed at all of them.

    Args:
      where: its first words; None for the device.
      beside: other rows; if P-EAGLE accepted another number of tokens there, the sentence says how
        many here, for the packaged head was another one then. None: it does not.
    """
    batches = sorted({row["batch_size"] for row in rows})
    parts = []
    for method in METHODS:
        over = _ratios(rows, method)
        if all(batch in over for batch in batches):
            spans = " and ".join(f"{over[batch]:.2f}x" for batch in batches)
            parts.append(f"{METHODS[method]} {spans}")
    commit = f"commit {rows[0]['commit']}"
    if not any(row.get("vllm_preload") for row in rows):
        commit += ", vLLM without tcmalloc"
    here, there = _length_of_peagle(rows), _length_of_peagle(beside or ())
    if here is not None and there is not None and abs(here - there) > 0.05:
        commit += f", a P-EAGLE head of length {here:.2f}, not {there:.2f}"
    return (
        f"{where or 'On ' + rows[0]['device']} ({commit}) at batch "
        f"{' and '.join(map(str, batches))}: {', '.join(parts)}."
    )


def gains_in_vllm(rows: Sequence[dict]) -> str:
    """A sentence: what the packaged heads gain in vLLM with one text, and where that was measured.

    Args:
      rows: of one comparison.

    Returns:
      "" where vLLM decoded nothing with a head, or nothing without.
    """
    found = {r["method"]: r for r in rows if (r["engine"], r["batch_size"]) == ("vllm", 1)}
    heads = [method for method in METHODS if method in found and found[method]["k"]]
    if "plain" not in found or not heads:
        return ""
    plain, first = found["plain"]["tokens_per_second"], found[heads[0]]
    gains = [f"{METHODS[m]} at {found[m]['tokens_per_second'] / plain:.2f} times" for m in heads]
    gains[0] += " plain decoding"
    return (
        f"Recorded earlier, the packaged heads in vLLM {first['engine_version']}, one text, "
        f"K = {first['k']}, {first['dtype']}, on {first['device']} (commit {first['commit']}): "
        f"{', '.join(gains)}."
    )


def _length_of_peagle(rows: Sequence[dict]) -> float | None:
    """The acceptance length of our P-EAGLE rows; None where there is none."""
    of_ours = (r for r in rows if (r["engine"], r["method"]) == ("peagle_jax", "peagle"))
    return next((row["acceptance_length"] for row in of_ours if row.get("acceptance_length")), None)


def _ratios(rows: Sequence[dict], method: str) -> dict[int, float]:
    """Batch size -> our speed over vLLM's, where both were timed."""
    found = {(row["engine"], row["batch_size"]): row for row in rows if row["method"] == method}
    return {
        batch: speed_ratio(row, found["vllm", batch])
        for (engine, batch), row in found.items()
        if engine == "peagle_jax" and ("vllm", batch) in found
    }


def speed_ratio(row: Mapping, other: Mapping) -> float:
    """The speed of a row over another's: the median over rounds, in which both were timed.

    A machine that is slow in a round is so for both. The speeds of a row are its own medians, whose
    ratio may be another one.
    """
    of_medians = row["tokens_per_second"] / other["tokens_per_second"]
    mine, theirs = row["seconds"], other["seconds"]
    if len(mine) != len(theirs):
        return of_medians
    seconds = statistics.median(mine) / statistics.median(theirs)
    paired = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
    return of_medians * seconds * paired  # the first two are the numbers of tokens


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
    ratios_of = {method: _ratios(rows, method) for method in METHODS}
    for method in _methods(rows):
        k = next(row["k"] for row in rows if row["method"] == method)
        cells = []
        for batch, name in cases:
            speed, over = speeds.get((batch, name, method)), ratios_of[method].get(batch)
            ratio = f" ({over:.2f}x)" if name == "peagle_jax" and over else ""
            cells.append(f"{speed:,.0f}{ratio}" if speed else "")
        lines.append([METHODS[method], str(k or ""), *cells])
    return lines


def caption(rows: Sequence[dict]) -> str:
    """What was compared, on what machine."""
    row = next(row for row in rows if row["engine"] == "vllm")
    version = ".".join(row["engine_version"].split(".")[:2])
    others = f"vLLM {version} (with torch.compile)"
    if any(row["engine"] == "transformers" for row in rows):
        others += " and transformers"
    return (
        f"Greedy tokens/s on {row['device']}, {row['dtype']}, commit {row['commit']}, "
        f"{row['time'][:10]}, in turns with {others}; "
        "in brackets, our speed over vLLM's, the median over rounds."
    )


def draw(rows: Sequence[dict], path: Path) -> None:
    """Bars of tokens/s, a panel for each batch size."""
    batches = sorted({r["batch_size"] for r in rows})
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(batches), figsize=(9, 3.2), squeeze=False)
        for axis, batch in zip(axes[0], batches, strict=True):
            methods = _methods([r for r in rows if r["batch_size"] == batch])
            for i, (engine, name) in enumerate(ENGINES.items()):
                chosen = [r for r in rows if (r["batch_size"], r["engine"]) == (batch, engine)]
                chosen = [r for r in chosen if r["method"] in METHODS]
                places = [methods.index(r["method"]) + 0.27 * (i - 1) for r in chosen]
                speeds = [r["tokens_per_second"] for r in chosen]
                bars = axis.bar(places, speeds, 0.25, color=COLORS[engine], label=name)
                axis.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], fontsize=8)
            axis.set_xticks(range(len(methods)), [METHODS[m].replace(" ", "\n") for m in methods])
            axis.set_title(f"batch {batch}: tokens/s")
            axis.grid(axis="x", visible=False)
        axes[0, 0].legend(fontsize=9, loc="upper left")
        axes[0, 0].set_ylim(top=1.3 * axes[0, 0].get_ylim()[1])
        save(figure, path, bbox_inches="tight")


def _cases(rows: Sequence[dict]) -> list[tuple[int, str]]:
    """Batch sizes and engines that have rows."""
    batches = sorted({row["batch_size"] for row in rows})
    measured = {(row["batch_size"], row["engine"]) for row in rows}
    return [(b, name) for b in batches for name in ENGINES if (b, name) in measured]


def _methods(rows: Sequence[dict]) -> list[str]:
    measured = {row["method"] for row in rows}
    return [method for method in METHODS if method in measured]
