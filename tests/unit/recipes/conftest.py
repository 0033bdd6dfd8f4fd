"""A small target in a folder, as a training run has it."""

import pytest
import torch

from recipes.training.settings import llama_config
from recipes.training.weights import (
    MasterWeights,
    export_checkpoint,
    initialise,
    load_frozen,
    new_llama,
)

CONFIG = llama_config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


@pytest.fixture(scope="package")
def target_folder(tmp_path_factory):
    """Larger weights than at initialisation, so that attention is far from uniform."""
    folder = tmp_path_factory.mktemp("target")
    masters = MasterWeights(new_llama(CONFIG, torch.device("cpu"), torch.float32))
    initialise(masters, 8, torch.Generator().manual_seed(0))
    masters.fill({n: p * 5 for n, p in masters.parameters.items() if p.ndim == 2})
    export_checkpoint(folder, masters.parameters, CONFIG, torch.float32)
    return folder


@pytest.fixture
def target(target_folder):
    return load_frozen(target_folder, torch.device("cpu"), torch.float32)
