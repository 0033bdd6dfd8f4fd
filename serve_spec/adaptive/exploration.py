"""Trials of other shapes, and a guard that compares rounds that draft with plain rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from serve_spec.adaptive.costs import NUM_BUCKETS
from serve_spec.adaptive.planner import Candidate
from serve_spec.adaptive.state import State, number, section
from serve_spec.core.round import DecodeBatch, Reason

PLAN_ROUNDS = 8
"""Rounds that follow a plan; twice as many follow one that keeps the shape."""
# Rounds between explorations: of drafts while off; of plain rounds, chains or trees while on.
EXPLORE_AFTER = 128


class Trial(NamedTuple):
    """What runs for a few rounds instead of the plan. `request_ids`: that draft; None: all."""

    candidate: Candidate
    num_rounds: int
    reason: Reason
    request_ids: frozenset[str] | None = None


class Exploration:
    """Time that trials took, and when the next one is due."""

    def __init__(self) -> None:
        self._total_ms = self._lost_ms = 0.0
        self._num_rounds = 0  # since the last trial
        self._tried_plain = False

    @property
    def fraction(self) -> float:
        """Fraction of the time that trials cost lately."""
        return self._lost_ms / max(self._total_ms, 1e-9)

    def observe(self, ms: float, lost_ms: float) -> None:
        """Add a round. lost_ms: what it cost more than the plan; 0 unless it was a trial."""
        fade = math.exp(-ms / 60_000.0)  # older than a minute weighs less than 1/e
        self._total_ms = self._total_ms * fade + ms
        self._lost_ms = max(0.0, self._lost_ms * fade + lost_ms)

    def state(self) -> State:
        """Return what outlives a restart."""
        return {
            "total_ms": self._total_ms,
            "lost_ms": self._lost_ms,
            "num_rounds": self._num_rounds,
            "tried_plain": self._tried_plain,
        }

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if it is none."""
        self._total_ms = number(state, "total_ms", 0.0)
        self._lost_ms = number(state, "lost_ms", 0.0)
        self._num_rounds = int(number(state, "num_rounds", 0.0))
        self._tried_plain = bool(number(state, "tried_plain", 0.0, 1.0))

    def propose(
        self,
        batch: DecodeBatch,
        chosen: Candidate,
        found: Sequence[Candidate],
        num_rounds: int,
        is_first: bool,
    ) -> Trial | None:
        """Return a trial if one is due and the time pays for it.

        found: candidates, plain rounds first. num_rounds: of the plan that follows otherwise.
        is_first: whether plain rounds have not run at this batch size.
        """
        spare_ms = 0.002 * self._total_ms - self._lost_ms  # trials may cost 0.2 % of the time
        self._num_rounds += num_rounds
        is_due = self._num_rounds >= EXPLORE_AFTER
        if not chosen.shape.depth:
            if len(found) < 2 or not is_due or spare_ms < 0.0:
                return None
            self._num_rounds = 0
            return _drafting_trial(batch, found)
        plain = found[0]
        kinds = [x for x in found[1:] if x.shape.is_chain != chosen.shape.is_chain]
        tried, num = plain, 3  # the first one's time includes planning
        if kinds and self._tried_plain and not is_first:
            tried, num = max(kinds, key=lambda each: each.tokens_per_ms), PLAN_ROUNDS
        lost = num * tried.ms * max(0.0, 1.0 - tried.tokens_per_ms / chosen.tokens_per_ms)
        if is_first:
            spare_ms = max(spare_ms, 0.5 * plain.ms)  # unless drafts promise too much
        if not (is_first or is_due) or lost > spare_ms:
            return None
        self._num_rounds, self._tried_plain = 0, tried is plain
        return Trial(tried, num, Reason.BASELINE if tried is plain else Reason.PROBE)


def _drafting_trial(batch: DecodeBatch, found: Sequence[Candidate]) -> Trial:
    """Return drafts of four requests, those that lack the fewest draft KV entries."""
    num = min(batch.size, 4)
    lacks = batch.num_missing_entries or [0] * batch.size
    members = sorted(range(batch.size), key=lambda at: (lacks[at], -at))[:num]
    tried = max(found[1:3], key=lambda each: each.tokens_per_ms)
    tried = replace(tried, budget=None, expected=tried.expected * num / batch.size)
    ids = frozenset([batch.request_ids[at] for at in members])
    return Trial(tried, PLAN_ROUNDS, Reason.PROBE, ids)


