"""Norms: the kernels against their laws."""

import pytest
import torch

from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference, relative_error

from serve_spec.ops import elementwise, elementwise_triton  # isort: skip

plain = reference(elementwise)

TOLERANCE = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-6}
EPS = 1e-5


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (5, 48), (2, 3, 300), (3, 4096)])
def test_the_kernels_follow_their_laws(shape, dtype):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    with poisoned_memory():
        normed, total = elementwise_triton.add_rms_norm(x, residual, weight, EPS)
        alone = elementwise_triton.rms_norm(x, weight, EPS)
    expected, sums = plain.add_rms_norm(x, residual, weight, EPS)
    assert (alone.shape, alone.dtype) == (normed.shape, normed.dtype) == (shape, dtype)
    assert relative_error(alone, plain.rms_norm(x, weight, EPS)) < TOLERANCE[dtype]
    assert torch.equal(total, sums), "the stream is rounded alike, whoever adds"
    assert relative_error(normed, expected) < TOLERANCE[dtype]
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 1, 8), (3, 5, 48), (4, 3, 4096)])
def test_addends_are_added_up_in_order_and_rounded_before_the_residual_is(shape, dtype):
    partials, residual = random(*shape), random(*shape[1:], dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    whole = partials[0]
    for addend in partials[1:]:
        whole = whole + addend
    expected = residual + whole.to(dtype)
    for impl in (plain, elementwise_triton):
        normed, total = impl.add_rms_norm(partials, residual, weight, EPS)
        assert torch.equal(total, expected)
        assert relative_error(normed, plain.rms_norm(expected, weight, EPS)) < TOLERANCE[dtype]


def test_rows_may_be_part_of_wider_tensors():
    wide, weight = random(4, 150), random(48, seed=1)
    x, residual = wide[:, :48], wide[:, 60:108]
    normed, total = elementwise_triton.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert relative_error(normed, plain.rms_norm(total, weight, EPS)) < 1e-6
    alone = elementwise_triton.rms_norm(residual, weight, EPS)
    assert relative_error(alone, plain.rms_norm(residual, weight, EPS)) < 1e-6


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e3])
def test_rows_of_any_size_are_normed_in_float32(scale):
    """Squares of a thousand overflow float16."""
    x = (scale * random(2, 64)).half()
    weight = random(64, seed=1).half()
    exact = plain.rms_norm(x.double(), weight.double(), EPS)
    assert torch.isfinite(exact).all()
    found = elementwise_triton.rms_norm(x, weight, EPS)
    assert torch.allclose(found.double(), exact, rtol=2e-3, atol=1e-6)


def test_no_rows_give_no_rows():
    x, weight = torch.empty(0, 16, device=DEVICE), random(16)
    assert elementwise_triton.rms_norm(x, weight, EPS).shape == (0, 16)
    assert [part.shape for part in elementwise_triton.add_rms_norm(x, x, weight, EPS)] == [
        (0, 16)
    ] * 2
