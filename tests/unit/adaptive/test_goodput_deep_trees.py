"""Laws of the goodput policy where one tree is deeper than another: found if it pays, left if not.

Four recorded texts, the first much harder than the others, and costs of one large GPU
(docs/results/h200-8b). Whatever text is the first gives the policy its first idea of every shape.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from benchmarks.simulator import PhaseReport, Simulator
from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.exploration import EXPLORATION_SHARE
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.adaptive.policy import StaticPolicy, StepPolicy
from serve_spec.adaptive.survival import SurvivalEstimator
from serve_spec.bench.phases import Phase
from serve_spec.bench.trace import TraceSet, load_traces
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepTimes
from tests.helpers.simulated_costs import RoundShape, interpolate, recorded_table

TRACES = load_traces(Path(__file__).parents[2] / "data" / "deep_tree_traces.json")
SHALLOW, DEEP = TRACES.trees
TREE_MS = {SHALLOW: (0.87, 4.72), DEEP: (1.62, 5.49)}
ORDERS = list(permutations(range(len(TRACES.traces))))


def costs(shape: RoundShape) -> StepTimes:
    """Of batch 1."""
    draft_ms = 0.08 + 0.157 * shape.num_steps if shape.num_steps else 0.0
    verify_ms = interpolate((0, 3, 7), (4.33, 4.40, 4.54), shape.num_steps)
    if not shape.draft.is_chain:
        draft_ms, verify_ms = TREE_MS[shape.draft]
    return StepTimes(draft_ms, verify_ms, draft_ms + verify_ms + 0.06)


def goodput(expected_rate: float | None = None) -> GoodputPolicy:
    """expected_rate: of every position of a chain, before anything is known."""
    table = recorded_table(costs, (1, 2), trees=TRACES.trees)
    prior = None if expected_rate is None else [expected_rate] * 7
    return GoodputPolicy(
        CostModel(table),
        trees={1: TRACES.trees},
        min_dwell_rounds=8,
        initial_steps=6,
        survival=SurvivalEstimator(7, prior, TRACES.trees),
    )


def in_order(traces: TraceSet, order: tuple[int, ...]) -> TraceSet:
    return replace(traces, traces=tuple(traces.traces[i] for i in order))


def short_of_three(traces: TraceSet, seed: int) -> TraceSet:
    """The same texts, where hardly a draft past the third is kept, of a tree or of a chain."""
    rng = random.Random(seed)

    def cut(kept: int) -> int:
        return next((k for k in range(3, kept) if rng.random() < 0.8), kept)

    return replace(
        traces,
        traces=tuple(
            replace(
                trace,
                num_correct_drafts=tuple(map(cut, trace.num_correct_drafts)),
                of_trees=tuple(tuple(map(cut, counts)) for counts in trace.of_trees),
            )
            for trace in traces.traces
        ),
    )


def play(policy: StepPolicy, traces: TraceSet, laps: int = 2) -> PhaseReport:
    """Each text `laps` times, one after the other."""
    return Simulator(policy, traces, costs).run(Phase("predictable", 1, 4 * laps, 96))


def speed(policy: StepPolicy, traces: TraceSet, laps: int = 2) -> float:
    return play(policy, traces, laps).tokens_per_ms


@pytest.mark.parametrize("expected_rate", [None, 0.45], ids=["knowing nothing", "expecting little"])
def test_a_deeper_tree_that_pays_is_found_within_some_150_rounds(
    expected_rate: float | None,
) -> None:
    """Against the deep tree in every round, in any order of the texts."""
    shares = []
    for order in ORDERS:
        traces = in_order(TRACES, order)
        policy = goodput(expected_rate)
        shares.append(speed(policy, traces) / speed(StaticPolicy(DEEP), traces))
        assert policy.budget.spent_share <= EXPLORATION_SHARE
    assert sum(shares) / len(shares) >= 0.98
    assert min(shares) >= 0.95


def test_a_deeper_tree_that_does_not_pay_is_left_for_the_other() -> None:
    rounds: Counter[DraftShape] = Counter()
    shares = []
    for seed, order in enumerate(ORDERS[::3]):
        traces = in_order(short_of_three(TRACES, seed), order)
        policy = goodput()
        report = play(policy, traces, laps=8)
        rounds += report.rounds_by_shape
        shares.append(report.tokens_per_ms / speed(StaticPolicy(SHALLOW), traces, laps=8))
        assert policy.budget.spent_share <= EXPLORATION_SHARE
    assert rounds[DEEP] <= 0.05 * rounds.total()
    assert sum(shares) / len(shares) >= 0.97
