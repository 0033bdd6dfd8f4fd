"""The imports of files, as a graph: for the import contract and for `make size`."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from pathlib import Path

_DOORS = ("serve_spec", "serve_spec.__main__")


def package_files(root: Path) -> dict[str, Path]:
    """Return the files of the package by module, without those that open it to users.

    `serve_spec/__init__.py` and `__main__.py` show, lazily, what lies above all others.
    """
    files = {module_of(path, root): path for path in sorted((root / "serve_spec").rglob("*.py"))}
    return {module: path for module, path in files.items() if module not in _DOORS}


def package_graph(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module of the package imports."""
    files = package_files(root)
    return {module: imported_files(path, files) for module, path in files.items()}


def module_of(path: Path, root: Path) -> str:
    """Return the dotted name of a file below `root`; of an `__init__.py`, that of its folder."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_names(path: Path) -> set[tuple[str, str]]:
    """Return (module, name) of every import statement; the name is empty for `import module`.

    Imports in functions and under TYPE_CHECKING are included. Modules that are loaded by a string,
    such as kernels and commands, are not.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            assert node.module is not None
            found |= {(node.module, alias.name) for alias in node.names}
    return found


def imported_files(path: Path, modules: Collection[str]) -> set[str]:
    """Return those of `modules` that a file imports.

    `from package import name` imports the file `package/name.py` if there is one, else the package.
    """
    found = set()
    for module, name in imported_names(path):
        file = f"{module}.{name}"
        found.add(file if file in modules else module)
    return found & set(modules)


def used_names(path: Path, modules: Collection[str]) -> set[tuple[str, str]]:
    """Return (module, name) of everything that a file uses of `modules`, without underscore.

    Of a module that is imported as a whole, these are the attributes that the file reads.
    """
    found = set()
    whole: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module)):
                for alias in node.names:
                    if f"{module}.{alias.name}" in modules:
                        whole[alias.asname or alias.name] = f"{module}.{alias.name}"
                    elif module in modules:
                        found.add((module, alias.name))
            case ast.Attribute(value=ast.Name(id=name)):
                found.add((name, node.attr))
    named = {(whole.get(module, module), name) for module, name in found}
    return {(module, name) for module, name in named if module in modules and name[0] != "_"}


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other (strongly connected, two or more)."""
    reached = {node: _reached(node, graph) for node in graph}
    groups = {
        frozenset(other for other in reached[node] if node in reached[other]) for node in graph
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(start: str, graph: Mapping[str, Collection[str]]) -> set[str]:
    """Return all nodes that can be reached from `start`, itself included only by a circle."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(graph.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found
