"""Kinds of text that every machine has, to say on which text a drafter is good.

All of it comes from the Python standard library. Structured text is `json` (an index of a module's
functions), `table` (the same in Markdown) and `boilerplate` (imports, and the module's signatures
without bodies). Open text is `prose` (docstrings) and `comments`. `code` is both. All kinds of one
module fall on one side of the held-out split.
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
# characters: shorter texts say nothing, longer ones are cut into several
MIN_CHARS, MAX_CHARS = 400, 4000

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def kinds_of(module: Document) -> Iterator[tuple[str, str]]:
    """Kind and text of everything that one module's source gives.

    A file that is no Python of this version gives nothing.
    """
    try:
        tree = ast.parse(module.text)
    except (SyntaxError, ValueError):
        return
    for kind, make in MAKERS.items():
        for text in make(module.name, module.text, tree):
            if len(text) >= MIN_CHARS:
                yield kind, text


def module_of(name: str) -> str:
    """The module that a text of `by_kind` is of, by the text's name."""
    return name.rsplit("#", 1)[0]


def by_kind(modules: Sequence[Document]) -> dict[str, list[Document]]:
    """All texts of some modules, by kind, named after their module."""
    documents: dict[str, list[Document]] = {kind: [] for kind in KINDS}
    for module in modules:
        for number, (kind, text) in enumerate(kinds_of(module)):
            documents[kind].append(Document(f"{module.name}#{number}", text))
    return documents


def _functions(tree: ast.Module) -> list[tuple[str, FunctionNode]]:
    """Class (or "") and function, in source order, two levels deep."""
    functions = []
    for node in tree.body:
        if isinstance(node, FunctionNode):
            functions.append(("", node))
        elif isinstance(node, ast.ClassDef):
            functions += [(node.name, f) for f in node.body if isinstance(f, FunctionNode)]
    return functions


def _pieces(lines: Sequence[str], head: str = "", tail: str = "") -> Iterator[str]:
    """Lines in pieces of at most `MAX_CHARS` characters, each between `head` and `tail`."""
    piece: list[str] = []
    size = 0
    for line in lines:
        if piece and size + len(line) > MAX_CHARS:
            yield head + "\n".join(piece) + tail
            piece, size = [], 0
        piece.append(line)
        size += len(line) + 1
    if piece:
        yield head + "\n".join(piece) + tail


def _json(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    entries = []
    for owner, function in _functions(tree):
        entry = {
            "module": name,
            "class": owner or None,
            "name": function.name,
            "line": function.lineno,
            "arguments": [argument.arg for argument in function.args.args],
            "documented": ast.get_docstring(function) is not None,
        }
        entries.append(f"{json.dumps(entry, indent=2)},")
    yield from _pieces(entries, "[\n", "\n]\n")


def _table(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    rows = []
    for owner, function in _functions(tree):
        documented = "yes" if ast.get_docstring(function) else "no"
        num_arguments = len(function.args.args)
        cells = owner or "-", function.name, num_arguments, function.lineno, documented
        rows.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    titles = "| class | function | arguments | line | documented |"
    rule = "| --- | --- | --- | --- | --- |"
    yield from _pieces(rows, f"# {name}\n\n{titles}\n{rule}\n", "\n")


def _boilerplate(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = [ast.unparse(node) for node in imports]
    previous_owner = ""
    for owner, function in _functions(tree):
        if owner and owner != previous_owner:
            lines.append(f"\n\nclass {owner}:")
        previous_owner = owner
        arguments = ", ".join(argument.arg for argument in function.args.args)
        stub = f"def {function.name}({arguments}):\n    raise NotImplementedError\n"
        lines.append(textwrap.indent(stub, "    " if owner else ""))
    yield from _pieces(lines, f'"""Interface of {name}."""\n\n', "\n")


def _code(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    yield from _pieces(source.split("\n"))


def _prose(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    """Docstrings of more than a line."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FunctionNode):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) > 80:
                lines += [*docstring.split("\n"), ""]
    yield from _pieces(lines)


def _comments(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    """Blocks of comment lines."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError):
        return
    lines: list[str] = []
    last_row = 0
    for token in tokens:
        if token.type == tokenize.COMMENT and len(token.string) > 20:
            if token.start[0] != last_row + 1 and lines:
                lines.append("")
            lines.append(token.string)
            last_row = token.start[0]
    yield from _pieces(lines)


MAKERS: dict[str, Callable[[str, str, ast.Module], Iterator[str]]] = {
    "json": _json,
    "table": _table,
    "boilerplate": _boilerplate,
    "code": _code,
    "prose": _prose,
    "comments": _comments,
}
