"""Trees from the text itself: the text stays, and a tree is what the text went on with before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_spec import LLM
from serve_spec.core.draft import TextDrafts
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import RowPlan, StepPlan
from serve_spec.core.request import RequestOutput, SamplingParams
from serve_spec.engine.synthetic import Cell, SyntheticPlans
from tests.helpers.engines import MakeLLM, heard_plans, switch_every_round, texts
from tests.helpers.plain_logprobs import close
from tests.unit.drafters.test_ngram import num_kept as num_on_path
from tests.unit.engine.test_grammars import prompts_and_params as ruled_requests
from tests.unit.engine.test_score_edits import prompts_and_params as edited_requests

EXECUTIONS = ["eager", "lanes"]
SWITCHING = (
    0,
    DraftShape(4, 12, 3),
    3,
    DraftShape(2, 4, 3),
    0,
    0,
    DraftShape(1, 3, 3),
    1,
    DraftShape(4, 4, 3),
)


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that went on in two ways, as code does, and every temperature."""
    prompts = [[5 + i, 7, 9 + i, 5 + i, 7, 11] * (2 + i % 3) + [5 + i, 7] for i in range(8)]
    params = [
        SamplingParams(max_tokens=16 + 2 * i, temperature=(0.0, 0.4, 0.7)[i % 3], seed=i)
        for i in range(8)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def plain(make_llm: MakeLLM) -> list[tuple[int, ...]]:
    return texts(make_llm().generate(*prompts_and_params()))


def with_trees(make_llm: MakeLLM, shape: tuple[int, int, int], **overrides: Any) -> LLM:
    """shape: steps, topk, rows with the root."""
    steps, topk, rows = shape
    keys = {
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": rows,
        "speculative_ngram_min_match_window_size": 1,
    }
    return make_llm("NGRAM", steps, **{**keys, **overrides})


def trees_of(plans: Sequence[StepPlan]) -> list[RowPlan]:
    return [row for plan in plans for row in plan.rows if row.tree_drafts]


def num_kept(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.speculation.num_correct_drafts for output in outputs)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(("shape", "batch"), [((1, 4, 5), 8), ((3, 2, 8), 1), ((4, 3, 16), 8)])
def test_trees_from_the_text_never_change_it(
    make_llm: MakeLLM,
    plain: list[tuple[int, ...]],
    execution: str,
    shape: tuple[int, int, int],
    batch: int,
) -> None:
    llm = with_trees(make_llm, shape, execution=execution, max_num_seqs=batch)
    plans = heard_plans(llm)
    outputs = llm.generate(*prompts_and_params())
    assert texts(outputs) == plain
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    assert 0 < num_kept(outputs) < drafted, "the test needs kept and rejected drafts"
    steps, topk, rows = shape
    for row in trees_of(plans):
        assert len(row.draft_ids) == len(row.draft_parents) == row.tree_drafts < rows
        assert row.num_steps <= steps
        assert max(map(row.draft_parents.count, row.draft_parents)) <= topk
    assert any(row.tree_drafts > row.num_steps for row in trees_of(plans)), "some trees branch"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_nor_do_they_between_chains_and_nothing_under_preemption(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], execution: str
) -> None:
    sizes = {"num_pages": 40, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    llm = with_trees(make_llm, (4, 3, 13), execution=execution, **sizes)
    switch_every_round(llm, SWITCHING)
    plans = heard_plans(llm)
    assert texts(llm.generate(*prompts_and_params())) == plain
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"
    assert trees_of(plans)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_round_keeps_the_branch_that_the_text_goes_along(
    make_llm: MakeLLM, execution: str
) -> None:
    """Texts of four tokens, which soon have gone on in every way."""
    llm = with_trees(make_llm, (4, 3, 13), execution=execution, max_num_seqs=4)
    rounds: list[tuple[RowPlan, list[int]]] = []
    commit = llm.engine.scheduler.commit

    def hear(plan: StepPlan, result: Any, cut: Any) -> Any:
        rounds.extend(zip(plan.sampling_rows, result.token_ids, strict=True))
        return commit(plan, result, cut)

    llm.engine.scheduler.commit = hear  # type: ignore[method-assign]
    four = {"allowed_token_ids": (5, 7, 9, 11), "frequency_penalty": 1.0}
    params = [SamplingParams(max_tokens=40, temperature=2.0, seed=i, **four) for i in range(4)]
    llm.generate([[5, 7, 9, 11]] * 4, params)
    branched = [(row, tokens) for row, tokens in rounds if row.tree_drafts > row.num_steps]
    for row, tokens in branched:
        tree = TextDrafts(row.draft_ids, row.draft_parents)
        assert num_on_path(tree, tokens) == len(tokens) - 1
    assert {0, 1, 2} <= {len(tokens) - 1 for _, tokens in branched}
    kept = [(row.draft_ids[: len(tokens) - 1], tuple(tokens[:-1])) for row, tokens in branched]
    assert any(first != branch for first, branch in kept), "the first branch is not always it"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_round_keeps_within_its_budget(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], execution: str
) -> None:
    llm = with_trees(make_llm, (3, 3, 13), execution=execution, max_num_batched_tokens=40)
    plans = heard_plans(llm)
    assert texts(llm.generate(*prompts_and_params())) == plain
    assert all(sum(row.query_len for row in plan.rows) <= 40 for plan in plans)
    assert any(row.tree_drafts > row.num_steps for row in trees_of(plans))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_where_nothing_matches_a_round_of_trees_is_a_plain_one(
    make_llm: MakeLLM, execution: str
) -> None:
    llm = with_trees(make_llm, (4, 3, 13), execution=execution)
    plans = heard_plans(llm)
    [output] = llm.generate([list(range(10, 30))], SamplingParams(max_tokens=2, temperature=0.0))
    assert output.speculation.num_draft_tokens == 0
    assert all(row.query_len == len(row.token_ids) for plan in plans for row in plan.rows)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_edits_count_a_rows_own_path_and_log_probabilities_are_the_plain_ones(
    make_llm: MakeLLM, execution: str
) -> None:
    prompts, params = edited_requests()
    params = [replace(p, logprobs=3) for p in params]
    llm = with_trees(make_llm, (4, 3, 13), execution=execution)
    outputs = llm.generate(prompts, params)
    close(outputs, make_llm().generate(prompts, params))
    assert num_kept(outputs) > 0


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_grammars_rule_every_path(make_llm: MakeLLM, execution: str) -> None:
    prompts, params = ruled_requests()
    llm = with_trees(make_llm, (3, 3, 11), execution=execution)
    plans = heard_plans(llm)
    outputs = llm.generate(prompts, params)
    close(outputs, make_llm().generate(prompts, params))
    ruled = [row for row in trees_of(plans) if row.params.grammar is not None]
    assert any(row.tree_drafts > row.num_steps for row in ruled)