# Rounds for which a guard keeps speculation off at most.
_MOST_CLOSED_ROUNDS = 1024
# Drafting rounds before a comparison, after which an older one weighs 1/e. Also the rounds off
# after a first loss: each further loss doubles them, as many rounds without a loss reset them.
_GUARD_ROUNDS = 64


class SpeedGuard:
    """Measured speed of drafting over plain rounds, of one bucket.

    Times are in units of the table's plain round.
    """

    def __init__(self) -> None:
        self.plain: float | None = None  # units that a plain round takes
        self.rounds_left = 0  # rounds that it keeps speculation off; the policy counts them down
        self._closed_rounds = _GUARD_ROUNDS
        self._num = 0
        self._tokens = self._units = 0.0

    def observe_plain(self, units: float) -> None:
        """Take in the time of plain rounds."""
        self.plain = units if self.plain is None else 0.5 * (self.plain + units)

    def observe(self, tokens: float, units: float, num: int = 1) -> None:
        """Take in rounds that drafted, with mean tokens per request and time."""
        fade = (1.0 - 1.0 / _GUARD_ROUNDS) ** num
        self._num += num
        self._tokens = fade * self._tokens + num * tokens
        self._units = fade * self._units + num * units
        speedup = self.speedup
        if speedup is None or self._num < _GUARD_ROUNDS:
            return
        if speedup < 0.98:  # drafting loses, beyond noise
            self.rounds_left = self._closed_rounds
            self._closed_rounds = min(2 * self._closed_rounds, _MOST_CLOSED_ROUNDS)
            self._num, self._tokens, self._units = 0, 0.0, 0.0
        elif self._num >= self._closed_rounds:
            self._closed_rounds = _GUARD_ROUNDS

    @property
    def speedup(self) -> float | None:
        """Measured speed over plain rounds; None before both ran."""
        return self._tokens / self._units * self.plain if self.plain and self._units else None

    def snapshot(self) -> dict[str, object]:
        """Return its state, JSON-able. Speeds are tokens per request and plain round."""
        speedup = self.speedup
        return {
            "guard_rounds_left": self.rounds_left,
            "plain_speed": None if self.plain is None else round(1.0 / self.plain, 4),
            "drafting_speed": round(self._tokens / self._units, 4) if self._units else None,
            "measured_speedup": None if speedup is None else round(speedup, 4),
        }

    def state(self) -> State:
        """Return what outlives a restart."""
        return {
            "plain": self.plain or 0.0,
            "rounds_left": self.rounds_left,
            "closed_rounds": self._closed_rounds,
            "num": self._num,
            "tokens": self._tokens,
            "units": self._units,
        }

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if it is none."""
        self.plain = number(state, "plain", 0.0) or None
        self.rounds_left = int(number(state, "rounds_left", 0.0, _MOST_CLOSED_ROUNDS))
        closed = number(state, "closed_rounds", _GUARD_ROUNDS, _MOST_CLOSED_ROUNDS)
        self._closed_rounds = int(closed)
        self._num = int(number(state, "num", 0.0))
        self._tokens, self._units = number(state, "tokens", 0.0), number(state, "units", 0.0)


class SpeedGuards:
    """A `SpeedGuard` per bucket of batch sizes."""

    def __init__(self) -> None:
        self._guards: dict[int, SpeedGuard] = {}

    def of(self, at: int) -> SpeedGuard:
        """Return the guard of a bucket."""
        return self._guards.setdefault(at, SpeedGuard())

    def state(self) -> State:
        """Return what outlives a restart."""
        return {str(at): guard.state() for at, guard in self._guards.items()}

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if it is none."""
        for at in range(NUM_BUCKETS):
            if str(at) in state:
                self.of(at).restore(section(state, str(at)))

    def snapshot(self) -> dict[str, dict[str, object]]:
        """Return the state of every guard by its batch size, JSON-able."""
        guards = sorted(self._guards.copy().items())
        return {str(1 << at): guard.snapshot() for at, guard in guards}
