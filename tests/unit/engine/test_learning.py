"""What the policy is told, and what an interrupted call leaves behind."""

from collections.abc import Sequence

import pytest

from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.metrics import StepStats
from tests.helpers.engines import MakeLLM


class RecordingController:
    """Always three steps; remembers what it was told."""

    candidate_steps = (3,)
    switch_reason = None

    def __init__(self) -> None:
        self.told: list[tuple[int, int, int]] = []

    def choose_steps(self, batch_size: int) -> int:
        return 3

    def on_verify_complete(self, correct: Sequence[int], batch_size: int, num_steps: int) -> None:
        self.told.append((len(correct), batch_size, num_steps))

    def snapshot(self) -> dict[str, object]:
        return {}


class RecordingSink:
    """Keeps every round's figures."""

    def __init__(self) -> None:
        self.rounds: list[StepStats] = []

    def observe(self, stats: StepStats) -> None:
        self.rounds.append(stats)


def test_the_policy_hears_only_of_live_rows_that_drafted_the_full_tier(make_llm: MakeLLM) -> None:
    """Of three rows one is capped at 1 draft and one finishes: each would read as rejection."""
    llm = make_llm("EAGLE3", 3)
    controller = RecordingController()
    llm.engine.controller = controller  # type: ignore[assignment]
    capped = SpeculativeOptions(max_steps=1)
    params = [
        SamplingParams(max_tokens=60, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, speculative=capped),
        SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
    ]
    prompt = list(range(20))
    for i, p in enumerate(params):
        llm.engine.add(llm.engine.new_sequence(str(i), prompt, p))
    live_full_rows = []
    while llm.engine.has_work:
        before = len(controller.told)
        llm.engine.step()
        if len(controller.told) > before:
            live_full_rows.append(controller.told[-1])
    third_alive = [row for row in live_full_rows if row[1] == 3]
    assert {rows for rows, _, _ in third_alive} <= {1, 2}
    assert (1, 3, 3) in third_alive, "the round in which the third request ends leaves one row"
    assert all(rows == 1 for rows, batch_size, _ in live_full_rows if batch_size == 2)


def test_the_figures_of_a_round_add_up_also_when_requests_are_preempted(make_llm: MakeLLM) -> None:
    llm = make_llm("EAGLE3", 3, num_pages=32, max_num_seqs=8)
    sink = RecordingSink()
    llm.engine.metrics = sink
    prompts = [[i] * 20 for i in range(8)]
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
    )
    assert llm.engine.scheduler.num_preemptions > 0
    for stats in sink.rounds:
        assert stats.num_prefill_tokens >= 0
        assert stats.batch_size == len(stats.accept_lengths)
        assert stats.num_output_tokens == stats.num_correct_drafts + stats.batch_size
    of_requests = sum(output.speculation.num_correct_drafts for output in outputs)
    assert sum(stats.num_correct_drafts for stats in sink.rounds) == of_requests
    assert llm.engine.counters.num_correct_drafts == of_requests


def test_an_interrupted_call_leaves_an_engine_that_works(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm("EAGLE3", 3)
    step, calls = llm.engine.step, []

    def interrupted() -> object:
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
