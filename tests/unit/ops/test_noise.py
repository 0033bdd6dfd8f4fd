"""Laws of the counter-based noise."""

import math

import torch
from scipy import stats

from serve_spec.ops.noise import gumbel_noise, row_keys


def test_noise_depends_on_seed_position_and_token_only() -> None:
    together = gumbel_noise(row_keys([7, 8, 7], [3, 3, 4]), 64)
    alone = [gumbel_noise(row_keys([s], [p]), 64)[0] for s, p in ((7, 3), (8, 3), (7, 4))]
    assert torch.equal(together, torch.stack(alone))
    wider = gumbel_noise(row_keys([7], [3]), 128)[0, :64]
    assert torch.equal(wider, together[0])


def test_any_bit_of_seed_or_position_changes_the_noise() -> None:
    base = gumbel_noise(row_keys([0], [0]), 32)
    for bit in range(64):
        assert not torch.equal(base, gumbel_noise(row_keys([1 << bit], [0]), 32))
    for bit in range(20):
        assert not torch.equal(base, gumbel_noise(row_keys([0], [1 << bit]), 32))


def test_noise_is_finite_for_every_word_the_hash_can_give() -> None:
    noise = gumbel_noise(row_keys(list(range(64)), [0] * 64), 8192)
    assert torch.isfinite(noise).all()


def test_noise_follows_the_gumbel_law() -> None:
    """Kolmogorov-Smirnov over 200k values; a correct law fails one seed in 10,000."""
    noise = gumbel_noise(row_keys([11] * 400, list(range(400))), 500).flatten().double()
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-4


def test_neighbouring_rows_and_tokens_are_uncorrelated() -> None:
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
