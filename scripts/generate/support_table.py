"""The README's table of supported targets, from the results of the tests: what was checked of every family, and whether it passed.

    .venv/bin/python -m pytest -m "not long" --junitxml runs/tests.xml
    .venv/bin/python scripts/generate/support_table.py runs/tests.xml [--check]

Rewrites the lines between the two markers in README.md, and docs/mutations.md; `--check` only says whether they would change.
Agreement with real vLLM is read from results/targets.jsonl (scripts/peers/check_targets.py).
"""

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = (
    "<!-- support table: scripts/generate/support_table.py -->",
    "<!-- end of support table -->",
)
FAMILIES = {  # title: (cases of tests/targets/families.py, largest configuration, its name for vLLM's check)
    "Llama 3": (("llama", "llama_tied"), "llama-3.1-8b-instruct", "llama"),
    "Qwen3": (
        ("qwen3", "plain", "tied", "one_kv_head", "bias", "sliding", "linear", "llama3", "yarn"),
        "qwen3-8b",
        "qwen3",
    ),
    "Qwen3-MoE": (("qwen3_moe", "qwen3_moe_raw"), "qwen3-coder-30b-a3b-instruct", "qwen3_moe"),
    "GPT-OSS": (("gpt_oss",), "gpt-oss-120b", "gpt_oss"),
    "Gemma 4": (("gemma4", "gemma4_moe", "gemma4_ple"), "gemma-4-31b-it", "gemma4"),
}
QWEN3 = "tests.targets.test_qwen3"  # has the older tests, of the same things


def results(path: Path) -> dict[str, bool]:
    """Test -> whether it passed; skipped ones are left out."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is None:
            found[f"{case.get('classname')}::{case.get('name')}"] = (
                case.find("failure") is None and case.find("error") is None
            )
    return found


def tally(tests: dict[str, bool], pattern: str) -> str:
    """'yes (3)' where all tests of that name passed, what failed otherwise, and nothing where there is none."""
    hits = [passed for name, passed in tests.items() if re.search(pattern, name)]
    return (
        ""
        if not hits
        else f"yes ({len(hits)})"
        if all(hits)
        else f"FAILED ({hits.count(False)} of {len(hits)})"
    )


def mutations() -> dict[str, str]:
    """Test of a mutation -> the case it mutates, as tests/targets/test_families.py lists them."""
    source = (ROOT / "tests/targets/test_families.py").read_text()
    return dict(re.findall(r'^    "([^"]+)": \("(\w+)",', source, re.MULTILINE))


def row(title: str, tests: dict[str, bool], vllm: dict[str, dict]) -> str:
    cases, largest, family = FAMILIES[title]
    names = "|".join(cases)
    where = (
        rf"({QWEN3}|tests.targets.test_families)"
        if title == "Qwen3"
        else "tests.targets.test_families"
    )
    mutated = "|".join(re.escape(name) for name, case in mutations().items() if case in cases)
    decoding = (
        r"test_lossless::test_real_heads"
        if title == "Qwen3"
        else rf"test_every_family::test_a_head_with_rings\[({names})\]"
    )
    checks = [
        tally(tests, rf"{where}::test_logits_taps_and_cache\[({names})\]"),
        tally(tests, rf"{where}::test_exported_folder_is_what_transformers_wrote\[({names})\]"),
        tally(tests, rf"test_formats::test_bfloat16\[({names})\]"),
        tally(tests, rf"test_parity_notices\[({mutated})\]") if mutated else "",
        tally(tests, decoding),
        tally(tests, rf"test_tracing::test_full_size\[{largest}\]").replace("yes (1)", largest),
    ]
    real = vllm.get(family)
    checks.append(
        f"{real['equal']} of {real['prompts']}, {real['accepted']} of {real['drafted']} drafts"
        if real
        else ""
    )
    return f"| {title} | " + " | ".join(checks) + " |"


def table(tests: dict[str, bool]) -> str:
    file = ROOT / "results/targets.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    vllm = {r["family"]: r for r in rows}
    head = (
        "family",
        "logits, taps, cache",
        "exports",
        "bfloat16",
        "mutations noticed",
        "P-EAGLE = greedy",
        "largest traced",
        "real vLLM: texts, accepted",
    )
    return "\n".join(
        [
            f"| {' | '.join(head)} |",
            "| --- " * len(head) + "|",
            *(row(title, tests, vllm) for title in FAMILIES),
        ]
    )


def mutation_page(tests: dict[str, bool]) -> str:
    lines = [
        "# What parity notices",
        "",
        "Each special thing of a family, taken away or changed in our model of it (tests/targets/test_families.py): the logits then",
        "differ from transformers' by more than 50 times the tolerance of 2e-5. By scripts/generate/support_table.py, from the tests.",
        "",
        "| family's case | changed | noticed |",
        "| --- | --- | --- |",
    ]
    for name, case in mutations().items():
        lines.append(
            f"| {case} | {name} | {tally(tests, re.escape(f'test_parity_notices[{name}]')).removesuffix(' (1)')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    new = f"{before}{BEGIN}\n{table(results(args.results))}\n{END}{rest.split(END)[1]}"
    page, listed = ROOT / "docs/mutations.md", mutation_page(results(args.results))
    if args.check:
        same = new == text and page.exists() and page.read_text() == listed
        sys.exit(
            0
            if same
            else "README.md's support table or docs/mutations.md is not what the tests say: run scripts/generate/support_table.py"
        )
    readme.write_text(new)
    page.write_text(listed)


if __name__ == "__main__":
    main()
