"""Laws of the goodput policy with trees, on recorded acceptance of chains and of trees."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator import Comparison, ControllerPolicy, Simulator, compare
from serve_spec.adaptive import AdaptiveController, PolicySettings, Reason
from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.exploration import EXPLORATION_SHARE
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.bench.phases import Phase
from serve_spec.bench.trace import TraceSet, load_traces
from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundSteps
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import GPU_8B, TWO_CPU_CORES, RoundCosts, recorded_table

TRACES = load_traces(Path(__file__).parents[2] / "data" / "tree_traces.json")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def table(costs: RoundCosts) -> CostTable:
    return recorded_table(costs, SIZES, trees=TRACES.trees)


def goodput(costs: RoundCosts = GPU_8B, **options: Any) -> GoodputPolicy:
    known = {"min_dwell_rounds": 8, "initial_steps": 3, "trees": {1: TRACES.trees}}
    return GoodputPolicy(CostModel(table(costs)), **{**known, **options})


@pytest.fixture(scope="module", params=[GPU_8B, TWO_CPU_CORES], ids=["gpu", "cpu"])
def compared(request: pytest.FixtureRequest) -> Comparison:
    """A long run: batches grow and shrink, texts change, and the policy learns throughout."""
    classes = ("mixture", "unpredictable", "predictable")
    sizes = ((16, 112), (1, 16), (4, 40), (1, 16), (64, 128))
    phases = [Phase(kind, size, count, 94) for size, count in sizes for kind in classes]
    policies = {
        "goodput": goodput(request.param),
        "chains": goodput(request.param, trees={}),
    }
    return compare(policies, phases, TRACES, request.param, static_steps=(0, 1, 2, 3, 5, 7))


def rounds_of(compared: Comparison, batch_size: int) -> Counter[DraftShape]:
    """Of the policy, in all phases of a batch size."""
    total: Counter[DraftShape] = Counter()
    for report in compared.reports["goodput"]:
        if report.phase.batch_size == batch_size:
            total += report.rounds_by_shape
    return total


def share_of_trees(rounds: Counter[DraftShape]) -> float:
    return sum(n for shape, n in rounds.items() if not shape.is_chain) / rounds.total()


def test_it_is_within_four_percent_of_the_best_chain_or_tree_of_every_phase(
    compared: Comparison,
) -> None:
    assert any("x" in best for best in compared.best), "trees win somewhere"
    assert any("x" not in best for best in compared.best), "and chains elsewhere"
    assert compared.regret("goodput") <= 0.04


def test_with_trees_to_choose_from_it_is_faster_than_without_and_never_slower_than_off(
    compared: Comparison,
) -> None:
    assert compared.regret("goodput") < compared.regret("chains")
    assert compared.worst_cell("goodput") >= 0.97


def test_where_rows_are_cheap_it_drafts_trees_and_where_they_are_dear_it_does_not(
    compared: Comparison,
) -> None:
    assert share_of_trees(rounds_of(compared, 1)) > 0.5
    assert share_of_trees(rounds_of(compared, 64)) < 0.15


class Watched:
    """A policy whose switches and probes are noted."""

    def __init__(self, policy: GoodputPolicy) -> None:
        self.policy = policy
        self.rounds: list[tuple[DecodeBatch, RoundSteps, StepRecord, Reason]] = []

    def run(self, *phases: Phase, traces: TraceSet = TRACES, **limits: int) -> None:
        def on_round(batch: DecodeBatch, steps: RoundSteps, verified: StepRecord) -> None:
            self.rounds.append((batch, steps, verified, reasons.pop()))

        reasons: list[Reason] = []
        choose = self.policy.choose

        def noted(batch: DecodeBatch) -> RoundSteps:
            steps = choose(batch)
            reasons.append(self.policy.last_reason)
            return steps

        self.policy.choose = noted  # type: ignore[method-assign]
        simulator = Simulator(self.policy, traces, GPU_8B, on_round=on_round, **limits)
        for phase in phases:
            simulator.run(phase)
        self.policy.choose = choose  # type: ignore[method-assign]


def test_every_round_of_trees_drafts_one_shape_and_no_row_deeper_than_it_may() -> None:
    watched = Watched(goodput())
    watched.run(Phase("mixture", 4, 40, 94))
    branched = [(b, s, v) for b, s, v, _ in watched.rounds if not s.shape.is_chain]
    assert branched
    for batch, steps, verified in branched:
        assert steps.shape in TRACES.trees
        assert steps.row_steps is not None
        assert max(steps.row_steps) <= steps.shape.depth
        assert len(steps.row_steps) == batch.size
        assert verified.shape == steps.shape


def test_a_shape_is_kept_for_the_dwell_and_probes_stay_within_their_budget() -> None:
    watched = Watched(goodput())
    watched.run(Phase("mixture", 4, 80, 94), Phase("unpredictable", 4, 80, 94))
    numbered = enumerate(watched.rounds)
    tiers = [(n, s.shape, why) for n, (_, s, _, why) in numbered if not s.notes.is_probe]
    changes = [(n, why) for (_, a, _), (n, b, why) in pairwise(tiers) if a != b]
    kept = [b - a for (a, _), (b, why) in pairwise(changes) if why is not Reason.RANGE]
    assert kept
    assert min(kept) >= 8, "but for batches of another size"
    others = [s for _, s, _, why in watched.rounds if why is Reason.PROBE and s.shape.is_chain]
    assert others, "chains are tried beside trees"
    assert watched.policy.budget.spent_share <= EXPLORATION_SHARE


def test_trees_give_way_to_chains_beside_prompts_and_where_drafts_are_scarce() -> None:
    policy = goodput()
    Watched(policy).run(Phase("unpredictable", 1, 12, 94))
    assert not policy.choose(decode_batch(1, first=900)).shape.is_chain
    beside = replace(decode_batch(1, first=900), num_prompt_rows=64, num_prompts=1)
    assert all(policy.choose(beside).shape.is_chain for _ in range(3))
    assert policy.last_reason is Reason.PROMPTS
    scarce = decode_batch(1, first=900, max_draft_tokens=2)
    assert all(policy.choose(scarce).shape.is_chain for _ in range(3))
    assert policy.last_reason is Reason.KV
    assert not policy.choose(decode_batch(1, first=900)).shape.is_chain


def test_a_row_that_can_not_draft_stays_plain_in_a_round_of_trees() -> None:
    policy = goodput()
    Watched(policy).run(Phase("unpredictable", 4, 24, 94))
    rows = replace(decode_batch(4, first=900), max_steps=[9, 0, 2, 9])
    policy.forget("900")
    for _ in range(40):  # until the plan is made of this batch
        steps = policy.choose(rows)
        wanted = steps.row_steps or [0] * 4  # a plain round, to compare with
        usable = [min(k, m) for k, m in zip(wanted, rows.max_steps, strict=True)]
        answer = verified_round(usable, 4, steps.shape.depth, row_steps=usable)
        policy.observe(replace(answer, shape=steps.shape))
    assert usable[1] == 0


def test_only_shapes_of_the_batch_s_slot_are_drafted() -> None:
    small, large = TRACES.trees[:1], TRACES.trees[1:]
    watched = Watched(goodput(trees={1: small, 4: large}, bounds={1: 7, 4: 3}))
    watched.run(Phase("unpredictable", 1, 8, 94), Phase("unpredictable", 4, 24, 94))
    seen = {(b.size >= 4, s.shape) for b, s, _, _ in watched.rounds if not s.shape.is_chain}
    assert seen == {(False, small[0]), (True, TRACES.trees[1])}, "a tree of 4 levels is too deep"


def test_a_round_of_a_tree_that_nobody_here_asked_for_teaches_nothing() -> None:
    policy = goodput(trees={})
    before = policy.snapshot()
    for _ in range(20):
        policy.observe(verified_round([3], 1, 4, shape=DraftShape(4, 9, 4)))
    assert policy.snapshot() == before


def test_snapshots_name_every_shape_beside_the_steps_of_chains() -> None:
    settings = PolicySettings(DraftShape.chain(4), tree=TRACES.trees[-1])
    assert settings.trees == TRACES.trees
    controller = AdaptiveController(settings, table(GPU_8B))
    simulator = Simulator(ControllerPolicy(controller), TRACES, GPU_8B)
    simulator.run(Phase("unpredictable", 1, 8, 94))
    shown: Any = json.loads(json.dumps(controller.snapshot()))
    assert shown["fallback"] is None
    assert list(shown["marginal_ms_by_rows"])[:3] == ["0", "1", "2"], "routers read it"
    with_trees, without = (goodput(**keys).snapshot() for keys in ({}, {"trees": {}}))
    assert with_trees["marginal_ms_by_rows"]["0"] < without["marginal_ms_by_rows"]["0"]  # type: ignore[index]
    names = [*map(str, range(8)), *map(str, TRACES.trees)]
    assert list(shown["predicted_goodput"]) == names
    assert set(shown["rounds_by_num_steps"]) <= set(names)
    assert set(shown["trees"]) <= set(names)
    assert list(shown["costs"]["tree_verify_factors"]) == names[8:]


def test_costs_that_lack_a_shape_leave_it_to_plain_decoding_to_go_on() -> None:
    settings = PolicySettings(DraftShape.chain(4), tree=DraftShape(5, 31, 4))
    said: list[str] = []
    controller = AdaptiveController(settings, table(GPU_8B), said.append)
    assert controller.choose_steps(decode_batch(1)) == RoundSteps(DraftShape.chain(0))
    assert len(said) == 1
