"""Hardware description of this machine."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_model() -> str:
    """Return the processor's model name on Linux; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
