"""Rotary position embeddings, in the arithmetic of Hugging Face's Llama.

Source of the scalings: transformers `modeling_rope_utils.py`, same order of operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.core.context import Rotation


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of rotary frequencies, by the names of config.json.

    `rope_type`: linear, llama3, yarn or longrope. `attention_factor` multiplies cosines and sines,
    and so the scores of attention by its square.
    """

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


# Rounds launched before the last is read may run past the end of a text; their tokens are dropped.
_MARGIN = 64


class RotaryTable:
    """Angles of positions 0 .. max_len - 1, made once in float32, on the default device.

    rotary_dim: numbers of a head that are rotated, all or its first ones. is_interleaved: see
    `Rotation`.
    """

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        scaling: RopeScaling | None,
        max_len: int,
        is_interleaved: bool = False,
    ) -> None:
        # Computed on the CPU wherever it is used: devices differ in the last bits of pow and cos.
        with torch.device("cpu"):
            frequencies = inverse_frequencies(rotary_dim, theta, scaling, max_len)
            angles = torch.outer(torch.arange(max_len + _MARGIN, dtype=torch.float32), frequencies)
        device = torch.empty(0).device
        factor = 1.0 if scaling is None else scaling.attention_factor
        cos, sin = ((part * factor).to(device) for part in (angles.cos(), angles.sin()))
        self._is_interleaved = is_interleaved
        self._cos, self._sin = self._table(cos, cos), self._table(-sin, sin)

    def _table(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the table [max_len, 1, rotary_dim] of both numbers of every pair."""
        if self._is_interleaved:
            return torch.stack((first, second), dim=-1).flatten(1).unsqueeze(1)
        return torch.cat((first, second), dim=-1).unsqueeze(1)

    def at(self, positions: Tensor) -> Rotation:
        """Return the rotation of tokens at `positions` [T] (int64, below `max_len`)."""
        return Rotation(self._cos, self._sin, positions, self._is_interleaved)


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None, max_len: int
) -> Tensor:
    """Return the angle per position of each pair, float32 [rotary_dim / 2].

    longrope has two sets of factors; `max_len` chooses one for all texts, so that a text does not
    depend on the lengths of others.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    periods = theta**exponents
    if scaling is None:
        return 1.0 / periods
    if scaling.rope_type == "linear":
        return 1.0 / periods / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(1.0 / periods, scaling)
    if scaling.rope_type == "yarn":
        return _yarn(periods, theta, scaling)
    is_long = max_len > scaling.original_max_position_embeddings
    factors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor)
    return 1.0 / (factors * periods)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch wavelengths longer than L / low_freq_factor by `factor`, where L is the original
    context; keep those shorter than L / high_freq_factor; between them, blend linearly."""
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / scaling.factor, frequencies)
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / scaling.factor + blend * scaled
    is_between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(is_between, blended, scaled)


def _yarn(periods: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Keep pairs that turn more than beta_fast times in the original context, stretch those that
    turn less than beta_slow times by `factor`; between them, blend linearly (arXiv 2309.00071)."""
    num_pairs, context = len(periods), scaling.original_max_position_embeddings

    def pair_with(turns: float) -> float:
        wanted = 2 * num_pairs * math.log(context / (turns * 2 * math.pi))
        return wanted / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
