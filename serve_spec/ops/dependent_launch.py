"""Programmatic dependent launch (Hopper and later): a kernel starts before the last one has ended.

Such a kernel may read weights at once. Every program waits for the kernel before it reads or writes
anything else, so the end of one kernel implies the end of all before it.
"""

from __future__ import annotations

from functools import cache

import torch


def dependent_launch(device: torch.device) -> bool:
    """Return whether `device` supports dependent launches."""
    return device.type == "cuda" and _supported(device)


@cache
def _supported(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
