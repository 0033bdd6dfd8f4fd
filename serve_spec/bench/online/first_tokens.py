"""Time to first token as a server itself measures it: at its door and at its engine.

Its counters are read from `/metrics` before and after a run. They arrive there seconds late, so
they are waited for until they hold every request of the run. Each is one number for the run: the
mean over its requests.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from serve_spec.metrics import FIRST_TOKEN_WAIT_MS, FIRST_TOKENS, Metric

_PLACE = re.compile(r'measured_at="(\w+)"')
_WITHIN_S = 20.0
_POLL_S = 0.25
_ANSWER_WITHIN_S = 10.0


def counter_name(metric: Metric) -> str:
    """Under which name Ray exports a counter of ours."""
    return f"ray_{metric.name}_total"


@dataclass(frozen=True)
class FirstTokens:
    """Requests that got to a first token, and what they waited for it, in all."""

    count: int = 0
    wait_ms: float = 0.0


PLACES = ("door", "engine")
Places = Mapping[str, FirstTokens]
"""By where it was measured, one of `PLACES`."""


def first_tokens(exposition: str) -> dict[str, FirstTokens]:
    """What the lines of `/metrics` add up to; empty where the server counts nothing of the kind."""
    sums: dict[str, dict[str, float]] = {}
    for line in exposition.splitlines():
        name, _, rest = line.partition("{")
        place = _PLACE.search(rest)
        if place is not None:
            place_sums = sums.setdefault(place.group(1), {})
            place_sums[name] = place_sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    counted = counter_name(FIRST_TOKENS)
    return {
        place: FirstTokens(round(each[counted]), each.get(counter_name(FIRST_TOKEN_WAIT_MS), 0.0))
        for place, each in sums.items()
        if counted in each
    }


def mean_ms(before: Places, after: Places) -> dict[str, float]:
    """By place: the mean wait of the requests that `after` counts and `before` does not."""
    new = {place: (now, before.get(place, FirstTokens())) for place, now in after.items()}
    return {
        place: (now.wait_ms - then.wait_ms) / (now.count - then.count)
        for place, (now, then) in new.items()
        if now.count > then.count
    }


class FirstTokenReader:
    """Reads them of one server, run by run."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._request = urllib.request.Request(f"{url}/metrics", headers=key)
        self._before: Places = {}

    def after(self, num_requests: int) -> dict[str, float]:
        """By place, the mean of the `num_requests` since the last call; waits until all count.

        Empty where they do not within 20 s.
        """
        deadline = time.monotonic() + _WITHIN_S
        while True:
            now = self._read()
            before, complete = self._before, _hold(now, self._before, num_requests)
            if complete or time.monotonic() > deadline:
                self._before = now
                return mean_ms(before, now) if complete else {}
            time.sleep(_POLL_S)

    def _read(self) -> dict[str, FirstTokens]:
        try:
            with urllib.request.urlopen(self._request, timeout=_ANSWER_WITHIN_S) as answer:
                return first_tokens(answer.read().decode())
        except OSError:
            return {}


def _hold(now: Places, before: Places, num_requests: int) -> bool:
    none = FirstTokens()
    return all(
        now.get(place, none).count >= before.get(place, none).count + num_requests
        for place in PLACES
    )
