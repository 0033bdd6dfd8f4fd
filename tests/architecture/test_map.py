"""ARCHITECTURE.md names every file of the package, and no file that is gone.

How a file is named there: by its path inside the package anywhere in the text (`config/base.py`),
or in the tree by its name alone, on or below the line of its room:

    config/       what the user may say
      base.py     closed models, YAML, environment
    log.py        one logger; back at the room's indent, so a file of the package itself
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


def named_files(text: str, rooms: set[str]) -> set[str]:
    """Every package file that `text` names, as paths inside the package."""
    named = set()
    room, room_indent = "", -1
    for line in text.splitlines():
        heading = ROOM.match(line)
        if heading is not None and heading["room"] in rooms:
            room, room_indent = heading["room"], len(heading["indent"])
        elif line.strip() and len(line) - len(line.lstrip(" │├└─|`*-")) <= room_indent:
            room, room_indent = "", -1
        for found in FILE.finditer(line):
            path = found["path"].removeprefix("serve_spec/")
            named.add(path if "/" in path or not room else f"{room}/{path}")
    return named


def package_files() -> set[str]:
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    return {path for path in files if not UNLISTED.search(path)}


def test_the_map_names_every_file_of_the_package() -> None:
    assert MAP.exists(), "ARCHITECTURE.md is missing: it is the map of serve_spec/"
    files = package_files()
    rooms = {path.split("/")[0] for path in files if "/" in path}
    missing = sorted(files - named_files(MAP.read_text(), rooms))
    assert not missing, f"ARCHITECTURE.md does not name {missing}; add a line for each"


def test_the_map_names_no_file_that_is_gone() -> None:
    files = package_files()
    rooms = {path.split("/")[0] for path in files if "/" in path}
    listed = {path for path in named_files(MAP.read_text(), rooms) if path.split("/")[0] in rooms}
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
      log.py         one logger
    """
    assert named_files(text, {"config", "adaptive", "engine"}) == {
        "engine/engine.py",
        "tests/architecture/test_contract.py",
        "config/base.py",
        "config/root.py",
        "config/serving.py",
        "adaptive/slot.py",
        "adaptive/params.py",
        "log.py",
    }
