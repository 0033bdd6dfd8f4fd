"""Reading of replicas' snapshots, which may come from another version of the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Snapshot: TypeAlias = Mapping[str, object]


def section(snapshot: Snapshot, *path: str) -> Snapshot:
    """Return a nested mapping of a snapshot; empty if it is missing."""
    for name in path:
        inner = snapshot.get(name)
        if not isinstance(inner, Mapping):
            return {}
        snapshot = inner
    return snapshot


def number(snapshot: Snapshot, *path: str) -> float:
    """Return a nested number of a snapshot; 0 if it is missing."""
    *outer, name = path
    value = section(snapshot, *outer).get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0
