"""What a user says of a draft reaches the draft the engine runs."""

import pytest
import torch

from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import load_models
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.models import load_target
from serve_spec.models.draft import load_draft
from serve_spec.models.draft_probe import choose_layers, choose_theta, probe_text
from serve_spec.parallel.group import SINGLE
from tests.helpers.checkpoints import make_eagle3


@pytest.fixture
def config(tmp_path, target_dir):
    make_eagle3(tmp_path, target_dir, rope_theta=40.0, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    return ServeSpecConfig.load(
        {
            "model": {"path": str(target_dir), "device": "cpu", "dtype": "float32"},
            "speculative": {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": str(tmp_path),
                "speculative_draft_dtype": "float32",
            },
            "cache": {"num_pages": 64},
        }
    )


def loaded_head(config, **changes):
    return load_models(ServeSpecConfig.load(config, **changes), SINGLE).head


def test_every_word_reaches_the_head(config):
    head = loaded_head(
        config,
        speculative_draft_rope_theta=7,
        speculative_draft_aux_layers_mean="output",
        speculative_draft_norm_before_residual=True,
        speculative_draft_norm_output=True,
    )
    assert head.shape.rope_theta == 7
    assert head.capture.layer_ids == (3, 5, 6)
    assert head.options.norm_before_residual
    assert head.options.norm_output
    head = loaded_head(config, speculative_draft_aux_layer_ids=[0, 1, 8])
    assert head.capture.layer_ids == (0, 1, 8)


def test_layers_that_are_to_be_measured_are_and_the_theta_after_them(config, target_dir):
    target = load_target(target_dir, torch.float32)
    path = config.speculative.speculative_draft_model_path
    ids = Tokenizer(target_dir).encode(probe_text())
    head = load_draft(path, target, "EAGLE3")
    layers = choose_layers(head, target, ids, [(2, 4, 5), (3, 5, 6)])
    theta = choose_theta(head, target, ids)
    measured = {"speculative_draft_aux_layers_mean": "probe"}
    found = loaded_head(config, speculative_draft_rope_theta="probe", **measured)
    assert (found.capture.layer_ids, found.shape.rope_theta) == (layers, theta)
    assert loaded_head(config, **measured).capture.layer_ids == layers
