"""What strategy goodput's probes really lose, counted from outside, by the true costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.exploration import (
    BASELINE_EVERY_ROUNDS,
    DEEPER_EVERY_ROUNDS,
    EXPLORATION_SHARE,
    LAST_WAIT_ROUNDS,
    NUM_FIRST_BASELINES,
    PROBED_ROWS_SHARE,
    TRIAL_ROUNDS,
)
from serve_spec.adaptive.goodput import PLAN_ROUNDS, GoodputPolicy
from serve_spec.adaptive.policy import Reason
from serve_spec.bench.phases import Phase
from serve_spec.bench.simulated_costs import TWO_CPU_CORES, RoundShape, recorded_table
from serve_spec.bench.simulator import Simulator
from serve_spec.bench.trace import TraceSet, load_traces
from serve_spec.core.draft_shape import PLAIN
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundSteps
from tests.helpers.rounds import decode_batch, verified_round


class Watched(GoodputPolicy):
    """Remembers what it would have asked for without a probe."""

    wanted: RoundSteps

    def _wanted(self, plan, batch):  # type: ignore[no-untyped-def]
        self.wanted = super()._wanted(plan, batch)
        return self.wanted


class Account:
    """Adds up what rounds take, and what they would have taken."""

    def __init__(self, policy: Watched) -> None:
        self.policy = policy
        self.total_ms = self.probes_ms = self.baselines_ms = 0.0
        self.drafting_ms, self.drafted_tokens = 0.0, 0
        self.baselines: list[tuple[float, int]] = []
        self.since_baseline: list[int] = [0]
        self.probed_rows: list[int] = []
        """Of rounds that would have drafted anyway."""
        self.num_probes = 0
        self.worst_share = 0.0

    def on_round(self, batch: DecodeBatch, steps: RoundSteps, verified: StepRecord) -> None:
        assert steps.row_steps is None or len(steps.row_steps) == batch.size
        ms = round_ms(batch, steps.row_steps or [steps.shape.depth] * batch.size)
        self.total_ms += ms
        self.since_baseline[-1] += 1
        if self.policy.last_reason is Reason.PROBE:
            self.probes_ms += ms - round_ms(batch, self.policy.wanted.row_steps or [])
            if any(self.policy.wanted.row_steps or []):
                self.probed_rows.append(self._num_deeper(steps))
            self.num_probes += 1
        elif self.policy.last_reason is Reason.BASELINE:
            self.baselines.append((ms, batch.size))
            self.since_baseline.append(0)
        elif verified.num_draft_tokens:
            self.drafting_ms += ms
            self.drafted_tokens += verified.num_output_tokens
        self.worst_share = max(self.worst_share, self.lost_share)

    def _num_deeper(self, steps: RoundSteps) -> int:
        pairs = zip(steps.row_steps or [], self.policy.wanted.row_steps or [], strict=True)
        return sum(asked > wanted for asked, wanted in pairs)

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


def account(traces: TraceSet, kind: str, size: int, num_requests: int) -> Account:
    costs = CostModel(recorded_table(TWO_CPU_CORES))
    policy = Watched(costs, min_dwell_rounds=8, initial_steps=3)
    kept = Account(policy)
    simulator = Simulator(policy, traces, TWO_CPU_CORES, on_round=kept.on_round)
    simulator.run(Phase(kind, size, num_requests, 96))
    return kept


@pytest.mark.parametrize("kind", ["predictable", "unpredictable"])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_probes_and_plain_rounds_together_lose_at_most_their_share_of_the_time(
    traces: TraceSet, kind: str, size: int
) -> None:
    kept = account(traces, kind, size, 24 * size)
    assert kept.num_probes or kept.baselines, "it must have tried something"
    # What plain rounds lose is estimated before they run: a third is room for that.
    assert kept.worst_share <= EXPLORATION_SHARE * 4 / 3, "at any moment, not only in the end"


@pytest.mark.parametrize("size", [1, 4, 16])
def test_while_it_drafts_a_probe_asks_one_row_in_sixteen_at_most_and_one_at_least(
    traces: TraceSet, size: int
) -> None:
    rows = account(traces, "predictable", size, 16 * size).probed_rows
    assert rows
    assert set(rows) == {max(1, size // PROBED_ROWS_SHARE)}


def hopeless(size: int) -> Watched:
    """Has seen no draft kept, and has a budget that refuses no probe."""
    policy = Watched(CostModel(recorded_table(TWO_CPU_CORES)), min_dwell_rounds=8, initial_steps=0)
    policy.budget.pass_time(1e9)
    for _ in range(4 * PLAN_ROUNDS):
        policy.observe(verified_round([0] * size, size, 3))
    return policy


@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_while_off_a_trial_asks_a_quarter_of_the_rows_at_most_or_four(size: int) -> None:
    policy = hopeless(size)
    rows_per_trial = []
    for _ in range(600):
        steps = policy.choose(decode_batch(size))
        row_steps = list(steps.row_steps or [steps.shape.depth] * size)
        if policy.last_reason is Reason.PROBE:
            rows_per_trial.append(sum(k > 0 for k in row_steps))
        else:
            assert not any(row_steps)
        policy.observe(verified_round([0] * size, size, max(row_steps), row_steps=row_steps))
    assert rows_per_trial
    assert 1 <= min(rows_per_trial) <= max(rows_per_trial) <= max(size // 4, min(size, 4))


def test_a_trial_takes_the_rows_with_least_to_make_up_and_fewer_the_more_that_is() -> None:
    def tried(backlogs: list[int]) -> list[int]:
        policy = hopeless(4)
        policy.costs.entry_ms = 0.02
        batch = replace(decode_batch(4), backlogs=backlogs, num_remaining=[8] * 4)
        while (steps := policy.choose(batch)).shape == PLAIN:
            policy.observe(verified_round([0] * 4, 4, 0))
        assert policy.last_reason is Reason.PROBE
        return [row for row, k in enumerate(steps.row_steps or []) if k]

    assert tried([900, 20, 40, 30]) == [1, 2, 3]
    assert tried([9000, 8000, 7000, 9000]) == [2]


def test_while_it_drafts_a_plain_round_comes_as_often_as_the_budget_lets_it(
    traces: TraceSet,
) -> None:
    kept = account(traces, "predictable", 1, 64)
    later = kept.since_baseline[NUM_FIRST_BASELINES:-1]
    assert len(later) >= 3
    assert min(later) >= BASELINE_EVERY_ROUNDS


def test_where_drafting_is_not_clearly_ahead_the_first_plain_rounds_come_sooner(
    traces: TraceSet,
) -> None:
    waits = account(traces, "mixture", 4, 64).since_baseline[:-1]
    first, later = waits[:NUM_FIRST_BASELINES], waits[NUM_FIRST_BASELINES:]
    assert first[0] < BASELINE_EVERY_ROUNDS / 2
    assert all(wait >= 8 << number for number, wait in enumerate(first))
    assert all(wait >= BASELINE_EVERY_ROUNDS for wait in later)


@pytest.mark.parametrize("affordable", [1, 3, 16])
def test_no_probe_asks_for_more_drafts_than_the_round_affords(affordable: int) -> None:
    """All are kept, so that the plan takes what there is, and whatever goes deeper is too much."""
    policy = Watched(CostModel(recorded_table(TWO_CPU_CORES)), min_dwell_rounds=8, initial_steps=3)
    policy.budget.pass_time(1e9)  # no probe is refused for its price
    for _ in range(300):
        steps = policy.choose(decode_batch(8, max_draft_tokens=affordable))
        row_steps = list(steps.row_steps or [steps.shape.depth] * 8)
        assert sum(row_steps) <= affordable
        policy.observe(verified_round(row_steps, 8, steps.shape.depth, row_steps=row_steps))


class Rounds:
    """Four rows that keep all of their drafts, or none, and a budget that refuses no probe."""

    def __init__(self) -> None:
        costs = CostModel(recorded_table(TWO_CPU_CORES))
        self.policy = Watched(costs, min_dwell_rounds=8, initial_steps=0)
        self.policy.budget.pass_time(1e9)

    def waits(self, num_rounds: int, *, is_kept: bool) -> list[int]:
        """Rounds at 0 before each probe; where drafts are kept, until the policy drafts."""
        found = [0]
        for _ in range(num_rounds):
            steps = self.policy.choose(decode_batch(4))
            row_steps = list(steps.row_steps or [steps.shape.depth] * 4)
            wants_none = not any(self.policy.wanted.row_steps or [])
            if self.policy.last_reason is Reason.PROBE and wants_none:
                found.append(0)
            elif any(row_steps) and is_kept:
                return found
            found[-1] += not any(row_steps) and self.policy.last_reason is not Reason.BASELINE
            kept = row_steps if is_kept else [0] * 4
            self.policy.observe(verified_round(kept, 4, steps.shape.depth, row_steps=row_steps))
        return found[:-1]


def test_while_off_waits_for_the_next_trial_double_from_32_to_256_rounds() -> None:
    found = Rounds().waits(6000, is_kept=False)
    begins = [before + TRIAL_ROUNDS - 1 for before in found[::TRIAL_ROUNDS]]
    assert begins[0] == 31 + TRIAL_ROUNDS - 1, "the first waits for no other"
    assert begins[1:] == [63, 127] + [255] * (len(begins) - 3)
    assert len(begins) > 9
    rest = {wait for at, wait in enumerate(found) if at % TRIAL_ROUNDS}
    assert rest == {0}, "a trial is so many rounds in a row"


def test_once_drafting_paid_waits_start_over() -> None:
    rounds = Rounds()
    assert rounds.waits(250, is_kept=False)[-TRIAL_ROUNDS] >= 100
    assert len(rounds.waits(30_000, is_kept=True)) > 2, "probes show it that drafts pay by now"
    assert rounds.waits(200, is_kept=False)[0] <= 32


@pytest.mark.parametrize("num_hard", [200, 3000, 20_000])
def test_however_long_drafts_failed_it_drafts_again_soon_after_they_stop_failing(
    num_hard: int,
) -> None:
    rounds = Rounds()
    rounds.waits(num_hard, is_kept=False)
    waits = rounds.waits(30_000, is_kept=True)
    assert sum(waits) <= LAST_WAIT_ROUNDS + 100, "a trial, and others that follow it up"


def test_trials_say_nothing_of_how_fast_speculation_is_where_it_runs() -> None:
    """They are slower than plain rounds, and known to be."""
    policy = hopeless(4)
    num_trials = 0
    for _ in range(12_000):
        steps = policy.choose(decode_batch(4))
        row_steps = list(steps.row_steps or [steps.shape.depth] * 4)
        num_trials += any(row_steps)
        shape = RoundShape(4, (sum(row_steps),) if any(row_steps) else (), 512, 0, 0, 0)
        times = TWO_CPU_CORES(shape)
        policy.observe(
            verified_round([0] * 4, 4, steps.shape.depth, row_steps=row_steps, times=times)
        )
    assert num_trials > 100
    assert policy.last_reason is not Reason.GUARD
    assert all(
        slot["num_closings"] == 0 and not slot["is_in_doubt"]
        for slot in policy.snapshot()["slots"].values()
    )


def test_while_it_drafts_one_row_tries_one_draft_more_every_64_rounds() -> None:
    """Rows keep their first draft and never a second: it has to ask again to know."""
    policy = Watched(CostModel(recorded_table(TWO_CPU_CORES)), min_dwell_rounds=8, initial_steps=1)
    policy.budget.pass_time(1e9)
    probes = []
    for number in range(1500):
        steps = policy.choose(decode_batch(4))
        row_steps = list(steps.row_steps or [steps.shape.depth] * 4)
        wanted = list(policy.wanted.row_steps or [])
        if policy.last_reason is Reason.PROBE and any(wanted):
            probes.append(number)
            further = [k - w for k, w in zip(row_steps, wanted, strict=True)]
            assert sorted(further) == [0, 0, 0, 1]
        kept = [min(1, k) for k in row_steps]
        policy.observe(verified_round(kept, 4, steps.shape.depth, row_steps=row_steps))
    gaps = [later - before for before, later in pairwise(probes)]
    assert set(gaps) <= {DEEPER_EVERY_ROUNDS, DEEPER_EVERY_ROUNDS + 1}, "a plain round between"
    assert len(gaps) > 15
