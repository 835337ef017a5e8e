"""Sentences about result rows: the report's first lines, the captions of its plots, and reasons.

Every claim is computed from the rows, so that it turns around when the numbers do.
"""

from collections.abc import Mapping, Sequence

from peagle_jax.report.records import (
    NAMES,
    batch_sizes,
    best,
    chains,
    greedy,
    is_chain,
    methods,
    plain_row,
)

# A time or length that changes by a smaller factor than this is said to hardly change.
HARDLY = 1.25
# Tokens lost to waiting rows are mentioned where they are more than this share.
NOTABLE = 0.05
# A P-EAGLE head that gains less is given its reason: what a step costs here, and what it writes.
LEAST_GAIN = 1.3
# A text is said to be easy to draft where it repeats more of its 4-grams than this.
REPETITIVE = 0.2


# ---------------------------------------------------------------- first lines


def headline(records: Sequence[dict]) -> list[str]:
    """The report's first lines: speed at each batch size, the two heads compared, losslessness."""
    fixed, lines = chains(records), []
    for batch_size in batch_sizes(greedy(records)):
        others = _other_lines(records, batch_size)
        if methods(fixed) or not others:
            lines.append(_speed_line(fixed, batch_size))
        lines += others
    if drawn := {r["method"]: r for r in records if r.get("synthetic_acceptance")}:
        rates = "; ".join(
            f"{NAMES[m]}: {', '.join(f'{100 * x:.3g}' for x in r['synthetic_acceptance'])} %"
            for m, r in drawn.items()
        )
        warning = "Acceptance is SYNTHETIC: drafts were accepted at given rates by position"
        lines.insert(0, f"{warning} ({rates}), whatever they were. Texts mean nothing.")
    if ratios := _peagle_over_eagle3(fixed):
        pairs = ", ".join(f"K = {k}: {ratio:.2f}" for k, ratio in ratios)
        lines.append(f"P-EAGLE over EAGLE-3 at the same K, batch size 1: {pairs}.")
    if checked := [r for r in records if "lossless" in r]:
        lines.append(_lossless_line(checked))
    return lines


def _speed_line(records: Sequence[dict], batch_size: int) -> str:
    """The best K of every method at a batch size.

    A best speedup below 1, and P-EAGLE's below `LEAST_GAIN`, is given its reason.
    """
    found = {m: best(records, m, batch_size) for m in ("peagle", "eagle3", "eagle")}
    rows = {method: row for method, row in found.items() if row is not None}
    if not rows:
        return f"Batch size {batch_size}: only plain decoding was measured."
    speeds = [
        f"{NAMES[m]} at its best K ({r['k']}) runs at {r['speedup']:.2f} times plain decoding"
        for m, r in rows.items()
    ]
    line = f"Batch size {batch_size}: {'; '.join(speeds)}."
    least = {"peagle": LEAST_GAIN}
    reasons = [
        slowdown_reason(records, r) for m, r in rows.items() if r["speedup"] < least.get(m, 1)
    ]
    return " ".join([line, *filter(None, reasons)])


def falls_short(records: Sequence[dict]) -> bool:
    """Whether P-EAGLE, at its best K and with one text, gains less than `LEAST_GAIN` or EAGLE-3."""
    fixed = chains(records)
    found = [best(fixed, method, 1) for method in ("peagle", "eagle3")]
    peagle, eagle3 = (None if row is None else row["speedup"] for row in found)
    return peagle is not None and peagle < max(LEAST_GAIN, eagle3 or 0)


def _other_lines(records: Sequence[dict], batch_size: int) -> list[str]:
    """A line for each way of drafting that is no chain, beside the best chain of its head."""
    rows, lines = [r for r in greedy(records) if r["batch_size"] == batch_size], []
    for row in rows:
        if is_chain(row):
            continue
        how = "with K chosen while decoding"
        if row.get("num_tree_nodes"):
            how = f"with trees of {row['num_tree_nodes']} drafts (K = {row['k']})"
        line = f"Batch size {batch_size}: {NAMES[row['method']]} {how} runs at "
        line += f"{row['speedup']:.2f} times plain decoding"
        if chain := best(chains(rows), row["method"], batch_size):
            line += f", {row['speedup'] / chain['speedup']:.2f} times the speed of its best K"
        lines.append(line + ".")
    return lines


