"""Products with eight-bit weights and scales of blocks: the kernel against the reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference, relative_error

from serve_spec.ops import scaled_linear, scaled_linear_triton  # isort: skip
from serve_spec.ops.linear import choose_tiles  # isort: skip
from serve_spec.ops.scaled_linear import MAX_ROWS, dequantize_into  # isort: skip

plain = reference(scaled_linear)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
E4M3 = torch.float8_e4m3fn
# (rows of x, outputs, in, unit): units that end with the matrix, inside it, and past it.
SHAPES = [
    (1, 64, 256, (128, 128)),
    (3, 40, 304, (128, 128)),
    (17, 200, 1104, (128, 128)),
    (33, 130, 256, (2, 16)),
    (5, 96, 144, (1, 144)),
    (70, 33, 64, (40, 500)),
    (2, 48, 1024, (48, 64)),
    (MAX_ROWS + 1, 20, 48, (7, 16)),
]


def made(num_outputs, in_features, unit, kind=E4M3, seed=1):
    """Numbers, and scales of all units."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_outputs, in_features, generator=generator) * 40
    counts = [-(-n // size) for n, size in zip((num_outputs, in_features), unit, strict=True)]
    scale = torch.rand(*counts, generator=generator) + 0.01
    return values.clamp(-120, 120).to(kind).to(DEVICE), scale.to(DEVICE)


def inputs(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", [E4M3, torch.int8])
@pytest.mark.parametrize(("num_rows", "num_outputs", "in_features", "unit"), SHAPES)
def test_the_kernel_follows_the_reference(num_rows, num_outputs, in_features, unit, kind, dtype):
    values, scale = made(num_outputs, in_features, unit, kind)
    x, bias = inputs(num_rows, in_features, dtype=dtype), inputs(num_outputs, dtype=dtype, seed=2)
    exact = plain.scaled_linear(x.float(), values, scale, unit)
    for b, out_dtype in ((None, None), (bias, torch.float32)):
        with poisoned_memory():
            found = scaled_linear_triton.scaled_linear(x, values, scale, unit, b, out_dtype)
        expected = exact if b is None else exact + b.float()
        assert found.dtype == (out_dtype or dtype)
        assert relative_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("unit", [(1, 16), (1, 32)])
def test_scales_of_sixteen_bits_are_as_good_as_their_floats(unit):
    values, scale = made(40, 96, unit, torch.int8)
    x = inputs(3, 96)
    found = scaled_linear_triton.scaled_linear(x, values, scale.half(), unit)
    for op in (scaled_linear_triton, plain):
        expected = op.scaled_linear(x, values, scale.half().float(), unit)
        assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("unit", "kind"), [((128, 128), E4M3), ((1, 1024), E4M3), ((1, 32), torch.int8)]
)
def test_a_row_has_the_same_bits_alone_and_among_others(unit, kind):
    assert choose_tiles(40, 1024, 1, bits=8).columns < 1024, "sums are split"
    values, scale = made(40, 1024, unit, kind)
    x = inputs(40, 1024)
    among = scaled_linear_triton.scaled_linear(x, values, scale, unit)
    for count in (0, 1, 2, 17, 33):
        found = scaled_linear_triton.scaled_linear(x[:count], values, scale, unit)
        assert torch.equal(found, among[:count])


def test_rows_may_be_part_of_a_wider_tensor():
    values, scale = made(20, 64, (128, 128))
    x = inputs(3, 100)[:, 30:94]
    found = scaled_linear_triton.scaled_linear(x, values, scale, (128, 128))
    assert relative_error(found, plain.scaled_linear(x, values, scale, (128, 128))) < 1e-6


SIZE = st.integers(1, 40)


@given(SIZE, SIZE, SIZE, SIZE, st.sampled_from([E4M3, torch.int8]))
def test_every_number_is_multiplied_by_the_scale_of_its_unit(
    num_outputs, in_features, rows, columns, kind
):
    values, scale = (each.cpu() for each in made(num_outputs, in_features, (rows, columns), kind))
    weight = torch.empty(num_outputs, in_features)
    found = dequantize_into(weight, values, scale, (rows, columns))
    for row in range(num_outputs):
        for column in (0, in_features // 2, in_features - 1):
            factor = scale[row // rows, column // columns]
            assert found[row, column] == values[row, column].float() * factor
