"""Between two plans the answer stands: it is given again for as long as it would be found again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.exploration import TRIAL_ROUNDS
from serve_spec.adaptive.goodput import PLAN_ROUNDS, GoodputPolicy
from serve_spec.adaptive.policy import Reason
from serve_spec.bench.phases import Phase
from serve_spec.bench.simulated_costs import GPU_8B, TWO_CPU_CORES, RoundCosts, recorded_table
from serve_spec.bench.simulator import Simulator
from serve_spec.bench.trace import TraceSet, load_traces
from serve_spec.core.draft_shape import PLAIN
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundSteps
from tests.helpers.rounds import decode_batch, verified_round

DATA = Path(__file__).parents[2] / "data"
CHAINS, TREES = (load_traces(DATA / f"{name}_traces.json") for name in ("acceptance", "tree"))
Asked = tuple[int, object, object, Reason]


class Asking(GoodputPolicy):
    """Finds every answer anew."""

    def _stand(self, *asked: object) -> None:
        return None


def answers(
    kind: type[GoodputPolicy], traces: TraceSet, costs: RoundCosts, phase: Phase
) -> list[Asked]:
    """Of every round of a phase: steps of the tier and of the rows, the tree, and why."""
    table = recorded_table(costs, (1, 4, 16, 64), trees=traces.trees)
    trees = {1: traces.trees} if traces.trees else {}
    policy = kind(CostModel(table), trees=trees, min_dwell_rounds=8, initial_steps=3)
    told: list[Asked] = []

    def on_round(batch: DecodeBatch, steps: RoundSteps, verified: StepRecord) -> None:
        row_steps = list(steps.row_steps or [steps.shape.depth] * batch.size)
        told.append((steps.shape, row_steps, policy.last_reason))

    Simulator(policy, traces, costs, on_round=on_round).run(phase)
    return told


@pytest.mark.parametrize("prompt_class", ["predictable", "unpredictable"])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("costs", [GPU_8B, TWO_CPU_CORES], ids=["gpu", "cpu"])
@pytest.mark.parametrize("traces", [CHAINS, TREES], ids=["chains", "trees"])
def test_it_is_the_answer_that_would_be_found_probes_and_reasons_included(
    traces: TraceSet, costs: RoundCosts, batch_size: int, prompt_class: str
) -> None:
    phase = Phase(prompt_class, batch_size, 8 * batch_size, 90)
    found, stood = (answers(kind, traces, costs, phase) for kind in (Asking, GoodputPolicy))
    assert len({why for *_, why in found}) > 1, "one answer for all, anything would hold"
    assert stood == found


def settled(kept: int) -> GoodputPolicy:
    """Two rows that keep all of their drafts, or none, until the answer stands."""
    table = recorded_table(TWO_CPU_CORES)
    policy = GoodputPolicy(CostModel(table), min_dwell_rounds=8, initial_steps=3)
    for _ in range(20 * PLAN_ROUNDS):
        steps = policy.choose(decode_batch(2))
        row_steps = list(steps.row_steps or [steps.shape.depth] * 2)
        correct = [min(kept, k) for k in row_steps]
        policy.observe(verified_round(correct, 2, max(row_steps), row_steps=row_steps))
    for _ in range(TRIAL_ROUNDS + 2):  # no probe is under way any more
        policy.choose(decode_batch(2))
    return policy


@pytest.mark.parametrize(
    "changed",
    [
        lambda batch: replace(batch, request_ids=["0", "joined"]),
        lambda batch: replace(batch, request_ids=["1", "0"]),
        lambda batch: replace(batch, num_prompts=1),
        lambda batch: replace(batch, num_prompt_rows=16),
        lambda batch: replace(batch, max_draft_tokens=1),
        lambda batch: replace(batch, text_steps=[0, 3]),
    ],
    ids=["another joins", "rows change places", "prompts wait", "prompts", "scarce", "texts"],
)
def test_while_it_drafts_another_batch_is_another_question(
    changed: Callable[[DecodeBatch], DecodeBatch],
) -> None:
    policy = settled(kept=7)
    stood = policy.choose(decode_batch(2))
    assert stood.shape.depth > 0
    assert policy.choose(changed(decode_batch(2))) is not stood


def test_where_nobody_drafts_it_stands_whoever_comes_and_goes() -> None:
    policy = settled(kept=0)
    stood = policy.choose(decode_batch(2))
    assert stood.shape == PLAIN
    joined = replace(decode_batch(2, first=100), num_prompts=3, num_prompt_rows=64)
    assert policy.choose(joined) is stood
    assert policy.choose(decode_batch(64)) is not stood, "of a batch of another size it may draft"
