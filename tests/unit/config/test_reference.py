"""Generated pages are what their generators write today."""

from pathlib import Path

import pytest

from serve_spec.config.base import dotted_keys
from serve_spec.config.root import ServeSpecConfig
from serve_spec.layers.formats.registry import FORMATS
from serve_spec.models.registry import TARGETS
from tools import configuration, support

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "written", "command"),
    [
        (
            "docs/configuration.md",
            lambda text: configuration.page(),
            "tools.configuration > docs/configuration.md",
        ),
        ("docs/models.md", lambda text: support.page(), "tools.support"),
        ("README.md", support.with_summary, "tools.support"),
    ],
)
def test_a_generated_page_is_current(name, written, command):
    text = (ROOT / name).read_text()
    assert text == written(text), f"run python -m {command}"


def test_every_key_has_one_row_with_a_description():
    lines = configuration.page().splitlines()
    for key in dotted_keys(ServeSpecConfig):
        section, _, leaf = key.partition(".")
        assert f"## `{section}`" in lines
        rows = [line for line in lines if line.startswith(f"| `{leaf}` |")]
        assert [row.endswith(". |") for row in rows] == [True] * bool(leaf), key


def test_every_registered_name_is_in_a_table_and_every_family_names_its_source():
    rows = [line for line in support.page().splitlines() if line.startswith("|")]
    names = (*support.own_names(TARGETS), *support.own_names(FORMATS))
    for name in (*names, *(method.name for method in support.methods())):
        assert any(f"`{name}`" in row for row in rows), name
    assert all(family.title and family.source for family in support.families())
