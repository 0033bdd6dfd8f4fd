"""What strategy goodput's probes really lose, counted from outside, by the true costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator import Simulator
from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.exploration import (
    EXPLORATION_SHARE,
    LAST_WAIT_ROUNDS,
)
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.adaptive.policy import Reason
from serve_spec.bench.phases import Phase
from serve_spec.bench.trace import TraceSet, load_traces
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundSteps
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import TWO_CPU_CORES, RoundShape, recorded_table


class Watched(GoodputPolicy):
    """Remembers what it would have asked for without a probe."""

    wanted: RoundSteps

    def _wanted(self, plan, batch):  # type: ignore[no-untyped-def]
        self.wanted = super()._wanted(plan, batch)
        return self.wanted


def watched(initial_steps: int) -> Watched:
    costs = CostModel(recorded_table(TWO_CPU_CORES))
    return Watched(costs, min_dwell_rounds=8, initial_steps=initial_steps)


class Account:
    """Adds up what rounds take, and what they would have taken."""

    def __init__(self, policy: Watched) -> None:
        self.policy = policy
        self.total_ms = self.probes_ms = 0.0
        self.drafting_ms, self.drafted_tokens = 0.0, 0
        self.baselines: list[tuple[float, int]] = []
        self.num_probes = 0
        self.worst_share = 0.0

    def on_round(self, batch: DecodeBatch, steps: RoundSteps, verified: StepRecord) -> None:
        assert steps.row_steps is None or len(steps.row_steps) == batch.size
        ms = round_ms(batch, steps.row_steps or [steps.shape.depth] * batch.size)
        self.total_ms += ms
        if self.policy.last_reason is Reason.PROBE:
            self.probes_ms += ms - round_ms(batch, self.policy.wanted.row_steps or [])
            self.num_probes += 1
        elif self.policy.last_reason is Reason.BASELINE:
            self.baselines.append((ms, batch.size))
        elif verified.num_draft_tokens:
            self.drafting_ms += ms
            self.drafted_tokens += verified.num_output_tokens
        self.worst_share = max(self.worst_share, self.lost_share)

    @property
    def lost_share(self) -> float:
        """Of all time: further drafts, kept or not, and plain rounds in place of drafting ones."""
        ms_per_token = self.drafting_ms / max(1, self.drafted_tokens)
        plain = sum(max(0.0, ms - tokens * ms_per_token) for ms, tokens in self.baselines)
        return (self.probes_ms + plain) / self.total_ms


def round_ms(batch: DecodeBatch, row_steps: Sequence[int]) -> float:
    """By the true costs."""
    steps = [min(k, most) for k, most in zip(row_steps, batch.max_steps, strict=True)]
    drafting = tuple(sum(k >= step for k in steps) for step in range(1, max(steps) + 1))
    shape = RoundShape(batch.size, drafting, batch.num_tokens, batch.num_sampled, 0, 0)
    return TWO_CPU_CORES(shape).step_ms


@pytest.fixture(scope="module")
def traces() -> TraceSet:
    return load_traces(Path(__file__).parents[2] / "data" / "acceptance_traces.json")


@pytest.mark.parametrize("kind", ["predictable", "unpredictable"])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_probes_and_plain_rounds_together_lose_at_most_their_share_of_the_time(
    traces: TraceSet, kind: str, size: int
) -> None:
    policy = watched(initial_steps=3)
    kept = Account(policy)
    simulator = Simulator(policy, traces, TWO_CPU_CORES, on_round=kept.on_round)
    simulator.run(Phase(kind, size, 24 * size, 96))
    assert kept.num_probes or kept.baselines, "it must have tried something"
    # What plain rounds lose is estimated before they run: a third is room for that.
    assert kept.worst_share <= EXPLORATION_SHARE * 4 / 3, "at any moment, not only in the end"


@pytest.mark.parametrize("affordable", [1, 3, 16])
def test_no_probe_asks_for_more_drafts_than_the_round_affords(affordable: int) -> None:
    """All are kept, so that the plan takes what there is, and whatever goes deeper is too much."""
    policy = watched(initial_steps=3)
    policy.budget.pass_time(1e9)  # no probe is refused for its price
    for _ in range(300):
        steps = policy.choose(decode_batch(8, max_draft_tokens=affordable))
        row_steps = list(steps.row_steps or [steps.shape.depth] * 8)
        assert sum(row_steps) <= affordable
        policy.observe(verified_round(row_steps, 8, steps.shape.depth, row_steps=row_steps))


@pytest.mark.parametrize("num_hard", [200, 20_000])
def test_however_long_drafts_failed_it_drafts_again_soon_after_they_stop_failing(
    num_hard: int,
) -> None:
    policy = watched(initial_steps=0)
    policy.budget.pass_time(1e9)

    def drafts(*, is_kept: bool) -> bool:
        """Whether one more round of four rows drafts, and not only to try."""
        steps = policy.choose(decode_batch(4))
        row_steps = list(steps.row_steps or [steps.shape.depth] * 4)
        kept = row_steps if is_kept else [0] * 4
        shape = RoundShape(4, (sum(map(bool, row_steps)),) * max(row_steps), 512, 0, 0, 0)
        told = verified_round(kept, 4, steps.shape.depth, row_steps=row_steps)
        policy.observe(replace(told, times=TWO_CPU_CORES(shape)))
        return any(row_steps) and policy.last_reason is not Reason.PROBE

    assert not any([drafts(is_kept=False) for _ in range(num_hard)][num_hard // 2 :])
    slots: Any = policy.snapshot()["slots"]
    assert slots["4"]["num_closings"] == 0, "of trials it is known that they are slower"
    assert any(drafts(is_kept=True) for _ in range(LAST_WAIT_ROUNDS + 100)), "soon after a trial"
