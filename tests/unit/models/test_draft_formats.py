"""Every public layout of an EAGLE or EAGLE-3 head is recognised by its tensors."""

import json

import pytest
import torch

from serve_spec.config.drafts import detect_method
from serve_spec.core.errors import CheckpointError
from serve_spec.models.drafts.base import DraftOptions
from serve_spec.models.drafts.checkpoint import open_draft
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.interfaces import FeatureCapture
from tests.helpers.checkpoints import (
    make_eagle,
    make_eagle3,
    make_target,
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.plain_heads import PlainHead
from tests.unit.models.draft_formats import (
    as_speculators,
    as_wrapped,
    assert_computes,
    medusa_tensors,
    official_medusa_names,
)


@pytest.fixture
def eagle3(tmp_path, target_dir):
    """An official EAGLE-3 head with a reduced vocabulary."""
    return make_eagle3(tmp_path / "official", target_dir, draft_vocab=100)


def refusal(directory, target, algorithm="EAGLE3"):
    with pytest.raises(CheckpointError) as error:
        load_draft(directory, target, algorithm)
    return str(error.value)


def test_a_head_of_other_names_is_of_a_layout_of_its_own(tmp_path, target_dir):
    make_eagle3(tmp_path, target_dir, layer_prefix="layers.0.")
    file = open_draft(tmp_path)
    assert (file.family, file.exporter) == ("EAGLE3", "vLLM, ModelOpt")


@pytest.mark.parametrize("adds", [None, True, False])
def test_a_speculators_head_adds_to_the_normed_state_unless_configured(
    tmp_path, target_dir, target, eagle3, adds
):
    switch = {} if adds is None else {"norm_before_residual": adds}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
    as_speculators(eagle3, tmp_path / "speculators", layers=rope, **switch)
    assert open_draft(tmp_path / "speculators").exporter == "speculators"
    head = load_draft(tmp_path / "speculators", target, "EAGLE3")
    assert head.target_ids is not None
    meant = {"norm_before_residual": adds is not False, "rope_theta": 300.0}
    assert_computes(head, PlainHead(eagle3, target_dir, **meant))


def test_a_speculators_head_with_an_input_norm_and_a_window_computes_what_its_trainer_did(
    tmp_path, target_dir, target
):
    official = make_eagle3(tmp_path / "official", target_dir, num_layers=2, own_embedding=True)
    config, tensors = read_checkpoint(official)
    tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 96)
    write_checkpoint(official, config, tensors)
    window = {"sliding_window": 5, "layer_types": ["sliding_attention", "sliding_attention"]}
    flags = {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}
    as_speculators(official, tmp_path / "speculators", layers=window, **flags)
    head = load_draft(tmp_path / "speculators", target, "EAGLE3")
    assert head.shape.sliding_window == 5
    assert_computes(head, PlainHead(official, target_dir, window=5, **flags))


def test_a_speculators_head_of_qwen3_layers_takes_their_norms_and_class_defaults(
    tmp_path, target_dir, target
):
    official = make_eagle3(
        tmp_path / "official", target_dir, num_attention_heads=32, num_key_value_heads=32,
        head_dim=128, rms_norm_eps=1e-6,
    )  # fmt: skip
    config, tensors = read_checkpoint(official)
    for which in ("q", "k"):
        tensors[f"midlayer.self_attn.{which}_norm.weight"] = torch.linspace(0.5, 1.5, 128)
    write_checkpoint(official, config, tensors)
    left_out = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    layers = {"model_type": "qwen3", "sliding_window": 4096, **dict.fromkeys(left_out)}
    as_speculators(official, tmp_path / "speculators", layers=layers)
    head = load_draft(tmp_path / "speculators", target, "EAGLE3")
    assert_computes(head, PlainHead(official, target_dir, norm_before_residual=True))


