"""The house rules, as tests: who may import whom, and which rooms may touch which libraries.

Policy must not know the time, the disk or random numbers (`PURE`). Torch-free rooms are imported
for real as well: a library that comes in through a neighbour counts like one that is named.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools.imports import circles, imported_files, imported_names, package_files, package_graph

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "serve_spec"
FILES = sorted(PACKAGE.rglob("*.py"))
# `__init__.py` and `__main__.py` of the package import rooms lazily.
IN_ROOMS = [path for path in FILES if path.parent != PACKAGE or not path.stem.startswith("__")]

MAY_IMPORT = {
    "log": [],
    "core": [],
    "config": ["core"],
    "metrics": ["core"],
    "parallel": ["core", "ops"],
    "ops": ["core"],
    "adaptive": ["config", "core"],
    "kvcache": ["core", "ops"],
    "layers": ["core", "ops", "parallel"],
    "models": ["core", "config", "parallel", "ops", "layers"],
    "scheduler": ["core", "config", "kvcache"],
    "structured": ["core"],
    "worker": ["core", "config", "parallel", "ops", "kvcache", "models", "structured"],
    "profile": ["core", "config", "adaptive", "models", "worker"],
    "engine": [
        "core", "config", "metrics", "adaptive", "kvcache", "models", "parallel", "profile",
        "scheduler", "structured", "worker",
    ],
    "serving": ["core", "config", "metrics", "adaptive", "worker", "engine"],
    "bench": ["core", "config", "metrics", "adaptive", "engine", "profile", "scheduler", "serving"],
    "plugins": ["core", "config", "layers", "models"],
    "cli": ["core", "config", "engine", "models", "serving", "bench"],
}  # fmt: skip

# A room that is a house: what its own files and folders may import of each other. Its `__init__.py`
# shows them, lazily. The rest of the package comes in by MAY_IMPORT.
INSIDE = {
    "serving": {
        "autoscaling": [],
        "errors": [],
        "events": [],
        "messages": [],
        "processes": [],
        "statistics": ["messages"],
        "router": ["errors", "messages", "statistics"],
        "protocols": ["errors", "events", "messages", "statistics", "router"],
        "proxy": ["errors", "events", "processes"],
        "deployment": [
            "autoscaling", "messages", "processes", "statistics", "router", "protocols", "proxy",
        ],
    },
}  # fmt: skip

# library -> path fragments allowed to import it; every other file may not.
CONFINED = {
    "triton": ["_triton.py", "_gluon.py"],
    "ray": [
        "serving/__init__.py",
        "serving/autoscaling.py",
        "serving/deployment/",
        "serving/router/fleet.py",
        "serving/statistics/",
    ],
    "fastapi": ["serving/"],
    "starlette": ["serving/"],
    "pydantic": [
        "config/",
        "serving/protocols/fields.py",
        "serving/protocols/native_api.py",
        "serving/protocols/openai.py",
        "serving/protocols/responses.py",
        "serving/protocols/tools.py",
        "serving/protocols/validation.py",
    ],
    "transformers": ["engine/tokenizer.py", "models/transformers_family.py"],
    "llguidance": ["structured/compiler.py"],
    "msgspec": ["engine/", "serving/protocols/fields.py", "serving/protocols/json_body.py"],
    "safetensors": ["models/weights.py"],
    "gguf": ["config/gguf.py", "models/gguf.py"],
    # The rest of the repository imports the package, never the reverse.
    **{name: [] for name in ("benchmarks", "recipes", "tests", "tools")},
}
TORCH_FREE = ["config/", "adaptive/", "serving/", "structured/", "metrics.py"]

# Decisions are pure: time arrives as a number, files as a mapping, random numbers not at all.
PURE = ["adaptive/"]
IMPURE = {"asyncio", "datetime", "io", "json", "logging", "os", "pathlib", "random", "secrets",
          "shutil", "socket", "subprocess", "tempfile", "threading", "time", "yaml"}  # fmt: skip


def imports(path):
    """Every module that an import statement of `path` names, lazy and TYPE_CHECKING ones included.

    `from serve_spec import adaptive` reaches the room as surely as its dotted name.
    """
    return {
        f"serve_spec.{name}" if module == "serve_spec" and name else module
        for module, name in imported_names(path)
        if module != "serve_spec" or not name.startswith("__")
    }


def where(path):
    """The path inside the package, as used in the tables above."""
    return path.relative_to(PACKAGE).as_posix()


def room_of(path):
    """The room of a file; a file of the package itself (`log.py`) is a room of its own."""
    return where(path).split("/")[0].removesuffix(".py")


def test_every_room_has_its_arrows():
    unknown = {room_of(path) for path in IN_ROOMS} - set(MAY_IMPORT)
    assert not unknown, f"say in MAY_IMPORT what {sorted(unknown)} may import"


@pytest.mark.parametrize("arrows", [MAY_IMPORT, *INSIDE.values()], ids=["package", *INSIDE])
def test_the_arrows_have_no_cycle(arrows):
    unknown = {below for row in arrows.values() for below in row} - set(arrows)
    assert not unknown, f"no such room: {sorted(unknown)}"
    assert not circles(arrows)


def test_no_files_import_each_other_in_a_circle():
    """An import in a function or under TYPE_CHECKING counts: it only hides the circle.

    What is loaded by a string does not: a kernel is found by the name of its reference, a command
    by that of its module. Neither do the doors of the package, `__init__.py` and `__main__.py`,
    which show users lazily what lies above all other files.
    """
    assert not circles(package_graph(ROOT))


@pytest.mark.parametrize(
    "text",
    [
        "import serve_spec.b",
        "from serve_spec import b",
        "from serve_spec.b import name",
        "def late():\n    from serve_spec.b import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from serve_spec.b import Name",
    ],
)
def test_a_circle_is_found_however_it_is_imported(text, tmp_path):
    package = tmp_path / "serve_spec"
    package.mkdir()
    (package / "__init__.py").write_text("from serve_spec.a import name\n")
    (package / "a.py").write_text(text)
    (package / "b.py").write_text("import serve_spec.c")
    (package / "c.py").write_text("from serve_spec.a import name")
    names = ["serve_spec.a", "serve_spec.b", "serve_spec.c"]
    assert circles(package_graph(tmp_path)) == [names]
    (package / "c.py").write_text("import serve_spec")
    assert not circles(package_graph(tmp_path))


@pytest.mark.parametrize("path", IN_ROOMS, ids=where)
def test_rooms_import_only_downwards(path):
    room = room_of(path)
    reached = {m.split(".")[1] for m in imports(path) if m.startswith("serve_spec.")}
    upward = reached - {room, "log"} - set(MAY_IMPORT[room])
    assert not upward, f"{room} must not import {sorted(upward)}; see MAY_IMPORT"


def below(path):
    """The file or folder of a room that holds a file: `router` for `serving/router/fleet.py`."""
    return where(path).split("/")[1].removesuffix(".py")


@pytest.mark.parametrize("room", INSIDE)
def test_inside_a_room_files_import_only_downwards(room):
    arrows, files = INSIDE[room], package_files(ROOT)
    own = {path: below(path) for path in IN_ROOMS if where(path).startswith(f"{room}/")}
    shown = PACKAGE / room / "__init__.py"
    assert set(own.values()) - {"__init__"} == set(arrows), "say in INSIDE what each may import"
    for path in own.keys() - {shown}:
        reached = {
            below(files[module]) for module in imported_files(path, files) if files[module] in own
        }
        upward = reached - {own[path], *arrows[own[path]]}
        assert not upward, f"{where(path)} must not import {sorted(upward)}; see INSIDE"


@pytest.mark.parametrize("path", FILES, ids=where)
def test_libraries_stay_in_their_rooms(path):
    roots = {m.split(".")[0] for m in imports(path)}
    for library, homes in CONFINED.items():
        if library in roots:
            assert any(home in where(path) for home in homes), f"{library} is confined to {homes}"
    if any(where(path).startswith(prefix) for prefix in TORCH_FREE):
        assert "torch" not in roots, "policy, config and wire formats are plain Python"
    if any(where(path).startswith(prefix) for prefix in PURE):
        assert not roots & IMPURE, f"policy must not reach for {sorted(roots & IMPURE)}"


@pytest.mark.parametrize(
    "module",
    [
        "serve_spec",
        "serve_spec.config",
        "serve_spec.adaptive",
        "serve_spec.metrics",
        "serve_spec.engine.client",
    ],
)
def test_policy_configuration_and_clients_of_engines_load_neither_torch_nor_ray(module):
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'ray', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("kernel", sorted(PACKAGE.rglob("*_triton.py")), ids=where)
def test_every_kernel_has_a_reference_that_calls_it(kernel):
    def functions(path, decorators):
        defs = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        return {
            d.name: ast.unparse(d.args)
            for d in defs
            if not d.name.startswith("_") and [*map(ast.unparse, d.decorator_list)] == decorators
        }

    reference = kernel.with_name(kernel.name.replace("_triton", ""))
    assert functions(kernel, []) == functions(reference, ["has_kernel"])


def test_every_function_that_has_a_kernel_stands_beside_it():
    found = [path for path in FILES if "\n@has_kernel\n" in path.read_text()]
    assert found
    assert not [path for path in found if not path.with_name(f"{path.stem}_triton.py").exists()]
