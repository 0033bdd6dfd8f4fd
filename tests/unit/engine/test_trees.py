"""Trees of drafts say what plain decoding says, in fewer rounds than chains of their depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import StepPlan
from serve_spec.core.request import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    SpeculativeOptions,
)
from serve_spec.core.round import VerifiedRound
from tests.helpers.engines import MakeLLM, Pair, llm_maker, switch_every_round, texts
from tests.helpers.plain_logprobs import close
from tests.unit.engine.test_equality import prompts_and_params
from tests.unit.engine.test_score_edits import prompts_and_params as edited_requests

ALGORITHMS = ["EAGLE3", "EAGLE", "MEDUSA", "STANDALONE"]
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


@pytest.fixture(scope="module", params=["eager", "lanes"])
def make_llm(pair: Pair, request: pytest.FixtureRequest) -> MakeLLM:
    return partial(llm_maker(pair, "cpu"), execution=request.param)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[tuple[int, ...]]:
    """The text of every request, alone, without speculation."""
    prompts, params = prompts_and_params()
    llm = llm_maker(pair, "cpu")()
    return [texts(llm.generate([p], q))[0] for p, q in zip(prompts, params, strict=True)]


def with_trees(
    make_llm: MakeLLM, algorithm: str, shape: tuple[int, int, int], **overrides: object
) -> LLM:
    """shape: steps, topk, rows with the root."""
    steps, topk, rows = shape
    return make_llm(
        algorithm,
        steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=rows,
        **overrides,
    )


def sums(outputs: Sequence[RequestOutput]) -> tuple[int, int, int]:
    """Rounds, drafts and kept drafts of all."""
    stats = [output.speculation for output in outputs]
    return (
        sum(one.num_rounds for one in stats),
        sum(one.num_draft_tokens for one in stats),
        sum(one.num_correct_drafts for one in stats),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("shape", "batch"), [((1, 4, 5), 8), ((3, 2, 8), 2), ((4, 4, 20), 8)])
def test_trees_never_change_the_text(
    make_llm: MakeLLM,
    plain: list[tuple[int, ...]],
    algorithm: str,
    shape: tuple[int, int, int],
    batch: int,
) -> None:
    prompts, params = prompts_and_params()
    outputs = with_trees(make_llm, algorithm, shape, max_num_seqs=batch).generate(prompts, params)
    assert texts(outputs) == plain
    rounds, drafted, correct = sums(outputs)
    assert drafted > rounds, "the test needs drafts that branch"
    assert 0 < correct < drafted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("chunked", "batch"), [(True, 3), (False, 8)])
def test_changing_between_chains_trees_and_nothing_every_round_never_changes_the_text(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str, chunked: bool, batch: int
) -> None:
    prompts, params = prompts_and_params()
    llm = with_trees(
        make_llm,
        algorithm,
        (4, 3, 13),
        max_num_seqs=batch,
        chunked_prefill=chunked,
        max_num_batched_tokens=19 if chunked else 128,
    )
    switch_every_round(llm, SWITCHING)
    assert texts(llm.generate(prompts, params)) == plain


def test_trees_of_texts_that_begin_with_pages_of_others_are_as_good(
    make_llm: MakeLLM, plain: list[tuple[int, ...]]
) -> None:
    """Neither kept drafts nor beams touch what other texts read."""
    prompts, params = prompts_and_params()
    llm = with_trees(make_llm, "EAGLE3", (4, 4, 20), max_num_seqs=3)
    first, second, third = (llm.generate(prompts, params) for _ in range(3))
    assert texts(first) == texts(second) == texts(third) == plain
    assert llm.engine.counters.num_prefix_hit_tokens > 0
    assert abs(sums(third)[2] - sums(first)[2]) < 0.1 * sums(first)[2]


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_preemption_never_changes_the_text(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str
) -> None:
    prompts, params = prompts_and_params()
    llm = with_trees(make_llm, algorithm, (3, 3, 10), num_pages=32, max_num_seqs=8)
    assert texts(llm.generate(prompts, params)) == plain
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"
    assert llm.engine.scheduler.cache.num_free_pages == 32


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_stops_on_an_accepted_path_end_the_text_where_they_do_without_one(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str
) -> None:
    prompts, params = prompts_and_params()
    stopping = []
    for i, (p, tokens) in enumerate(zip(params, plain, strict=True)):
        place = 3 + 2 * i
        stop = {"stop": (chr(tokens[place]),)} if i % 2 else {"stop_token_ids": (tokens[place],)}
        stopping.append(replace(p, **stop))
    off = make_llm().generate(prompts, stopping)
    on = with_trees(make_llm, algorithm, (4, 2, 12)).generate(prompts, stopping)
    assert [(o.text, o.token_ids, o.finish_reason) for o in on] == [
        (o.text, o.token_ids, o.finish_reason) for o in off
    ]
    assert sum(output.finish_reason is FinishReason.STOP for output in on) >= 4


def test_requests_that_refuse_or_cap_speculation_keep_their_text_beside_others(
    make_llm: MakeLLM, plain: list[tuple[int, ...]]
) -> None:
    prompts, params = prompts_and_params()
    options = [SpeculativeOptions(enabled=False), SpeculativeOptions(max_steps=2), None]
    mixed = [
        replace(p, speculative=options[i % 3] or SpeculativeOptions()) for i, p in enumerate(params)
    ]
    outputs = with_trees(make_llm, "EAGLE3", (4, 3, 16)).generate(prompts, mixed)
    assert texts(outputs) == plain
    assert all(output.speculation.num_draft_tokens == 0 for output in outputs[::3])
    assert all(max(output.speculation.rounds_by_num_steps) <= 2 for output in outputs[1::3])


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_edits_count_a_rows_own_path_and_every_log_probability_is_the_plain_one(
    make_llm: MakeLLM, algorithm: str
) -> None:
    prompts, params = edited_requests()
    params = [
        replace(p, logprobs=3, prompt_logprobs=(None, 2)[i % 2]) for i, p in enumerate(params)
    ]
    off = make_llm().generate(prompts, params)
    llm = with_trees(make_llm, algorithm, (4, 3, 13), max_num_batched_tokens=60)
    switch_every_round(llm, SWITCHING)
    on = llm.generate(prompts, params)
    close(on, off)
    assert sums(on)[2] > 0


def test_text_to_the_last_position_of_the_model_is_the_plain_one(make_llm: MakeLLM) -> None:
    """Trees take cache entries for which the text has no positions any more."""
    prompt, params = [list(range(30, 60))], SamplingParams(max_tokens=34, temperature=0.0)
    sizes = {"max_model_len": 64, "num_pages": 16}
    expected = texts(make_llm(**sizes).generate(prompt, params))
    outputs = with_trees(make_llm, "STANDALONE", (4, 4, 20), **sizes).generate(prompt, params)
    assert texts(outputs) == expected
    assert sums(outputs)[2] > 0


class Rounds:
    """Keeps the plans of an engine and what became of them."""

    def __init__(self, llm: LLM) -> None:
        self.plans: list[StepPlan] = []
        self.verified: list[VerifiedRound] = []
        engine = llm.engine
        submit, learn = engine.worker.submit, engine.controller.on_verify_complete

        def keep(plan: StepPlan) -> object:
            self.plans.append(plan)
            return submit(plan)

        def tell(verified: VerifiedRound) -> None:
            self.verified.append(verified)
            learn(verified)

        engine.worker.submit = keep  # type: ignore[method-assign, assignment]
        engine.controller.on_verify_complete = tell  # type: ignore[method-assign]


def test_a_round_keeps_within_its_budget_and_a_policy_is_told_what_became_of_it(
    make_llm: MakeLLM,
) -> None:
    prompts, params = prompts_and_params()
    llm = with_trees(make_llm, "EAGLE3", (3, 3, 13), max_num_batched_tokens=40)
    seen = Rounds(llm)
    llm.generate(prompts, params)
    trees = [plan for plan in seen.plans if any(row.tree_drafts for row in plan.rows)]
    assert all(plan.shape == DraftShape(3, 12, 3) for plan in trees)
    assert all(sum(row.query_len for row in plan.rows) <= 40 for plan in trees)
    sizes = {row.tree_drafts for plan in trees for row in plan.rows if row.tree_drafts}
    assert min(sizes) < 12 == max(sizes), "the test needs rounds that are short of room"
    assert all(row.num_steps <= row.tree_drafts for plan in trees for row in plan.rows)
    for verified in seen.verified:
        kept = zip(verified.num_correct_drafts, verified.row_steps, strict=True)
        assert all(correct <= levels <= 3 for correct, levels in kept)
        assert verified.num_draft_tokens >= sum(verified.row_steps)
    assert any(not verified.shape.is_chain for verified in seen.verified)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_tree_of_the_shipped_pair_keeps_more_drafts_than_a_chain_of_its_depth(
    temperature: float,
) -> None:
    prompts = ["import os\n\n\ndef walk(", "class Graph:\n    def __init__(", "for key, value in "]
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]

    def kept(**tree: object) -> tuple[list[tuple[int, ...]], float]:
        drafting = {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": "asset:tiny/eagle3",
            "speculative_num_steps": 3,
            "speculative_adaptive": False,
        }
        model = {"path": "asset:tiny/target", "device": "cpu", "dtype": "float32"}
        settings = {"model": model, "speculative": {**drafting, **tree}, "cache": {"num_pages": 64}}
        llm = LLM(settings, max_model_len=512)
        return texts(llm.generate(prompts, params)), llm.engine.counters.accept_length

    chain, of_chain = kept()
    tree, of_tree = kept(speculative_eagle_topk=4)
    assert tree == chain
    assert of_tree > of_chain + 0.1


def test_a_model_that_drafts_for_itself_keeps_every_level(make_llm: MakeLLM) -> None:
    """At temperature 0 its likeliest path is the text, whatever else the tree holds.

    So every draft beside it was computed from another path, and none of them was let in.
    """
    prompts, params = prompts_and_params()
    greedy = [replace(p, temperature=0.0, max_tokens=25) for p in params]
    llm = with_trees(make_llm, "STANDALONE", (4, 3, 31))
    outputs = llm.generate(prompts, greedy)
    rounds, _, correct = sums(outputs)
    # 24 tokens after the prompt's: four rounds of 5 and one of 4.
    assert (rounds, correct) == (5 * len(prompts), 19 * len(prompts))


def kept_by_round(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    seen = Rounds(llm)
    llm.generate(prompts, params)
    return [
        list(verified.num_correct_drafts)
        for verified in seen.verified
        if not verified.shape.is_chain
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lanes_draft_the_trees_of_the_host(pair: Pair, algorithm: str) -> None:
    """Round by round as many drafts are kept, until the end comes into sight."""
    make, shape, total = llm_maker(pair, "cpu"), (3, 2, 5), 0
    for temperature in (0.0, 1.0, 1.5):
        params = SamplingParams(max_tokens=70, temperature=temperature, seed=3, ignore_eos=True)
        of_host, of_lanes = (
            kept_by_round(
                with_trees(make, algorithm, shape, execution=execution), [[7, 8, 9]], params
            )[:12]
            for execution in ("eager", "lanes")
        )
        assert of_host == of_lanes
        total += sum(map(sum, of_host))
    assert 0 < total < 3 * 36, "the test needs kept and rejected drafts"


def test_trees_are_drafted_beside_prompts(pair: Pair) -> None:
    prompts, params = prompts_and_params()
    make = llm_maker(pair, "cpu")
    plain = texts(make().generate(prompts, params))
    llm = with_trees(
        make, "EAGLE3", (3, 2, 6), execution="lanes", max_num_seqs=3, max_num_batched_tokens=48
    )
    seen = Rounds(llm)
    assert texts(llm.generate(prompts, params)) == plain
    mixed = [
        plan
        for plan in seen.plans
        if any(row.tree_drafts for row in plan.rows) and not all(row.is_decode for row in plan.rows)
    ]
    assert len(mixed) > 3
    assert any(plan.follows for plan in mixed)


def test_a_head_that_gives_nan_ends_trees_of_its_sequences_and_no_text(
    make_llm: MakeLLM, plain: list[tuple[int, ...]]
) -> None:
    prompts, params = prompts_and_params()
    llm = with_trees(make_llm, "EAGLE3", (3, 3, 10))
    worker = llm.engine.worker
    head = getattr(worker, "eager", worker).drafter.head
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
    assert sums(outputs)[2] > 0
    stopped = [output for output in outputs if output.speculation.rounds_by_num_steps.get(0, 0) > 2]
    assert len(stopped) == 1


@pytest.mark.parametrize("wanted", [1.0, 3.0])
def test_forced_acceptance_goes_along_first_children(make_llm: MakeLLM, wanted: float) -> None:
    prompts, params = prompts_and_params()
    params = [replace(p, max_tokens=40) for p in params]  # 13 rounds of 3 after the first
    llm = with_trees(make_llm, "EAGLE3", (2, 2, 7), synthetic_acceptance=wanted)
    outputs = llm.generate(prompts, params)
    rounds, _, correct = sums(outputs)
    assert correct == (wanted - 1) * rounds
