"""docs/chat_templates.md: what is trained of three conversations, with published chat templates.

    .venv/bin/python scripts/generate/template_table.py FOLDER [--check]

FOLDER has the templates as NAME.jinja. The tokenizer is the packaged target's; it only says which
tags are special tokens of its own, and spans are of characters. What stands between the two markers
of the page is written anew. `--check` writes nothing and exits with
1 if the page would change.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from peagle_jax.chat.pieces import Conversation
from peagle_jax.chat.trained_spans import trained_spans
from peagle_jax.types import InputError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/chat_templates.md"
TOKENIZER = ROOT / "peagle_jax/assets/target"
BEGIN = "<!-- template table: scripts/generate/template_table.py -->"
END = "<!-- end of template table -->"

CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Paris"}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "two turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Second."},
    ],
    "with reasoning": [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "reasoning_content": "Think.", "content": "First."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "reasoning_content": "Again.", "content": "Second."},
    ],
    "with a tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "Wet."},
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = page(before, table(arguments.folder))
    if arguments.check:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


def page(text: str, rows: str) -> str:
    """The page with other lines between its markers."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{rows}\n{END}{rest.split(END)[1]}"


def table(folder: Path) -> str:
    """A row for each template of a folder, with what is trained of each conversation."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    lines = [
        f"| template | {' | '.join(CONVERSATIONS)} |",
        "| --- " * (1 + len(CONVERSATIONS)) + "|",
    ]
    files = sorted(folder.glob("*.jinja"))
    if not files:
        raise SystemExit(f"{folder}: there must be templates; got no *.jinja; name their folder")
    for file in files:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        cells = [cell(tokenizer, messages) for messages in CONVERSATIONS.values()]
        lines.append(f"| {file.stem} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(tokenizer, messages: list[dict[str, Any]]) -> str:
    """The trained spans of a conversation, or why it is refused."""
    try:
        text, spans = trained_spans(tokenizer, Conversation(tuple(messages)), "conversation")
    except InputError as error:
        return f"refused: {error.rule}; {error.got}".replace("|", "\\|")
    return " ".join(code(text[start:end]) for start, end in spans)


def code(text: str) -> str:
    """A text in one line of a table."""
    shown = text.replace("\n", "\\n").replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


if __name__ == "__main__":
    sys.exit(main())
