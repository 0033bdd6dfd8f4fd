"""Reads what a policy learned before a restart: plain mappings, numbers and lists, as of JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from serve_spec.adaptive.curves import Floats

State: TypeAlias = Mapping[str, Any]


class Learner(Protocol):
    """Part of a policy whose knowledge outlives a restart."""

    def state(self) -> State:
        """Return what it knows."""

    def restore(self, state: State) -> object:
        """Continue from a state; raise ValueError if it is none."""


def section(state: State, name: str) -> State:
    """Return a mapping inside a state; raise ValueError if it is none."""
    found = state.get(name)
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}={found!r:.40}: no mapping")
    return found


def array(
    state: State,
    name: str,
    shape: tuple[int, ...],
    least: float | Floats = -math.inf,
    most: float | Floats = math.inf,
) -> Floats:
    """Return finite numbers of a state; raise ValueError: other shape, or out of range.

    shape: -1 as its first size allows any.
    """
    given = state.get(name)
    try:
        found = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}={given!r:.40}: no numbers") from None
    if shape[:1] == (-1,):
        found = found.reshape(0, *shape[1:]) if not found.size else found
        shape = (len(found) if found.ndim else 0, *shape[1:])
    if found.shape != shape:
        raise ValueError(f"{name}: of shape {found.shape}, but {shape} is needed")
    if not (np.isfinite(found) & (found >= least) & (found <= most)).all():
        raise ValueError(f"{name}: not all are finite and within their limits")
    return found


def number(state: State, name: str, least: float = -math.inf, most: float = math.inf) -> float:
    """Return one finite number of a state; raise ValueError as `array`."""
    return float(array(state, name, (), least, most))
