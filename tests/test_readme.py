"""README and the guides: numbers are rows of results/, and paths, commands and options exist."""

import argparse
import dataclasses
import json
import re
import runpy
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from peagle_jax.cli.commands import COMMANDS, make_parser, parse_arguments
from peagle_jax.train.config import TASKS
from peagle_jax.train.overrides import apply_overrides
from peagle_jax.train.settings import build

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# CHANGELOG.md and LOG.md name files and options of former days
PAGES = sorted(
    [
        README,
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        ROOT / "scripts" / "README.md",
        ROOT / "experiments" / "README.md",
        ROOT / "configs" / "targets" / "README.md",
    ]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
ROOMS = "peagle_jax|scripts|tests|configs|docs|experiments"
PATH = re.compile(rf"(?<![\w/.-])(?:{ROOMS})/[\w./*-]*[\w/*]")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the page's code blocks."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[str]:
    """The command lines in the page's code blocks, with their continuation lines joined.

    In a block that marks its commands with `$ `, the other lines are output.
    """
    for language, block in blocks(page):
        if language not in ("", "bash", "sh"):
            continue
        lines = block.replace("\\\n", " ").splitlines()
        marked = any(line.startswith("$ ") for line in lines)
        for line in lines:
            if not marked or line.startswith("$ "):
                yield line.removeprefix("$ ")


def words(command: str) -> list[str]:
    try:
        return shlex.split(command, comments=True)
    except ValueError:  # a line of a here document
        return []


def peagle_commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `peagle ...` command line, up to a pipe or the next command."""
    for command in commands(page):
        arguments = words(command)
        if arguments and arguments[0].removeprefix(".venv/bin/") == "peagle":
            ends = [i for i, word in enumerate(arguments) if word in ("|", ">", ";", "&&")]
            yield arguments[1 : ends[0] if ends else None]


# ---------------------------------------------------------------- README


def test_readme_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    assert not [line for line in lines if len(line) > 100]


def demo_table() -> dict:
    return runpy.run_path(str(ROOT / "scripts" / "generate" / "readme_table.py"))


def newest_demos() -> dict[str, list[dict]]:
    lines = (ROOT / "results" / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    return demo_table()["newest_demos"](lines)


def test_the_blocks_are_what_the_script_writes():
    text = README.read_text(encoding="utf-8")
    assert demo_table()["block"](newest_demos()) in text
    assert demo_table()["peers_block"]() in text


def table_after(marker: str) -> list[list[str]]:
    """The cells of README's table behind a marker, its header first."""
    text = README.read_text(encoding="utf-8").split(marker)[1]
    lines = [line for line in text.split("<!--")[0].splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len({len(line) for line in table}) == 1
    return [table[0], *table[2:]]


def test_every_number_of_the_demo_is_its_row():
    """Read back from README, apart from the script that writes the table."""
    header, *lines = table_after(demo_table()["BEGIN"])
    ks = [int(cell.removeprefix("K = ")) for cell in header[1:-1]]
    assert header[0] == "speedup (length)" and len(ks) >= 5 and header[-1] == "batch 8, best K"
    names = {"EAGLE-3": "eagle3", "P-EAGLE": "peagle"}
    devices = [pair for pair in newest_demos().items() for _ in names]
    page = README.read_text(encoding="utf-8")
    for (where, *cells), (device, rows) in zip(lines, devices, strict=True):
        machine, method = where.split(": ")
        by_case = {(r["method"], r["k"], r["batch_size"]): r for r in rows}
        plain = by_case["none", 0, 1]["tokens_per_second"]
        assert device.startswith(machine)
        assert f"- {device}, {rows[0]['dtype']}, plain {plain:.0f} tokens/s" in page
        for k, cell in zip(ks, cells[:-1], strict=True):
            row = by_case[names[method], k, 1]
            assert cell == f"{row['speedup']:.2f} ({row['acceptance_length']:.2f})"
        many = [by_case[names[method], k, 8]["speedup"] for k in ks]
        assert cells[-1] == f"{max(many):.2f}"


OURS_AND_VLLM = ("peagle_jax", "vllm")


def times_as_fast(row, other):
    """The median over rounds, in each of which both wrote all answers."""
    assert row["num_prompts"] == other["num_prompts"] == 8
    rounds = zip(row["seconds"], other["seconds"], strict=True)
    return statistics.median(theirs / mine for mine, theirs in rounds)


def test_every_number_beside_vllm_is_its_row():
    """The first table: of the newest comparison in bfloat16."""
    header, *lines = table_after(demo_table()["PEERS_BEGIN"])
    text = README.read_text(encoding="utf-8")
    lines_of_file = (ROOT / "results" / "peers.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [r for r in map(json.loads, lines_of_file) if r["dtype"] == "bfloat16"]
    rows = [r for r in rows if not r.get("continuous") and r["target"] == "target"]
    rows = [r for r in rows if "--vllm-compile" in r["command"]]
    words = " ".join(text.split())
    caption = words[words.index("Greedy tokens/s on") : words.index("<!-- end of peers")]
    caption, of_streams = caption.split("Where both hand out the tokens of every step,")
    for is_stream, sentences in {False: caption, True: of_streams}.items():
        of_kind = [r for r in rows if r.get("stream", False) == is_stream]
        for device in sorted({row["device"] for row in of_kind}, reverse=True):
            here = [row for row in of_kind if row["device"] == device]
            # vLLM at its best counts alone, where it has run so
            here = [row for row in here if row.get("vllm_preload")] or here
            last = max(row["time"] for row in here)
            here = [row for row in here if row["time"] == last]
            if not is_stream and last == max(row["time"] for row in of_kind):
                rows_of_table = here
                continue
            found = {(r["engine"], r["batch_size"]): r for r in here if r["method"] == "peagle"}
            over = (times_as_fast(*(found[e, batch] for e in OURS_AND_VLLM)) for batch in (1, 8))
            name = "Intel" if device.startswith("Intel") else "AMD"
            of_device = sentences[sentences.lower().index(f"on {name}".lower()) :]
            about, _, numbers = of_device.partition(" at batch")
            assert f"(commit {here[0]['commit']}" in about
            spans = " and ".join(f"{ratio:.2f}x" for ratio in over)
            assert numbers.split("P-EAGLE ")[1].startswith(f"{spans}.")
    rows = rows_of_table
    assert f"commit {rows[0]['commit']}, {rows[0]['time'][:10]}" in " ".join(text.split())
    assert not any(row["dirty"] for row in rows)
    by_case = {(r["engine"], r["method"], r["batch_size"]): r for r in rows}
    for (engine, method, batch_size), row in by_case.items():
        if engine == "peagle_jax":  # in bfloat16 sums are rounded by the number of rows
            assert row["different"] <= by_case["vllm", method, batch_size]["different"]
    names = {"plain decoding": "plain", "prompt lookup": "prompt_lookup"}
    names |= {"EAGLE-3": "eagle3", "P-EAGLE": "peagle"}
    assert [line[0] for line in lines] == list(names) and len(header) == 8
    for method, k, *cells in lines:
        for title, cell in zip(header[2:], cells, strict=True):
            if ": " in title:
                batch, title = title.removeprefix("batch ").split(": ")
            engine = "peagle_jax" if title == "ours" else title.lower()
            row = by_case.get((engine, names[method], int(batch)))
            wanted = f"{row['tokens_per_second']:,.0f}" if row else ""
            if row and engine == "peagle_jax":
                vllm = by_case["vllm", names[method], int(batch)]
                wanted += f" ({times_as_fast(row, vllm):.2f}x)"
            assert cell == wanted
            assert row is None or k == str(row["k"] or "")


def test_the_rows_are_of_clean_commits_and_lossless():
    """Where decoding was timed in bfloat16, float32 texts were compared in the same demo."""
    for rows in newest_demos().values():
        wanted = {(m, k) for m in ("eagle3", "peagle") for k in (1, 3, 5, 7, 11)}
        assert {(row["method"], row["k"]) for row in rows} >= wanted
        assert not any(row["dirty"] for row in rows)
        compared = rows if rows[0]["dtype"] == "float32" else exactness_rows(rows[0])
        compared = [row for row in compared if row["k"]]
        assert {(row["method"], row["k"]) for row in compared} >= wanted
        assert all(row["lossless"] for row in compared)


def exactness_rows(row: dict) -> list[dict]:
    """The rows of the float32 comparison in the demo that `row` belongs to."""
    lines = (ROOT / "results" / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    name, origin = "demo/small/exactness", ("commit", "device")
    return [
        other
        for other in map(json.loads, lines)
        if other["name"] == name and all(other[key] == row[key] for key in origin)
    ]


def test_the_share_of_repetitions_is_its_rows():
    text = README.read_text(encoding="utf-8")
    stated = re.search(r"(\d+) % of the output's 4-grams repeat", " ".join(text.split()))
    assert stated, "README says how much of the output repeats itself"
    for rows in newest_demos().values():
        shares = {f"{100 * row['repeated_4grams']:.0f}" for row in rows if row["batch_size"] == 1}
        assert shares == {stated[1]}


def test_a_newer_demo_replaces_the_rows_of_its_device(tmp_path):
    def row(time, device, speed, **changes):
        case = {"method": "peagle", "k": 3, "batch": 1, "temperature": 0.0}
        origin = {"name": "demo/small", "time": time, "commit": time, "device": device}
        numbers = {"tokens_per_second": speed, "speedup": 1.5, "acceptance_length": 2.0}
        return json.dumps(case | origin | numbers | changes)

    lines = [
        row("1", "A, 2 cores", 10),
        row("2", "B(R) Processor, 4 cores", 20),
        row("3", "A, 2 cores", 30),
        row("3", "A, 2 cores", 40, temperature=1.0),
        row("4", "A, 2 cores", 50, name="demo/smoke"),
    ]
    script = demo_table()
    demos = script["newest_demos"](lines)
    assert [r["tokens_per_second"] for r in demos["A, 2 cores"]] == [30]
    assert script["table"](demos) == [
        "| speedup (length) | K = 3 |",
        "| --- | --- |",
        "| A: P-EAGLE | 1.50 (2.00) |",
        "| B: P-EAGLE | 1.50 (2.00) |",
    ]


def test_the_support_table_says_what_vllm_said(tmp_path):
    """Its cells are rows of results/targets.jsonl; rows with the names of today read the same."""
    script = runpy.run_path(str(ROOT / "scripts" / "generate" / "support_table.py"))
    cell = script["vllm_agreement"]
    rows = script["read_agreement"](ROOT / "results" / "targets.jsonl")
    page = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8")
    for family in script["FAMILIES"].values():
        assert f"| {cell(rows[family.vllm_name])} |" in page
    today = {"family": "llama", "equal": 5, "num_prompts": 6, "num_draft_tokens": 8}
    (tmp_path / "rows.jsonl").write_text(json.dumps(today | {"num_accepted_tokens": 7}) + "\n")
    read = script["read_agreement"](tmp_path / "rows.jsonl")
    assert cell(read["llama"]) == "5 of 6, 7 of 8 drafts"
    assert script["read_agreement"](tmp_path / "none.jsonl") == {} and cell(None) == ""


# ---------------------------------------------------------------- all pages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    written = set(re.findall(r"cat >+ (\S+)", text))  # by the page's own commands
    for path in set(PATH.findall(text)) - written:
        # docs/testing.md leaves out tests/ before the files that it names
        found = [*ROOT.glob(path), *(ROOT / "tests").glob(path)]
        assert found, f"{name_of(page)} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_peagle_commands_parse(page):
    for arguments in peagle_commands(page):
        options = parse_arguments(arguments)
        if options.name == "train":
            check_overrides(options.config, options.overrides)
        for word in arguments[1:]:
            if word.startswith("-") and word not in options.overrides:
                check_present_spelling(options.name, word.partition("=")[0])


def check_present_spelling(command: str, option: str) -> None:
    """Former spellings of options work, but no page teaches them."""
    action = subparsers()[command]._option_string_actions[option]
    assert option in action.option_strings, f"{option} is now {action.option_strings[-1]}"


def check_overrides(recipe: Path, rest: list[str]) -> None:
    """Every option behind a recipe is one of its keys; a recipe that is no file is P-EAGLE's."""
    raw = {"task": "peagle", "target": "T", "out": "O", "data": {"source": None}}
    if (ROOT / recipe).exists():
        raw = yaml.safe_load((ROOT / recipe).read_text(encoding="utf-8"))
    apply_overrides(build(TASKS[raw["task"]], raw, str(recipe)), rest, str(recipe))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_in_the_text_exist(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    parsers = subparsers()
    for span in INLINE.findall(text):
        match = re.match(r"peagle ([a-z][\w-]*)(.*)", span)
        if match is None:
            continue
        command, rest = match.groups()
        assert command in COMMANDS, f"{name_of(page)}: {span}"
        for option in re.findall(r"(?<!\S)(--?[a-zA-Z][\w.-]*)", rest):
            if command == "train" and overrides_a_key(option):
                continue
            known = parsers[command]._option_string_actions
            assert option in known, f"{name_of(page)}: {span}: unknown {option}"
            check_present_spelling(command, option)


def overrides_a_key(option: str) -> bool:
    """Whether an option of `peagle train` is a key of some recipe, as --optimizer.steps is."""
    keys = {field.name for recipe in TASKS.values() for field in dataclasses.fields(recipe)}
    return option.removeprefix("--").split(".")[0] in keys


def subparsers() -> dict[str, argparse.ArgumentParser]:
    actions = make_parser()._actions
    choices = next(a.choices for a in actions if isinstance(a, argparse._SubParsersAction))
    return dict(choices)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_other_commands_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands(page):
        arguments = words(command)
        if arguments[:1] == ["make"] and len(arguments) > 1:
            assert arguments[1] in targets, f"{name_of(page)}: {command}"
        if arguments[1:2] == ["-m"] and arguments[2].startswith("experiments."):
            assert (ROOT / f"{arguments[2].replace('.', '/')}.py").exists(), command
        if len(arguments) > 1 and arguments[1].startswith("scripts/"):
            source = (ROOT / arguments[1]).read_text(encoding="utf-8")
            for option in (word for word in arguments[2:] if word.startswith("--")):
                assert f'"{option}"' in source, f"{name_of(page)}: {command}: unknown {option}"
    for span in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if match := re.match(r"make ([\w-]+)", span):
            assert match[1] in targets, f"{name_of(page)}: {span}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_recipes_shown_are_valid(page):
    for language, block in blocks(page):
        if language == "yaml" and re.search(r"^task:", block, re.MULTILINE):
            raw = yaml.safe_load(block)
            build(TASKS[raw["task"]], raw, name_of(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_shown_compiles_and_names_public_functions(page):
    import peagle_jax

    for language, block in blocks(page):
        if language == "python":
            compile(block, name_of(page), "exec")
            for name in re.findall(r"peagle_jax\.(\w+)\(", block):
                assert name in peagle_jax.__all__, f"{name_of(page)}: peagle_jax.{name}"


# ---------------------------------------------------------------- the tree


def test_the_tree_names_every_file_and_no_other():
    tree = next(block for _, block in blocks(ARCHITECTURE) if block.startswith("peagle_jax/"))
    named = set()
    room = ""
    for line in tree.splitlines()[1:]:
        indent, name = re.match(r"( *)(\S+)", line).groups()
        if name.endswith("/"):
            room = name
        elif name.endswith(".py"):
            named.add(name if len(indent) == 2 else room + name)
    package = ROOT / "peagle_jax"
    files = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert named == files


def test_the_example_of_the_engine_runs(capsys, monkeypatch):
    """Three answers as text, each by its place in the requests."""
    monkeypatch.chdir(ROOT)
    (example,) = [text for language, text in blocks(ROOT / "docs" / "decode.md") if language]
    exec(example, {})
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line[0] for line in lines) == ["0", "1", "2"]
    assert all(line.endswith(("stop", "length")) for line in lines)


def test_the_faults_table_is_that_of_the_rows():
    rows = {}
    for line in (ROOT / "results" / "faults.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["fault"]] = row  # the last of each
    page = (ROOT / "docs" / "reliability.md").read_text()
    table = page.partition("<!-- faults table")[2].partition("<!-- end of faults table")[0]
    assert table.count("\n| ") == len(rows) + 2
    for name, row in rows.items():
        is_equal = "NO" if row["problems"] else "yes"
        cells = name, row["seconds"], len(row["moments"]), is_equal, row["commit"]
        assert "| " + " | ".join(map(str, cells)) + " |" in table, name


def test_the_mistakes_made_by_hand_are_those_of_the_rows():
    script = runpy.run_path(str(ROOT / "scripts" / "generate" / "support_table.py"))
    section = script["by_hand_section"](ROOT / "results" / "mutants_by_hand.jsonl")
    page = (ROOT / "docs" / "mutations.md").read_text()
    assert page.endswith(section)
    assert script["tool_section"](ROOT / "results" / "mutants.jsonl") in page
    assert "| NO |" not in section
