"""Two folders that stand for checkpoints, and an environment without settings."""

import os

import pytest


@pytest.fixture(autouse=True)
def _silent_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SERVE_SPEC_"):
            monkeypatch.delenv(name)


@pytest.fixture
def checkpoints(tmp_path):
    """Folders `target` and `draft`, empty: configuration only asks whether they exist."""
    (tmp_path / "target").mkdir()
    (tmp_path / "draft").mkdir()
    return tmp_path


@pytest.fixture
def minimal(checkpoints):
    """The least a configuration can say."""
    return {"model": {"path": str(checkpoints / "target")}}


@pytest.fixture
def drafting(checkpoints, minimal):
    """A configuration that speculates."""
    return minimal | {
        "speculative": {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(checkpoints / "draft"),
        }
    }
