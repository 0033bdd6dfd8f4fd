"""The gated activation: the kernel against its law."""

import pytest
import torch

from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference, relative_error

from serve_spec.ops import linear_triton  # isort: skip
from serve_spec.ops import linear

plain = reference(linear)

TOLERANCE = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 48), (2, 1024), (5, 1500)])
def test_the_kernel_follows_the_law(num_rows, width, dtype):
    gate_up = 3 * torch.randn(num_rows, 2 * width, generator=torch.Generator().manual_seed(0))
    gate_up = gate_up.to(DEVICE, dtype)
    with poisoned_memory():
        found = linear_triton.silu_and_mul(gate_up)
    expected = plain.silu_and_mul(gate_up)
    assert found.shape == (num_rows, width)
    assert found.dtype == dtype
    assert relative_error(found, expected) < TOLERANCE[dtype]


def test_rows_may_be_part_of_a_wider_tensor():
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = linear_triton.silu_and_mul(wide[:, :64])
    assert relative_error(found, plain.silu_and_mul(wide[:, :64])) < 1e-6


def test_a_gate_far_from_zero_is_open_or_closed():
    gate_up = torch.tensor([[-3e4, -100.0, 0.0, 100.0, 2.0, 2.0, 2.0, 2.0]])
    found = linear_triton.silu_and_mul(gate_up.to(DEVICE, torch.bfloat16))
    assert found.tolist() == [[0.0, 0.0, 0.0, 200.0]]


def test_no_rows_give_no_rows():
    assert linear_triton.silu_and_mul(torch.empty(0, 8, device=DEVICE)).shape == (0, 4)
