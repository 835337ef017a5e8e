"""Kinds of text that every machine has, for saying on which text a drafter is good: all of it from the Python standard library.

Structured: `json` (an index of a module's functions), `table` (the same in Markdown), `boilerplate` (imports, and the module's
signatures without bodies). Open: `prose` (docstrings), `comments`. And `code`, which is both. All kinds of one module fall on one side
of the held-out split.
"""

import ast
import io
import json
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Sequence

from peagle_jax.corpus import Document

KINDS = ("json", "table", "boilerplate", "code", "prose", "comments")
STRUCTURED, OPEN = ("json", "table", "boilerplate"), ("prose", "comments")
LEAST, MOST = 400, 4000  # characters: shorter texts say nothing, longer ones are cut into several


def kinds_of(module: Document) -> Iterator[tuple[str, str]]:
    """(kind, text) of everything that one module's source gives; nothing for a file that is no Python of today."""
    try:
        tree = ast.parse(module.text)
    except (SyntaxError, ValueError):
        return
    for kind, make in MAKERS.items():
        for text in make(module.name, module.text, tree):
            if len(text) >= LEAST:
                yield kind, text


def by_kind(modules: Sequence[Document]) -> dict[str, list[Document]]:
    """All texts of some modules, by kind, named after their module."""
    out: dict[str, list[Document]] = {kind: [] for kind in KINDS}
    for module in modules:
        for number, (kind, text) in enumerate(kinds_of(module)):
            out[kind].append(Document(f"{module.name}#{number}", text))
    return out


def _functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(class or "", function) in source order, two levels deep."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(("", node))
        elif isinstance(node, ast.ClassDef):
            found += [
                (node.name, f)
                for f in node.body
                if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
    return found


def _pieces(lines: Sequence[str], head: str = "", tail: str = "") -> Iterator[str]:
    """Lines in pieces of at most `MOST` characters, each between `head` and `tail`."""
    piece, size = [], 0
    for line in lines:
        if piece and size + len(line) > MOST:
            yield head + "\n".join(piece) + tail
            piece, size = [], 0
        piece.append(line)
        size += len(line) + 1
    if piece:
        yield head + "\n".join(piece) + tail


def _json(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    rows = [
        json.dumps(
            {
                "module": name,
                "class": owner or None,
                "name": f.name,
                "line": f.lineno,
                "arguments": [a.arg for a in f.args.args],
                "documented": ast.get_docstring(f) is not None,
            },
            indent=2,
        )
        for owner, f in _functions(tree)
    ]
    yield from _pieces([f"{row}," for row in rows], "[\n", "\n]\n")


def _table(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    rows = [
        f"| {owner or '-'} | {f.name} | {len(f.args.args)} | {f.lineno} | {'yes' if ast.get_docstring(f) else 'no'} |"
        for owner, f in _functions(tree)
    ]
    yield from _pieces(
        rows,
        f"# {name}\n\n| class | function | arguments | line | documented |\n| --- | --- | --- | --- | --- |\n",
        "\n",
    )


def _boilerplate(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    lines = [
        ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    owner_before = ""
    for owner, f in _functions(tree):
        if owner != owner_before and owner:
            lines.append(f"\n\nclass {owner}:")
        owner_before = owner
        arguments = ", ".join(a.arg for a in f.args.args)
        lines.append(
            textwrap.indent(
                f"def {f.name}({arguments}):\n    raise NotImplementedError\n",
                "    " if owner else "",
            )
        )
    yield from _pieces(lines, f'"""Interface of {name}."""\n\n', "\n")


def _code(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    yield from _pieces(source.split("\n"))


def _prose(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    nodes = (
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    texts = [text for node in nodes if (text := ast.get_docstring(node)) and len(text) > 80]
    yield from _pieces([line for text in texts for line in (*text.split("\n"), "")])


def _comments(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    """Blocks of comment lines."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError):
        return
    lines, row = [], 0
    for token in tokens:
        if token.type == tokenize.COMMENT and len(token.string) > 20:
            if token.start[0] != row + 1 and lines:
                lines.append("")
            lines.append(token.string)
            row = token.start[0]
    yield from _pieces(lines)


MAKERS: dict[str, Callable[[str, str, ast.Module], Iterator[str]]] = {
    "json": _json,
    "table": _table,
    "boilerplate": _boilerplate,
    "code": _code,
    "prose": _prose,
    "comments": _comments,
}