def _peagle_over_eagle3(records: Sequence[dict]) -> list[tuple[int, float]]:
    """(K, P-EAGLE's tokens per second over EAGLE-3's), greedy, at batch size 1."""
    rows = [r for r in greedy(records) if r["batch_size"] == 1]
    eagle3 = {r["k"]: r["tokens_per_second"] for r in rows if r["method"] == "eagle3"}
    peagle = {r["k"]: r["tokens_per_second"] for r in rows if r["method"] == "peagle"}
    return [(k, peagle[k] / eagle3[k]) for k in sorted(peagle) if k in eagle3]


def _lossless_line(checked: Sequence[dict]) -> str:
    """What the comparison with plain decoding found."""
    different = sum(r["different"] for r in checked)
    near_ties = sum(r["near_ties"] for r in checked)
    num_texts = sum(r["num_prompts"] for r in checked)
    if different + near_ties == 0:
        result = "every one is the same, token for token"
    else:
        result = f"{different} differ, {near_ties} at near ties"
    return f"Compared with plain greedy decoding: {num_texts} speculative texts; {result}."


# ---------------------------------------------------------------- why a row gains little


def slowdown_reason(records: Sequence[dict], row: dict) -> str:
    """Why a speculative row gains little or nothing: what its step costs, and what it yields.

    The costs are the row's own seconds divided by a plain step's.

    Returns:
      "" where plain decoding was not measured, or nothing was drafted.
    """
    plain = plain_row(records, row)
    if plain is None or row["acceptance_length"] is None:
        return ""
    step = row["step_seconds"] / plain["step_seconds"]
    cost = f"A step of {NAMES[row['method']]} at K = {row['k']} costs {step:.2f} plain steps"
    if row.get("draft_seconds") and row.get("verify_seconds"):
        draft = row["draft_seconds"] / plain["step_seconds"]
        verify = row["verify_seconds"] / plain["step_seconds"]
        cost += f" ({draft:.2f} for drafting, {verify:.2f} for verifying {row['k'] + 1} tokens"
        if draft + verify > (1 + 2 * NOTABLE) * step:
            cost += "; these were timed apart, and add up to more than the step: measure again"
        cost += ")"
    length = row["acceptance_length"]
    written = _tokens_per_step(row) or length
    if written < (1 - NOTABLE) * length:
        result = f"{cost} and writes {written:.2f} tokens per row ({length:.2f} if all places were "
        result += "in use, and no answer ended at its limit)"
    else:
        written = length
        result = f"{cost} and writes {length:.2f} tokens per row"
    if written > step and row["speedup"] < 1:
        result += ". The steps alone would pay; the rest of the call, with its prefill, does not"
    return result + "."


def _tokens_per_step(row: dict) -> float | None:
    """Tokens that a step adds to one of `batch_size` places, free ones included."""
    if "num_steps" not in row:
        return None
    written = row["num_tokens"] - row["num_prompts"]  # the prefill writes one of each answer
    return written / max(1, row["num_steps"] * row["batch_size"])


def slowdown_reasons(records: Sequence[dict]) -> list[str]:
    """One sentence for every speculative row that is slower than plain decoding."""
    reasons = []
    for row in chains(records):
        if row["k"] and row["speedup"] < 1 and (reason := slowdown_reason(records, row)):
            where = f"Batch size {row['batch_size']}"
            if row["temperature"]:
                where += f", temperature {row['temperature']:g}"
            reasons.append(f"{where}, {row['speedup']:.2f} times plain decoding. {reason}")
    return reasons


# ---------------------------------------------------------------- captions


def against_k_caption(records: Sequence[dict]) -> str:
    """Of drafting time and speed against K, at one batch size."""
    sentences = [f"Greedy decoding, batch size {records[0]['batch_size']}."]
    sentences += [_drafting_sentence(records, method) for method in methods(records)]
    for method in methods(records):
        row = best(records, method, records[0]["batch_size"])
        if row is None:
            continue
        if row["speedup"] >= 1:
            speed = f"at K = {row['k']}, with {row['speedup']:.2f} times plain decoding's speed"
            sentences.append(f"{NAMES[method]} is fastest {speed}.")
        else:
            reason = slowdown_reason(records, row)
            sentences.append(f"{NAMES[method]} is slower than plain decoding at every K. {reason}")
    return " ".join(sentences)


