"""docs/configuration.md is what the generator writes today."""

from pathlib import Path

from serve_spec.config.base import dotted_keys
from serve_spec.config.root import ServeSpecConfig
from tools.configuration import page

FILE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_configuration_page_is_current():
    fix = "run python -m tools.configuration > docs/configuration.md"
    assert FILE.read_text() == page(), fix


def test_every_key_has_one_row_with_a_description():
    lines = page().splitlines()
    for key in dotted_keys(ServeSpecConfig):
        section, _, leaf = key.partition(".")
        assert f"## `{section}`" in lines
        rows = [line for line in lines if line.startswith(f"| `{leaf}` |")]
        assert [row.endswith(". |") for row in rows] == [True] * bool(leaf), key
