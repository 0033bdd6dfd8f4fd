"""Without speculation nothing of it runs, and after any pause it goes on as if there was none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import PendingBatch, ScheduledBatch
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import RoundSteps
from tests.helpers.engines import FakeController, MakeLLM, control, llm_maker, make_pair

GREEDY = SamplingParams(max_tokens=1060, temperature=0, ignore_eos=True)


def by_length(llm: LLM, steps_at: Callable[[int], int]) -> FakeController:
    """Replace the policy by one that looks at the length of the text."""
    chains = DraftShape.chain
    return control(
        llm, FakeController([0, 3], lambda batch: RoundSteps(chains(steps_at(batch.num_tokens))))
    )


def run(
    llm: LLM, steps_at: Callable[[int], int]
) -> tuple[dict[int, tuple[int, int]], tuple[int, ...]]:
    """Return what was drafted and kept at each length of a text, and the text."""
    controller = by_length(llm, steps_at)
    (output,) = llm.generate([[5, 6, 7, 8]], GREEDY)
    kept = {
        step.num_tokens: (step.row_steps[0], step.row_correct_drafts[0])
        for step in controller.told
        if step.row_steps
    }
    return kept, output.token_ids


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
    assert sum(steps == 0 for steps, _ in paused.values()) >= 1000
    assert sum(steps == 3 for steps, _ in steady.values()) > 100
    after = {length: kept for length, kept in paused.items() if length >= end}
    assert len(after) > 10
    assert after == {length: kept for length, kept in steady.items() if length >= end}
    assert sum(correct for _, correct in after.values()) > 0, "drafts must be right sometimes"


def test_without_steps_nothing_drafts_or_reserves_ahead(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm("EAGLE3", 3)
    worker: Any = llm.engine.worker
    submit, page_size = worker.submit, llm.engine.scheduler.cache.page_size

    def check_pages(plan: ScheduledBatch) -> PendingBatch:
        for row in plan.requests:
            assert len(row.page_ids) == -(-row.length // page_size), "pages for drafts that are not"
        return submit(plan)

    monkeypatch.setattr(worker, "_draft", lambda *args: pytest.fail("a step without drafts"))
    monkeypatch.setattr(worker, "submit", check_pages)
    by_length(llm, lambda length: 0)
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=3, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], [4, 5]], params)
    assert [len(output.token_ids) for output in outputs] == [20, 20]
