"""The keys that correct a draft's config.json reach the loaded head."""

from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import load_models
from serve_spec.parallel.group import SINGLE
from tests.helpers.checkpoints import make_eagle3


def test_every_correction_reaches_the_head(tmp_path, target_dir):
    make_eagle3(tmp_path, target_dir, rope_theta=40.0, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    config = ServeSpecConfig.load(
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

    def head(**corrections):
        return load_models(ServeSpecConfig.load(config, **corrections), SINGLE).head

    corrected = head(
        speculative_draft_rope_theta=7,
        speculative_draft_aux_layers_mean="output",
        speculative_draft_norm_before_residual=True,
        speculative_draft_norm_output=True,
    )
    assert corrected.shape.rope_theta == 7
    assert corrected.capture.layer_ids == (3, 5, 6)
    assert corrected.options.norm_before_residual
    assert corrected.options.norm_output
    corrected = head(speculative_draft_aux_layer_ids=[0, 1, 8])
    assert corrected.capture.layer_ids == (0, 1, 8)
