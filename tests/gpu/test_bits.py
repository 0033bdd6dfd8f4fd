"""In bfloat16 a row of a product has the same bits in any batch of up to 64."""

import pytest
import torch

from serve_spec.ops import fast

pytestmark = pytest.mark.gpu

# (outputs, in) of an 8B model and its draft: sums of one program and of several, even and uneven.
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (32000, 4096), (4096, 12288), (6144, 8192)]


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize(("num_outputs", "in_features"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_among_others(num_outputs: int, in_features: int) -> None:
    x, weight = random(64, in_features, seed=0), random(num_outputs, in_features, seed=1)
    whole = fast.linear(x, weight)
    for count in (1, 2, 8, 16, 17, 32, 33, 63):
        assert torch.equal(fast.linear(x[:count], weight), whole[:count])


def test_a_gated_row_has_the_same_bits_alone_and_among_others() -> None:
    x, weight = random(64, 4096, seed=0), random(2 * 14336, 4096, seed=1)
    whole = fast.gate_up(x, weight)
    for count in (1, 2, 8, 16, 17, 32, 33, 63):
        assert torch.equal(fast.gate_up(x[:count], weight), whole[:count])
