"""The record of a step, and what the policy observes of it."""

import pytest

from serve_spec.adaptive import AdaptiveSpeculativeParams
from serve_spec.adaptive.ema import EmaPolicy
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.core.round import NO_NOTES, Reason
from serve_spec.engine import engine
from tests.helpers.engines import always_three, recorded_plans, recorded_steps, switch_every_round
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
    steps = recorded_steps(llm)
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
    steps = recorded_steps(llm)
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


def test_the_average_of_the_slot_that_chose_is_reported(make_llm):
    llm = make_llm("EAGLE3", 3, slots={key: {"candidate_steps": [3]} for key in ("1", "3")})
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


def test_goodput_reports_the_predicted_time_and_marks_trials():
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


def test_the_policy_observes_live_requests_and_what_each_really_drafted(make_llm):
    """Of three requests one is capped at 1 draft and one ends: neither may read as rejection."""
    llm = make_llm("EAGLE3", 3)
    controller = always_three(llm)
    capped = SpeculativeOptions(max_steps=1)
    params = [
        SamplingParams(max_tokens=60, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, speculative=capped),
        SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
    ]
    for i, p in enumerate(params):
        llm.engine.add(llm.engine.new_sequence(str(i), list(range(20)), p))
    while llm.engine.has_work:
        llm.engine.step()
    by_name = {"0": set(), "1": set(), "2": set()}
    for verified in controller.observed:
        for name, steps in zip(verified.request_ids, verified.steps_per_req, strict=True):
            by_name[name].add(steps)
    assert 3 in by_name["0"]
    assert by_name["1"] <= {0, 1}
    last_with_three = [v for v in controller.observed if v.batch_size == 3][-1]
    assert "2" not in last_with_three.request_ids, "the round in which a request ends leaves it out"
    assert last_with_three.num_output_tokens > len(last_with_three.request_ids)
    assert controller.observed[-1].steps_per_req == ()
    assert sorted(controller.forgotten) == ["0", "1", "2"]
    sizes = [
        (v.num_ended, v.num_ended_prompt_tokens, v.num_ended_tokens) for v in controller.observed
    ]
    assert [sum(column) for column in zip(*sizes, strict=True)] == [3, 3 * 20, 60 + 60 + 5]


def test_a_request_that_is_aborted_or_preempted_leaves_the_policy(make_llm):
    llm = make_llm("EAGLE3", 3, num_pages=32, max_num_seqs=8)
    controller = always_three(llm)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for i in range(8):
        llm.engine.add(llm.engine.new_sequence(str(i), [i] * 20, params))
    while not llm.engine.scheduler.queue.num_preemptions:
        llm.engine.step()
    running = {seq.request_id for seq in llm.engine.scheduler.queue.running}
    assert controller.forgotten
    assert not running & set(controller.forgotten)
    survivor = running.pop()
    llm.engine.abort(survivor)
    assert controller.forgotten[-1] == survivor


def test_the_figures_of_a_round_add_up_also_when_requests_are_preempted(make_llm):
    llm = make_llm("EAGLE3", 3, num_pages=32, max_num_seqs=8)
    steps = recorded_steps(llm)
    prompts = [[i] * 20 for i in range(8)]
    outputs = llm.generate(
        prompts,
        SamplingParams(
            max_tokens=40,
            temperature=0.8,
            seed=1,
            ignore_eos=True,
            speculative=SpeculativeOptions(lists_rounds=True),
        ),
    )
    assert llm.engine.scheduler.queue.num_preemptions > 0
    for output in outputs:
        rounds = output.speculation.rounds
        assert rounds
        assert sum(drafts for drafts, _ in rounds) == output.speculation.num_draft_tokens
        assert sum(correct for _, correct in rounds) == output.speculation.num_correct_drafts
    for stats in steps:
        assert stats.num_prefill_tokens >= 0
        assert stats.batch_size == len(stats.accept_lengths)
        assert not stats.batch_size or 0 < stats.draft_ms + stats.verify_ms <= stats.step_ms
        assert stats.num_output_tokens == stats.num_correct_drafts + stats.batch_size
    of_requests = sum(output.speculation.num_correct_drafts for output in outputs)
    assert sum(stats.num_correct_drafts for stats in steps) == of_requests
    assert llm.engine.counters.num_correct_drafts == of_requests
    positions = llm.collector.snapshot()["since_start"]["positions"]
    assert sum(each["verified"] for each in positions) == sum(sum(s.steps_per_req) for s in steps)
    accepted = sum(sum(stats.correct_per_req) for stats in steps)
    assert sum(each["accepted"] for each in positions) == accepted


def test_an_interrupted_call_leaves_an_engine_that_works(make_llm, monkeypatch):
    llm = make_llm("EAGLE3", 3)
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    expected = llm.generate([[1, 2, 3]], params)[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [4, 5]], params)
    assert llm.engine.scheduler.cache.num_free_pages == 512
    assert llm.generate([[1, 2, 3]], params)[0].token_ids == expected


def test_without_steps_nothing_drafts_or_reserves_ahead(make_llm, monkeypatch):
    llm = make_llm("EAGLE3", 3)
    switch_every_round(llm, [0])
    plans = recorded_plans(llm)
    monkeypatch.setattr(
        llm.engine.worker, "_draft", lambda *args: pytest.fail("a step without drafts")
    )
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=3, ignore_eos=True)
    llm.generate([[1, 2, 3], [4, 5]], params)
    page_size = llm.engine.scheduler.cache.page_size
    for req in (req for plan in plans for req in plan.requests):
        assert len(req.page_ids) == -(-req.length // page_size), "no pages are reserved for drafts"
