"""A draft's rotary base and the layers it reads: as configured, or as measured on a text."""

import math

import pytest
import torch

from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import load_models
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.models import DraftOptions, FeatureCapture, draft_probe, load_draft, load_target
from serve_spec.models.draft_checkpoint import read_draft
from serve_spec.models.draft_probe import (
    TRAINER_THETA,
    choose_layers,
    choose_theta,
    overlap_measure,
    probe_text,
    set_theta,
)
from serve_spec.models.draft_shape import both_readings
from serve_spec.parallel.group import SINGLE
from tests.helpers.checkpoints import make_eagle, make_eagle3
from tests.helpers.paged import PagedSequences
from tests.helpers.plain_heads import PlainHead
from tests.unit.models.draft_formats import assert_computes

IDS = torch.randint(0, 288, (150,), generator=torch.Generator().manual_seed(1))


def plain_overlap(head, plain, target):
    """What the measure means: float64, a paged pool for the target, one softmax for all rows."""
    ctx = PagedSequences(target.shape, 1, len(IDS)).extend([(0, len(IDS))])
    out = target.forward(IDS, ctx, head.capture)
    _, logits = plain.unroll(IDS[1:], out.features[:-1])
    p = target.logits(out.hidden[1:]).double().softmax(dim=1)
    if head.target_ids is not None:
        p = p[:, head.target_ids]
    return float(torch.minimum(p, logits.softmax(dim=1)).sum(dim=1).mean())


WINDOW = {"sliding_window": 7, "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("make", "theta", "keys"),
    [
        (make_eagle, 10000.0, {"num_key_value_heads": 2}),
        (make_eagle3, 30.0, {"draft_vocab": 100}),
        (make_eagle3, 10000.0, WINDOW),
    ],
)
def test_the_measure_is_what_an_exact_rule_could_keep_of_the_first_drafts(
    tmp_path, target_dir, target, make, theta, keys
):
    make(tmp_path, target_dir, **keys)
    head = load_draft(tmp_path, target, "EAGLE" if make is make_eagle else "EAGLE3")
    measure = overlap_measure(head, target, IDS)
    set_theta(head, theta)
    window = {"window": 7} if keys is WINDOW else {}
    plain = PlainHead(tmp_path, target_dir, rope_theta=theta, **window)
    expected = plain_overlap(head, plain, target)
    assert 0.01 < expected < 0.99
    assert math.isclose(measure(), expected, rel_tol=1e-4)


def test_a_measured_head_computes_with_the_theta_that_drafts_best(tmp_path, target_dir, target):
    make_eagle3(tmp_path, target_dir, rope_theta=40.0)
    head = load_draft(tmp_path, target, "EAGLE3")
    found = choose_theta(head, target, IDS.tolist())
    by_theta = {
        theta: plain_overlap(head, PlainHead(tmp_path, target_dir, rope_theta=theta), target)
        for theta in (40.0, TRAINER_THETA, target.shape.rope_theta)
    }
    assert found == max(by_theta, key=lambda theta: by_theta[theta])
    assert head.shape.rope_theta == found
    assert_computes(head, PlainHead(tmp_path, target_dir, rope_theta=found))


def test_of_equal_thetas_the_heads_own_wins_and_each_is_measured_once(
    tmp_path, target_dir, target, monkeypatch
):
    make_eagle3(tmp_path, target_dir, rope_theta=TRAINER_THETA)
    head = load_draft(tmp_path, target, "EAGLE3")
    measured = []
    measure = lambda *_: lambda: measured.append(head.shape.rope_theta) or 0.5  # noqa: E731
    monkeypatch.setattr(draft_probe, "overlap_measure", measure)
    assert choose_theta(head, target, IDS.tolist()) == TRAINER_THETA
    assert measured == [TRAINER_THETA, target.shape.rope_theta]


@pytest.mark.parametrize("ids", [[1, 3, 4], [2, 4, 5], [3, 4, 6]])
def test_a_measured_head_reads_the_layers_that_draft_best(tmp_path, target_dir, target, ids):
    make_eagle3(tmp_path, target_dir, eagle_aux_hidden_state_layer_ids=ids)
    readings = both_readings(read_draft(tmp_path), 8)
    assert readings == (tuple(ids), tuple(k + 1 for k in ids))
    scores = {}
    for layers in readings:
        head = load_draft(tmp_path, target, "EAGLE3", DraftOptions(aux_layer_ids=layers))
        scores[layers] = plain_overlap(head, PlainHead(tmp_path, target_dir), target)
    for mean in ("input", "output"):
        head = load_draft(tmp_path, target, "EAGLE3", DraftOptions(aux_layers_mean=mean))
        found = choose_layers(head, target, IDS.tolist(), readings)
        assert found == max(readings, key=lambda layers: scores[layers])
        assert head.capture == FeatureCapture(found)


@pytest.mark.parametrize("ids", [None, [2, 4, 8]])
def test_ids_of_one_reading_alone_are_not_read_otherwise(tmp_path, target_dir, target, ids):
    """The target has 8 layers, and so no output of another one."""
    entry = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    make_eagle3(tmp_path, target_dir, **entry)
    assert both_readings(read_draft(tmp_path), 8) == ()
    head = load_draft(tmp_path, target, "EAGLE3")
    assert choose_layers(head, target, IDS.tolist(), ()) == tuple(ids or (2, 4, 5))


def test_no_more_of_a_text_is_read_than_positions_there_are(tmp_path, target_dir):
    make_eagle3(tmp_path, target_dir)
    short = load_target(target_dir, torch.float32, max_model_len=20)
    head = load_draft(tmp_path, short, "EAGLE3")
    twice = [choose_theta(head, short, IDS[:count].tolist()) for count in (150, 20)]
    assert twice[0] == twice[1]


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


def test_every_key_reaches_the_head(config):
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
    path = config.draft_folder
    ids = Tokenizer(target_dir).encode(probe_text())
    head = load_draft(path, target, "EAGLE3")
    layers = choose_layers(head, target, ids, [(2, 4, 5), (3, 5, 6)])
    theta = choose_theta(head, target, ids)
    measured = {"speculative_draft_aux_layers_mean": "probe"}
    found = loaded_head(config, speculative_draft_rope_theta="probe", **measured)
    assert (found.capture.layer_ids, found.shape.rope_theta) == (layers, theta)
    assert loaded_head(config, **measured).capture.layer_ids == layers
