"""The parts against their definitions."""

import pytest
import torch

from serve_spec.layers.module import tensor_defaults
from serve_spec.layers.norm import RMSNorm


@pytest.mark.parametrize(
    ("scale", "finished"), [(0.0, True), (1e-5, False), (1.0, True), (1e4, False)]
)
def test_norms_follow_their_definition(scale, finished):
    norm = RMSNorm(48, 1e-5)
    generator = torch.Generator().manual_seed(0)
    norm.weight.copy_(torch.randn(48, generator=generator))
    if finished:
        norm.finish()
    x = scale * torch.randn(5, 48, generator=generator)
    exact = x.double()
    exact = exact / (exact.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    assert torch.allclose(norm(x).double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("finished", [False, True])
def test_norms_are_computed_in_float32(finished):
    with tensor_defaults(torch.float16, "cpu"):
        norm = RMSNorm(64, 1e-6)
    norm.weight.fill_(1.0)
    if finished:
        norm.finish()
    # Squares of 1000 overflow float16.
    x = torch.full((1, 64), 1000.0, dtype=torch.float16)
    assert torch.equal(norm(x), torch.ones(1, 64, dtype=torch.float16))


@pytest.mark.parametrize("finished", [False, True])
def test_the_fused_norm_adds_partial_sums_and_leaves_its_inputs_alone(finished):
    norm = RMSNorm(8, 1e-6)
    norm.weight.fill_(2.0)
    if finished:
        norm.finish()
    x, residual = torch.ones(3, 8), torch.full((3, 8), 2.0)
    for partials in (torch.ones(1, 3, 8), torch.full((4, 3, 8), 0.25)):
        assert all(map(torch.equal, norm.add(partials, residual), norm.add(x, residual)))
    normed, total = norm.add(x, residual)
    assert torch.equal(total, torch.full((3, 8), 3.0))
    assert torch.equal(normed, norm(total))
    assert torch.equal(x, torch.ones(3, 8))
    assert torch.equal(residual, torch.full((3, 8), 2.0))


def test_defaults_are_restored_after_building():
    before = torch.get_default_dtype()
    with pytest.raises(RuntimeError, match="inside"), tensor_defaults(torch.bfloat16, "cpu"):
        raise RuntimeError("inside")
    assert torch.get_default_dtype() == before
