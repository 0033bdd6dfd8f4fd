"""What a fleet knows of acceptance, by pair of models, and the start it gives new replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from serve_spec.adaptive.ledger import AcceptanceLedger
from serve_spec.serving.snapshots import Snapshot, acceptance_summary

_Key: TypeAlias = tuple[str, int]

# Replicas of so many pairs share one actor at most; a rolling update needs two.
_MOST_PAIRS = 16
# A merge over all replicas is too much for every report.
_MERGE_EVERY_S = 5.0


@dataclass(frozen=True)
class _Prior:
    rates: list[float]
    time_s: float


class FleetAcceptance:
    """One `AcceptanceLedger` per pair of models and depth: others say nothing about each other.

    A prior is remembered for `memory_s` seconds after the last replica that could give it has gone,
    so that a fleet of one does not start cold after a restart.
    """

    def __init__(self, *, stale_after_s: float, memory_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._memory_s = memory_s
        self._ledgers: dict[_Key, AcceptanceLedger] = {}
        self._key_of: dict[str, _Key] = {}
        self._remembered: dict[_Key, _Prior] = {}
        self._merged_at: dict[_Key, float] = {}

    def report(self, replica: str, snapshot: Snapshot, now_s: float) -> None:
        """Takes a replica's snapshot; one that says nothing of acceptance is passed over."""
        summary = acceptance_summary(snapshot)
        if summary is None:
            return
        rates = summary["accept_rates"]
        assert isinstance(rates, list)
        key = (str(snapshot.get("pair", "")), len(rates))
        if self._key_of.get(replica, key) != key:
            self.forget(replica)
        ledger = self._ledger(key)
        if ledger is not None:
            self._key_of[replica] = key
            ledger.report(replica, summary, now_s)
            self._remember(key, now_s)

    def forget(self, replica: str) -> None:
        """Drops a replica; what it taught stays a prior for a while."""
        key = self._key_of.pop(replica, None)
        if key is not None:
            self._ledgers[key].forget(replica)

    def prior(self, pair: str, max_steps: int, now_s: float) -> list[float] | None:
        """Accept rates by position for a new `SurvivalEstimator`; None: nobody knows any."""
        key = (pair, max_steps)
        ledger = self._ledgers.get(key)
        rates = None if ledger is None else ledger.prior(now_s)
        remembered = self._remembered.get(key)
        if rates is None and remembered is not None:
            is_recent = now_s - remembered.time_s <= self._memory_s
            rates = remembered.rates if is_recent else None
        return rates

    def view(self, now_s: float) -> list[dict[str, object]]:
        """Every pair's ledger, JSON-able."""
        return [
            {"pair": pair, "max_steps": max_steps, **ledger.view(now_s)}
            for (pair, max_steps), ledger in sorted(self._ledgers.items())
        ]

    def _ledger(self, key: _Key) -> AcceptanceLedger | None:
        if key not in self._ledgers and not self._make_room():
            return None
        return self._ledgers.setdefault(
            key, AcceptanceLedger(key[1], stale_after_s=self._stale_after_s)
        )

    def _make_room(self) -> bool:
        """Pairs that no replica runs any more make way; False: all of them are in use."""
        in_use = set(self._key_of.values())
        idle = [key for key in self._ledgers if key not in in_use]
        if len(self._ledgers) >= _MOST_PAIRS and idle:
            del self._ledgers[idle[0]]
            self._remembered.pop(idle[0], None)
            self._merged_at.pop(idle[0], None)
        return len(self._ledgers) < _MOST_PAIRS

    def _remember(self, key: _Key, now_s: float) -> None:
        if now_s - self._merged_at.get(key, float("-inf")) >= _MERGE_EVERY_S:
            self._merged_at[key] = now_s
            rates = self._ledgers[key].prior(now_s)
            if rates is not None:
                self._remembered[key] = _Prior(rates, now_s)
