"""Where the time of a request goes, by a clock that the test moves."""

from __future__ import annotations

import pytest

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason
from serve_spec.metrics import Reading
from serve_spec.serving import telemetry
from serve_spec.serving.messages import Accepted, Failed, Refused
from serve_spec.serving.telemetry import ARRIVED, RequestTimer, router_timer
from tests.serving.fakes import delta

LAST = delta("b", 3, 4, 5, 6, finish=FinishReason.STOP)


class Clock:
    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(telemetry, "time", clock)
    return clock


def values(seen):
    return {r.metric.name.removeprefix("serve_spec_"): r.value for r in seen}


def test_first_and_later_tokens_are_timed_apart(clock):
    seen: list[Reading] = []
    timer = RequestTimer(seen.append, "engine", started=99.5)
    timer.observe(Accepted(3, "r"))
    timer.observe(delta("a", 1, 2))
    clock.now += 0.08
    timer.observe(LAST)
    timer.end()
    assert values(seen) == pytest.approx(
        {
            "time_to_first_token_ms": 500,
            "first_token_wait_ms": 500,
            "first_tokens": 1,
            "time_per_output_token_ms": 20,
            "later_tokens_wait_ms": 80,
            "later_tokens": 4,
            "requests": 1,
        }
    )
    assert {r.labels["measured_at"] for r in seen} == {"engine"}


@pytest.mark.parametrize(
    ("items", "outcome"),
    [
        ([Accepted(3, "r"), LAST], "done"),
        ([Refused(InvalidRequest("top_k", -3, "no"))], "refused"),
        ([Accepted(3, "r"), delta("a", 1), Failed("boom")], "failed"),
        ([Accepted(3, "r"), delta("a", 1), RuntimeError("gone")], "failed"),
        ([Accepted(3, "r"), delta("a", 1)], "left"),
    ],
    ids=["done", "refused", "failed", "broken", "left"],
)
def test_every_request_ends_in_one_outcome(items, outcome):
    seen: list[Reading] = []
    timer = router_timer(seen.append)
    for item in items:
        if isinstance(item, Exception):
            timer.fail()
        else:
            timer.observe(item)
    timer.end()
    ended = [r.labels for r in seen if r.metric.name == "serve_spec_requests"]
    assert ended == [
        {"outcome": outcome, "measured_at": measured_at} for measured_at in ("router", "door")
    ]


async def test_the_router_counts_from_the_arrival_of_the_request(clock):
    seen: list[Reading] = []
    ARRIVED.set(98.0)
    timer = router_timer(seen.append)
    timer.observe(LAST)
    timer.end()
    assert values(seen)["time_to_first_token_ms"] == pytest.approx(2000)
