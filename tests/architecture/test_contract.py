"""The house rules, as tests: who may import whom, and which rooms may touch which libraries.

Policy must not know the time, the disk or chance (`PURE`). Torch-free rooms are imported for real
as well: a library that comes in through a neighbour counts like one that is named.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "serve_spec"
FILES = sorted(PACKAGE.rglob("*.py"))
# `__init__.py` and `__main__.py` of the package are its doors: they show rooms, lazily.
IN_ROOMS = [path for path in FILES if path.parent != PACKAGE or not path.stem.startswith("__")]

MAY_IMPORT = {
    "log": [],
    "core": [],
    "config": [],
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
    "engine": [
        "core", "config", "metrics", "adaptive", "kvcache", "models", "parallel", "scheduler",
        "structured", "worker",
    ],
    "serving": ["core", "config", "metrics", "adaptive", "worker", "engine"],
    "bench": ["core", "config", "metrics", "adaptive", "engine", "scheduler", "serving"],
    "cli": ["core", "config", "engine", "models", "serving", "bench"],
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
    "transformers": ["engine/tokenizer.py"],
    "llguidance": ["structured/compiler.py"],
    "msgspec": ["engine/", "serving/protocols/fields.py", "serving/protocols/json_body.py"],
    "safetensors": ["models/weights.py"],
    # The rest of the repository imports the package, never the reverse.
    **{name: [] for name in ("benchmarks", "recipes", "tests", "tools")},
}
TORCH_FREE = ["config/", "adaptive/", "serving/", "structured/", "metrics.py"]

# Decisions are pure: time arrives as a number, files as a mapping, chance not at all.
PURE = ["adaptive/"]
IMPURE = {"asyncio", "datetime", "io", "json", "logging", "os", "pathlib", "random", "secrets",
          "shutil", "socket", "subprocess", "tempfile", "threading", "time", "yaml"}  # fmt: skip


def imports(path):
    """Every module named by an import statement in `path`, lazy and TYPE_CHECKING ones included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            assert node.module is not None
            names = {alias.name for alias in node.names if not alias.name.startswith("__")}
            # `from serve_spec import adaptive` reaches the room as surely as its dotted name.
            inside = {f"serve_spec.{name}" for name in names}
            found |= inside if node.module == "serve_spec" else {node.module}
    return found


def where(path):
    """The path inside the package, as used in the tables above."""
    return path.relative_to(PACKAGE).as_posix()


def room_of(path):
    """The room of a file; a file of the package itself (`log.py`) is a room of its own."""
    return where(path).split("/")[0].removesuffix(".py")


def test_every_room_has_its_arrows():
    unknown = {room_of(path) for path in IN_ROOMS} - set(MAY_IMPORT)
    assert not unknown, f"say in MAY_IMPORT what {sorted(unknown)} may import"


def test_the_arrows_have_no_cycle():
    done = set()
    while len(done) < len(MAY_IMPORT):
        ready = {r for r, below in MAY_IMPORT.items() if r not in done and set(below) <= done}
        assert ready, f"cycle among {sorted(set(MAY_IMPORT) - done)}"
        done |= ready


@pytest.mark.parametrize("path", IN_ROOMS, ids=where)
def test_rooms_import_only_downwards(path):
    room = room_of(path)
    reached = {m.split(".")[1] for m in imports(path) if m.startswith("serve_spec.")}
    upward = reached - {room, "log"} - set(MAY_IMPORT[room])
    assert not upward, f"{room} must not import {sorted(upward)}; see MAY_IMPORT"


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
