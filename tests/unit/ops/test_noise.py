"""Counter-based noise: its distribution, and the same words in plain Python and in kernels."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from serve_spec.ops.noise import Stream, gumbel_noise, noise_keys, seed_words, stream_seeds
from tests.helpers.plain_sampling import gumbel, row_key, stream_key
from tests.helpers.triton import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip

from serve_spec.ops.noise_triton import gumbel_noise_of, load_noise_keys  # isort: skip

rows = st.lists(
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 9)),
    min_size=1,
    max_size=5,
)


def words(seeds):
    return torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32, device=DEVICE)


def row_keys(seeds, positions):
    return noise_keys(words(seeds), torch.tensor(positions, device=DEVICE)).cpu()


def unsigned(keys):
    return [tuple(word % 2**32 for word in key) for key in keys.tolist()]


@given(rows)
def test_keys_are_those_of_plain_integers(rows):
    seeds, roots, more = (list(column) for column in zip(*rows, strict=True))
    positions = [root + i for root, i in zip(roots, more, strict=True)]
    expected = [row_key(*row) for row in zip(seeds, positions, strict=True)]
    assert unsigned(row_keys(seeds, positions)) == expected
    for stream in Stream:
        of_stream = stream_seeds(stream, words(seeds), torch.tensor(roots, device=DEVICE))
        found = noise_keys(of_stream, torch.tensor(positions, device=DEVICE))
        columns = zip(seeds, roots, positions, strict=True)
        assert unsigned(found) == [stream_key(stream, *row) for row in columns]


@triton.jit
def noise_kernel(noise, seeds, positions, SIZE: tl.constexpr):
    row = tl.program_id(0)
    first, second = load_noise_keys(seeds, row, tl.load(positions + row))
    ids = tl.arange(0, SIZE)
    tl.store(noise + row * SIZE + ids, gumbel_noise_of(ids, first, second))


@pytest.mark.parametrize("position", [0, 77, 2**31 + 5, 2**40 + 1])
def test_noise_is_that_of_plain_numbers_in_kernels_too(position):
    """The same words; float32 is coarse only where noise is too low for its token to win."""
    seeds = [0, -1, 2**63 - 1, -(2**63), 123456789]
    expected = np.stack([gumbel(row_key(seed, position), 4096) for seed in seeds])
    noise = torch.full((5, 4096), float("nan"), device=DEVICE)
    noise_kernel[(5,)](noise, words(seeds), torch.full((5,), position, device=DEVICE), SIZE=4096)
    plain = gumbel_noise(row_keys(seeds, [position] * 5), 4096)
    torch.testing.assert_close(noise.cpu(), plain, rtol=5e-7, atol=2e-6)
    can_win = expected > -1
    np.testing.assert_allclose(plain[can_win], expected[can_win], rtol=1e-6, atol=4e-6)
    np.testing.assert_allclose(plain, expected, atol=0.05)


def test_any_bit_of_seed_or_position_changes_the_noise():
    base = gumbel_noise(row_keys([0], [0]), 32)
    for bit in range(64):
        assert not torch.equal(base, gumbel_noise(row_keys([1 << bit], [0]), 32))
    for bit in range(20):
        assert not torch.equal(base, gumbel_noise(row_keys([0], [1 << bit]), 32))


def test_noise_follows_the_gumbel_distribution_and_is_finite_for_every_word():
    """Kolmogorov-Smirnov over 200k values; a correct one fails one seed in 10,000."""
    noise = gumbel_noise(row_keys([11] * 400, list(range(400))), 500).flatten().double()
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-4
    noise = gumbel_noise(row_keys(list(range(64)), [0] * 64), 8192)
    assert torch.isfinite(noise).all()


def test_neighbouring_rows_and_tokens_are_uncorrelated():
    """10^6 pairs: a correlation above 5 standard errors (0.005) has odds below 1e-6 per lag."""
    noise = gumbel_noise(row_keys([5] * 1000, list(range(1000))), 1000)
    noise = (noise - noise.mean()) / noise.std()
    for shifted in (
        noise.roll(1, 0),
        noise.roll(1, 1),
        noise.roll(7, 1),
        noise.roll((1, 1), (0, 1)),
    ):
        assert abs((noise * shifted).mean().item()) < 5 / math.sqrt(noise.numel())