def _drafting_sentence(records: Sequence[dict], method: str) -> str:
    """How the drafting time of a method changes from its smallest to its largest K."""
    rows = sorted((r for r in records if r["method"] == method), key=lambda r: r["k"])
    first, last = rows[0], rows[-1]
    start, end = 1e3 * first["draft_seconds"], 1e3 * last["draft_seconds"]
    forwards = "one forward" if method == "peagle" else "one forward per token"
    if first is last:
        return f"{NAMES[method]} drafts {first['k']} tokens in {start:.2f} ms ({forwards})."
    growth = end / start
    if 1 / HARDLY < growth < HARDLY:
        change = "hardly changes"
    elif growth >= HARDLY:
        change = f"grows {growth:.1f}-fold"
    else:
        change = f"falls to {100 * growth:.0f} %"
    ks = f"From K = {first['k']} to K = {last['k']}"
    return f"{ks} {NAMES[method]}'s drafting ({forwards}) {change}: {start:.2f} to {end:.2f} ms."


def break_even_caption(records: Sequence[dict]) -> str:
    """Of the acceptance length reached and needed: at which K each method gains."""
    sentences = [
        "Dashed: the acceptance length at which speculation would be as fast as plain decoding, by "
        "the measured cost of whole calls. Solid: the acceptance length that the head reached."
    ]
    for batch_size in batch_sizes(records):
        here = [r for r in records if r["batch_size"] == batch_size]
        gains = [_gain(here, method) for method in methods(here)]
        sentences.append(f"Batch size {batch_size}: {'; '.join(gains)}.")
    return " ".join(sentences)


def _gain(records: Sequence[dict], method: str) -> str:
    """At which K a method is faster than plain decoding."""
    rows = sorted((r for r in records if r["method"] == method), key=lambda r: r["k"])
    rows = [r for r in rows if r["acceptance_length"] is not None]
    if not rows:
        return f"{NAMES[method]} drafted nothing"
    ks = [str(r["k"]) for r in rows if r["acceptance_length"] > r["break_even"]]
    if not ks:
        return f"{NAMES[method]} gains at no K"
    if len(ks) == len(rows):
        return f"{NAMES[method]} gains at every K"
    return f"{NAMES[method]} gains at K = {', '.join(ks)} only"


def step_caption(records: Sequence[dict]) -> str:
    """Of the parts of a step, at one batch size: the numbers at the largest K."""
    sentences = ["Drafting and verification were timed alone, each in a loop of its own."]
    rests = []
    for method in methods(records):
        row = max((r for r in records if r["method"] == method), key=lambda r: r["k"])
        step, draft, verify = (
            1e3 * row[key] for key in ("step_seconds", "draft_seconds", "verify_seconds")
        )
        rest = step - draft - verify
        rests.append(rest)
        more = f"{rest:.2f} ms more" if rest >= 0 else f"{-rest:.2f} ms less"
        sentences.append(
            f"At K = {row['k']} a step of {NAMES[method]} takes {step:.2f} ms: "
            f"{draft:.2f} ms drafting and {verify:.2f} ms verification when alone, and {more} "
            "than the two together."
        )
    on_cpu = "core" in records[0].get("device", "")
    if any(row.get("num_threads", 1) > 1 for row in records):
        sentences.append(
            "Engines side by side share the rows: a part was timed with the rows of one engine, "
            "and without a neighbour; an engine that is done waits for the others."
        )
    elif on_cpu and rests and min(rests) > 0:
        sentences.append(
            "One reason: a model alone finds weights in the processor's cache; in a step target "
            "and head run in turns and load them again."
        )
    return " ".join(sentences)


