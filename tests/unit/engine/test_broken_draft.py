"""A draft that gives NaN ends speculation for its own sequence, and the text does not notice."""

import pytest
import torch
from torch import Tensor

from serve_spec import LLM
from serve_spec.core.request import SamplingParams
from serve_spec.metrics import StepStats
from tests.helpers.engines import MakeLLM


class Heard:
    """Keeps what the engine reports."""

    def __init__(self) -> None:
        self.rounds: list[StepStats] = []

    def observe(self, stats: StepStats) -> None:
        self.rounds.append(stats)


def break_draft(llm: LLM, rows: list[int], *, after: int) -> None:
    """The head gives NaN for these rows of its batch, from its `after`-th forward on."""
    head = llm.engine.worker.eager.drafter.head if hasattr(llm.engine.worker, "eager") else None
    head = head or llm.engine.worker.drafter.head  # type: ignore[attr-defined]
    whole, calls = head.logits, 0

    def broken(hidden: Tensor, step: int = 0) -> Tensor:
        nonlocal calls
        calls += 1
        logits: Tensor = whole(hidden, step)
        if calls > after:
            logits[[row for row in rows if row < len(logits)]] = torch.nan
        return logits

    head.logits = broken


@pytest.mark.parametrize("execution", ["eager", "lanes"])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_sequence_whose_draft_breaks_goes_on_without_speculation(
    make_llm: MakeLLM, execution: str, after: int
) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    plain = [output.token_ids for output in make_llm().generate(prompts, params)]
    llm = make_llm("EAGLE3", 3, execution=execution)
    heard = llm.engine.metrics = Heard()
    break_draft(llm, [1], after=after)
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == plain
    assert sum(stats.num_broken_drafts for stats in heard.rounds) >= 1
    assert outputs[1].speculation.num_draft_tokens < outputs[0].speculation.num_draft_tokens
    assert outputs[0].speculation.num_correct_drafts > 0
