"""Drafts from the text itself: the text stays, and where nothing matches nothing is drafted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.engine.synthetic import Cell, SyntheticPlans
from tests.helpers.engines import MakeLLM, heard_plans, switch_every_round, texts

EXECUTIONS = ["eager", "lanes"]


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves, as code does, and every temperature."""
    prompts = [[5 + i, 7, 9 + i, 11] * (2 + i % 3) + [5 + i, 7] for i in range(8)]
    params = [
        SamplingParams(max_tokens=16 + 2 * i, temperature=(0.0, 0.4, 1.0)[i % 3], seed=i)
        for i in range(8)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def plain(make_llm: MakeLLM) -> list[tuple[int, ...]]:
    return texts(make_llm().generate(*prompts_and_params()))


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("batch", [1, 8])
def test_drafts_from_the_text_never_change_it(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], execution: str, batch: int
) -> None:
    llm = make_llm(
        "NGRAM",
        5,
        execution=execution,
        max_num_seqs=batch,
        speculative_ngram_min_match_window_size=1,
    )
    outputs = llm.generate(*prompts_and_params())
    assert texts(outputs) == plain
    correct = sum(output.speculation.num_correct_drafts for output in outputs)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    assert 0 < correct < drafted, "the test needs kept and rejected drafts"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_nor_do_they_under_another_tier_every_round_and_preemption(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], execution: str
) -> None:
    llm = make_llm("NGRAM", 7, execution=execution, num_pages=40, max_num_seqs=8)
    switch_every_round(llm, [0, 3, 7, 1])
    assert texts(llm.generate(*prompts_and_params())) == plain
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"


def test_where_nothing_matches_nothing_is_drafted(make_llm: MakeLLM) -> None:
    llm = make_llm("NGRAM", 5)
    [output] = llm.generate([list(range(10, 30))], SamplingParams(max_tokens=2, temperature=0.0))
    assert output.speculation.num_draft_tokens == 0


def test_where_nothing_matches_the_next_round_is_planned_while_one_runs(
    make_llm: MakeLLM,
) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1, ignore_eos=True)
    llm = make_llm("NGRAM", 3, execution="lanes", speculative_ngram_min_match_window_size=5)
    plans = heard_plans(llm)
    llm.generate([list(range(20, 40))], params)
    decoding = [plan for plan in plans if plan.batch_size]
    assert not any(row.draft_ids for plan in decoding for row in plan.rows)
    assert all(plan.follows for plan in decoding[1:])


def test_only_rounds_that_draft_from_the_text_wait_for_it(make_llm: MakeLLM) -> None:
    llm = make_llm("NGRAM", 3, execution="lanes", speculative_ngram_min_match_window_size=1)
    plans = heard_plans(llm)
    llm.generate(*prompts_and_params())
    decoding = [plan for plan in plans if plan.batch_size]
    drafted = [any(row.draft_ids for row in plan.rows) for plan in decoding]
    assert not any(plan.follows for plan, drafts in zip(decoding, drafted, strict=True) if drafts)
    assert any(drafted)
    assert any(plan.follows for plan in decoding)


def test_nor_does_anything_wait_for_a_text_while_the_policy_wants_no_drafts(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm("NGRAM", 3, execution="lanes", speculative_ngram_min_match_window_size=1)
    switch_every_round(llm, [0])
    plans = heard_plans(llm)
    llm.generate(*prompts_and_params())
    alone = [plan for plan in plans if plan.batch_size == len(plan.rows)]
    assert len(alone) > 8
    assert all(plan.follows for plan in alone[1:])


def test_it_adapts_like_any_drafter(make_llm: MakeLLM, plain: list[tuple[int, ...]]) -> None:
    llm = make_llm("NGRAM", 3, speculative_adaptive=True, speculative_adaptive_strategy="ema")
    assert texts(llm.generate(*prompts_and_params())) == plain
    assert llm.engine.controller.snapshot()["fallback"] is None
    assert llm.engine.counters.num_draft_tokens > 0


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_its_rounds_can_be_measured_before_there_is_a_text(
    make_llm: MakeLLM, execution: str
) -> None:
    worker = make_llm("NGRAM", 3, execution=execution).engine.worker
    plans = SyntheticPlans(page_size=4, vocab_size=worker.vocab_size)
    result = worker.execute(
        plans.plan(Cell(context=12, batch_size=2, shape=DraftShape.chain(3)), 0.0)
    )
    assert [len(tokens) >= 1 for tokens in result.token_ids] == [True, True]


def test_requests_that_ended_leave_no_text_behind(make_llm: MakeLLM) -> None:
    llm = make_llm("NGRAM", 3)
    llm.generate(*prompts_and_params())
    found = llm.engine.scheduler.texts
    assert found is not None
    assert len(found) == 0
    assert not found.drafter._texts  # type: ignore[attr-defined]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_drafts_from_a_corpus_are_kept_where_it_knows_the_text_and_never_change_it(
    make_llm: MakeLLM, tmp_path: Path, algorithm: str, execution: str
) -> None:
    prompts = [[30 + 5 * i, 90 - i, 17] for i in range(4)]
    params = [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)] * 4
    plain = texts(make_llm().generate(prompts, params))
    np.save(tmp_path / "answers.npy", np.concatenate([*map(np.array, plain[:2])]))
    llm = make_llm(
        algorithm,
        4,
        execution=execution,
        max_num_seqs=4,
        speculative_ngram_corpus=str(tmp_path / "answers.npy"),
        speculative_ngram_first=algorithm != "NGRAM",
        speculative_ngram_min_match_window_size=3,
    )
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    for output in outputs[:2]:
        assert output.speculation.num_correct_drafts > 0
