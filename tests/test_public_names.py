"""What `import peagle_jax` offers: the same names everywhere, and an example that runs."""

import ast
import re
import textwrap
from pathlib import Path

import peagle_jax

PACKAGE = Path(peagle_jax.__file__).parent


def test_the_public_names_are_the_same_everywhere():
    """`__all__`, the lazy imports, what type checkers see, and the docstring."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    checked = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {name: f"peagle_jax.{module}" for name, module in peagle_jax._MODULES.items()}
    assert checked == lazy
    assert peagle_jax.__all__ == sorted(lazy)
    described = re.findall(r"^  (\w+)  +\S", peagle_jax.__doc__, re.MULTILINE)
    assert sorted(described) == peagle_jax.__all__
    assert 15 <= len(described) <= 25


def test_the_example_in_the_docstring_runs(capsys):
    blocks = re.findall(r"(?:^    .*\n|^\n)+", peagle_jax.__doc__, re.MULTILINE)
    example = max(blocks, key=len)
    assert "load_pair" in example and "generate" in example
    exec(textwrap.dedent(example), {})
    assert "tokens per forward of the target" in capsys.readouterr().out


def test_the_version_and_what_completion_offers():
    assert re.fullmatch(r"\d+\.\d+\.\d+.*|not installed", peagle_jax.__version__)
    assert dir(peagle_jax) == sorted([*peagle_jax.__all__, "__version__"])
