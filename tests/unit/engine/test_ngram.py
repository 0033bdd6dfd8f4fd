"""Drafts from the text itself: when a round has them, when it waits for them, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import ScheduledBatch, ScheduledRequest
from serve_spec.core.request import RequestOutput, SamplingParams
from serve_spec.engine.synthetic import Cell, SyntheticPlans
from tests.helpers.engines import MakeLLM, heard_plans, heard_rounds, switch_every_round, texts

BRANCHING = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 11}
CHAIN: dict[str, Any] = {"speculative_ngram_min_match_window_size": 1}
TREE = {**CHAIN, **BRANCHING}
FIRST = {"speculative_ngram_first": True}
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
AHEAD = {"async_scheduling": True}


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that went on in two ways, as code does, and every temperature."""
    prompts = [[5 + i, 7, 9 + i, 5 + i, 7, 11] * (2 + i % 3) + [5 + i, 7] for i in range(8)]
    params = [
        SamplingParams(max_tokens=16 + 2 * i, temperature=(0.0, 0.4, 1.0)[i % 3], seed=i)
        for i in range(8)
    ]
    return prompts, params


def sources(plan: ScheduledBatch) -> set[str]:
    """Who drafted for the rows of a round."""
    return {"text" if row.draft_ids else "model" for row in plan.rows if row.num_steps}


def num_kept(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.speculation.num_correct_drafts for output in outputs)


def num_on_path(row: ScheduledRequest, future: list[int]) -> int:
    """Drafts of a row's tree that a text of this future keeps."""
    node, kept = 0, 0
    for token in future:
        drafts = enumerate(zip(row.draft_ids, row.draft_parents, strict=True), start=1)
        node = next((number for number, draft in drafts if draft == (token, node)), -1)
        if node < 0:
            break
        kept += 1
    return kept


@SHAPES
def test_where_nothing_matches_a_round_is_a_plain_one(
    make_llm: MakeLLM, shape: dict[str, Any]
) -> None:
    llm = make_llm("NGRAM", 4, **shape)
    plans = heard_plans(llm)
    [output] = llm.generate([list(range(10, 30))], SamplingParams(max_tokens=2, temperature=0.0))
    assert output.speculation.num_draft_tokens == 0
    assert all(row.query_len == len(row.token_ids) for plan in plans for row in plan.rows)


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("NGRAM", {"speculative_ngram_min_match_window_size": 5}),
        ("EAGLE3", FIRST),
        ("EAGLE3", {**BRANCHING, **FIRST}),
    ],
)
def test_where_nothing_matches_the_next_round_is_planned_while_one_runs(
    make_llm: MakeLLM, algorithm: str, keys: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1, ignore_eos=True)
    llm = make_llm(algorithm, 3, **AHEAD, **keys)
    plans = heard_plans(llm)
    llm.generate([list(range(20, 40))], params)
    decoding = [plan for plan in plans if plan.batch_size]
    assert "text" not in set().union(*map(sources, decoding))
    assert all(plan.follows for plan in decoding[1:])


@SHAPES
@pytest.mark.parametrize(("algorithm", "first"), [("NGRAM", {}), ("EAGLE3", FIRST)])
def test_only_rounds_that_draft_from_the_text_wait_for_it(
    make_llm: MakeLLM, algorithm: str, first: dict[str, Any], shape: dict[str, Any]
) -> None:
    llm = make_llm(algorithm, 3, **AHEAD, **first, **shape)
    plans = heard_plans(llm)
    assert num_kept(llm.generate(*prompts_and_params())) > 0
    decoding = [plan for plan in plans if plan.batch_size]
    drafted = ["text" in sources(plan) for plan in decoding]
    assert not any(plan.follows for plan, drafts in zip(decoding, drafted, strict=True) if drafts)
    assert any(drafted)
    assert first or any(plan.follows for plan in decoding)


def test_nor_does_anything_wait_for_a_text_while_the_policy_wants_no_drafts(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm("NGRAM", 3, **AHEAD, **CHAIN)
    switch_every_round(llm, [0])
    plans = heard_plans(llm)
    llm.generate(*prompts_and_params())
    alone = [plan for plan in plans if plan.batch_size == len(plan.rows)]
    assert len(alone) > 8
    assert all(plan.follows for plan in alone[1:])


@pytest.mark.parametrize("shape", [DraftShape.chain(3), DraftShape(3, 6, 2)])
def test_its_rounds_can_be_measured_before_there_is_a_text(
    make_llm: MakeLLM, shape: DraftShape
) -> None:
    tree = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}
    worker = make_llm("NGRAM", 3, **({} if shape.is_chain else tree)).engine.worker
    plans = SyntheticPlans(page_size=4, vocab_size=worker.vocab_size)
    result = worker.execute(plans.plan(Cell(12, 2, shape), 0.0))
    assert [len(tokens) >= 1 for tokens in result.token_ids] == [True, True]