@pytest.mark.parametrize(
    ("strategy", "execution"),
    [("ema", "eager"), ("ema", "lanes"), ("per_request", "lanes"), ("goodput", "eager")],
)
def test_every_policy_drafts_them(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], strategy: str, execution: str
) -> None:
    llm = with_trees(
        make_llm,
        (3, 2, 7),
        execution=execution,
        speculative_adaptive=True,
        speculative_adaptive_strategy=strategy,
    )
    plans = heard_plans(llm)
    for _ in range(2):
        assert texts(llm.generate(*prompts_and_params())) == plain
    snapshot: Any = llm.engine.controller.snapshot()
    assert snapshot["fallback"] is None
    assert snapshot["candidate_trees"]
    if strategy != "goodput":  # that one may find that chains are better
        assert trees_of(plans)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rounds_of_trees_can_be_measured_before_there_is_a_text(
    make_llm: MakeLLM, execution: str
) -> None:
    worker = with_trees(make_llm, (3, 2, 7), execution=execution).engine.worker
    plans = SyntheticPlans(page_size=4, vocab_size=worker.vocab_size)
    cell = Cell(context=12, batch_size=2, shape=DraftShape(3, 6, topk=2))
    result = worker.execute(plans.plan(cell, 0.0))
    assert [len(tokens) >= 1 for tokens in result.token_ids] == [True, True]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_what_followed_less_often_is_kept_where_a_chain_drafts_what_did_more_often(
    make_llm: MakeLLM, tmp_path: Path, execution: str
) -> None:
    prompts = [[30 + 5 * i, 90 - i, 17] for i in range(4)]
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)
    ]
    plain = texts(make_llm().generate(prompts, params))
    pieces = [np.array(text) for text in plain]
    for text in plain:
        for i in range(3, len(text)):
            pieces += 2 * [np.array([*text[i - 3 : i], (text[i] + 1) % 256])]
    np.save(tmp_path / "answers.npy", np.concatenate(pieces))
    kept = []
    for topk in (1, 3):
        llm = make_llm(
            "NGRAM",
            3,
            execution=execution,
            speculative_eagle_topk=topk,
            speculative_ngram_corpus=str(tmp_path / "answers.npy"),
            speculative_ngram_min_match_window_size=3,
            speculative_ngram_max_match_window_size=3,
        )
        outputs = llm.generate(prompts, params)
        assert texts(outputs) == plain
        kept.append(num_kept(outputs))
    of_chains, of_trees = kept
    assert of_trees > 2 * of_chains
