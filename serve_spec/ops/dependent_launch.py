"""Programmatic dependent launch: a kernel starts before the one in front of it has ended.

Hopper and later. A kernel launched so may read what no kernel writes (weights) at once, and waits
for its predecessor in every program before it reads or writes anything else. Because all of them
wait, the end of one implies the end of all before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_allowed = True


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` should be launched so."""
    return _allowed and device.type == "cuda" and _supported(device)


@contextmanager
def plain_launches() -> Iterator[None]:
    """Kernels launched inside start after their predecessor's end: to measure the difference."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


@cache
def _supported(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
