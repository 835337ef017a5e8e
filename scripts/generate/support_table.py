"""The table of supported targets in docs/targets.md, and docs/mutations.md, from test results.

    .venv/bin/python -m pytest -m "not peer" --junitxml runs/tests.xml
    .venv/bin/python scripts/generate/support_table.py runs/tests.xml [--check]

For each family the table says what was checked, and whether it passed. It replaces the lines
between the two markers in docs/targets.md. `--check` writes nothing and exits with 1 if either
page would change. Agreement with real vLLM is read from results/targets.jsonl, which
scripts/peers/check_targets.py writes.
"""

import argparse
import dataclasses
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from peagle_jax.old_names import AGREEMENT_ROW_KEYS, with_new_names

ROOT = Path(__file__).parents[2]
PAGE, MUTATIONS_PAGE = ROOT / "docs/targets.md", ROOT / "docs/mutations.md"
BEGIN = "<!-- support table: scripts/generate/support_table.py -->"
END = "<!-- end of support table -->"
COLUMNS = (
    "family",
    "logits, hidden states, cache",
    "exports",
    "bfloat16",
    "mutations noticed",
    "P-EAGLE = greedy",
    "largest traced",
    "real vLLM: texts, accepted",
)
FAMILY_TESTS = r"tests\.targets\.test_families"


@dataclasses.dataclass(frozen=True)
class FamilyTests:
    """Where the checks of one family are found.

    Attributes:
      cases: parameters of the tests, from tests/targets/families.py and test_qwen3.py.
      largest: the largest configuration in configs/targets.
      vllm_name: the family's name in results/targets.jsonl.
      modules: pattern of the test modules for logits and exports.
      decoding: pattern of the tests that compare P-EAGLE's output with greedy decoding.
    """

    cases: Sequence[str]
    largest: str
    vllm_name: str
    modules: str = FAMILY_TESTS
    decoding: str = r"test_every_family::test_a_head_with_rings\[({cases})\]"


FAMILIES = {
    "Llama 3": FamilyTests(("llama", "llama_tied"), "llama-3.1-8b-instruct", "llama"),
    "Qwen3": FamilyTests(
        ("qwen3", "plain", "tied", "one_kv_head", "bias", "sliding", "linear", "llama3", "yarn"),
        "qwen3-8b",
        "qwen3",
        modules=rf"({FAMILY_TESTS}|tests\.targets\.test_qwen3)",
        decoding=r"test_lossless::test_real_heads",
    ),
    "Qwen3-MoE": FamilyTests(
        ("qwen3_moe", "qwen3_moe_raw"), "qwen3-coder-30b-a3b-instruct", "qwen3_moe"
    ),
    "GPT-OSS": FamilyTests(("gpt_oss",), "gpt-oss-120b", "gpt_oss"),
    "Gemma 4": FamilyTests(("gemma4", "gemma4_moe", "gemma4_ple"), "gemma-4-31b-it", "gemma4"),
}


def read_results(path: Path) -> dict[str, bool]:
    """Test -> whether it passed, from pytest's JUnit file; skipped tests are left out."""
    passed = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            passed[f"{case.get('classname')}::{case.get('name')}"] = not failed
    return passed


def summarize(results: Mapping[str, bool], pattern: str) -> str:
    """ "yes (3)" if all three tests of that name passed, how many failed, or "" without any."""
    matching = [passed for name, passed in results.items() if re.search(pattern, name)]
    if not matching:
        return ""
    if all(matching):
        return f"yes ({len(matching)})"
    return f"FAILED ({matching.count(False)} of {len(matching)})"


def read_mutations() -> dict[str, str]:
    """Mutation -> the case that it changes, as tests/targets/test_families.py lists them."""
    source = (ROOT / "tests/targets/test_families.py").read_text()
    return dict(re.findall(r'^    "([^"]+)": \(\s*"(\w+)",', source, re.MULTILINE))


def row(title: str, results: Mapping[str, bool], vllm: Mapping[str, dict]) -> str:
    family = FAMILIES[title]
    cases = "|".join(family.cases)
    mutations = "|".join(
        re.escape(name) for name, case in read_mutations().items() if case in family.cases
    )
    logits_tests = "test_logits_hidden_states_and_cache"
    export_tests = "test_exported_folder_is_what_transformers_wrote"
    traced = summarize(results, rf"test_tracing::test_full_size\[{family.largest}\]")
    cells = [
        title,
        summarize(results, rf"{family.modules}::{logits_tests}\[({cases})\]"),
        summarize(results, rf"{family.modules}::{export_tests}\[({cases})\]"),
        summarize(results, rf"test_formats::test_bfloat16\[({cases})\]"),
        summarize(results, rf"test_parity_notices\[({mutations})\]") if mutations else "",
        summarize(results, family.decoding.format(cases=cases)),
        traced.replace("yes (1)", family.largest),
        vllm_agreement(vllm.get(family.vllm_name)),
    ]
    return f"| {' | '.join(cells)} |"


def vllm_agreement(result: Mapping | None) -> str:
    """One cell from a row of results/targets.jsonl; "" where there is none."""
    if result is None:
        return ""
    texts = f"{result['equal']} of {result['num_prompts']}"
    return f"{texts}, {result['num_accepted_tokens']} of {result['num_draft_tokens']} drafts"


