"""What a round reports beside its counts: live rows, and what the policy thought of it."""

import json

import pytest

from serve_spec.adaptive import AdaptiveSpeculativeParams
from serve_spec.adaptive.ema import EmaPolicy
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import NO_NOTES, Reason
from serve_spec.engine import engine
from tests.helpers.engines import heard_steps
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import TWO_CPU_CORES, RoundShape, recorded_table

PROMPTS = [[i, *range(20, 35)] for i in range(3)]


class Ticking:
    """A clock that moves when it is read."""

    TICK_S = 1e-3

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += self.TICK_S
        return self.now

    def takes_a_second(self, work):
        def timed(*given):
            self.now += 1.0
            return work(*given)

        return timed


def generate(llm, *max_tokens):
    """The rounds of one request per given length."""
    steps = heard_steps(llm)
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in max_tokens]
    llm.generate(PROMPTS[: len(params)], params)
    return steps


def test_times_of_rounds_add_up_to_those_of_the_steps_and_pauses_are_none_of_them(
    make_llm, monkeypatch
):
    """By a clock that ticks when it is read, and whenever a plan is made or a text handed out."""
    llm, clock = make_llm("EAGLE3", 3), Ticking()
    monkeypatch.setattr(engine, "time", clock)
    monkeypatch.setattr(engine, "step_record", clock.takes_a_second(engine.step_record))
    for owner, work in ((llm.engine.scheduler, "plan"), (llm.engine, "_delta")):
        monkeypatch.setattr(owner, work, clock.takes_a_second(getattr(owner, work)))
    steps = heard_steps(llm)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    llm.engine.add(llm.engine.new_sequence("a", PROMPTS[0], params))
    steps_s = 0.0
    while llm.engine.has_work:
        before, settled = clock.now, llm.engine.counters.num_steps_executed
        llm.engine.step()
        assert llm.engine.counters.num_steps_executed == settled + 1
        steps_s += clock.now - before
        clock.now += 1000.0
    after_the_last = clock.now - 1000.0 - llm.engine._synced_at
    assert sum(stats.step_ms for stats in steps) / 1e3 == pytest.approx(
        steps_s - after_the_last, abs=2 * Ticking.TICK_S * len(steps)
    )


def test_the_average_of_the_slot_that_chose_is_reported(make_llm, tmp_path):
    slots = tmp_path / "slots.json"
    slots.write_text(json.dumps({"1": {"candidate_steps": [3]}, "3": {"candidate_steps": [3]}}))
    llm = make_llm(
        "EAGLE3",
        3,
        speculative_adaptive=True,
        speculative_adaptive_strategy="ema",
        speculative_adaptive_config=str(slots),
    )
    decoding = [stats for stats in generate(llm, 30, 30, 60) if stats.batch_size]
    assert {(s.notes.slot, s.batch_size >= 3) for s in decoding} == {("3", True), ("1", False)}
    averages = [s.notes.ema_accept_length for s in decoding if s.notes.slot == "3"]
    assert averages[0] == 2.0, "three steps less one, before anything was learned"
    assert len(set(averages)) > 3
    prefill = generate(llm, 10)[0]
    assert prefill.batch_size == 0
    assert prefill.notes == NO_NOTES, "no slot chose this round"


@pytest.mark.parametrize("num_correct", [0, 1])
def test_ema_marks_its_probes_and_nothing_else(num_correct):
    """At 0 every rise is a probe until it is decided on: it lasts, or falls back."""
    config = {"candidate_steps": [0, 1], "warmup_batches": 0, "update_interval": 5}
    policy = EmaPolicy(AdaptiveSpeculativeParams(0, config, min_dwell_rounds=5), {})
    marked = []
    for _ in range(15):
        steps = policy.choose(decode_batch(1))
        marked.append((steps.shape.depth, steps.notes.is_probe))
        kept = min(num_correct, steps.shape.depth)
        policy.observe(verified_round([kept], 1, steps.shape.depth))
    after = (1, False) if num_correct else (0, False)
    assert marked == [(0, False)] * 5 + [(1, True)] * 5 + [after] * 5


def test_goodput_says_what_it_expects_of_a_round_and_why_it_takes_it():
    policy = GoodputPolicy(recorded_table(TWO_CPU_CORES), min_dwell_rounds=8, initial_steps=3)
    learning = {Reason.PROBE, Reason.BASELINE}
    seen = set()
    for number in range(2000):
        steps = policy.choose(decode_batch(1))
        notes, reason = steps.notes, policy.last_reason
        assert notes.predicted_ms is not None
        assert notes.is_probe == (reason in learning)
        seen.add(reason)
        if not notes.is_probe:
            assert policy.snapshot()["predicted_ms"] == pytest.approx(notes.predicted_ms, abs=1e-4)
        steps_per_req = [steps.shape.depth] if steps.steps_per_req is None else steps.steps_per_req
        times = TWO_CPU_CORES(RoundShape(1, (1,) * max(steps_per_req), 128, 0, 0, 0))
        # Half of the first drafts are kept, then none: drafting pays at first.
        kept = [min(1 - number % 2, k) if number < 600 else 0 for k in steps_per_req]
        policy.observe(
            verified_round(kept, 1, steps.shape.depth, steps_per_req=steps_per_req, times=times)
        )
    assert learning <= seen, "both kinds of learning must come up"
