"""On a GPU the models compute what they compute on the CPU (there: what transformers does)."""

import pytest
import torch

from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.loader import load_target
from tests.helpers.checkpoints import make_eagle, make_eagle3, make_target
from tests.helpers.paged import PagedSequences

pytestmark = pytest.mark.gpu

FAMILIES = {
    "llama3": {"mlp_bias": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
    "qwen3": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
}
ROUNDS = [[(0, 30)], [(1, 20), (0, 8)], [(0, 1), (1, 1)], [(0, 4), (1, 4)], [(1, 5), (0, 2)]]


def run(model, capture=None):
    """Logits and features of two sequences over `ROUNDS`, on the CPU."""
    weight = model.embed_tokens.weight
    sequences = PagedSequences(
        model.spec.caches, 2, 60, dtype=weight.dtype, device=weight.device.type
    )
    generator = torch.Generator().manual_seed(0)
    logits, features = [], []
    for chunks in ROUNDS:
        count = sum(n for _, n in chunks)
        ids = torch.randint(0, 288, (count,), generator=generator).to(weight.device)
        out = model.forward(ids, sequences.extend(chunks), capture)
        logits.append(model.logits(out.hidden).cpu())
        features.append((out.hidden if out.features is None else out.features).cpu())
    return torch.cat(logits), torch.cat(features)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_targets_agree_across_devices(tmp_path, family):
    directory = make_target(tmp_path, family, **FAMILIES[family])
    capture = FeatureCapture((1, 3, 6))
    expected = run(load_target(directory, torch.float32), capture)
    found = run(load_target(directory, torch.float32, "cuda"), capture)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-3


def test_bfloat16_agrees_across_devices(tmp_path):
    directory = make_target(tmp_path, "llama3")
    expected, _ = run(load_target(directory, torch.bfloat16))
    found, _ = run(load_target(directory, torch.bfloat16, "cuda"))
    assert torch.cosine_similarity(found, expected, dim=1).min() > 0.995


@pytest.mark.parametrize(
    ("algorithm", "make", "keys"),
    [("EAGLE", make_eagle, {}), ("EAGLE3", make_eagle3, {"draft_vocab": 99})],
)
def test_heads_agree_across_devices(tmp_path, algorithm, make, keys):
    make_target(tmp_path / "target", "llama3")
    make(tmp_path / "head", tmp_path / "target", **keys)
    answers = []
    for device in ("cpu", "cuda"):
        target = load_target(tmp_path / "target", torch.float32, device)
        head = load_draft(tmp_path / "head", target, algorithm)
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(25, head.feature_dim, generator=generator).to(device)
        sequences = PagedSequences(head.caches, 1, 30, device=device)
        ids = torch.arange(25, device=device)
        hidden = head.forward(ids, head.encode(features), sequences.extend([(0, 25)]))
        drafted = head.forward(ids[:1], hidden[-1:], sequences.extend([(0, 1)]))
        assert head.target_ids is None or head.target_ids.device.type == device
        answers.append(head.logits(torch.cat((hidden, drafted))).cpu())
    assert (answers[0] - answers[1]).abs().max() < 1e-3
