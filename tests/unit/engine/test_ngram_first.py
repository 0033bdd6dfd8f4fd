"""Drafts from the text where it repeats itself, a model's elsewhere: the text stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import StepPlan
from serve_spec.core.request import SamplingParams
from tests.helpers.engines import MakeLLM, heard_plans, switch_every_round, texts

EXECUTIONS = ["eager", "lanes"]
DRAFTS = ["EAGLE3", "EAGLE", "MEDUSA", "STANDALONE"]
CHAINS: dict[str, Any] = {}
TREES: dict[str, Any] = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 11}
SHAPES = pytest.mark.parametrize("shape", [CHAINS, TREES], ids=["chains", "trees"])
TIERS: list[int | DraftShape] = [0, 3, 7, 1]
BRANCHING = [
    *TIERS,
    DraftShape(4, 12, 3),
    DraftShape(1, 3, 3),
    0,
    DraftShape(7, 14, 3),
    DraftShape(2, 4, 3),
]


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves and prompts that do not, at every temperature."""
    repeated = [[5 + i, 7, 9 + i, 11] * (2 + i % 3) + [5 + i, 7] for i in range(4)]
    plain = [list(range(20 + 9 * i, 32 + 9 * i)) for i in range(4)]
    params = [
        SamplingParams(max_tokens=16 + 2 * i, temperature=(0.0, 0.4, 1.0)[i % 3], seed=i)
        for i in range(8)
    ]
    return [*repeated, *plain], params


@pytest.fixture(scope="module")
def plain(make_llm: MakeLLM) -> list[tuple[int, ...]]:
    return texts(make_llm().generate(*prompts_and_params()))


def make_first(make_llm: MakeLLM, algorithm: str, num_steps: int = 4, **overrides: Any) -> LLM:
    overrides = {"speculative_ngram_min_match_window_size": 1, **overrides}
    return make_llm(algorithm, num_steps, speculative_ngram_first=True, **overrides)


def sources(plan: StepPlan) -> set[str]:
    """Who drafted for the rows of a round."""
    return {"text" if row.draft_ids else "model" for row in plan.rows if row.num_steps}


def kept(plans: Sequence[StepPlan], source: str) -> int:
    """Drafts of a source among those that were planned."""
    rows = [row for plan in plans for row in plan.rows if row.num_steps]
    return sum(row.num_steps for row in rows if bool(row.draft_ids) == (source == "text"))


@SHAPES
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("algorithm", DRAFTS)
def test_both_kinds_of_drafts_never_change_the_text(
    make_llm: MakeLLM,
    plain: list[tuple[int, ...]],
    algorithm: str,
    execution: str,
    shape: dict[str, Any],
) -> None:
    llm = make_first(make_llm, algorithm, execution=execution, max_num_seqs=8, **shape)
    plans = heard_plans(llm)
    outputs = llm.generate(*prompts_and_params())
    assert texts(outputs) == plain
    assert {"text", "model"} in [sources(plan) for plan in plans], "one round holds both"
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 0
    found = [row for plan in plans for row in plan.rows if row.draft_ids]
    assert all(len(row.draft_parents) == row.tree_drafts for row in found)
    assert any(row.tree_drafts > row.num_steps for row in found) == (shape is TREES)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("tiers", [TIERS, BRANCHING], ids=["chains", "trees"])
def test_nor_do_they_under_another_tier_every_round_and_preemption(
    make_llm: MakeLLM,
    plain: list[tuple[int, ...]],
    algorithm: str,
    execution: str,
    tiers: list[int | DraftShape],
) -> None:
    sizes = {"num_pages": 40, "max_num_seqs": 8}
    shape = CHAINS if tiers is TIERS else {"speculative_eagle_topk": 3}
    llm = make_first(make_llm, algorithm, 7, execution=execution, **sizes, **shape)
    switch_every_round(llm, tiers)
    plans = heard_plans(llm)
    assert texts(llm.generate(*prompts_and_params())) == plain
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"
    assert kept(plans, "text") > 0 < kept(plans, "model")
    assert llm.engine.scheduler.cache.num_free_pages == 40


@SHAPES
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_model_goes_on_reading_where_it_was_after_rounds_of_drafts_from_the_text(
    make_llm: MakeLLM, execution: str, shape: dict[str, Any]
) -> None:
    """The target as its own draft: one entry missing or stale, and some draft would be wrong."""
    prompts = [[3 + i, *range(20, 21 + 5 * i), 3 + i] for i in range(6)]
    params = [SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)] * 6
    if shape is TREES:  # all that the beam makes: what is likeliest is among it
        shape = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 22}
    llm = make_first(make_llm, "STANDALONE", 3, execution=execution, max_num_seqs=6, **shape)
    plans = heard_plans(llm)
    results: list[tuple[StepPlan, list[list[int]]]] = []
    commit = llm.engine.scheduler.commit

    def hear(plan: StepPlan, result: Any, cut: Any) -> Any:
        results.append((plan, result.token_ids))
        return commit(plan, result, cut)

    llm.engine.scheduler.commit = hear  # type: ignore[method-assign]
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == texts(make_llm().generate(prompts, params))
    assert kept(plans, "text") > 0
    by_model = [
        (row.num_steps, len(tokens) - 1)
        for plan, drawn in results
        for row, tokens in zip(plan.sampling_rows, drawn, strict=True)
        if row.model_steps
    ]
    assert len(by_model) > 5
    assert all(num_steps == correct for num_steps, correct in by_model)


@SHAPES
def test_where_nothing_matches_the_next_round_is_planned_while_one_runs(
    make_llm: MakeLLM, shape: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True)
    llm = make_llm("EAGLE3", 3, execution="lanes", speculative_ngram_first=True, **shape)
    plans = heard_plans(llm)
    llm.generate([list(range(20, 40))], params)
    decoding = [plan for plan in plans if plan.batch_size]
    assert "text" not in set().union(*map(sources, decoding))
    assert all(plan.follows for plan in decoding[1:])


@SHAPES
def test_rounds_after_a_match_wait_for_what_it_brings(
    make_llm: MakeLLM, shape: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    llm = make_first(make_llm, "EAGLE3", 3, execution="lanes", **shape)
    plans = heard_plans(llm)
    llm.generate([[5, 6, 7] * 6], params)
    assert not any(plan.follows for plan in plans if "text" in sources(plan))
    assert kept(plans, "text") > 0


@SHAPES
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("strategy", ["ema", "goodput", "per_request"])
def test_every_policy_takes_both_kinds(
    make_llm: MakeLLM,
    plain: list[tuple[int, ...]],
    strategy: str,
    execution: str,
    shape: dict[str, Any],
) -> None:
    llm = make_first(
        make_llm,
        "EAGLE3",
        execution=execution,
        speculative_adaptive=True,
        speculative_adaptive_strategy=strategy,
        **shape,
    )
    plans = heard_plans(llm)
    for _ in range(3):
        assert texts(llm.generate(*prompts_and_params())) == plain
    assert llm.engine.controller.snapshot()["fallback"] is None
    assert kept(plans, "text") > 0


def test_requests_that_ended_leave_no_text_behind(make_llm: MakeLLM) -> None:
    llm = make_first(make_llm, "EAGLE3")
    llm.generate(*prompts_and_params())
    found = llm.engine.scheduler.texts
    assert found is not None
    assert len(found) == 0