def read_agreement(path: Path) -> dict[str, dict]:
    """Family -> its last row; {} where there is no file. Former names of keys are read too."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [with_new_names(json.loads(line), AGREEMENT_ROW_KEYS, str(path)) for line in lines]
    return {row["family"]: row for row in rows}


def support_table(results: Mapping[str, bool]) -> str:
    vllm = read_agreement(ROOT / "results/targets.jsonl")
    rows = [row(title, results, vllm) for title in FAMILIES]
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|", *rows])


def mutations_page(results: Mapping[str, bool]) -> str:
    lines = [
        "# Mutations that the comparison with transformers notices",
        "",
        "The tests compare every family with transformers on tiny random models. To confirm that",
        "this comparison would notice a mistake, each architectural option of a family is removed",
        "or changed in our model of it (tests/targets/test_families.py). The logits must then",
        "differ from transformers' by more than 50 times the tolerance of 2e-5.",
        "scripts/generate/support_table.py writes this page from the test results.",
        "",
        "| family's case | changed | noticed |",
        "| --- | --- | --- |",
    ]
    for name, case in read_mutations().items():
        noticed = summarize(results, re.escape(f"test_parity_notices[{name}]"))
        lines.append(f"| {case} | {name} | {noticed.removesuffix(' (1)')} |")
    tool = tool_section(ROOT / "results/mutants.jsonl")
    return "\n".join(lines) + "\n" + tool + by_hand_section(ROOT / "results/mutants_by_hand.jsonl")


def tool_section(path: Path) -> str:
    """What scripts/measure/mutants.py found last of each mutant."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    last = {(r["area"], r["seed"], r["number"]): r for r in rows if "area" in r}
    lines = [
        "",
        "# Mutants made by a tool",
        "",
        "cosmic-ray changes one operator, comparison, number, truth value, loop or exception of",
        "a file. Mutants are drawn at random by `.venv/bin/python scripts/measure/mutants.py`",
        "([rows](../results/mutants.jsonl)). Tests run until one fails: the test files that name",
        "the module, the folders of its area, all of `make test`, and the slow tests of both.",
        "",
        "| area | mutants | named files | folders | `make test` | slow | alive | equivalent |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    areas = list(dict.fromkeys(area for area, *_ in last))
    for area in areas:
        of_area = [row for row in last.values() if row["area"] == area]
        stages = [row["found_by"] for row in of_area]
        counts = [stages.count(stage) for stage in ("near", "room", "test")]
        counts.append(stages.count("slow") + stages.count("all"))
        is_equivalent = [row.get("reason", "").startswith("equivalent") for row in of_area]
        counts += [stages.count(None) - sum(is_equivalent), sum(is_equivalent)]
        lines.append(f"| {area} | {len(of_area)} | {' | '.join(map(str, counts))} |")
    alive = [row for row in last.values() if row["found_by"] is None]
    if alive:
        lines += [
            "",
            "| not found | place | before | after | why |",
            "| --- | --- | --- | --- | --- |",
        ]
    for row in alive:
        place = f"{row['file'].removeprefix('peagle_jax/')}:{row['line']}"
        cells = [f"`{row[key].replace('|', chr(92) + '|')}`" for key in ("before", "after")]
        reason = row.get("reason", f"looked for until the stage {row['until']!r}")
        lines.append(
            f"| {row['area']} {row['number']} | {place} | {' | '.join(cells)} | {reason} |"
        )
    return "\n".join(lines) + "\n"


def by_hand_section(path: Path) -> str:
    """What scripts/measure/mutants_by_hand.py found last of each mistake."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    last = {row["mistake"]: row for row in rows}
    lines = [
        "",
        "# Mistakes made by hand",
        "",
        "Each was once made and noticed by no test of its place. It is made again in a copy of the",
        "checkout by `.venv/bin/python scripts/measure/mutants_by_hand.py`, and the tests that are",
        "named run ([rows](../results/mutants_by_hand.jsonl)).",
        "",
        "| mistake | file of peagle_jax/ | tests | noticed |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in last.items():
        tests = ", ".join(test.replace("::", ": ") for test in row["tests"].split())
        noticed = "yes" if row["noticed"] else "NO"
        lines.append(f"| {name} | {row['file']} | {tests} | {noticed} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="JUnit file of a test run")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page would change"
    )
    args = parser.parse_args()
    results = read_results(args.results)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    new_page = f"{before}{BEGIN}\n{support_table(results)}\n{END}{rest.split(END)[1]}"
    new_mutations = mutations_page(results)
    if args.check:
        old_mutations = MUTATIONS_PAGE.read_text() if MUTATIONS_PAGE.exists() else None
        if (page, old_mutations) != (new_page, new_mutations):
            sys.exit(
                "docs/targets.md or docs/mutations.md is not what the test results say: "
                "run scripts/generate/support_table.py"
            )
        return
    PAGE.write_text(new_page)
    MUTATIONS_PAGE.write_text(new_mutations)


if __name__ == "__main__":
    main()
