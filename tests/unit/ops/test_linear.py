"""Products of few rows: the kernels against the reference, and the way products are cut."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference, relative_error

from serve_spec.layers.formats.fp8_draft import fp8_rows  # isort: skip
from serve_spec.layers.linear import Linear  # isort: skip
from serve_spec.layers.module import tensor_defaults  # isort: skip
from serve_spec.ops import linear, linear_triton  # isort: skip
from serve_spec.ops.linear import TILE_DEPTH, choose_tiles  # isort: skip
from serve_spec.ops.scaled_linear import PER_ROW  # isort: skip

plain = reference(linear)

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
ACTIVATION_TOLERANCE = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-6}
# (rows, outputs, in): one block and several, each with a tail; sums of one program and of many.
SHAPES = [(1, 64, 256), (3, 40, 304), (17, 33, 1104), (40, 130, 64), (150, 20, 48), (70, 9000, 80)]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def integers(*shape, seed=0):
    """bfloat16 numbers whose products add up exactly in float32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(DEVICE, torch.bfloat16)


def stored(weight, unit):
    """The weight as the kernels take it, with the scales of units; None: floats without any."""
    if unit is None:
        return weight, None, PER_ROW
    if unit == PER_ROW:
        return *fp8_rows(weight), unit
    counts = [-(-n // size) for n, size in zip(weight.shape, unit, strict=True)]
    return weight.to(torch.float8_e4m3fn), random(*counts, seed=3).abs() + 0.5, unit


@pytest.mark.gpu
@pytest.mark.parametrize("unit", [None, PER_ROW, (128, 128), (48, 256)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_rows", "num_outputs", "in_features"), [*SHAPES, (2, 48, 1024)])
def test_the_kernels_follow_the_reference(num_rows, num_outputs, in_features, dtype, unit):
    x = random(num_rows, in_features, dtype=dtype)
    floats = random(2 * num_outputs, in_features, dtype=dtype, seed=1)
    weight, scale, unit = stored(floats, unit)
    bias = random(2 * num_outputs, dtype=dtype, seed=2)
    for b in (None, bias):
        with poisoned_memory():
            found = linear_triton.small_linear(x, weight, b, scale=scale, unit=unit)
        expected = plain.small_linear(x, weight, b, scale=scale, unit=unit)
        assert found.dtype == dtype
        assert relative_error(found, expected) < TOLERANCE[dtype]
    with poisoned_memory():
        found = linear_triton.small_gate_up(x, weight, scale, unit)
    assert found.shape == (num_rows, num_outputs)
    assert relative_error(found, plain.small_gate_up(x, weight, scale, unit)) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_number_of_eight_bits_is_multiplied_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    weight = torch.where(codes.float().isnan(), torch.zeros_like(codes), codes).view(2, 128)
    one, x = weight.new_ones(2, 1, dtype=torch.float32), torch.eye(128, device=DEVICE, dtype=dtype)
    found = linear_triton.small_linear(x, weight, None, torch.float32, one)
    assert torch.equal(found, weight.float().T)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**31), st.floats(-30, 30))
def test_eight_bits_keep_every_row_to_a_sixteenth_of_each_number_or_of_nothing(
    num_outputs, in_features, seed, exponent
):
    """Four significant bits, and below 2^-6 / 448 of the largest number a fixed step."""
    weight = random(num_outputs, in_features, seed=seed) * 2.0**exponent
    weight[-1] = 0
    values, scale = fp8_rows(weight)
    error = (values.float() * scale[:, None] - weight).abs()
    smallest = weight.abs().amax(dim=1, keepdim=True) * 2.0**-9 / 448
    assert bool((error <= weight.abs() / 16 + smallest).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_rows", "num_outputs", "in_features"), SHAPES[1:])
def test_addends_make_the_whole_to_the_bit(num_rows, num_outputs, in_features, dtype):
    x = random(num_rows, in_features, dtype=dtype)
    weight = random(num_outputs, in_features, dtype=dtype, seed=1)
    for unit in (None, PER_ROW, (128, 128)):
        values, scale, unit = stored(weight, unit)
        with poisoned_memory():
            partials = linear_triton.small_partials(x, values, scale, unit)
        expected = linear_triton.small_linear(x, values, scale=scale, unit=unit)
        assert torch.equal(linear.sum_partials(partials, expected), expected)
        found = linear.sum_partials(plain.small_partials(x, values, scale, unit), expected)
        assert relative_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ACTIVATION_TOLERANCE)
@pytest.mark.parametrize(("splits", "num_rows", "width"), [(1, 1, 1), (3, 7, 100), (8, 2, 600)])
def test_splits_of_a_sum_are_added_first_to_last(splits, num_rows, width, dtype):
    partials, bias = random(splits, num_rows, width), random(width, dtype=dtype, seed=1)
    for b in (None, bias):
        found, expected = (torch.empty(num_rows, width, device=DEVICE, dtype=dtype) for _ in "12")
        linear_triton.sum_splits(partials, b, found)
        plain.sum_splits(partials, b, expected)
        assert torch.equal(found, expected)


@pytest.mark.gpu
def test_float32_results_of_products_are_never_rounded():
    x = torch.ones(1, 272, device=DEVICE, dtype=torch.bfloat16)
    x[:, 257:] = 0  # 257 is no bfloat16.
    assert linear_triton.small_linear(x, x, out_dtype=torch.float32).item() == 257.0
    assert linear_triton.small_linear(x, x).item() in (256.0, 258.0)


def test_float32_results_of_layers_are_never_rounded():
    with tensor_defaults(torch.bfloat16, DEVICE):
        layer = Linear(512, {"head": 256})
    layer.tensors()["head.weight"].copy_(integers(256, 512))
    x = integers(2, 512, seed=1)
    rounded = layer(x)
    layer.out_dtype = torch.float32
    layer.finish()
    logits = layer(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.bfloat16(), rounded)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "stride", "first"),
    [(4, 200, 32), (4, 200, 30), (4, 190, 32), (4, 128, 3), (1, 1, 8), (1, 1, 5)],
)
def test_rows_of_products_may_be_part_of_a_wider_tensor(num_rows, stride, first):
    x = integers(1000).as_strided((num_rows, 128), (stride, 1), first)
    weight = integers(16, 128, seed=1)
    found = linear_triton.small_linear(x, weight, out_dtype=torch.float32)
    assert torch.equal(found, x.float() @ weight.float().T)


