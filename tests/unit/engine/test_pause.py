"""Without speculation nothing of it runs, and after any pause it goes on as if there was none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import PendingBatch, ScheduledBatch
from serve_spec.core.record import StepRecord
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import NO_NOTES, DecodeBatch, RoundSteps
from tests.helpers.engines import MakeLLM, llm_maker, make_pair

GREEDY = SamplingParams(max_tokens=1060, temperature=0, ignore_eos=True)


class Scheduled:
    """Steps by the length of the text, one sequence; keeps what was drafted and kept where."""

    shapes = (DraftShape.chain(0), DraftShape.chain(3))
    switch_reason = None
    notes = NO_NOTES

    def __init__(self, steps_at: Callable[[int], int]) -> None:
        self.steps_at = steps_at
        self.kept: dict[int, tuple[int, int]] = {}

    def choose_steps(self, batch: DecodeBatch) -> RoundSteps:
        return RoundSteps(DraftShape.chain(self.steps_at(batch.num_tokens)))

    def on_verify_complete(self, verified: StepRecord) -> None:
        for steps, correct in zip(verified.row_steps, verified.row_correct_drafts, strict=True):
            self.kept[verified.num_tokens] = (steps, correct)

    def forget(self, request_id: str) -> None:
        pass

    def snapshot(self) -> dict[str, object]:
        return {}


def run(llm: LLM, steps_at: Callable[[int], int]) -> tuple[Scheduled, list[int]]:
    controller = Scheduled(steps_at)
    llm.engine.worker.init_states(controller.shapes)
    llm.engine.controller = controller  # type: ignore[assignment]
    return controller, list(llm.generate([[5, 6, 7, 8]], GREEDY)[0].token_ids)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
def test_a_pause_of_a_thousand_rounds_is_forgotten(tmp_path: Path, algorithm: str) -> None:
    """From the end of the pause on, every round keeps what an engine that never paused keeps."""
    end = 1010
    pair = make_pair(tmp_path, max_position_embeddings=2048, num_hidden_layers=4)
    llm = llm_maker(pair, "cpu")(algorithm, 3, max_model_len=1080)
    # Both arrive at length `end` exactly: the second draws single tokens for a while before it.
    paused, text = run(llm, lambda length: 0 if length < end else 3)
    steady, same_text = run(llm, lambda length: 0 if end - 12 < length < end else 3)
    assert text == same_text
    assert sum(steps == 0 for steps, _ in paused.kept.values()) >= 1000
    assert sum(steps == 3 for steps, _ in steady.kept.values()) > 100
    after = {length: kept for length, kept in paused.kept.items() if length >= end}
    assert len(after) > 10
    assert after == {length: kept for length, kept in steady.kept.items() if length >= end}
    assert sum(correct for _, correct in after.values()) > 0, "drafts must be right sometimes"


def test_without_steps_nothing_drafts_or_reserves_ahead(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm("EAGLE3", 3)
    worker: Any = llm.engine.worker
    submit, page_size = worker.submit, llm.engine.scheduler.cache.page_size

    def check_pages(plan: ScheduledBatch) -> PendingBatch:
        for row in plan.rows:
            assert len(row.page_ids) == -(-row.length // page_size), "pages for drafts that are not"
        return submit(plan)

    monkeypatch.setattr(worker, "_draft", lambda *args: pytest.fail("a step without drafts"))
    monkeypatch.setattr(worker, "submit", check_pages)
    llm.engine.controller = Scheduled(lambda length: 0)  # type: ignore[assignment]
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=3, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], [4, 5]], params)
    assert [len(output.token_ids) for output in outputs] == [20, 20]
