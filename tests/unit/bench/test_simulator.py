"""Replays of recorded traces."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator import Phase, Simulator, _row_steps
from serve_spec.adaptive.policy import StaticPolicy
from serve_spec.bench.trace import AcceptanceTrace, TraceSet, load_traces
from serve_spec.core.draft import DraftShape
from serve_spec.core.round import DecodeBatch, Reason, RoundSteps
from serve_spec.scheduler.requests import fair_drafts
from tests.helpers.simulated_costs import TWO_CPU_CORES

TRACES = load_traces(Path(__file__).parents[2] / "data" / "acceptance_traces.json")
PHASES = [
    Phase("predictable", 1, 2, 60),
    Phase("mixture", 8, 20, 60),
    Phase("unpredictable", 32, 40, 60),
    Phase("heated", 3, 6, 60),
]


class RandomPolicy:
    """Asks for anything at all, of rows that can and rows that cannot."""

    shapes = tuple(map(DraftShape.chain, range(8)))
    last_reason = Reason.STATIC

    def __init__(self, numbers):
        self.numbers = numbers
        self.num_rounds = 0
        self.forgotten = []

    def choose(self, batch):
        self.num_rounds += 1
        at = self.num_rounds
        steps_per_req = [self.numbers[(at + i) % len(self.numbers)] for i in range(batch.size)]
        return RoundSteps(DraftShape.chain(7), steps_per_req)

    def observe(self, verified):
        rows = zip(verified.correct_per_req, verified.steps_per_req, strict=True)
        assert all(0 <= correct <= steps for correct, steps in rows)

    def forget(self, request_id):
        self.forgotten.append(request_id)

    def snapshot(self):
        return {}


def rounds_of(policy, phase, costs=TWO_CPU_CORES, **limits):
    rounds = []
    simulator = Simulator(
        policy, TRACES, costs, on_round=lambda *each: rounds.append(each), **limits
    )
    return simulator.run(phase), rounds


@given(st.lists(st.integers(0, 7), min_size=1, max_size=9), st.sampled_from(PHASES))
def test_every_text_is_emitted_once_without_drafts_past_its_end(numbers, phase):
    policy = RandomPolicy(numbers)
    report, rounds = rounds_of(policy, phase)
    # The first token of every text comes from its prompt.
    assert report.num_output_tokens == phase.num_requests * (phase.num_tokens - 1)
    assert sorted(policy.forgotten) == sorted({i for b, _, _ in rounds for i in b.request_ids})
    for batch, _, verified in rounds:
        usable = dict(zip(batch.request_ids, batch.max_steps, strict=True))
        assert batch.size <= phase.batch_size
        rows = zip(verified.request_ids, verified.steps_per_req, strict=True)
        assert all(steps <= usable[row] for row, steps in rows)
        assert all(most >= 0 for most in batch.max_steps)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(0, 40),
    st.booleans(),
)
def test_drafts_are_granted_as_the_scheduler_grants_them(rows, max_draft_tokens, whole):
    wanted, usable = zip(*rows, strict=True)
    batch = DecodeBatch([str(i) for i in range(len(rows))], usable, 9, 0, max_draft_tokens)
    steps = RoundSteps(DraftShape.chain(5)) if whole else RoundSteps(DraftShape.chain(9), wanted)
    granted = [drafts.shape.depth for drafts in fair_drafts(steps, batch)]
    assert _row_steps(steps, batch) == granted


@pytest.mark.parametrize("mixes", [False, True])
def test_prompts_run_alone_or_in_mixed_batches_and_all_are_computed(mixes):
    steps = []

    def costs(shape):
        steps.append(shape)
        return TWO_CPU_CORES(shape)

    report, rounds = rounds_of(
        StaticPolicy(DraftShape.chain(3)), PHASES[1], costs, mixes_prompts=mixes
    )
    decoding = [shape for shape in steps if shape.batch_size]
    assert report.num_rounds == len(rounds) == len(decoding)
    assert report.decode_ms == pytest.approx(sum(TWO_CPU_CORES(s).step_ms for s in decoding))
    alone = [shape for shape in steps if not shape.batch_size]
    assert report.prompt_ms == pytest.approx(sum(TWO_CPU_CORES(s).step_ms for s in alone))
    assert any(shape.num_prefill_tokens for shape in decoding) == mixes
    traces = {kind: TRACES.of(kind)[0].num_prompt_tokens for kind in PHASES[1].kinds}
    asked = sum(traces[PHASES[1].kind(i)] for i in range(PHASES[1].num_requests))
    assert sum(shape.num_prefill_tokens for shape in steps) == asked
    assert sum(verified.num_ended for _, _, verified in rounds) == PHASES[1].num_requests
    assert sum(verified.num_ended_prompt_tokens for _, _, verified in rounds) == asked


def test_a_depth_or_a_length_that_was_not_recorded_is_refused():
    with pytest.raises(ValueError, match="num_steps=9"):
        Simulator(StaticPolicy(DraftShape.chain(9)), TRACES, TWO_CPU_CORES)
    with pytest.raises(ValueError, match="num_tokens=1000"):
        rounds_of(StaticPolicy(DraftShape.chain(1)), Phase("heated", 1, 1, 1000))
    known = TraceSet(7, (AcceptanceTrace("code", 0.0, 0, 9, (1, 2)),))
    with pytest.raises(ValueError, match="shuffled"):
        Simulator(StaticPolicy(DraftShape.chain(1)), known, TWO_CPU_CORES).run(
            Phase("mixture", 1, 2, 3)
        )
