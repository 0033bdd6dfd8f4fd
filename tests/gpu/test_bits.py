"""In bfloat16 a row of a product has the same bits in any batch of up to 128, of logits 64."""

import pytest
import torch

from serve_spec.layers.rope import RotaryTable
from serve_spec.ops import elementwise, linear
from serve_spec.ops.linear import sum_partials

pytestmark = pytest.mark.gpu

# (outputs, in) of an 8B model and its draft: sums of one program and of several, even and uneven.
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (32000, 4096), (4096, 12288), (6144, 8192)]
COUNTS = (1, 2, 8, 9, 16, 17, 32, 33, 63, 64, 65, 127)


def random(*shape, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize(("num_outputs", "in_features"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_among_others(num_outputs, in_features):
    most = 128 if linear.is_ours(128, num_outputs) else 64
    x, weight = random(most, in_features, seed=0), random(num_outputs, in_features, seed=1)
    whole = linear.linear(x, weight)
    for count in COUNTS:
        assert torch.equal(linear.linear(x[:count], weight), whole[:count])


def test_a_gated_row_has_the_same_bits_alone_and_among_others():
    x, weight = random(128, 4096, seed=0), random(2 * 14336, 4096, seed=1)
    whole = linear.gate_up(x, weight)
    for count in COUNTS:
        assert torch.equal(linear.gate_up(x[:count], weight), whole[:count])


@pytest.mark.parametrize(("num_outputs", "in_features"), SHAPES)
def test_addends_make_the_product_to_the_bit(num_outputs, in_features):
    x, weight = random(128, in_features, seed=0), random(num_outputs, in_features, seed=1)
    for count in (1, 16, 17, 64, 128):
        product = linear.linear(x[:count], weight)
        assert torch.equal(sum_partials(linear.partials(x[:count], weight), product), product)


@pytest.mark.parametrize("count", [1, 16, 128])
def test_norms_and_rotations_of_addends_are_those_of_the_product(count):
    x, residual = random(count, 4096, seed=0), random(count, 4096, seed=1)
    for num_outputs in (4096, 3072):
        partials = linear.partials(x, random(num_outputs, 4096, seed=2))
        assert partials.dim() == 3, "the sums of both are shared"
        like = random(count, num_outputs, seed=3)
        if num_outputs == 4096:
            gain = random(4096, seed=4)
            found = elementwise.add_rms_norm(partials, residual, gain, 1e-5)
            expected = elementwise.add_rms_norm(sum_partials(partials, like), residual, gain, 1e-5)
        else:
            found, expected = rotated(partials), rotated(sum_partials(partials, like))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def rotated(projected):
    heads = projected.view(*projected.shape[:-1], 24, 128)
    slots = torch.arange(heads.shape[-3], device="cuda")
    with torch.device("cuda"):
        rotation = RotaryTable(128, 10000.0, None, 500).at(slots)
    keys = torch.zeros(128, 4, 128, dtype=torch.bfloat16, device="cuda")
    values = torch.zeros_like(keys)
    return elementwise.rotate_and_store(heads, rotation, slots, keys, values, 16), keys, values
