"""Copies from the host to the device, in stream order, without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return host values, not pinned, on the device."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