def per_position_caption(panels: Sequence[Sequence[dict]]) -> str:
    """Of the bars of acceptance per position. Each panel has rows of one K and temperature."""
    sentences = ["Share of steps in which the draft at each position was accepted."]
    for rows in panels:
        temperature = rows[0]["temperature"]
        mode = f"At temperature {temperature:g}" if temperature else "Greedy"
        shares = "; ".join(map(_first_and_last_position, rows))
        sentences.append(f"{mode}: {shares}.")
    return " ".join(sentences)


def _first_and_last_position(row: dict) -> str:
    """Acceptance at both ends of a row's K positions."""
    first, last = (100 * row["accepted_per_position"][i] for i in (0, -1))
    name = NAMES[row["method"]]
    if row["k"] == 1:
        return f"{name} {first:.0f} % at position 1"
    return f"{name} {first:.0f} % at position 1 and {last:.0f} % at position {row['k']}"


def training_caption(curves: Mapping[str, Sequence[dict]]) -> str:
    """Of the acceptance lengths that were measured while the heads trained."""
    sentences = [
        "Training of the heads measured above: greedy acceptance on excerpts of held-out files."
    ]
    for method in ("eagle", "eagle3", "peagle"):
        rows = [r for r in curves.get(method, ()) if r.get("acceptance_length")]
        if len(rows) < 2:
            continue
        change = _change(rows[0]["acceptance_length"], rows[-1]["acceptance_length"])
        minutes = rows[-1]["seconds"] / 60
        name = NAMES[method]
        sentences.append(f"{name}'s acceptance length {change} within {minutes:.0f} minutes.")
    return " ".join(sentences)


def _change(start: float | int, end: float | int) -> str:
    """A verb and the two numbers."""
    if f"{start:.2f}" == f"{end:.2f}":
        return f"stays at {end:.2f}"
    verb = "rises" if end > start else "falls"
    return f"{verb} from {start:.2f} to {end:.2f}"


def fresh_head_caption(rows: Sequence[dict], is_measured: bool = False) -> str:
    """Of the loss and accuracy of the head that the demo trains.

    Args:
      rows: its training metrics.
      is_measured: whether it is the P-EAGLE head of the measurements; otherwise it was trained only
        to show training.
    """
    losses = running_mean([r["loss"] for r in rows])
    which = "Training of the P-EAGLE head measured above"
    if not is_measured:
        which = "The head that this run trained to show training, not the one measured above"
    sentences = [
        f"{which}; it begins as a copy of the target's last layer. The running mean of the loss "
        f"{_change(losses[0], losses[-1])}."
    ]
    for depth in range(max(len(r["accuracy"]) for r in rows)):
        trained = [r for r in rows if depth < len(r["accuracy"])]
        accuracy = running_mean([100 * r["accuracy"][depth] for r in trained])[-1]
        input_name = "real tokens" if depth == 0 else "placeholders"
        joins = "" if trained[0] is rows[0] else f", trained from step {trained[0]['step']} on,"
        sentences.append(
            f"Depth {depth} (reads {input_name}){joins} ends at {accuracy:.0f} % of the target's "
            "argmaxes."
        )
    return " ".join(sentences)


def running_mean(values: Sequence[float | int], weight: float = 0.25) -> list[float]:
    """Each value with `weight`, and the mean before it with the rest; single batches are noisy."""
    means: list[float] = []
    for value in map(float, values):
        means.append(value if not means else weight * value + (1 - weight) * means[-1])
    return means


def sample_caption(k: int, temperature: float, repeated: float, num_candidates: int) -> str:
    """Of the marked text: how it was decoded and chosen, and how much of it repeats itself.

    Args:
      repeated: share of its 4-grams that it had written before.
      num_candidates: answers that it was chosen from.
    """
    decoding = "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"
    chosen = f"of {num_candidates} answers the one that repeats itself least"
    sentences = [f"K = {k}, {decoding}; {chosen} ({100 * repeated:.0f} % repeated 4-grams)."]
    if repeated > REPETITIVE:
        sentences.append("Repetition is easy to draft, and inflates acceptance.")
    sentences.append(
        "Gray: the prompt. Blue: drafted by the P-EAGLE head and accepted. Plain: the target's own "
        "tokens, one per step."
    )
    return " ".join(sentences)
