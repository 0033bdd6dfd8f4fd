"""Rounds that are launched ahead of the host: whose time is the host's, and for which round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.adaptive.policy import Reason
from serve_spec.core.record import StepTimes
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import TWO_CPU_CORES, RoundShape, recorded_table

SIZE = 4


def on_device(row_steps: list[int]) -> StepTimes:
    """What the stages take."""
    drafting = tuple(sum(k >= step for k in row_steps) for step in range(1, max(row_steps) + 1))
    times = TWO_CPU_CORES(RoundShape(SIZE, drafting, 128 * SIZE, 0, 0, 0))
    return replace(times, step_ms=times.draft_ms + times.verify_ms)


PLAIN_MS = on_device([0] * SIZE).step_ms


class Engine:
    """Rows that keep their first draft. What the host does after drafts takes so long, in plain
    rounds; after a plain one it takes nothing. No probe is refused."""

    def __init__(self, host_after_drafts: float) -> None:
        costs = CostModel(recorded_table(TWO_CPU_CORES))
        self.policy = GoodputPolicy(costs, min_dwell_rounds=8, initial_steps=1)
        self.policy.budget.pass_time(1e9)
        self.host_after_drafts = host_after_drafts * PLAIN_MS
        self.reasons: list[Reason] = []
        self.round_ms: list[float] = []
        self.tokens: list[float] = []
        """Of a row."""
        self._host_ms = 0.0

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            steps = self.policy.choose(decode_batch(SIZE))
            row_steps = list(steps.row_steps or [steps.shape.depth] * SIZE)
            times = on_device(row_steps)
            times = replace(times, step_ms=max(times.step_ms, self._host_ms))
            self._host_ms = self.host_after_drafts if any(row_steps) else 0.0
            kept = [min(1, k) for k in row_steps]
            told = verified_round(kept, SIZE, max(row_steps), row_steps=row_steps, times=times)
            self.policy.observe(replace(told, follows=True))
            self.reasons.append(self.policy.last_reason)
            self.round_ms.append(times.step_ms)
            self.tokens.append(1 + sum(kept) / SIZE)


@pytest.mark.parametrize("host_after_drafts", [1.6, 1.9])
def test_the_speedup_it_tells_is_that_of_rounds_as_long_as_the_host_takes_for_them(
    host_after_drafts: float,
) -> None:
    engine = Engine(host_after_drafts)
    engine.run(1500)
    told = engine.policy.snapshot()["slots"]["4"]["speedup"]  # type: ignore[index]
    assert told == pytest.approx(2 / host_after_drafts, rel=0.02)


def test_drafts_that_gain_less_than_the_host_takes_for_them_are_given_up() -> None:
    """The device would do more with them than without; the host can not."""
    engine = Engine(2.2)
    engine.run(16_000)
    assert Reason.GUARD in engine.reasons
    speed = sum(engine.tokens[8000:]) / sum(engine.round_ms[8000:])
    assert speed > 0.98 / PLAIN_MS
