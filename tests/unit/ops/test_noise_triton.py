"""The noise inside kernels."""

from __future__ import annotations

import pytest
import torch

from serve_spec.ops.noise import gumbel_noise, row_keys, seed_words
from tests.helpers.triton import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip

from serve_spec.ops.noise_triton import gumbel_noise_of, load_row_keys  # isort: skip


@triton.jit
def noise_kernel(noise, seeds, positions, SIZE: tl.constexpr):
    row = tl.program_id(0)
    first, second = load_row_keys(seeds, row, tl.load(positions + row))
    ids = tl.arange(0, SIZE)
    tl.store(noise + row * SIZE + ids, gumbel_noise_of(ids, first, second))


@pytest.mark.parametrize("position", [0, 77, 2**31 + 5, 2**40 + 1])
def test_a_kernel_sees_the_noise_of_the_law(position: int) -> None:
    """The same words; the logarithms within a few of the last places of float32."""
    seeds = [0, -1, 2**63 - 1, -(2**63), 123456789]
    noise = torch.full((5, 4096), float("nan"), device=DEVICE)
    words = torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32, device=DEVICE)
    noise_kernel[(5,)](noise, words, torch.full((5,), position, device=DEVICE), SIZE=4096)
    expected = gumbel_noise(row_keys(seeds, [position] * 5), 4096)
    assert torch.allclose(noise.cpu(), expected, rtol=5e-7, atol=2e-6)
