"""In bfloat16 a row of a product has the same bits in any batch of up to 128, of logits 64."""

import pytest
import torch

from serve_spec.ops import linear

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


@pytest.mark.parametrize("width", [14336, 3584])
def test_a_gated_row_has_the_same_bits_alone_and_among_others(width):
    x, weight = random(128, 4096, seed=0), random(2 * width, 4096, seed=1)
    whole = linear.gate_up(x, weight)
    for count in COUNTS:
        assert torch.equal(linear.gate_up(x[:count], weight), whole[:count])
