"""What a GPU is."""

from __future__ import annotations

from functools import cache

import torch


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU that the products of few rows are tuned for."""
    return torch.cuda.get_device_capability(device)[0] == 9
