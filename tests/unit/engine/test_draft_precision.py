"""Data types and quantization of a draft, which leave the target as it is."""

import logging

import pytest
import torch

from serve_spec.layers.formats.fp8_draft import Fp8DraftWeight
from serve_spec.layers.formats.int4 import Int4Weight
from serve_spec.layers.formats.int8 import Int8Weight
from serve_spec.layers.linear import Linear
from serve_spec.models.drafts import loader
from serve_spec.models.drafts.loader import draft_dtype, draft_weights, load_draft
from serve_spec.models.loader import load_target
from tests.helpers.engines import make_pair, sampled_requests, texts

FORMATS = {"fp8": Fp8DraftWeight, "int8": Int8Weight, "int4": Int4Weight}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_weights_and_dtype_of_a_draft_suit_its_device_unless_configured(monkeypatch):
    for is_hopper in (True, False):
        monkeypatch.setattr(loader, "is_hopper", lambda _, answer=is_hopper: answer)
        assert draft_weights("auto", GPU) == ("fp8" if is_hopper else "plain")
        assert draft_weights("none", GPU) == "plain"
        assert draft_weights("int4", GPU) == draft_weights("int4", CPU) == "int4"
        assert draft_weights("auto", CPU) == "plain"
    with pytest.raises(ValueError, match=r"quantization='fp8': .* this is cpu; use 'auto'"):
        draft_weights("fp8", CPU)
    with pytest.raises(ValueError, match=r"quantization='int8': .* this is cuda:0; use 'auto'"):
        draft_weights("int8", GPU)
    assert draft_dtype("auto", torch.bfloat16, GPU, "fp8") == torch.float16
    assert draft_dtype("auto", torch.bfloat16, GPU, "plain") == torch.bfloat16
    assert draft_dtype("bfloat16", torch.bfloat16, GPU, "fp8") == torch.bfloat16
    assert draft_dtype("auto", torch.bfloat16, CPU, "int8") == torch.float32
    assert draft_dtype("auto", torch.float32, GPU, "int4") == torch.bfloat16


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integers_are_refused_where_torch_does_not_support_them(pair, monkeypatch, weights):
    target = load_target(pair.target, torch.float32, CPU)
    monkeypatch.setattr(loader, f"{weights}_works", lambda *_: False)
    with pytest.raises(ValueError, match=rf"quantization='{weights}': not supported .* use 'none'"):
        load_draft(pair.target, target, "STANDALONE", weights=weights)


@pytest.mark.parametrize(
    ("algorithm", "weights"),
    [("EAGLE", "fp8"), ("EAGLE3", "int8"), ("STANDALONE", "int8"), ("EAGLE3", "int4")],
)
def test_every_matrix_of_a_draft_is_quantized_and_none_of_the_target(algorithm, weights, pair):
    """Also if the draft is a copy of the target, or shares its head."""
    target = load_target(pair.target, torch.float32, CPU)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    head = load_draft(pair.heads[algorithm], target, algorithm, weights=weights)
    shared = set(target.modules())
    own = [m for m in head.modules() if isinstance(m, Linear) and m not in shared]
    assert own
    assert {type(m.format) for m in own} == {FORMATS[weights]}
    theirs = {type(m.format) for m in shared if isinstance(m, Linear)}
    assert not theirs & set(FORMATS.values())
    after = target.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_matrix_whose_shape_int4_does_not_take_stays_as_it_is_with_a_warning(tmp_path, caplog):
    pair = make_pair(tmp_path, vocab_size=290)
    target = load_target(pair.target, torch.float32, CPU)
    head = load_draft(pair.target, target, "STANDALONE", weights="int4")
    matrices = [m for m in head.modules() if isinstance(m, Linear)]
    plain = [m for m in matrices if not isinstance(m.format, Int4Weight)]
    assert plain == [head.model.lm_head]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"1 of {len(matrices)} draft matrices keep their format" in warning


def test_a_draft_of_lower_precision_than_its_target_never_changes_the_text(make_llm):
    request = sampled_requests()
    outputs = make_llm("EAGLE3", 3, speculative_draft_dtype="bfloat16").generate(*request)
    assert texts(outputs) == texts(make_llm().generate(*request))
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 0
