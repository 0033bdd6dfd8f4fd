"""A draft that gives NaN, or ids that are none, ends speculation for its own sequence.

The text does not notice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_spec import LLM
from serve_spec.config import SpeculativeConfig
from serve_spec.config.algorithms import ALGORITHMS, Algorithm
from serve_spec.core.draft import TextDrafts
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.grammar import Grammar
from serve_spec.core.record import StepRecord
from serve_spec.core.request import SamplingParams
from tests.helpers.engines import MakeLLM, sampled_requests, texts


class Heard:
    """Keeps what the engine reports."""

    def __init__(self) -> None:
        self.rounds: list[StepRecord] = []

    def observe(self, stats: StepRecord) -> None:
        self.rounds.append(stats)


def head_of(llm: LLM) -> Any:
    worker: Any = llm.engine.worker
    return getattr(worker, "eager", worker).drafter.head


def break_draft(llm: LLM, rows: list[int], *, after: int) -> None:
    """The head gives NaN for these rows of its batch, from its `after`-th forward on."""
    head = head_of(llm)
    whole, calls = head.logits, 0

    def broken(hidden: Tensor, step: int = 0) -> Tensor:
        nonlocal calls
        calls += 1
        logits: Tensor = whole(hidden, step)
        if calls > after:
            logits[[row for row in rows if row < len(logits)]] = torch.nan
        return logits

    head.logits = broken


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_sequence_whose_draft_breaks_goes_on_without_speculation(
    make_llm: MakeLLM, after: int
) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    plain = [output.token_ids for output in make_llm().generate(prompts, params)]
    llm = make_llm("EAGLE3", 3)
    heard = llm.engine.metrics = Heard()
    break_draft(llm, [1], after=after)
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == plain
    assert sum(stats.num_broken_drafts for stats in heard.rounds) >= 1
    assert outputs[1].speculation.num_draft_tokens < outputs[0].speculation.num_draft_tokens
    assert outputs[0].speculation.num_correct_drafts > 0


def test_a_head_that_gives_nan_ends_trees_of_its_sequences_and_no_text(make_llm: MakeLLM) -> None:
    prompts, params = sampled_requests()
    plain = texts(make_llm().generate(prompts, params))
    tree = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 10}
    llm = make_llm("EAGLE3", 3, **tree)
    head = head_of(llm)
    whole, calls = head.logits, 0

    def broken(hidden: Tensor, step: int = 0) -> Tensor:
        nonlocal calls
        calls += 1
        logits: Tensor = whole(hidden, step)
        logits[0] = float("nan") if 3 < calls < 7 else logits[0]
        return logits

    head.logits = broken
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 0
    stopped = [output for output in outputs if output.speculation.rounds_by_num_steps.get(0, 0) > 2]
    assert len(stopped) == 1


class Misspeller:
    """Drafts the newest token, then ids that no vocabulary has, of texts that
    begin with an odd one."""

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        if token_ids[0] % 2 == 0:
            return (token_ids[-1],) * min(most, 2)
        return (token_ids[-1], 10**6, -7)[:most]

    def propose_tree(
        self, request_id: str, token_ids: Sequence[int], shape: DraftShape
    ) -> TextDrafts:
        chain = self.propose(request_id, token_ids, shape.depth)
        return TextDrafts(chain, tuple(range(len(chain))))

    def forget(self, request_id: str) -> None:
        pass


def build_misspeller(
    config: SpeculativeConfig, encode: Callable[[str], list[int]], max_steps: int
) -> Misspeller:
    return Misspeller()


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("grammar", [None, Grammar.regex("[a-z ]*")])
def test_a_draft_that_is_no_id_of_the_target_ends_speculation_for_its_sequence(
    make_llm: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    topk: int,
    grammar: Grammar | None,
) -> None:
    misspeller = Algorithm(f"{__name__}:build_misspeller", from_text=True)
    monkeypatch.setitem(ALGORITHMS, "MISSPELL", misspeller)
    prompts = [[100, 101, 102], [101, 103, 104]]
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, grammar=grammar)
    plain = [output.token_ids for output in make_llm().generate(prompts, params)]
    llm = make_llm("MISSPELL", 3, speculative_eagle_topk=topk)
    heard = llm.engine.metrics = Heard()
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == plain
    assert sum(stats.num_broken_drafts for stats in heard.rounds) == 1
    drafted = [output.speculation.num_draft_tokens for output in outputs]
    assert drafted[0] > 10 > drafted[1] > 0
