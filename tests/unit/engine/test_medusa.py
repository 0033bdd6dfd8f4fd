"""Heads that all read one feature: the text stays, and nobody asks for more than there are."""

from __future__ import annotations

import pytest

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import SamplingParams
from tests.helpers.engines import MakeLLM, switch_every_round, texts

EXECUTIONS = ["eager", "lanes"]
HEADS = 4


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[3 + i, *range(20, 21 + 5 * i)] for i in range(6)]
    params = [
        SamplingParams(max_tokens=24, temperature=(0.0, 0.5)[i % 2], seed=i) for i in range(6)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def plain(make_llm: MakeLLM) -> list[tuple[int, ...]]:
    return texts(make_llm().generate(*prompts_and_params()))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_heads_never_change_the_text(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], execution: str
) -> None:
    outputs = make_llm("MEDUSA", HEADS, execution=execution).generate(*prompts_and_params())
    assert texts(outputs) == plain
    correct = sum(output.speculation.num_correct_drafts for output in outputs)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    assert 0 < correct < drafted, "the test needs kept and rejected drafts"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_nor_do_they_under_another_tier_every_round_and_preemption(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], execution: str
) -> None:
    llm = make_llm("MEDUSA", HEADS, execution=execution, num_pages=32, max_num_seqs=6)
    switch_every_round(llm, [0, 3, HEADS, 1])
    assert texts(llm.generate(*prompts_and_params())) == plain
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"


def test_more_drafts_than_there_are_heads_are_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(ValueError, match=r"speculative_num_steps=5.*the draft makes 4 at most"):
        make_llm("MEDUSA", HEADS + 1)


def test_a_policy_that_picks_its_own_depths_picks_none_beyond_the_heads() -> None:
    config = ServeSpecConfig.load(
        {
            "model": {"path": "asset:tiny/target"},
            "speculative": {
                "speculative_algorithm": "MEDUSA",
                "speculative_draft_model_path": "asset:tiny/medusa",
            },
        }
    ).speculative
    assert PolicySettings.of(config).max_depth > HEADS
    assert PolicySettings.of(config, max_steps=HEADS).max_depth == HEADS
