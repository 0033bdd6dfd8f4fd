"""Products with weights in integers of four and eight bits."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.layers.formats.choices import ConvertedFormats
from serve_spec.layers.formats.int4 import (
    GROUP,
    Int4Weight,
    int4_works,
    plain_weight,
    quantized_groups,
)
from serve_spec.layers.formats.int8 import Int8Weight, int8_works, quantized_rows
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import tensor_defaults

CPU = torch.device("cpu")
needs_int4 = pytest.mark.skipif(not int4_works(CPU), reason="torch has no int4 products here")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loaded(weight, bias, **formats):
    """A layer before it is finished."""
    with tensor_defaults(torch.float32, CPU):
        layer = Linear(weight.shape[1], {"proj": len(weight)}, bias=True, **formats)
    tensors = layer.tensors()
    tensors["proj.weight"].copy_(weight)
    tensors["proj.bias"].copy_(bias)
    return layer


@given(
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(1, 3),
    st.floats(-30, 30),
    st.sampled_from([0.0, 1.0, -300.0]),
)
def test_each_number_is_off_by_at_most_half_a_step_of_its_group(
    seed, rows, groups, exponent, offset
):
    """Also far from zero, where a grid's middle is rounded by more than the group is wide."""
    weight = (random(rows, groups * GROUP, seed=seed) + offset) * 2.0**exponent
    codes, grids = quantized_groups(weight)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) <= 15
    assert grids.dtype == torch.bfloat16
    step = grids[..., 0].float().T.repeat_interleave(GROUP, dim=1)
    error = (plain_weight(codes, grids) - weight).abs()
    assert torch.all(error <= 0.5001 * step)


def test_a_group_around_zero_spends_all_its_steps_on_its_range():
    weight = random(64, 4 * GROUP)
    step = quantized_groups(weight)[1][..., 0].float().T
    low, high = weight.unflatten(1, (-1, GROUP)).aminmax(dim=2)
    assert torch.all(step <= 1.02 * (high - low) / 15)
    for equal in (torch.zeros(2, GROUP), torch.full((2, GROUP), 0.75)):
        assert torch.equal(plain_weight(*quantized_groups(equal)), equal), "nothing to round"


@needs_int4
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "in_features", "dtype"),
    [
        (1, 16, 32, torch.float32),
        (3, 48, 96, torch.bfloat16),
        (8, 64, 160, torch.float16),
        (40, 128, 64, torch.float32),
    ],
)
def test_the_product_is_that_of_the_plain_weight_with_its_bias(
    num_rows, num_outputs, in_features, dtype
):
    """Rows need not follow each other in memory."""
    x = random(num_rows, 2, in_features, seed=1)[:, 0]
    weight, bias = random(num_outputs, in_features, seed=2), random(num_outputs, seed=3)
    found = Int4Weight(weight, bias.to(dtype)).linear(x.to(dtype), dtype)
    expected = x.bfloat16().float() @ plain_weight(*quantized_groups(weight)).T + bias
    assert found.dtype == dtype
    assert (found.float() - expected).norm() < 0.01 * expected.norm()


@needs_int4
@pytest.mark.parametrize("shape", [(48, 64), (512, 256)])
def test_a_layer_keeps_five_bits_a_number_and_no_other_copy(shape):
    """The larger is one that oneDNN would lay out otherwise."""
    weight, bias, x = random(*shape), random(shape[0], seed=1), random(3, shape[1], seed=2)
    formats = ConvertedFormats(Int4Weight.convert)
    layer = loaded(weight, bias, formats=formats)
    plain = weakref.ref(layer.format)
    layer.finish()
    gc.collect()
    assert plain() is None, "what was loaded is freed"
    assert formats.num_bytes == layer.format.num_bytes == weight.numel() * 5 // 8
    held = [*layer.parameters(), *vars(layer).values(), *vars(layer.format).values()]
    num_bytes = {id(kept): kept.nbytes for kept in held if isinstance(kept, torch.Tensor)}
    assert sum(num_bytes.values()) == weight.numel() * 5 // 8 + bias.nbytes
    assert torch.equal(layer(x), Int4Weight(weight, bias).linear(x))


@pytest.mark.parametrize("shape", [(20, 64), (16, 48), (257, 33)])
def test_a_weight_of_another_shape_stays_as_it_is(shape):
    weight, bias, x = random(*shape), random(shape[0], seed=1), random(3, shape[1], seed=2)
    formats = ConvertedFormats(Int4Weight.convert)
    layer, plain = loaded(weight, bias, formats=formats), loaded(weight, bias)
    for each in (layer, plain):
        each.finish()
    assert (formats.num_converted, formats.num_plain, formats.num_bytes) == (0, 1, 0)
    assert torch.equal(layer(x), plain(x))


needs_int8 = pytest.mark.skipif(not int8_works(), reason="torch has no int8 products here")


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 40))
def test_each_number_of_eight_bits_is_off_by_at_most_half_a_step_of_its_row(seed, rows, columns):
    weight = random(rows, columns, seed=seed)
    weight[0] *= seed % 2
    values, scale = quantized_rows(weight)
    assert values.dtype == torch.int8
    assert torch.isfinite(scale).all()
    error = (values.float() * scale[:, None] - weight).abs()
    assert torch.all(error <= 0.5001 * scale[:, None])


@needs_int8
@pytest.mark.parametrize(
    ("dtype", "num_rows"), [(torch.float32, 1), (torch.bfloat16, 3), (torch.float32, 40)]
)
def test_the_product_of_eight_bits_is_near_the_exact_one_with_its_bias(dtype, num_rows):
    x, weight = random(num_rows, 96, seed=num_rows), random(48, 96, seed=5)
    bias = random(48, seed=6)
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
