"""What the policy is told, that no drafts cost nothing, and what an interrupted call leaves."""

import pytest

from serve_spec.core.request import SamplingParams, SpeculativeOptions
from tests.helpers.engines import always_three, heard_plans, heard_steps, switch_every_round


def test_the_policy_hears_of_live_rows_and_of_what_each_really_drafted(make_llm):
    """Of three rows one is capped at 1 draft and one finishes: neither may read as rejection."""
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
    for verified in controller.told:
        for name, steps in zip(verified.request_ids, verified.steps_per_req, strict=True):
            by_name[name].add(steps)
    assert 3 in by_name["0"]
    assert by_name["1"] <= {0, 1}
    last_with_three = [v for v in controller.told if v.batch_size == 3][-1]
    assert "2" not in last_with_three.request_ids, "the round in which a row ends leaves it out"
    assert last_with_three.num_output_tokens > len(last_with_three.request_ids)
    assert controller.told[-1].steps_per_req == ()
    assert sorted(controller.left) == ["0", "1", "2"]


def test_the_policy_hears_once_of_every_request_that_ends_what_it_took(make_llm):
    llm = make_llm("EAGLE3", 3)
    controller = always_three(llm)
    params = [SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True) for i in range(5)]
    llm.generate([list(range(i, 2 * i + 20)) for i in range(5)], params)
    told = controller.told
    assert sum(v.num_ended for v in told) == 5
    assert sum(v.num_ended_prompt_tokens for v in told) == sum(20 + i for i in range(5))
    assert sum(v.num_ended_tokens for v in told) == sum(4 + 3 * i for i in range(5))


def test_a_round_says_how_long_it_took_and_how_many_rows_of_prompts_shared_it(make_llm):
    llm = make_llm("EAGLE3", 3)
    controller = always_three(llm)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    llm.engine.add(llm.engine.new_sequence("0", [1, 2, 3], params))
    for _ in range(3):
        llm.engine.step()
    llm.engine.add(llm.engine.new_sequence("1", [4, 5, 6], params))
    llm.engine.step()
    llm.engine.step()
    assert [told.num_prefill_tokens for told in controller.told[-2:]] == [3, 0]
    for told in controller.told:
        assert told.times is not None
        assert 0 < told.times.draft_ms + told.times.verify_ms <= told.times.step_ms


def test_a_request_that_is_aborted_or_preempted_leaves_the_policy(make_llm):
    llm = make_llm("EAGLE3", 3, num_pages=32, max_num_seqs=8)
    controller = always_three(llm)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for i in range(8):
        llm.engine.add(llm.engine.new_sequence(str(i), [i] * 20, params))
    while not llm.engine.scheduler.queue.num_preemptions:
        llm.engine.step()
    running = {seq.request_id for seq in llm.engine.scheduler.queue.running}
    assert controller.left
    assert not running & set(controller.left)
    survivor = running.pop()
    llm.engine.abort(survivor)
    assert controller.left[-1] == survivor


def test_the_figures_of_a_round_add_up_also_when_requests_are_preempted(make_llm):
    llm = make_llm("EAGLE3", 3, num_pages=32, max_num_seqs=8)
    steps = heard_steps(llm)
    prompts = [[i] * 20 for i in range(8)]
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
    )
    assert llm.engine.scheduler.queue.num_preemptions > 0
    for stats in steps:
        assert stats.num_prefill_tokens >= 0
        assert stats.batch_size == len(stats.accept_lengths)
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
    plans = heard_plans(llm)
    monkeypatch.setattr(
        llm.engine.worker, "_draft", lambda *args: pytest.fail("a step without drafts")
    )
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=3, ignore_eos=True)
    llm.generate([[1, 2, 3], [4, 5]], params)
    page_size = llm.engine.scheduler.cache.page_size
    for row in (row for plan in plans for row in plan.requests):
        assert len(row.page_ids) == -(-row.length // page_size), "pages for drafts that are not"
