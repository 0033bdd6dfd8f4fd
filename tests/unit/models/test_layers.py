"""The parts against their definitions."""

import pytest
import torch

from serve_spec.layers.linear import Linear, onednn_rows, onednn_works
from serve_spec.layers.module import tensor_defaults
from serve_spec.layers.norm import RMSNorm


def filled(linear, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator).to(dtype))
    return linear


@pytest.mark.parametrize(
    ("num_rows", "bias"), [(1, False), (2, True), (8, False), (9, True), (100, False)]
)
def test_a_packed_linear_is_the_same_linear(num_rows, bias):
    plain, packed = (filled(Linear(256, {"a": 300, "b": 20}, bias=bias)) for _ in range(2))
    packed.finish()
    assert packed.weight.numel() == 0 or not onednn_works(torch.float32)
    # Every other half of longer rows.
    x = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(1))[:, :256]
    once = packed(x)
    assert torch.allclose(once, plain(x), rtol=1e-5, atol=1e-4)
    packed.finish()
    assert torch.equal(packed(x), once), "finishing twice changes nothing"
    small = filled(Linear(16, {"a": 16}))
    small.finish()
    assert small.weight.shape == (16, 16), "a small linear is not packed"


@pytest.mark.parametrize("in_features", [256, 1408, 2048])
def test_a_row_of_a_packed_linear_has_the_same_bits_alone_and_among_others(in_features):
    """Or a text would depend on how many drafts are verified with it."""
    linear = filled(Linear(in_features, {"a": 640}))
    linear.finish()
    x = torch.randn(100, in_features, generator=torch.Generator().manual_seed(1))
    among = linear(x)
    for count in (1, 2, 3, 7, 8, 9, 16, 33, 64):
        assert torch.equal(linear(x[:count]), among[:count])


def test_padding_adds_at_most_an_eighth_and_leaves_few_sizes():
    sizes = [onednn_rows(num_rows) for num_rows in range(4097)]
    assert all(num_rows <= size <= num_rows * 9 / 8 for num_rows, size in enumerate(sizes))
    assert sizes[:17] == list(range(17))
    assert all(onednn_rows(size) == size for size in sizes)
    assert len(set(sizes)) < 100


def test_bfloat16_products_accumulate_in_float32():
    with tensor_defaults(torch.bfloat16, "cpu"):
        linear = filled(Linear(1024, {"a": 256}), torch.bfloat16)
    exact_weight = linear.weight.float()
    linear.finish()
    x = torch.randn(3, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.float() @ exact_weight.T
    assert ((linear(x).float() - expected).abs() / expected.abs().clamp_min(1.0)).max() < 1e-2


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


def test_the_fused_norm_leaves_its_inputs_alone():
    norm = RMSNorm(8, 1e-6)
    norm.weight.fill_(2.0)
    x, residual = torch.ones(3, 8), torch.full((3, 8), 2.0)
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
