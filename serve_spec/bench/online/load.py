"""When requests come: closed loops of streams, and open loops on a schedule drawn from a seed.

An open loop sends at the scheduled times whatever the server does, and its latencies count from
the schedule, so a server that stalls can not make its own load lighter (coordinated omission). A
closed loop asks again only when it was answered; its latencies count from the moment of sending.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias


@dataclass(frozen=True)
class ClosedLoop:
    """`num_streams` callers, each with one request at a time and no pause between."""

    num_streams: int
    per_replica: bool = False
    """So many for each replica of the server."""

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"closed {self.num_streams}" + " a replica" * self.per_replica


@dataclass(frozen=True)
class Poisson:
    """Independent callers: gaps are exponential, `rate` requests a second on average."""

    rate: float

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"poisson {self.rate:g}/s"

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds from the start at which `count` requests are due, ascending."""
        rng = random.Random(seed)
        return list(accumulate(rng.expovariate(1.0) / self.rate for _ in range(count)))


@dataclass(frozen=True)
class Bursty:
    """`burst_size` requests at the same instant; bursts are Poisson, `rate` counts requests."""

    rate: float
    burst_size: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"bursty {self.rate:g}/s x{self.burst_size}"

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds from the start, ascending; the last burst may be smaller than the others."""
        num_bursts = -(-count // self.burst_size)
        bursts = Poisson(self.rate / self.burst_size).arrivals(num_bursts, seed)
        return [bursts[request // self.burst_size] for request in range(count)]


@dataclass(frozen=True)
class Ramp:
    """A Poisson process whose rate goes in a straight line from `first_rate` to `last_rate`."""

    first_rate: float
    last_rate: float

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"ramp {self.first_rate:g}-{self.last_rate:g}/s"

    def seconds(self, count: int) -> float:
        """How long the ramp is: `count` requests at the mean of both rates."""
        return 2 * count / (self.first_rate + self.last_rate)

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds from the start, ascending, all within `seconds(count)`.

        A Poisson process of which the number of arrivals is known is that number of independent
        draws with density proportional to the rate; each is the inverse of a uniform share.
        """
        rng = random.Random(seed)
        shares = sorted(rng.random() for _ in range(count))
        return [self._time_of(share) * self.seconds(count) for share in shares]

    def _time_of(self, share: float) -> float:
        """The part of the ramp, 0 to 1, by which `share` of its requests have come."""
        first, last = self.first_rate, self.last_rate
        # The root of (last - first)/2 · x² + first · x = share · (first + last)/2, in the form that
        # also holds where both rates are the same.
        whole = share * (first + last)
        return whole / (first + math.sqrt(first * first + (last - first) * whole))


OpenLoop: TypeAlias = Poisson | Bursty | Ramp
Load: TypeAlias = ClosedLoop | OpenLoop


def on_replicas(load: Load, num_replicas: int) -> Load:
    """The load that a server of so many replicas gets."""
    if isinstance(load, ClosedLoop) and load.per_replica:
        return ClosedLoop(load.num_streams * num_replicas)
    return load
