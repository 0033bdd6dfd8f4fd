"""A configuration whose model nobody loads."""

import os

import pytest

from serve_spec.config import ServeSpecConfig

MODEL = "fake"


@pytest.fixture(autouse=True)
def _silent_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SERVE_SPEC_") and "__" in name:
            monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path):
    """The defaults, with an empty folder for a model."""
    (tmp_path / MODEL).mkdir()
    return ServeSpecConfig.load({"model": {"path": str(tmp_path / MODEL)}})
