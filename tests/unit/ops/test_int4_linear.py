"""Products with integers of four bits: the kernels against the reference."""

import pytest
import torch

from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference, relative_error

from serve_spec.ops import int4_linear, int4_linear_triton  # isort: skip
from serve_spec.ops.int4_linear import packed_codes, unpacked_codes  # isort: skip
from serve_spec.ops.linear import sum_partials  # isort: skip

plain = reference(int4_linear)

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
# (rows, outputs, in, columns of a group, zeros): tails of each, groups below and above a tile.
SHAPES = [
    (1, 64, 128, 32, torch.uint8),
    (3, 40, 304, 16, torch.uint8),
    (17, 33, 1088, 64, torch.uint8),
    (40, 130, 384, 128, torch.uint8),
    (5, 70, 200, 200, torch.uint8),
    (2, 48, 1024, 256, torch.uint8),
    (70, 20, 256, 64, torch.uint8),
    (17, 40, 288, 32, torch.float16),
    (2, 70, 96, 32, torch.float32),
]


def weight(num_outputs, in_features, group, dtype=torch.float16, zeros_dtype=torch.uint8):
    """Return codes, scale and zeros of a random matrix, and the matrix."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(16, (num_outputs, in_features), generator=generator)
    sizes = in_features // group, num_outputs
    zeros = torch.randint(17, sizes, generator=generator).to(zeros_dtype)
    scale = torch.rand(sizes, generator=generator).to(dtype)
    each = torch.arange(in_features) // group
    factors = scale.float().T[:, each]
    if zeros_dtype.is_floating_point:
        zeros = (zeros / -3).to(zeros_dtype)
        exact = codes * factors + zeros.float().T[:, each]
    else:
        exact = (codes - zeros.T[:, each].int()) * factors
    packed = packed_codes(codes.to(torch.uint8))
    return (*(tensor.to(DEVICE) for tensor in (packed, scale, zeros)), exact.to(DEVICE))


def with_factors(num_outputs, in_features, group, together):
    """Return codes, scale, zeros and factors of so many groups, and the matrix."""
    codes, scale, zeros, _ = weight(num_outputs, in_features, group)
    generator = torch.Generator().manual_seed(2)
    scale = torch.randint(64, scale.shape, generator=generator).to(DEVICE, torch.uint8)
    sizes = 2, len(scale) // together, num_outputs
    factors = torch.randn(sizes, generator=generator).half().to(DEVICE)
    each = torch.arange(in_features, device=DEVICE) // group
    of_scale, of_zero = factors.float().repeat_interleave(together, dim=1)
    exact = unpacked_codes(codes, in_features) * (of_scale * scale).T[:, each]
    return codes, scale, zeros, factors, exact + (of_zero * zeros).T[:, each]


@pytest.mark.parametrize("num_rows", [3, 129])
def test_scales_and_zeros_may_be_integers_times_factors(num_rows):
    *stored, factors, exact = with_factors(70, 512, 32, 8)
    for dtype in TOLERANCE:
        found = int4_linear_triton.dequantized(*stored, 512, dtype, factors)
        assert torch.equal(found, exact.to(dtype))
        assert torch.equal(plain.dequantized(*stored, 512, dtype, factors), exact.to(dtype))
        x = inputs(num_rows, 512, dtype)
        expected = x.float() @ exact.to(dtype).float().T
        found = int4_linear_triton.small_int4_linear(x, *stored, None, torch.float32, factors)
        assert relative_error(found, expected) < TOLERANCE[dtype]
        for op in (plain, int4_linear):
            found = op.int4_linear(x, *stored, None, torch.float32, factors)
            assert relative_error(found, expected) < TOLERANCE[dtype]
            partials = op.int4_partials(x, *stored, factors)
            found = sum_partials(partials, torch.empty_like(expected))
            assert relative_error(found.float(), expected) < TOLERANCE[dtype]


def inputs(num_rows, in_features, dtype):
    generator = torch.Generator().manual_seed(0)
    # Every other half of longer rows.
    x = torch.randn(num_rows, 2 * in_features, generator=generator).to(DEVICE, dtype)
    return x[:, :in_features]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_rows", "num_outputs", "in_features", "group", "zeros"), SHAPES)
def test_the_kernels_follow_the_reference(num_rows, num_outputs, in_features, group, zeros, dtype):
    *stored, exact = weight(num_outputs, in_features, group, zeros_dtype=zeros)
    assert torch.equal(plain.dequantized(*stored, in_features, torch.float32), exact)
    with poisoned_memory():
        rounded = int4_linear_triton.dequantized(*stored, in_features, dtype)
    assert torch.equal(rounded, exact.to(dtype))
    x = inputs(num_rows, in_features, dtype)
    for bias in (None, inputs(1, num_outputs, dtype)[0]):
        with poisoned_memory():
            found = int4_linear_triton.small_int4_linear(x, *stored, bias)
        expected = plain.small_int4_linear(x, *stored, bias)
        assert found.dtype == dtype
        assert relative_error(found, expected) < TOLERANCE[dtype]
    # Gates and ups, as many of each.
    half = num_outputs // 16 * 8
    even = stored[0][: 2 * half], *(each[:, : 2 * half].contiguous() for each in stored[1:])
    with poisoned_memory():
        wide = int4_linear_triton.small_int4_linear(x, *stored, None, torch.float32)
        partials = int4_linear_triton.small_int4_partials(x, *stored)
        gated = int4_linear_triton.small_int4_gate_up(x, *even)
    assert torch.equal(sum_partials(partials, wide), wide)
    # The kernel for Hopper may round a number to its other neighbour, and rounds offsets.
    limit = TOLERANCE[dtype] / (4 if zeros == torch.uint8 else 1)
    limit = 1e-5 if DEVICE.type == "cpu" else limit
    assert relative_error(wide, x.float() @ rounded.float().T) < limit
    assert relative_error(gated, plain.small_int4_gate_up(x, *even)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype):
    """Of a sum that several programs share."""
    *stored, _ = weight(64, 2048, 128)
    x = inputs(70, 2048, dtype)
    among = int4_linear_triton.small_int4_linear(x, *stored)
    for count in (1, 2, 16, 17, 33):
        assert torch.equal(int4_linear_triton.small_int4_linear(x[:count], *stored), among[:count])
    assert len(int4_linear_triton.small_int4_partials(x[:1], *stored)) > 1


@pytest.mark.parametrize("num_rows", [4, 128, 129, 700])
def test_products_of_many_rows_dequantize_first(num_rows):
    *stored, exact = weight(320, 512, 64)
    x = inputs(num_rows, 512, torch.bfloat16)
    bias = inputs(1, 320, torch.bfloat16)[0]
    found = int4_linear.int4_linear(x, *stored, bias)
    expected = x.float() @ exact.bfloat16().float().T + bias.float()
    assert relative_error(found, expected) < TOLERANCE[torch.bfloat16]
    partials = int4_linear.int4_partials(x, *stored)
    assert (
        relative_error(sum_partials(partials, x.new_empty(num_rows, 320)), expected - bias) < 4e-3
    )