# The target has 8 layers; the ids that an official head would count as outputs.
@pytest.mark.parametrize("ids", [[1, 3, 4], [3, 4, 6], [2, 4, 8]])
def test_speculators_counts_the_inputs_of_layers(tmp_path, target, eagle3, ids):
    as_speculators(eagle3, tmp_path / "speculators", eagle_aux_hidden_state_layer_ids=ids)
    load = load_draft(tmp_path / "speculators", target, "EAGLE3")
    assert load.capture == FeatureCapture(tuple(ids))
    options = DraftOptions(aux_layers_mean="output")
    if max(ids) < 8:
        load = load_draft(tmp_path / "speculators", target, "EAGLE3", options)
        assert load.capture == FeatureCapture(tuple(k + 1 for k in ids))


@pytest.mark.parametrize("fc_bias", [True, False])
@pytest.mark.parametrize("rewrite", [None, as_wrapped, as_speculators])
def test_eagle_heads_of_all_layouts_have_an_fc_bias_if_it_is_stored(
    tmp_path, target_dir, target, fc_bias, rewrite
):
    # The config says the opposite, as published ones do.
    official = make_eagle(tmp_path / "official", target_dir, fc_bias=fc_bias, bias=not fc_bias)
    directory = official
    if rewrite is not None:
        kind = {"kind": "eagle"} if rewrite is as_speculators else {}
        directory = rewrite(official, tmp_path / "rewritten", **kind)
    head = load_draft(directory, target, "EAGLE")
    assert (head.fc.format.bias is not None) == fc_bias
    assert_computes(head, PlainHead(official, target_dir))


@pytest.mark.parametrize(
    ("family", "make"),
    [
        ("EAGLE", lambda d, t: make_eagle(d, t)),
        ("EAGLE3", lambda d, t: make_eagle3(d, t)),
        ("EAGLE3", lambda d, t: make_eagle3(d, t, layer_prefix="layers.0.")),
        ("EAGLE3", lambda d, t: make_eagle3(d, t, hidden_size=16, own_embedding=True)),
        ("STANDALONE", lambda d, t: make_target(d, "qwen3")),
        ("MEDUSA", lambda d, t: write_checkpoint(d, {}, medusa_tensors(32, 2, 2, 288))),
        (
            "MEDUSA",
            lambda d, t: write_checkpoint(
                d, {}, official_medusa_names(medusa_tensors(32, 3, 1, 288), "medusa_head.")
            ),
        ),
    ],
)
def test_the_family_follows_from_the_tensors_alone(tmp_path, target_dir, family, make):
    make(tmp_path, target_dir)
    config, _ = read_checkpoint(tmp_path)
    claimed = detect_method(config)
    assert claimed is None or claimed.name == family
    # Whatever the config calls itself.
    for name in ("LlamaForCausalLM", "MedusaModel", "LlamaForCausalLMEagle3"):
        config = {**config, "architectures": [name], "model_type": "llama"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        file = open_draft(tmp_path)
        assert file.family == family
        assert file.evidence


@pytest.mark.parametrize(
    ("top", "layers", "words"),
    [
        ({"speculators_model_type": "peagle"}, {}, ["'peagle'", "['eagle', 'eagle3']"]),
        ({"speculators_model_type": "eagle"}, {}, ["'eagle'", "are of EAGLE3"]),
        ({"layernorms": True}, {}, ["layernorms=true", "implementations differ"]),
        ({}, {"model_type": "deepseek"}, ["model_type='deepseek'", "llama"]),
        (
            {},
            {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
            ["sliding_window=9", "mixed"],
        ),
        ({}, {"sliding_window": 9}, ["sliding_window=9", "layer_types"]),
        ({}, {"vocab_size": 100}, ["vocab_size=100", "288", "trained for this target"]),
        ({"norm_before_fc": True}, {}, ["missing input_norm.weight"]),
    ],
)
def test_speculators_heads_that_are_not_computed_are_refused_by_name(
    tmp_path, target, eagle3, top, layers, words
):
    as_speculators(eagle3, tmp_path / "speculators", layers=layers, **top)
    message = refusal(tmp_path / "speculators", target)
    assert all(word in message for word in words), message
