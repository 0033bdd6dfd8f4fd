"""The model handed to transformers is ours: the same logits from the same memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_spec.bench.hf_model import as_transformers
from serve_spec.layers.linear import onednn_works
from serve_spec.models import Llama, load_target
from serve_spec.models.expand import Size, expand_target
from tests.helpers.checkpoints import VOCAB, make_target
from tests.helpers.paged import PagedSequences

IDS = torch.arange(90) * 7 % VOCAB
LARGE = Size(hidden_factor=2, ffn_factor=2, num_layers=5, vocab_size=400)


def our_logits(target: Llama) -> Tensor:
    sequences = PagedSequences(target.shape, 1, len(IDS))
    with torch.inference_mode():
        out = target.forward(IDS, sequences.extend([(0, len(IDS))]))
        return target.logits(out.hidden)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    # Small enough that no matrix is packed.
    return make_target(tmp_path / "small", "llama3", layers=3, hidden=32)


def load(base: Path) -> Llama:
    return load_target(base, torch.float32)


@pytest.mark.parametrize(
    "config", [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "rope_scaling": None}]
)
def test_logits_are_those_of_our_model(tmp_path: Path, config: dict[str, Any]) -> None:
    target = load(make_target(tmp_path, "llama3", layers=3, hidden=32, **config))
    model = as_transformers(target)
    assert (model(IDS[None]).logits[0] - our_logits(target)).abs().max() < 1e-4


def test_no_weight_is_copied(base: Path) -> None:
    target = load(base)
    ours = {tensor.data_ptr() for tensor in target.tensors().values()}  # type: ignore[union-attr]
    theirs = {parameter.data_ptr() for parameter in as_transformers(target).parameters()}
    assert theirs == ours


def test_padding_is_never_drawn_and_a_small_model_assists_its_expansion(
    base: Path, tmp_path: Path
) -> None:
    expand_target(str(base), LARGE, tmp_path / "large", noise=1.0, seed=0)
    large = load(tmp_path / "large")
    model = as_transformers(large)
    assistant = as_transformers(load(base), vocab_size=400)
    found, expected = model(IDS[None]).logits[0], our_logits(large)
    assert torch.equal(found.isinf(), expected.isinf())
    assert (found - expected)[:, :VOCAB].abs().max() < 1e-4
    assert assistant(IDS[None]).logits.shape == found[None].shape
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    plain = model.generate(IDS[None, :9], **how)
    assisted = model.generate(IDS[None, :9], assistant_model=assistant, **how)
    assert torch.equal(plain, assisted)
    assert plain.shape == (1, 29)
    assert plain.max() < VOCAB


def test_what_can_not_be_shared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'Qwen3ForCausalLM': only Llama"):
        as_transformers(load(make_target(tmp_path / "qwen", "qwen3", layers=1, hidden=32)))
    wide = load(make_target(tmp_path / "wide", "llama3", layers=1, hidden=256))
    if not onednn_works(torch.float32):
        pytest.skip("this processor has no packed products")
    with pytest.raises(ValueError, match="packed for this CPU; load the target on a GPU"):
        as_transformers(wide)
