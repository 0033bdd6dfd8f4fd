"""Which private names of Ray the package uses: each may change in any release of Ray."""

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "serve_spec").rglob("*.py"))

MODULES = {
    # module of Ray, and what is imported from it -> files that do
    ("ray._private", "worker"): {"serving/deployment/command.py"},
    ("ray.serve._private.api", "serve_start"): {"serving/deployment/command.py"},
    ("ray.serve._private.common", "DeploymentID"): {"serving/statistics/stats_actor.py"},
    ("ray.serve._private.common", "ReplicaID"): {"serving/statistics/stats_actor.py"},
    ("ray.serve._private.config", "DeploymentConfig"): {"serving/deployment/versions.py"},
    ("ray.serve.context", "_get_global_client"): {"serving/deployment/command.py"},
}
MEMBERS = {
    # member or keyword of Ray's -> where Ray has it, and the file that uses it
    "_blocking": ("ray.serve.api:delete", "serving/deployment/command.py"),
    "_deployment_config": ("ray.serve.deployment:Deployment", "serving/deployment/versions.py"),
    "_global_node": ("ray._private.worker", "serving/deployment/command.py"),
    "__serve_build_asgi_app__": ("ray.serve._private.replica", "serving/deployment/app.py"),
}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_OF_PYTHON = {"_asdict", "_exit", "_replace"}


def test_private_names_of_ray_are_those_that_are_listed():
    """A new one is listed here only if Ray has no public name for it."""
    modules, members = {}, {}
    for file in FILES:
        tree = ast.parse(file.read_text())
        place = file.relative_to(ROOT / "serve_spec").as_posix()
        for name in private_imports(tree):
            modules.setdefault(name, set()).add(place)
        if imports_ray(tree):
            for name in private_members(tree):
                members.setdefault(name, set()).add(place)
    assert modules == MODULES
    assert members == {name: {file} for name, (_, file) in MEMBERS.items()}


def test_the_installed_ray_has_every_private_name():
    for module, name in MODULES:
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")
    for name, (place, _) in MEMBERS.items():
        module, _, member = place.partition(":")
        found = importlib.import_module(module)
        source = inspect.getsource(getattr(found, member) if member else found)
        assert re.search(rf"\b{name}\b", source), f"{place} has no {name}"


def test_the_package_asks_for_the_minor_version_of_ray_that_has_them():
    pinned = re.search(r"^ray==(\d+)\.(\d+)\.", (ROOT / "constraints.txt").read_text(), re.M)
    major, minor = map(int, pinned.groups())
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray[serve]>={major}.{minor},<{major}.{minor + 1}" in dependencies


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from ray._private import worker", {("ray._private", "worker")}),
        ("import ray._raylet", {("ray._raylet", "")}),
        ("from ray.serve.api import _run", {("ray.serve.api", "_run")}),
        ("from ray.serve.context import anything", {("ray.serve.context", "anything")}),
        ("from ray.serve import Deployment", set()),
        ("import ray\nray.worker._global", {"_global"}),
        ("import ray\nray.get(ref, _owner=1)", {"_owner"}),
        ("import ray\nclass C:\n  def f(self): self._mine = other._mine", set()),
        ("import ray\nimport os\nos._exit(1)", set()),
    ],
)
def test_a_private_name_is_recognized(code, found):
    tree = ast.parse(code)
    assert private_imports(tree) | private_members(tree) == found


def private_imports(tree):
    """Return (module, name) of each import of Ray's that is not part of its public API."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_rays(node.module):
            found |= {
                (node.module, alias.name)
                for alias in node.names
                if is_private(node.module) or alias.name.startswith("_")
            }
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names if is_rays(alias.name)}
            found |= {(name, "") for name in names if is_private(name)}
    return found


def private_members(tree):
    """Return names with an underscore that are neither of the file's own classes nor Python's."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            on_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if on_itself else used).add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            used.add(node.arg)
    single = {name for name in used - own - _OF_PYTHON if re.match(r"_[^_]", name)}
    return single | {name for name in own if name.startswith("__serve_")}


def imports_ray(tree):
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes]
    return any(map(is_rays, names))


def is_rays(module):
    return module is not None and (module == "ray" or module.startswith("ray."))


def is_private(module):
    """Return whether a module of Ray's is undocumented: `ray.serve.context` is, too."""
    return "._" in module or module == "ray.serve.context"
