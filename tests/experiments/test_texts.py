"""Kinds of text of one module: each is what its words say, and of a length that says something."""

import ast
import json
import shutil
import textwrap

import pytest

from experiments import texts
from experiments.texts import KINDS, MAX_CHARS, MIN_CHARS, by_kind, kinds_of
from peagle_jax.corpus import Document

WORDS = (
    "It says in many words what this is for, so that there is enough of it to be read as prose by "
    "whoever wants to."
)
HEAD = f'''"""About the whole.

{WORDS}
"""
import os
from json import (
    dumps,
    loads,
)

# a comment of more than twenty characters
# and its second line, {WORDS}
'''
FUNCTION = '''
def first{i}(alpha, beta={i}, *rest):
    """{words} Function {i}."""
    # inside of number {i}: {words}
    return os.path, dumps, loads  # short
'''
CLASS = f'''
class Room:
    """Short."""

    def enter(self, door):
        """{WORDS} A method."""
        return door * 17

    async def leave(self):
        def hidden():
            return 1
        return hidden
'''
MODULE = HEAD + "".join(FUNCTION.format(i=i, words=WORDS) for i in range(8)) + CLASS


@pytest.fixture(scope="module")
def kinds():
    found: dict[str, list[str]] = {}
    for kind, piece in kinds_of(Document("room/module.py", MODULE)):
        found.setdefault(kind, []).append(piece)
    assert list(found) == list(KINDS) and all(len(pieces) == 1 for pieces in found.values())
    return {kind: pieces[0] for kind, pieces in found.items()}


FUNCTIONS = [*((None, f"first{i}") for i in range(8)), ("Room", "enter"), ("Room", "leave")]


def test_json_is_an_index_of_the_functions(kinds):
    rows = json.loads(kinds["json"].replace("},\n]", "}\n]"))
    assert [(row["class"], row["name"]) for row in rows] == FUNCTIONS
    assert [row["documented"] for row in rows] == [True] * 9 + [False] and rows[1]["arguments"] == [
        "alpha",
        "beta",
    ]
    lines = MODULE.splitlines()
    assert all(
        row["module"] == "room/module.py" and f"def {row['name']}(" in lines[row["line"] - 1]
        for row in rows
    )


def test_the_table_says_the_same(kinds):
    head, *rows = [line for line in kinds["table"].splitlines() if line.startswith("|")]
    assert head == "| class | function | arguments | line | documented |" and kinds[
        "table"
    ].startswith("# room/module.py\n\n")
    cells = [row.strip("| ").split(" | ") for row in rows[1:]]
    assert [(None if a == "-" else a, b) for a, b, *_ in cells] == FUNCTIONS
    assert [c[2] for c in cells] == ["2"] * 9 + ["1"] and [c[4] for c in cells] == ["yes"] * 9 + [
        "no"
    ]


def test_boilerplate_has_no_bodies(kinds):
    tree = ast.parse(kinds["boilerplate"])
    assert [ast.unparse(node) for node in tree.body[1:3]] == [
        "import os",
        "from json import dumps, loads",
    ]
    assert [f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)] == [
        name for _, name in FUNCTIONS
    ]
    assert (
        kinds["boilerplate"].count("raise NotImplementedError") == 10
        and "return" not in kinds["boilerplate"]
        and WORDS not in kinds["boilerplate"]
    )


def test_code_is_the_source(kinds):
    assert kinds["code"] == MODULE


def test_prose_is_docstrings(kinds):
    lines = [line for line in kinds["prose"].splitlines() if line]
    assert lines == [
        "About the whole.",
        WORDS,
        *(f"{WORDS} Function {i}." for i in range(8)),
        f"{WORDS} A method.",
    ]


def test_comments_are_blocks_of_long_ones(kinds):
    assert kinds["comments"].split("\n\n") == [
        f"# a comment of more than twenty characters\n# and its second line, {WORDS}",
        *(f"# inside of number {i}: {WORDS}" for i in range(8)),
    ]


@pytest.mark.parametrize(
    "source", ["def (", "x = 1\n  y = 2", "print 'as it was'", "x = 'open", "a\0b"]
)
def test_what_is_no_python_gives_nothing(source):
    assert list(kinds_of(Document("m.py", source + "\n" * MIN_CHARS))) == []


def test_short_texts_say_nothing():
    short = "x = 1\n" * ((MIN_CHARS - 1) // 6)
    assert (
        list(kinds_of(Document("m.py", short))) == [] and list(kinds_of(Document("m.py", ""))) == []
    )
    assert [kind for kind, _ in kinds_of(Document("m.py", short + "y = 23\n" * 4))] == ["code"]


def test_long_texts_are_cut_between_lines():
    source = MODULE + "".join(
        textwrap.dedent(f"""
        def more{i}(one, two):
            \"\"\"{WORDS} More {i}.\"\"\"
            # why number {i} is there, {WORDS}
            return one + {i}
        """)
        for i in range(220)
    )
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for kind, piece in kinds_of(Document("m.py", source)):
        found[kind].append(piece)
    longest = max(map(len, source.splitlines()))
    for kind, pieces in found.items():
        assert len(pieces) > 1, kind
        assert all(MIN_CHARS <= len(piece) <= MAX_CHARS + 150 for piece in pieces), (
            kind
        )  # a head and a tail beside them
        assert all(len(piece) > MAX_CHARS - 2 * longest for piece in pieces[:-1]), kind
    whole = "\n".join(found["code"])  # but for an end too short to say anything
    assert source.startswith(whole) and len(source) - len(whole) <= MIN_CHARS
    names = [
        row["name"] for piece in found["json"] for row in json.loads(piece.replace("},\n]", "}\n]"))
    ]
    assert (
        names == [*(name for _, name in FUNCTIONS), *(f"more{i}" for i in range(220))][: len(names)]
        and len(names) > 220
    )
    assert all(piece.startswith("# m.py\n\n| class | function |") for piece in found["table"])


def test_by_kind_of_the_standard_library():
    modules = [
        Document(f"{m.__name__}.py", m.__loader__.get_source(m.__name__))
        for m in (ast, json, textwrap, shutil)
    ]
    found = by_kind([*modules, Document("broken.py", "def (")])
    assert tuple(found) == KINDS == tuple(texts.MAKERS) and all(found.values())
    every = [d for documents in found.values() for d in documents]
    assert len({d.name for d in every}) == len(every) and {d.name.split("#")[0] for d in every} == {
        m.name for m in modules
    }
    assert all(MIN_CHARS <= len(d.text) <= MAX_CHARS + 500 for d in every)
    assert {*texts.STRUCTURED, "code", *texts.OPEN} == set(KINDS)
