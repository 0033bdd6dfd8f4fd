"""Rotary position embeddings, in the half-split layout and arithmetic of Hugging Face's Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.core.context import Rotation


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency scaling (`rope_type: llama3`), names as in the config."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


# Rounds launched before the last is read may run past the end of a text; their tokens are dropped.
_MARGIN = 64


class RotaryTable:
    """Angles of positions 0 .. max_len - 1, made once in float32, on the default device."""

    def __init__(
        self, head_dim: int, theta: float, scaling: Llama3Scaling | None, max_len: int
    ) -> None:
        # Computed on the CPU wherever it is used: devices differ in the last bits of pow and cos.
        with torch.device("cpu"):
            frequencies = inverse_frequencies(head_dim, theta, scaling)
            angles = torch.outer(torch.arange(max_len + _MARGIN, dtype=torch.float32), frequencies)
        device = torch.empty(0).device
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        self._cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
        self._sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)

    def at(self, positions: Tensor) -> Rotation:
        """Return the rotation of tokens at `positions` [T] (int64, below `max_len`)."""
        return Rotation(self._cos, self._sin, positions)


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None) -> Tensor:
    """Return the angle per position of each pair, float32 [head_dim / 2].

    Llama 3 scaling: wavelengths longer than L / low_freq_factor are stretched by `factor`, those
    shorter than L / high_freq_factor stay, and between them a linear blend (L is the original
    context). Source: transformers `_compute_llama3_parameters`, same order of operations.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / scaling.factor, frequencies)
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / scaling.factor + blend * scaled
    is_between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(is_between, blended, scaled)
