"""From the host to the device, in the stream's order; the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The same on the device. values: on the host, not pinned."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
