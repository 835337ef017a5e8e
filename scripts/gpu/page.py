"""Tables of Markdown pages that commands write anew."""

import re
from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The table, without a line end."""
    ruled = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled)


def with_table(text: str, name: str, table: str) -> str:
    """The page with the table between `<!-- NAME ... -->` and `<!-- end -->`."""
    markers = re.compile(rf"(<!-- {name}[^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
    return markers.sub(lambda m: f"{m[1]}{table}\n{m[2]}", text)
