"""A configuration whose model is not loaded."""

import os

import pytest

from serve_spec.config import ServeSpecConfig
from tests.serving.asgi import Server
from tests.serving.texts import word_tokenizer, write_text_files

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


@pytest.fixture
def server(config):
    """The app, a fake engine behind it, and the engine's words as its tokenizer."""
    write_text_files(config.model.folder, tokenizer=word_tokenizer())
    return Server(config)
