"""Targets on disk, once per session."""

import pytest
import torch

from serve_spec.models.loader import load_target
from tests.helpers.checkpoints import make_target


@pytest.fixture(autouse=True)
def _small_and_frozen():
    # One thread: at these sizes a second only adds waiting, most of all on a shared machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory):
    """A Llama-3-like target of 8 layers: EAGLE-3's default captures are three different ones."""
    return make_target(tmp_path_factory.mktemp("target"), "llama3", layers=8, hidden=32)


@pytest.fixture(scope="session")
def target(target_dir):
    return load_target(target_dir, torch.float32)
