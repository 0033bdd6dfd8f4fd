"""Print the sizes of parts of the repository beside their limits: `make size`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tools.imports import circles, module_of, package_files, package_graph, used_names

ROOT = Path(__file__).parents[1]
Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"

PUBLIC_NAMES = {
    "adaptive": 9,
    "bench": 3,
    "config": 63,
    "core": 71,
    "engine": 18,
    "kvcache": 9,
    "layers": 38,
    "models": 22,
    "ops": 80,
    "parallel": 11,
    "profile": 15,
    "scheduler": 5,
    "serving": 10,
    "serving/deployment": 11,
    "serving/protocols": 4,
    "serving/proxy": 7,
    "serving/router": 11,
    "serving/statistics": 15,
    "structured": 6,
    "worker": 16,
}
"""How many names of a folder files outside it may use: room for 15% more, or for three."""

BUDGETS = {
    "package folders": 18,
    "longest file": 500,
    "longest class": 250,
    "longest function": 60,
    "most branches": 12,
    "most parameters": 8,
    "functions over a budget": 0,
    "circles between files": 0,
    **{f"names of {room}/": most for room, most in PUBLIC_NAMES.items()},
    "README.md lines": 140,
    "ARCHITECTURE.md lines": 250,
    "docs/results JSON bytes": 1_000_000,
    "docs/results JSON files": 18,
}


class Measure(NamedTuple):
    """A measured value, and where it was found."""

    value: int
    where: str = ""


def measure(root: Path = ROOT) -> dict[str, Measure]:
    """Return the value of every budget."""
    package = sorted((root / "serve_spec").rglob("*.py"))
    names = _public_names(root)
    results = [*(root / "docs" / "results").glob("*.json*")]
    return {
        "package folders": Measure(len(list((root / "serve_spec").glob("*/__init__.py")))),
        "longest file": max(
            Measure(_lines(path), _shown(path, root)) for path in package if not _has_kernels(path)
        ),
        **_largest(package, root),
        "circles between files": _circles(root),
        **{f"names of {room}/": Measure(names.get(room, 0)) for room in PUBLIC_NAMES},
        "README.md lines": Measure(_lines(root / "README.md")),
        "ARCHITECTURE.md lines": Measure(_lines(root / "ARCHITECTURE.md")),
        "docs/results JSON bytes": Measure(sum(path.stat().st_size for path in results)),
        "docs/results JSON files": Measure(len(results)),
    }


def _circles(root: Path) -> Measure:
    found = circles(package_graph(root))
    return Measure(len(found), "; ".join(", ".join(circle) for circle in found))


def _public_names(root: Path) -> dict[str, int]:
    """Return, per folder of the package, how many of its names files outside it use."""
    files = package_files(root)
    used = {user: used_names(path, files) for user, path in files.items()}
    counts = {}
    for folder in (path.parent for path in files.values() if path.name == "__init__.py"):
        inside = f"{module_of(folder, root)}."
        own = {user for user in files if f"{user}.".startswith(inside)}
        others = set().union(*(used[user] for user in files.keys() - own))
        room = folder.relative_to(root / "serve_spec").as_posix()
        counts[room] = len({(module, name) for module, name in others if module in own})
    return counts


def _largest(files: list[Path], root: Path) -> dict[str, Measure]:
    names = ("longest class", "longest function", "most branches", "most parameters")
    largest, over = dict.fromkeys(names, Measure(0)), 0
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            sizes = _sizes(node)
            over += "longest class" not in sizes and any(
                value > BUDGETS[name] for name, value in sizes.items()
            )
            where = f"{_shown(path, root)}:{node.lineno}"
            largest |= {
                name: max(largest[name], Measure(value, where)) for name, value in sizes.items()
            }
    return {**largest, "functions over a budget": Measure(over)}


def _sizes(node: ast.ClassDef | Function) -> dict[str, int]:
    if isinstance(node, ast.ClassDef):
        return {"longest class": _height(node)}
    if any(re.match(r"(triton|gluon)\.jit", ast.unparse(each)) for each in node.decorator_list):
        return {}  # see `_has_kernels`
    return {
        "longest function": _height(node),
        "most branches": branches(node),
        "most parameters": parameters(node),
    }


def _has_kernels(path: Path) -> bool:
    """Return whether a file holds kernels. Such a file, and a kernel, may have any size."""
    return path.name.endswith(("_triton.py", "_gluon.py"))


def _height(node: ast.ClassDef | Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def branches(node: ast.AST) -> int:
    """Return the branches of a function as pylint counts them (R0912), inner functions apart."""
    inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    below = [child for child in ast.iter_child_nodes(node) if not isinstance(child, inner)]
    return sum(_own_branches(child) + branches(child) for child in below)


def _own_branches(node: ast.AST) -> int:
    match node:
        case ast.If(orelse=[ast.If()]):
            return 1
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
            return 1 + bool(node.orelse)
        case ast.Try():
            return len(node.handlers) + bool(node.orelse) + bool(node.finalbody)
        case ast.Match():
            return len(node.cases)
    return 0


def parameters(node: Function) -> int:
    """Return the parameters of a function without `self` and `cls`."""
    args = [*node.args.posonlyargs, *node.args.args]
    own = [arg for at, arg in enumerate(args) if at or arg.arg not in ("self", "cls")]
    extra = (node.args.vararg, node.args.kwarg)
    return len(own) + len(node.args.kwonlyargs) + sum(each is not None for each in extra)


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def main() -> None:
    """Print lines, files and used names per folder of the package, then every budget."""
    print(f"{'':24}{'lines':>10}{'files':>10}{'names':>10}")
    package, names = ROOT / "serve_spec", _public_names(ROOT)
    for folder in sorted(path.parent for path in package.rglob("__init__.py")):
        room, files = folder.relative_to(package).as_posix(), list(folder.rglob("*.py"))
        title = "total" if folder == package else room
        count = names.get(room, "")
        print(f"{title:24}{sum(map(_lines, files)):>10,}{len(files):>10}{count:>10}")
    print(f"\n{'':32}{'value':>10}{'limit':>10}")
    for name, (value, where) in measure().items():
        print(f"{name:32}{value:>10,}{BUDGETS[name]:>10,}  {where}".rstrip())


if __name__ == "__main__":
    main()
