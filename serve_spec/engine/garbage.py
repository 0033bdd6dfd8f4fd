"""Settings of Python's garbage collector, which would make the device wait."""

from __future__ import annotations

import gc

_DEFAULT_THRESHOLDS = gc.get_threshold()

GC_THRESHOLD = 50_000
"""New objects that trigger a collection. A step of 256 requests has some thousands, without cycles;
with Python's default of 700 every step would be scanned several times."""


def freeze_gc() -> None:
    """Exclude existing objects from collection, and collect rarely.

    A scan of a whole engine takes a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *_DEFAULT_THRESHOLDS[1:])


def unfreeze_gc() -> None:
    """Restore Python's settings."""
    gc.unfreeze()
    gc.set_threshold(*_DEFAULT_THRESHOLDS)
