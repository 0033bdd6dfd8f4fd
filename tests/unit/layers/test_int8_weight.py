"""Products with weights in eight-bit integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.layers.quantized import Int8Weight, int8_works, quantized_rows

needs_int8 = pytest.mark.skipif(not int8_works(), reason="torch has no int8 products here")


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 40))
def test_each_number_is_off_by_at_most_half_a_step_of_its_row(seed, rows, columns):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    values, scale = quantized_rows(weight)
    assert values.dtype == torch.int8
    error = (values.float() * scale[:, None] - weight).abs()
    assert torch.all(error <= 0.5001 * scale[:, None])


def test_a_row_of_zeros_stays_one():
    values, scale = quantized_rows(torch.zeros(2, 3))
    assert not values.any()
    assert torch.isfinite(scale).all()


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_the_product_is_near_the_exact_one_with_its_bias(dtype, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((num_rows, 96), (48, 96), (48,))
    )
    found = Int8Weight(weight, bias).linear(x.to(dtype), dtype)
    expected = x @ weight.T + bias
    assert found.dtype == dtype
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


@needs_int8
def test_a_row_of_huge_numbers_takes_nothing_from_the_others():
    x, weight = (torch.randn(n, 96, generator=torch.Generator().manual_seed(n)) for n in (4, 48))
    huge = torch.cat([x, 1e5 * x[:1], torch.zeros(1, 96)])
    found = Int8Weight(weight).linear(huge, torch.float32)
    expected = x @ weight.T
    assert (found[:4] - expected).norm() < 0.05 * expected.norm()
    assert not found[-1].any()
