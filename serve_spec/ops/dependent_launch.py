"""Programmatic dependent launch: a kernel starts before the one in front of it has ended.

Hopper and later. A kernel launched so may read what no kernel writes (weights) at once, and waits
for its predecessor in every program before it reads or writes anything else. Because all of them
wait, the end of one implies the end of all before it.
"""

from __future__ import annotations

from functools import cache

import torch


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` should be launched so."""
    return device.type == "cuda" and _supported(device)


@cache
def _supported(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
