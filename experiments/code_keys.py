"""The key of the code that a result depends on, found by following imports.

A cached stage, a trained head and a finished row are found again by keys, and each key covers the
code that made them. `code_key` starts at the modules that are called, follows their imports through
`peagle_jax` and `experiments`, and hashes the syntax tree of each module that it reaches:

- Imports inside functions are followed as well: kernels are imported when they are first needed.
- `from package import name` is resolved through the package's __init__.py to the module that
  defines the name, so that a stage does not depend on what else the package exports.
- Comments, docstrings and layout are not part of the key.
"""

import ast
import copy
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from experiments import folders

PACKAGES = ("peagle_jax", "experiments")

# Modules, or packages with all their modules, that cannot change a number, and why. They are
# neither hashed nor followed, so that a new plot or option does not train every head again.
WITHOUT_INFLUENCE = {
    "peagle_jax.cli": "reads the command line; what it read is part of a run's configuration",
    "peagle_jax.report": "draws and words what was measured",
    "peagle_jax.provenance": "records machine, versions and command",
    "peagle_jax.progress": "shows how far the work is",
    "peagle_jax.atomic_write": "writes the bytes that it is given",
    "peagle_jax.checkpoints.model_card": "writes the README.md of an exported head",
    "experiments.base": "variants and measurements are part of the key by their values",
    "experiments.budgets": "sizes are part of the key by their values",
    "experiments.code_keys": "makes the keys",
    "experiments.folders": "says where files are",
    "experiments.stages.cache": "finds what a stage made, and makes nothing itself",
}

# statements of an __init__.py that only give names
NAMING = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def code_key(modules: tuple[str, ...], without: tuple[str, ...] = ()) -> str:
    """The key of some modules and of everything that they import.

    Args:
      modules: dotted names, for example ("peagle_jax.pipelines.train_head",).
      without: modules, or packages with all their modules, that cannot change what these make.

    Raises:
      ValueError: a module does not exist, or an import cannot be followed.
    """
    digest = hashlib.sha256()
    for module in imported_modules(modules, without):
        digest.update(f"{module}\n{_syntax(module)}\n".encode())
    return digest.hexdigest()[:12]


def imported_modules(modules: tuple[str, ...], without: tuple[str, ...] = ()) -> list[str]:
    """The modules themselves and all modules of this repository that they import, sorted.

    Args:
      without: as in `code_key`.

    Raises:
      ValueError: a module does not exist, or an import cannot be followed.
    """
    reached: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in reached or not _has_influence(module, without):
            continue
        reached.add(module)
        waiting += _imports(module)
        waiting += _parent_packages_that_run_code(module)
    return sorted(reached)


def _has_influence(module: str, without: tuple[str, ...]) -> bool:
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return not any(name in WITHOUT_INFLUENCE or name in without for name in names)


def _imports(module: str) -> Iterator[str]:
    """Modules of this repository that a module imports, wherever in its file."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and _is_ours(source := _source(node, module)):
            yield from (_defining_module(source, alias.name) for alias in node.names)


def _source(node: ast.ImportFrom, module: str) -> str:
    """The absolute name of the module after `from`."""
    if not node.level:
        return node.module or ""
    package = module if _is_package(module) else module.rpartition(".")[0]
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _defining_module(source: str, name: str) -> str:
    """The module that `from source import name` needs: a submodule, or where the name is defined.

    Raises:
      ValueError: the name stands neither in the package nor beside it.
    """
    if not _is_package(source):
        return source
    # also names that a package imports when they are first used are written down for type checkers
    for node in ast.walk(_parse(_existing_path(source), keep_type_checking=True)):
        if isinstance(node, ast.ImportFrom):
            origin = _source(node, source)
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            # `from package import module` in the package's own __init__.py names the module below
            if name in names and origin != source and _is_ours(origin):
                return _defining_module(origin, names[name])
    if name in _defined_names(source):
        return source
    if _path(f"{source}.{name}") is not None:
        return f"{source}.{name}"
    raise ValueError(
        f"from {source} import {name}: must be a module, or named in {source}/__init__.py, so that "
        "the import can be followed; import it from the module that defines it"
    )


def _defined_names(package: str) -> set[str]:
    """Names that a package's __init__.py defines itself."""
    names: set[str] = set()
    for node in _tree(package).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _parent_packages_that_run_code(module: str) -> list[str]:
    """Packages around a module whose __init__.py does more than name things.

    Importing a module runs them too: a setting of JAX there would change numbers.
    """
    parts = module.split(".")
    packages = (".".join(parts[:count]) for count in range(1, len(parts)))
    return [
        package
        for package in packages
        if any(not isinstance(node, NAMING) for node in _without_docstring(_tree(package).body))
    ]


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def _is_package(module: str) -> bool:
    path = _path(module)
    return path is not None and path.name == "__init__.py"


def _path(module: str) -> Path | None:
    """A module's file; None where there is none."""
    place = folders.ROOT.joinpath(*module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _tree(module: str) -> ast.Module:
    """A module's code, without what only type checkers read."""
    return _parse(_existing_path(module), keep_type_checking=False)


def _existing_path(module: str) -> Path:
    path = _path(module)
    if path is None:
        raise ValueError(
            f"{module}: must be a module of this repository; got no such file under "
            f"{folders.ROOT}; correct the name where it is imported or listed"
        )
    return path


@functools.cache
def _parse(path: Path, keep_type_checking: bool) -> ast.Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tree if keep_type_checking else WithoutTypeChecking().visit(tree)


class WithoutTypeChecking(ast.NodeTransformer):
    """Removes `if TYPE_CHECKING:` blocks, which never run."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        is_for_types = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        return node.orelse if is_for_types else node


def _syntax(module: str) -> str:
    """What a module's code does, as text: without comments, docstrings and layout."""
    tree = copy.deepcopy(_tree(module))
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            node.body = _without_docstring(node.body) or [ast.Pass()]
    return ast.dump(tree)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return body[1:] if is_docstring else body


def forget() -> None:
    """Reads all files anew from now on: for tests that change them."""
    code_key.cache_clear()
    _parse.cache_clear()
