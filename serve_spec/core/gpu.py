"""GPU architectures."""

from __future__ import annotations

from functools import cache

import torch


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether `device` is a Hopper GPU, for which the small matrix products are tuned."""
    return torch.cuda.get_device_capability(device)[0] == 9