def test_rows_of_activations_may_be_part_of_a_wider_tensor_and_none_give_none():
    gates = random(4, 100, seed=1)[:, :64]
    assert relative_error(linear_triton.silu_and_mul(gates), plain.silu_and_mul(gates)) < 1e-6
    x, weight = integers(0, 32), integers(8, 32)
    assert linear_triton.small_linear(x, weight).shape == (0, 8)
    assert linear_triton.small_gate_up(x, weight).shape == (0, 4)
    assert linear_triton.silu_and_mul(torch.empty(0, 8, device=DEVICE)).shape == (0, 4)


@pytest.mark.parametrize("few", [True, False])
def test_callers_get_the_same_numbers_whichever_library_multiplies(few):
    x, weight = integers(3 if few else 300, 64), integers(32, 64, seed=1)
    exact = x.float() @ weight.float().T
    rounded = exact if exact.is_cuda else exact.bfloat16().float()
    assert torch.equal(linear.linear(x, weight, out_dtype=torch.float32), rounded)
    assert torch.equal(linear.linear(x, weight), exact.bfloat16())
    expected = F.silu(exact[:, :16].bfloat16()) * exact[:, 16:].bfloat16()
    assert relative_error(linear.gate_up(x, weight), expected) < 1e-3


@pytest.mark.parametrize("dtype", ACTIVATION_TOLERANCE)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 48), (2, 1024), (5, 1500)])
def test_the_gated_activation_follows_the_reference(num_rows, width, dtype):
    gate_up = 3 * random(num_rows, 2 * width, dtype=dtype)
    with poisoned_memory():
        found = linear_triton.silu_and_mul(gate_up)
    expected = plain.silu_and_mul(gate_up)
    assert found.shape == (num_rows, width)
    assert found.dtype == dtype
    assert relative_error(found, expected) < ACTIVATION_TOLERANCE[dtype]


def test_a_gate_far_from_zero_is_open_or_closed():
    gate_up = torch.tensor([[-3e4, -100.0, 0.0, 100.0, 2.0, 2.0, 2.0, 2.0]])
    found = linear_triton.silu_and_mul(gate_up.to(DEVICE, torch.bfloat16))
    assert found.tolist() == [[0.0, 0.0, 0.0, 200.0]]


OUTPUTS, INPUTS = st.integers(1, 200_000), st.integers(1, 30_000)


@given(OUTPUTS, INPUTS, st.integers(0, 600), st.booleans(), st.sampled_from([16, 8, 4]))
def test_any_product_is_cut_into_programs_that_fit(num_outputs, in_features, num_rows, gated, bits):
    tiles = choose_tiles(num_outputs, in_features, num_rows, gated, bits)
    assert tiles.columns % TILE_DEPTH == 0
    assert not gated or tiles.columns >= in_features
    assert tiles.rows & (tiles.rows - 1) == 0
    weight_rows = tiles.outputs * (2 if gated else 1)
    assert tiles.stages >= 2
    bytes_per_column = weight_rows * bits / 8 + tiles.rows * 2
    assert tiles.stages * TILE_DEPTH * bytes_per_column <= 227 * 1024


@given(OUTPUTS, INPUTS, st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_a_row_is_summed_in_the_same_order_in_a_batch_of_any_size(
    num_outputs, in_features, one, other, gated
):
    first, second = (choose_tiles(num_outputs, in_features, rows, gated) for rows in (one, other))
    assert first.columns == second.columns