@pytest.mark.parametrize(("algorithm", "first"), [("NGRAM", {}), ("EAGLE3", FIRST)])
def test_requests_that_ended_leave_no_text_behind(
    make_llm: MakeLLM, algorithm: str, first: dict[str, Any]
) -> None:
    llm = make_llm(algorithm, 3, **CHAIN, **first)
    llm.generate(*prompts_and_params())
    found = llm.engine.scheduler.texts
    assert found is not None
    assert len(found) == 0
    assert not found.drafter._texts  # type: ignore[attr-defined]


def test_a_round_of_trees_keeps_within_its_bounds_and_its_budget(make_llm: MakeLLM) -> None:
    llm = make_llm("NGRAM", 3, **TREE, max_num_batched_tokens=40)
    plans = heard_plans(llm)
    llm.generate(*prompts_and_params())
    assert all(sum(row.query_len for row in plan.rows) <= 40 for plan in plans)
    trees = [row for plan in plans for row in plan.rows if row.tree_drafts]
    for row in trees:
        assert len(row.draft_ids) == len(row.draft_parents) == row.tree_drafts < 11
        assert row.num_steps <= 3
        assert max(map(row.draft_parents.count, row.draft_parents)) <= 3
    assert any(row.tree_drafts > row.num_steps for row in trees), "some trees branch"


def test_a_round_keeps_the_branch_that_the_text_goes_along(make_llm: MakeLLM) -> None:
    """Texts of four tokens, which soon have gone on in every way."""
    llm = make_llm("NGRAM", 4, **{**TREE, "speculative_num_draft_tokens": 13})
    rounds = heard_rounds(llm)
    four = {"allowed_token_ids": (5, 7, 9, 11), "frequency_penalty": 1.0}
    params = [SamplingParams(max_tokens=40, temperature=2.0, seed=i, **four) for i in range(4)]
    llm.generate([[5, 7, 9, 11]] * 4, params)
    branched = [(row, tokens) for row, tokens in rounds if row.tree_drafts > row.num_steps]
    for row, tokens in branched:
        assert num_on_path(row, tokens) == len(tokens) - 1
    assert {0, 1, 2} <= {len(tokens) - 1 for _, tokens in branched}
    kept = [(row.draft_ids[: len(tokens) - 1], tuple(tokens[:-1])) for row, tokens in branched]
    assert any(first != branch for first, branch in kept), "the first branch is not always it"


@SHAPES
def test_a_model_goes_on_reading_where_it_was_after_rounds_of_drafts_from_the_text(
    make_llm: MakeLLM, shape: dict[str, Any]
) -> None:
    """The target as its own draft: one entry missing or stale, and some draft would be wrong."""
    prompts = [[3 + i, *range(20, 21 + 5 * i), 3 + i] for i in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    if shape is TREE:  # all that the beam makes: what is likeliest is among it
        shape = {**TREE, "speculative_num_draft_tokens": 22}
    llm = make_llm("STANDALONE", 3, max_num_seqs=6, **shape, **FIRST)
    rounds = heard_rounds(llm)
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == texts(make_llm().generate(prompts, params))
    assert any(row.draft_ids for row, _ in rounds)
    by_model = [(row.num_steps, len(tokens) - 1) for row, tokens in rounds if row.model_steps]
    assert len(by_model) > 5
    assert all(num_steps == correct for num_steps, correct in by_model)


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_drafts_from_a_corpus_are_kept_where_it_knows_the_text_and_never_change_it(
    make_llm: MakeLLM, tmp_path: Path, algorithm: str
) -> None:
    prompts = [[30 + 5 * i, 90 - i, 17] for i in range(4)]
    params = [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)] * 4
    plain = texts(make_llm().generate(prompts, params))
    np.save(tmp_path / "answers.npy", np.concatenate([*map(np.array, plain[:2])]))
    llm = make_llm(
        algorithm,
        4,
        max_num_seqs=4,
        speculative_ngram_corpus=str(tmp_path / "answers.npy"),
        speculative_ngram_first=algorithm != "NGRAM",
        speculative_ngram_min_match_window_size=3,
    )
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    for output in outputs[:2]:
        assert output.speculation.num_correct_drafts > 0


def test_what_followed_less_often_is_kept_where_a_chain_drafts_what_did_more_often(
    make_llm: MakeLLM, tmp_path: Path
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
