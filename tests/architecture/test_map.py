"""ARCHITECTURE.md names every file of the package, and no file that is gone.

How a file is named there: by its path inside the package anywhere in the text (`config/base.py`),
or in the tree by its name alone, on or below the line of its room:

    config/       what the user may say
      base.py     closed models, YAML, environment
    log.py        one logger; back at the room's indent, so a file of the package itself

Rooms within rooms are indented once more.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "serve_spec"
MAP = ROOT / "ARCHITECTURE.md"

# Doors without a subject of their own.
UNLISTED = re.compile(r"(^|/)__init__\.py$")
ROOM = re.compile(r"^(?P<indent>[\s│├└─|`*-]*)`?(?:serve_spec/)?(?P<room>\w+)/`?(?=\s|$)")
FILE = re.compile(r"(?<![\w/])(?P<path>(?:[\w-]+/)*\w+\.py)\b")


def named_files(text: str, folders: set[str]) -> set[str]:
    """Every package file that `text` names, as paths inside the package.

    folders: those of the package, as such paths.
    """
    named = set()
    inside: list[tuple[int, str]] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip(" │├└─|`*-"))
        while line.strip() and inside and indent <= inside[-1][0]:
            inside.pop()
        heading = ROOM.match(line)
        if heading is not None:
            folder = "/".join([*(folder for _, folder in inside[-1:]), heading["room"]])
            if folder in folders:
                inside.append((indent, folder))
        for found in FILE.finditer(line):
            path = found["path"].removeprefix("serve_spec/")
            named.add(path if "/" in path or not inside else f"{inside[-1][1]}/{path}")
    return named


def package_files() -> set[str]:
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    return {path for path in files if not UNLISTED.search(path)}


def folders_of(files: set[str]) -> set[str]:
    return {path.rsplit("/", 1)[0] for path in files if "/" in path}


def test_the_map_names_every_file_of_the_package() -> None:
    assert MAP.exists(), "ARCHITECTURE.md is missing: it is the map of serve_spec/"
    files = package_files()
    missing = sorted(files - named_files(MAP.read_text(), folders_of(files)))
    assert not missing, f"ARCHITECTURE.md does not name {missing}; add a line for each"


def test_the_map_names_no_file_that_is_gone() -> None:
    files = package_files()
    folders = folders_of(files)
    named = named_files(MAP.read_text(), folders)
    listed = {path for path in named if path.split("/")[0] in folders}
    gone = sorted(path for path in listed - files if not UNLISTED.search(path))
    assert not gone, f"ARCHITECTURE.md names {gone}, which do not exist; mend or drop the lines"


def test_the_reading_of_the_map_itself() -> None:
    text = """
    The loop is in `engine/engine.py`; see tests/architecture/test_contract.py.

    serve_spec/
      config/        what the user may say
        base.py      closed models
        root.py, serving.py
      adaptive/      slot.py, params.py
      bench/
        report.py    tables
        adaptive/    a room within a room
          arms.py    its own
        plots.py     not of that
      log.py         one logger
    """
    folders = {"config", "adaptive", "engine", "bench", "bench/adaptive"}
    assert named_files(text, folders) == {
        "engine/engine.py",
        "tests/architecture/test_contract.py",
        "config/base.py",
        "config/root.py",
        "config/serving.py",
        "adaptive/slot.py",
        "adaptive/params.py",
        "bench/report.py",
        "bench/adaptive/arms.py",
        "bench/plots.py",
        "log.py",
    }
