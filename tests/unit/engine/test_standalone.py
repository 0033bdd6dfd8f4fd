"""A whole model drafts: here the target itself, which knows what it will say."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import RowPlan, StepPlan
from serve_spec.core.request import SamplingParams
from serve_spec.layers.int4_weight import int4_works
from serve_spec.layers.int8_weight import int8_works
from tests.helpers.checkpoints import VOCAB, read_checkpoint, write_checkpoint
from tests.helpers.engines import MakeLLM, Pair, switch_every_round, texts

EXECUTIONS = ["eager", "lanes"]
STEPS = 3
INTEGERS = [
    pytest.param(
        name, marks=pytest.mark.skipif(not works, reason=f"torch has no {name} products here")
    )
    for name, works in (("int8", int8_works()), ("int4", int4_works(torch.device("cpu"))))
]


def prompts_and_params(
    temperatures: tuple[float, ...],
) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[3 + i, *range(20, 21 + 5 * i)] for i in range(6)]
    params = [
        SamplingParams(
            max_tokens=21, temperature=temperatures[i % len(temperatures)], seed=i, ignore_eos=True
        )
        for i in range(6)
    ]
    return prompts, params


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_every_draft_of_the_target_itself_is_kept(make_llm: MakeLLM, execution: str) -> None:
    """Prompts of one token and of many: the draft reads all of a text, its first token, too."""
    request = prompts_and_params((0.0,))
    outputs = make_llm("STANDALONE", STEPS, execution=execution).generate(*request)
    assert texts(outputs) == texts(make_llm().generate(*request))
    for output in outputs:
        assert output.speculation.num_correct_drafts == output.speculation.num_draft_tokens
        # One token comes with the prompt, and the last round has no use for a draft of each.
        assert output.speculation.num_rounds == 20 / (STEPS + 1)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_after_rounds_without_drafts_and_preemption_it_goes_on_reading_where_it_was(
    make_llm: MakeLLM, execution: str
) -> None:
    request = prompts_and_params((0.0,))
    llm = make_llm("STANDALONE", STEPS, execution=execution, num_pages=32, max_num_seqs=6)
    switch_every_round(llm, [0, 3, 0, 0, 2], ragged=False)
    outputs = llm.generate(*request)
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"
    assert texts(outputs) == texts(make_llm().generate(*request))
    for output in outputs:
        assert output.speculation.num_correct_drafts == output.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("text_first", [False, True])
@pytest.mark.parametrize("tiers", [[7, 3, 7, 1], [DraftShape(3, 21, 3), 5, DraftShape(2, 12, 3)]])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rows_that_draft_less_than_others_leave_the_entries_of_others_alone(
    make_llm: MakeLLM, execution: str, tiers: list[int | DraftShape], text_first: bool
) -> None:
    """Pages go from sequence to sequence all the time, for the pool is small."""
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 20))] for _ in range(24)]
    params = [
        SamplingParams(max_tokens=rng.randint(5, 60), temperature=0.0, ignore_eos=True)
        for _ in prompts
    ]
    keys: dict[str, Any] = {"num_pages": 60, "max_num_seqs": 6, "prefix_caching": False}
    if text_first:
        keys |= {"speculative_ngram_first": True, "speculative_ngram_min_match_window_size": 1}
    llm = make_llm("STANDALONE", 7, execution=execution, speculative_eagle_topk=3, **keys)
    switch_every_round(llm, tiers)
    by_model: list[tuple[RowPlan, int]] = []
    commit = llm.engine.scheduler.commit

    def hear(plan: StepPlan, result: Any, cut: Any) -> Any:
        rows = zip(plan.sampling_rows, result.token_ids, strict=True)
        by_model.extend((row, len(tokens) - 1) for row, tokens in rows if row.model_steps)
        return commit(plan, result, cut)

    llm.engine.scheduler.commit = hear  # type: ignore[method-assign]
    llm.generate(prompts, params)
    whole = [pair for pair in by_model if pair[0].tree_drafts in {0, 3, 12, 21}]
    assert len(whole) > 20
    assert all(kept == row.num_steps for row, kept in whole), "but for trees that lack room"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_drafts_at_another_temperature_never_change_the_text(
    make_llm: MakeLLM, execution: str
) -> None:
    request = prompts_and_params((0.7, 1.0))
    llm = make_llm("STANDALONE", 5, execution=execution, speculative_draft_sharpness=0.5)
    outputs = llm.generate(*request)
    assert texts(outputs) == texts(make_llm().generate(*request))
    correct = sum(output.speculation.num_correct_drafts for output in outputs)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    assert 0 < correct < drafted, "the test needs kept and rejected drafts"


def with_vocabulary(pair: Pair, directory: Path, size: int) -> Path:
    """The target, with more rows for ids that nobody uses, or without its last ones."""
    config, tensors = read_checkpoint(pair.target)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            rows = tensors[name][:size]
            more = torch.ones(size - len(rows), rows.shape[1])
            tensors[name] = torch.cat([rows, more])
    write_checkpoint(directory, {**config, "vocab_size": size}, tensors)
    shutil.copy(pair.target / "tokenizer.json", directory)
    return directory


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("size", [260, 270, VOCAB + 3, VOCAB + 64])
def test_a_vocabulary_that_is_padded_otherwise_is_no_other_vocabulary(
    make_llm: MakeLLM, pair: Pair, tmp_path: Path, execution: str, topk: int, size: int
) -> None:
    """Texts in which tokens come that a shorter one lacks; of any other every draft is kept."""
    prompts, params = prompts_and_params((0.0, 0.9))
    likely = dict.fromkeys(range(255, VOCAB), 3.0)
    hard = [replace(p, temperature=1.5, logit_bias=likely) for p in params]
    folder = str(with_vocabulary(pair, tmp_path, size))
    llm = make_llm(
        "STANDALONE",
        STEPS,
        execution=execution,
        speculative_draft_model_path=folder,
        speculative_eagle_topk=topk,
        speculative_draft_sharpness=1.0,
    )
    for asked in (params, hard):
        outputs = llm.generate(prompts, asked)
        assert texts(outputs) == texts(make_llm().generate(prompts, asked))
        assert asked is params or max(max(text) for text in texts(outputs)) >= 270
        stats = [output.speculation for output in outputs]
        kept, drafted = (
            sum(one.num_correct_drafts for one in stats),
            sum(one.num_draft_tokens for one in stats),
        )
        assert kept > 0
        if asked is params and topk == 1 and size > VOCAB:
            assert kept == drafted


@pytest.mark.parametrize("integers", INTEGERS)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_copy_of_the_target_in_integers_never_changes_the_text(
    make_llm: MakeLLM, execution: str, integers: str
) -> None:
    request = prompts_and_params((0.0, 0.8))
    llm = make_llm(
        "STANDALONE",
        STEPS,
        execution=execution,
        speculative_draft_model_quantization=integers,
        num_pages=32,
        max_num_seqs=6,
    )
    switch_every_round(llm, [0, 3, 1, 2])
    outputs = llm.generate(*request)
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"
    assert texts(outputs) == texts(make_llm().generate(*request))
    assert all(output.speculation.num_correct_drafts > 0 for output in outputs)


@pytest.mark.parametrize("integers", INTEGERS)
def test_most_drafts_of_the_shipped_target_in_integers_are_kept(integers: str) -> None:
    target = "asset:tiny/target"
    settings = {
        "model": {"path": target, "device": "cpu", "dtype": "float32"},
        "speculative": {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": target,
            "speculative_draft_model_quantization": integers,
            "speculative_num_steps": STEPS,
            "speculative_adaptive": False,
        },
        "cache": {"num_pages": 64},
    }
    llm = LLM(settings, max_model_len=256)
    prompts = ["import os\n\n\ndef files(folder):\n", "class Node:\n    def __init__(self, "]
    params = SamplingParams(max_tokens=41, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    correct = sum(output.speculation.num_correct_drafts for output in outputs)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    assert correct > {"int8": 0.9, "int4": 0.7}[integers] * drafted > 0
