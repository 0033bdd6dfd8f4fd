"""Links and names of files in documents lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "decisions").glob("*.md"),
    ROOT / "examples" / "README.md",
    ROOT / "k8s" / "README.md",
    ROOT / "recipes" / "smollm2" / "README.md",
    ROOT / "recipes" / "tiny" / "README.md",
]
GUIDES = [path for path in DOCUMENTS if path.parent.name != "decisions"]
PLACEHOLDER = "NAME"
FOLDERS = ("serve_spec", "tests", "tools", "benchmarks", "recipes")
FILES = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def anchors(text):
    """Return the anchors of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target.read_text()), f"{link}: no such heading"


@pytest.mark.parametrize("document", GUIDES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_of_the_package_are_named_as_they_are(document):
    """Relative to the repository, to the package, or to the folder that a sentence names."""
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", document.read_text()):
        if PLACEHOLDER not in name:
            assert any(path.endswith(f"/{name}") for path in FILES), f"{name}: no such file"
