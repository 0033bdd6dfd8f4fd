"""Reading what a replica sent. It may be of another version, so nothing is taken for granted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from serve_spec.config.adaptive_file import MAX_STEPS

Snapshot: TypeAlias = Mapping[str, object]

_LOWEST_RATE, _HIGHEST_RATE = 0.001, 0.999
"""What `PositionRates` can hold: it does not start from certainty."""
_UNTRIED = (0.5, 0.0)
_MOST = 1e15
"""No count of trials, speed or speedup is higher."""
_MOST_SIZES = 64


class Speed(NamedTuple):
    """Decode tokens per ms in one range of batch sizes; 0: not measured yet."""

    off: float
    """In rounds without drafts."""
    speculating: float


class AcceptanceSummary(NamedTuple):
    """What a replica measured of acceptance, and how fast it is."""

    positions: list[tuple[float, float]]
    """Accept rate and trials, by position."""
    speeds: dict[int, Speed]
    """By the lower bound of a range of batch sizes."""


def section(snapshot: Snapshot, *path: str) -> Snapshot:
    """A nested mapping of a snapshot; empty where a replica does not send it."""
    for name in path:
        inner = snapshot.get(name)
        if not isinstance(inner, Mapping):
            return {}
        snapshot = inner
    return snapshot


def number(snapshot: Snapshot, name: str) -> float:
    """A number of a snapshot; 0 where a replica does not send it."""
    value = snapshot.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def sums(snapshots: Iterable[Snapshot], names: Iterable[str]) -> dict[str, float]:
    """Sum by name, whole ones as integers."""
    totals = dict.fromkeys(names, 0.0)
    for snapshot in snapshots:
        for name in totals:
            totals[name] += number(snapshot, name)
    return {name: int(total) if total.is_integer() else total for name, total in totals.items()}


def drafted_steps(snapshot: Snapshot) -> int:
    """Return how deep a replica may draft; 0 where it does not say."""
    steps = snapshot.get("candidate_steps")
    known = [k for k in steps if isinstance(k, int)] if isinstance(steps, list) else []
    deepest = int(max(known, default=0))
    return deepest if 0 < deepest <= MAX_STEPS else 0


def acceptance_summary(snapshot: Snapshot, max_steps: int) -> AcceptanceSummary | None:
    """Return what a replica measured of acceptance and speed; None if a figure cannot be true.

    The rates are those of the policy's own estimate where it keeps one, else of the counts since
    start.
    """
    estimated = section(snapshot, "acceptance").get("positions")
    counted = section(snapshot, "speculation", "since_start").get("positions")
    try:
        if isinstance(estimated, list):
            known = _by_position(estimated, "trials")
        elif isinstance(counted, list):
            known = _by_position(counted, "reached")
        else:
            return None
        return AcceptanceSummary(
            [known.get(position, _UNTRIED) for position in range(1, max_steps + 1)],
            _speeds(section(snapshot, "speculation", "by_batch_size")),
        )
    except ValueError:
        return None


def _by_position(entries: list[object], trials: str) -> dict[int, tuple[float, float]]:
    found = {}
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("accept_rate") is not None:
            rate = min(max(_figure(entry, "accept_rate", 1.0), _LOWEST_RATE), _HIGHEST_RATE)
            found[int(_figure(entry, "position", MAX_STEPS))] = rate, _figure(entry, trials, _MOST)
    return found


def _speeds(by_batch_size: Snapshot) -> dict[int, Speed]:
    """Return plain speed as measured; drafting speed by the speedup, which compares like with like.

    Raises:
        ValueError: too many sizes, or a figure that cannot be true.
    """
    if len(by_batch_size) > _MOST_SIZES:
        raise ValueError(len(by_batch_size))
    speeds = {}
    for size, bucket in by_batch_size.items():
        if isinstance(bucket, Mapping):
            off = _figure(section(bucket, "tokens_per_ms"), "0", _MOST)
            speeds[int(str(size))] = Speed(off, off * _figure(bucket, "effective_speedup", _MOST))
    return speeds


def _figure(mapping: Snapshot, name: str, most: float) -> float:
    """Return a figure from 0 to `most`; 0 if it is missing.

    Raises:
        ValueError: anything else.
    """
    value = mapping.get(name)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or not 0 <= value <= most:  # NaN compares false
        raise ValueError(f"{name}={value!r}")
    return float(value)
