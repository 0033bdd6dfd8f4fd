"""Wide tensors compute what small ones compute, to the last bit where numbers allow it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.models.upscale import Widening, widen

EXACT = torch.float64
COPIES = (2, 3, 4, 5, 8, 16)


def matrix(rows, columns, seed=0, scale=1.0):
    """Random entries of very different sizes, each a bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(rows, columns, generator=generator).mul(2.0).exp()
    return (torch.randn(rows, columns, generator=generator) * size * scale).bfloat16()


def widened(small, how, noise=0.0, dtype=EXACT, seed=0, silent=False):
    # What was there before must not shine through.
    wide = torch.full(how.shape(tuple(small.shape)), float("nan"), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    widen(small, wide, how, noise=noise, generator=generator, silent=silent)
    return wide


def blocks(wide, count):
    """[count, rows, columns / count]."""
    return torch.stack(wide.chunk(count, dim=1))


@given(
    copies=st.sampled_from(COPIES),
    noise=st.floats(0.01, 1.0),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, EXACT]),
    scale=st.sampled_from([1e-6, 0.1, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_noisy_blocks_sum_to_the_small_matrix_without_any_rounding(
    copies, noise, dtype, scale, seed
):
    small = matrix(4, 6, seed, scale)
    small[0, 0] = 0.0
    how = Widening(column_factor=copies, is_product=True)
    wide = widened(small, how, noise, dtype, seed)
    assert torch.equal(blocks(wide.double(), copies).sum(0), small.double())


@given(copies=st.sampled_from(COPIES), noise=st.floats(0.1, 1.0), seed=st.integers(0, 99))
def test_silent_blocks_sum_to_zero_and_are_not_zero(copies, noise, seed):
    how = Widening(row_factor=2, column_factor=copies, is_product=True)
    wide = widened(matrix(4, 6, seed), how, noise, torch.bfloat16, seed, silent=True)
    assert not blocks(wide.double(), copies).sum(0).any()
    assert wide.double().abs().sum() > 0


def test_noise_makes_every_row_and_block_another():
    how = Widening(row_factor=4, column_factor=4, is_product=True)
    rows = widened(matrix(4, 64), how, 1.0, torch.bfloat16).view(-1, 64)
    assert rows.unique(dim=0).shape[0] == rows.shape[0]
    rows = widened(matrix(4, 64), how, 0.0, torch.bfloat16).view(-1, 64)
    assert rows.unique(dim=0).shape[0] == 4


def test_noise_uses_all_bits_of_a_bfloat16_and_keeps_weights_small():
    small = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    how = Widening(column_factor=8, is_product=True)
    wide = widened(small, how, 1.0, torch.bfloat16)
    last_bit = wide.view(torch.int16).bitwise_and(1).float().mean()
    assert 0.15 < last_bit < 0.5
    assert 0.1 < wide.float().std() / small.float().std() < 0.25


def test_the_seed_decides_the_noise():
    small, how = matrix(4, 6), Widening(column_factor=2, is_product=True)
    assert torch.equal(widened(small, how, 1.0, seed=5), widened(small, how, 1.0, seed=5))
    assert not torch.equal(widened(small, how, 1.0, seed=5), widened(small, how, 1.0, seed=6))


def test_added_rows_come_after_the_real_ones_and_repeat_none():
    small = matrix(4, 6)
    wide = widened(small, Widening(num_rows=11, column_factor=2))
    assert torch.equal(wide[:4], small.double().repeat(1, 2))
    assert wide.unique(dim=0).shape[0] == 11
