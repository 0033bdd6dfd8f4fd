"""A whole model drafts: here the target itself, which knows what it will say."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.layers.int4_weight import int4_works
from serve_spec.layers.int8_weight import int8_works
from tests.helpers.checkpoints import VOCAB
from tests.helpers.engines import MakeLLM, Pair, heard_rounds, switch_every_round, texts
from tests.helpers.lives import with_vocabulary

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


def test_every_draft_of_the_target_itself_is_kept(make_llm: MakeLLM) -> None:
    """Prompts of one token and of many: the draft reads all of a text, its first token, too."""
    request = prompts_and_params((0.0,))
    outputs = make_llm("STANDALONE", STEPS).generate(*request)
    assert texts(outputs) == texts(make_llm().generate(*request))
    for output in outputs:
        assert output.speculation.num_correct_drafts == output.speculation.num_draft_tokens
        # One token comes with the prompt, and the last round has no use for a draft of each.
        assert output.speculation.num_rounds == 20 / (STEPS + 1)


def test_after_rounds_without_drafts_and_preemption_it_goes_on_reading_where_it_was(
    make_llm: MakeLLM,
) -> None:
    request = prompts_and_params((0.0,))
    llm = make_llm("STANDALONE", STEPS, num_pages=32, max_num_seqs=6)
    switch_every_round(llm, [0, 3, 0, 0, 2], ragged=False)
    outputs = llm.generate(*request)
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"
    assert texts(outputs) == texts(make_llm().generate(*request))
    for output in outputs:
        assert output.speculation.num_correct_drafts == output.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("text_first", [False, True])
@pytest.mark.parametrize("tiers", [[7, 3, 7, 1], [DraftShape(3, 21, 3), 5, DraftShape(2, 12, 3)]])
def test_rows_that_draft_less_than_others_leave_the_entries_of_others_alone(
    make_llm: MakeLLM, tiers: list[int | DraftShape], text_first: bool
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
    llm = make_llm("STANDALONE", 7, speculative_eagle_topk=3, **keys)
    switch_every_round(llm, tiers)
    rounds = heard_rounds(llm)
    llm.generate(prompts, params)
    whole = [
        (row.num_steps, len(tokens) - 1)
        for row, tokens in rounds
        if row.model_steps and row.tree_drafts in {0, 3, 12, 21}  # others lack room
    ]
    assert len(whole) > 20
    assert all(num_steps == kept for num_steps, kept in whole)


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("size", [260, 270, VOCAB + 3, VOCAB + 64])
def test_a_vocabulary_that_is_padded_otherwise_is_no_other_vocabulary(
    make_llm: MakeLLM, pair: Pair, tmp_path: Path, topk: int, size: int
) -> None:
    """Texts in which tokens come that a shorter one lacks; of any other every draft is kept."""
    prompts, params = prompts_and_params((0.0, 0.9))
    likely = dict.fromkeys(range(255, VOCAB), 3.0)
    hard = [replace(p, temperature=1.5, logit_bias=likely) for p in params]
    folder = str(with_vocabulary(pair, tmp_path, size))
    llm = make_llm(
        "STANDALONE",
        STEPS,
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
def test_a_copy_of_the_target_in_integers_never_changes_the_text(
    make_llm: MakeLLM, integers: str
) -> None:
    request = prompts_and_params((0.0, 0.8))
    llm = make_llm(
        "STANDALONE",
        STEPS,
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
