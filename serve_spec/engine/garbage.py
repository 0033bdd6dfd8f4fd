"""Python's cycle collector, kept out of rounds: while it looks around, the device waits."""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()

YOUNG_OBJECTS = 50_000
"""Objects more than before that make it look. A round of 256 rows holds some thousands at a time,
so that by Python's own number, 700, it looks at every round again and again, and finds nothing:
what rounds are made of has no cycles."""


def calm_collector() -> None:
    """What is there now is never looked at again, what comes seldom.

    An engine lives as long as the process, as a rule: looking through all of it takes a tenth of a
    second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *_USUAL[1:])


def restore_collector() -> None:
    """As Python has it."""
    gc.unfreeze()
    gc.set_threshold(*_USUAL)
