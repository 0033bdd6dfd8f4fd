"""Hardware description of this machine."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether `device` is a Hopper GPU, for which the small matrix products are tuned."""
    import torch

    return torch.cuda.get_device_capability(device)[0] == 9


def cpu_model() -> str:
    """Return the processor's model name on Linux; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
