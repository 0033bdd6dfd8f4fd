"""Decoders that transformers computes give its logits over our cache, in batches with drafts."""

import json
from itertools import pairwise

import pytest
import torch

from serve_spec.core.errors import CheckpointError
from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.loader import check_target, load_target
from serve_spec.parallel.group import TensorParallel
from tests.helpers.checkpoints import read_checkpoint, write_checkpoint
from tests.helpers.paged import PagedSequences
from tests.helpers.transformers_models import CASES, make_model

TOLERANCE = 1e-4
# Rounds of (sequence, tokens): chunks of prompts, and texts that go on beside them.
ROUNDS = [[(0, 17), (1, 12)], [(0, 1), (1, 4)], [(0, 22), (1, 1)], [(1, 6)]]
LENGTHS = [sum(count for each in ROUNDS for at, count in each if at == n) for n in (0, 1)]


def texts(vocab=288):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (length,), generator=generator) for length in LENGTHS]


def saved(folder, family, **config):
    model = make_model(family, **config)
    model.save_pretrained(folder)
    return model


def run(model, tokens, capture=None):
    """Logits [length, V], or features, of every sequence."""
    sequences = PagedSequences(model.spec.caches, len(tokens), max(LENGTHS))
    found = [[] for _ in tokens]
    for chunks in ROUNDS:
        starts = [sequences.lengths[at] for at, _ in chunks]
        ctx = sequences.extend(chunks)
        parts = [
            tokens[at][start : start + n] for (at, n), start in zip(chunks, starts, strict=True)
        ]
        output = model.forward(torch.cat(parts), ctx, capture)
        rows = model.logits(output.hidden) if capture is None else output.features
        for (at, _), part in zip(chunks, rows.split([n for _, n in chunks]), strict=True):
            found[at].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("family", CASES)
def test_batches_of_any_chunks_give_transformers_logits_and_streams(tmp_path, family):
    reference = saved(tmp_path, family)
    model, tokens = load_target(tmp_path, torch.float32), texts()
    answers = [reference(ids[None], output_hidden_states=True) for ids in tokens]
    for found, answer in zip(run(model, tokens), answers, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, answer.logits[0], rtol=0, atol=TOLERANCE)
        assert torch.equal(found.argmax(-1), answer.logits[0].argmax(-1))
    for found, answer in zip(run(model, tokens, FeatureCapture((0, 2))), answers, strict=True):
        streams = torch.cat([answer.hidden_states[0][0], answer.hidden_states[2][0]], dim=1)
        torch.testing.assert_close(found, streams, rtol=0, atol=TOLERANCE)
    for found, answer in zip(run(model, tokens, FeatureCapture(None)), answers, strict=True):
        torch.testing.assert_close(found, answer.hidden_states[-1][0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["gemma2", "phi3"])
def test_what_a_layer_sees_is_what_it_asks_for(tmp_path, family):
    saved(tmp_path, family)
    caches = load_target(tmp_path, torch.float32).spec.caches
    windows = {"gemma2": [8, 8, None], "phi3": [9, 9, 9]}[family]
    assert [cache.window for cache in caches] == windows
    assert {cache.softcap for cache in caches} == {5.0 if family == "gemma2" else None}
    assert caches[0].score_scale == pytest.approx(24**-0.5 if family == "gemma2" else 16**-0.5)


def test_a_text_model_inside_a_multimodal_one_has_the_names_of_its_file(tmp_path):
    saved(tmp_path / "alone", "gemma3_text")
    expected = run(load_target(tmp_path / "alone", torch.float32), texts())
    config, tensors = read_checkpoint(tmp_path / "alone")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    inside = {name.replace("model.", "language_model.model.", 1): t for name, t in tensors.items()}
    inside["vision_tower.patch.weight"] = torch.ones(2, 2)
    write_checkpoint(tmp_path / "whole", {**whole, "text_config": config}, inside)
    found = run(load_target(tmp_path / "whole", torch.float32), texts())
    assert all(map(torch.equal, found, expected))


def test_random_weights_have_the_shape_of_a_config(tmp_path):
    saved(tmp_path, "olmo2")
    (tmp_path / "model.safetensors").unlink()
    model = load_target(tmp_path, torch.float32, load_format="dummy")
    assert run(model, texts())[0].std() > 0.1


class TwoRanks(TensorParallel):
    size = 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DiffLlamaForCausalLM"]}, "DiffLlamaForCausalLM"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"model_type": "gemma"}, "model_type is that of GemmaForCausalLM"),
        ({"hidden_size": 60}, "expected"),
        ({"num_attention_heads": "four"}, "model_type='gemma2'"),
        ({"intermediate_size": 96}, r"mlp\.\w+_proj.weight is \[128, 64\], expected \[96, 64\]"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, changes, words):
    saved(tmp_path, "gemma2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=words):
        check_target(tmp_path)


def test_several_ranks_are_refused(tmp_path):
    saved(tmp_path, "olmo2")
    with pytest.raises(CheckpointError, match="tensor_parallel_size=2"):
        load_target(tmp_path, torch.float32, parallel=TwoRanks())


def test_a_row_has_the_same_bits_alone_and_among_others(tmp_path):
    saved(tmp_path, "olmo2", hidden=256)
    model = load_target(tmp_path, torch.float32)
    product = model.decoder.layers[0].mlp.down_proj
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    among = product(x)
    assert all(torch.equal(product(x[a:b]), among[a:b]) for a, b in pairwise((0, 1, 3, 20, 40)))
