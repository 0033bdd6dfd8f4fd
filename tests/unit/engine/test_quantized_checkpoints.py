"""Texts of quantized checkpoints do not depend on speculation, and their drafts are as good."""

import pytest

from serve_spec.core.errors import CheckpointError
from serve_spec.models.drafts.base import DraftOptions
from serve_spec.models.drafts.loader import check_draft
from serve_spec.models.loader import check_target
from tests.helpers.checkpoints import make_mtp, make_target, read_checkpoint, write_checkpoint
from tests.helpers.engines import Pair, llm_maker, sampled_requests, texts
from tests.helpers.quantized import FORMATS, repack

# Where the config of the target does not tell how the layer that drafts is stored.
MTP_FORMATS = ("fp8 blocks", "fp8 AutoFP8", "compressed rows", "compressed int8", "modelopt")


def generated(llm):
    """Return the texts of sampled requests, and how many drafts were right."""
    outputs = llm.generate(*sampled_requests())
    return texts(outputs), sum(output.speculation.num_correct_drafts for output in outputs)


@pytest.mark.parametrize("name", FORMATS)
def test_speculation_leaves_the_text_of_a_quantized_target_as_it_is(name, pair, tmp_path):
    packed, _ = repack(pair.target, tmp_path, name)
    make = llm_maker(Pair(packed, {**pair.heads, "STANDALONE": packed}), "cpu")
    plain, _ = generated(make())
    for algorithm in ("EAGLE3", "STANDALONE"):
        drafted, num_right = generated(make(algorithm, 3))
        assert drafted == plain
        assert num_right > 20


@pytest.fixture
def mimo(tmp_path):
    target = make_target(tmp_path / "made", "qwen2", layer_scale=0.3, rope_scaling=None)
    return make_mtp(tmp_path / "mimo", target, mimic=True, rope_scaling=None)


@pytest.mark.parametrize("name", MTP_FORMATS)
def test_a_layer_that_drafts_inside_a_quantized_file_is_as_good_as_its_floats(name, mimo, tmp_path):
    found = []
    for folder in repack(mimo, tmp_path, name):
        make = llm_maker(Pair(folder, {"MTP": folder}), "cpu")
        found.append(generated(make("MTP", 2)))
    assert found[0] == found[1]
    assert found[0][1] > 20


def test_a_layer_that_drafts_without_its_scales_is_refused_by_name(mimo, tmp_path):
    packed, _ = repack(mimo, tmp_path, "fp8 blocks")
    config, tensors = read_checkpoint(packed)
    scale = "mlp.down_proj.weight_scale_inv"
    del tensors[f"model.mtp_layers.0.{scale}"]
    write_checkpoint(packed, config, tensors)
    with pytest.raises(CheckpointError, match=rf"missing layers.0.{scale}; "):
        check_draft(packed, check_target(packed), "MTP", DraftOptions())
