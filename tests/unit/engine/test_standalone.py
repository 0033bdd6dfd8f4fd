"""A whole model drafts: here the target itself, whose every draft is right."""

import random

import pytest
import torch

from serve_spec import LLM
from serve_spec.config.adaptive_file import MAX_STEPS
from serve_spec.core.draft import DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.layers.formats.int4 import int4_works
from serve_spec.layers.formats.int8 import int8_works
from tests.helpers.checkpoints import VOCAB
from tests.helpers.engines import recorded_rounds, recorded_steps, switch_every_round, texts
from tests.helpers.scenarios import with_vocabulary

STEPS = 3
TREES = [DraftShape(3, 21, 3), 5, DraftShape(2, 12, 3)]
INTEGERS = [
    pytest.param(
        name, marks=pytest.mark.skipif(not works, reason=f"torch has no {name} products here")
    )
    for name, works in (("int8", int8_works()), ("int4", int4_works(torch.device("cpu"))))
]


@pytest.mark.parametrize(
    ("depths", "text_first", "ahead"),
    [
        ([7, 3, 7, 1], False, False),
        ([0, 3, 0, 2], True, True),
        (TREES, False, True),
        (TREES, True, False),
    ],
    ids=str,
)
def test_every_draft_of_the_target_itself_is_kept_whatever_happens(
    make_llm, depths, text_first, ahead
):
    """Requests draft less than others, or nothing, or from the text; pages change owners.

    A draft would be wrong if one entry were missing, stale or of another request.
    """
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 20))] for _ in range(24)]
    params = [
        SamplingParams(max_tokens=rng.randint(5, 60), temperature=0.0, ignore_eos=True)
        for _ in prompts
    ]
    keys = {"num_pages": 44, "max_num_seqs": 6, "prefix_caching": False}
    if text_first:
        keys |= {"speculative_ngram_first": True, "speculative_ngram_min_match_window_size": 1}
    llm = make_llm("STANDALONE", 7, speculative_eagle_topk=3, async_scheduling=ahead, **keys)
    switch_every_round(llm, depths)
    rounds = recorded_rounds(llm)
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == texts(make_llm().generate(prompts, params))
    assert llm.engine.scheduler.queue.num_preemptions > 0
    assert text_first == any(row.draft_ids for row, _ in rounds)
    whole = [
        (row.num_steps, len(tokens) - 1)
        for row, tokens in rounds
        if row.model_steps and row.shape.tree_size in {0, 3, 12, 21}  # others lack room
    ]
    assert len(whole) > 10
    assert all(num_steps == kept for num_steps, kept in whole)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_deepest_chain_that_is_allowed_is_kept_whole(make_llm, ahead):
    """Also after rounds without drafts, one of which is in flight."""
    llm = make_llm("STANDALONE", MAX_STEPS, async_scheduling=ahead, max_model_len=512)
    switch_every_round(llm, [MAX_STEPS, 0, 0, MAX_STEPS, MAX_STEPS], ragged=False)
    rounds = recorded_rounds(llm)
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    llm.generate([[1, 2, 3], [4, 5]], params)
    kept = [len(tokens) - 1 for row, tokens in rounds if row.num_steps == MAX_STEPS]
    assert kept
    assert set(kept) == {MAX_STEPS}


@pytest.mark.parametrize(("topk", "padding"), [(1, 3), (2, 64)])
def test_a_vocabulary_that_is_padded_otherwise_is_no_other_vocabulary(
    make_llm, pair, tmp_path, topk, padding
):
    """Every draft of a chain is kept. `tests/fuzz` drafts with a shorter vocabulary."""
    folder = str(with_vocabulary(pair, tmp_path, VOCAB + padding))
    keys = {"speculative_draft_model_path": folder, "speculative_eagle_topk": topk}
    llm = make_llm("STANDALONE", STEPS, speculative_draft_sharpness=1.0, **keys)
    outputs = llm.generate(SHORT_PROMPTS, HOT_PARAMS)
    assert texts(outputs) == texts(make_llm().generate(SHORT_PROMPTS, HOT_PARAMS))
    kept = sum(output.speculation.num_correct_drafts for output in outputs)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    assert 0 < kept <= drafted
    assert topk > 1 or kept == drafted


@pytest.mark.parametrize("integers", INTEGERS)
def test_most_drafts_of_the_shipped_target_in_integers_are_kept_and_change_no_text(integers):
    keys = {"device": "cpu", "dtype": "float32", "speculative_adaptive": False}
    copy = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": "asset:tiny/target",
        "speculative_draft_model_quantization": integers,
        "speculative_num_steps": STEPS,
    }
    prompts = ["import os\n\n\ndef files(folder):\n", "class Node:\n    def __init__(self, "]
    params = SamplingParams(max_tokens=41, temperature=0.0, ignore_eos=True)
    outputs = LLM("configs/tiny.yaml", **keys, **copy).generate(prompts, params)
    plain = LLM("configs/tiny.yaml", **keys, speculative_num_steps=0).generate(prompts, params)
    assert texts(outputs) == texts(plain)
    correct = sum(output.speculation.num_correct_drafts for output in outputs)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    assert correct > {"int8": 0.9, "int4": 0.7}[integers] * drafted > 0


SHORT_PROMPTS = [[3 + i, *range(20, 26)] for i in range(4)]
HOT_PARAMS = [
    SamplingParams(max_tokens=40, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)
]
SMALL_TREE = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}


@pytest.mark.parametrize(("num_steps", "keys"), [(4, {}), (2, SMALL_TREE)], ids=["chain", "tree"])
def test_a_sharpness_changes_which_drafts_are_accepted_and_no_text(make_llm, num_steps, keys):
    """The target is its own draft: at sharpness 1 it knows every token, at 0.2 it does not.

    Of a tree with all that its beams meet, the first branch is the chain.
    """
    plain = texts(make_llm().generate(SHORT_PROMPTS, HOT_PARAMS))

    def lost_fraction(sharpness):
        llm = make_llm("STANDALONE", num_steps, speculative_draft_sharpness=sharpness, **keys)
        steps = recorded_steps(llm)
        assert texts(llm.generate(SHORT_PROMPTS, HOT_PARAMS)) == plain
        drafted = sum(sum(step.steps_per_req) for step in steps)
        return 1 - sum(sum(step.correct_per_req) for step in steps) / drafted

    assert lost_fraction(1.0) == 0
    assert lost_fraction(0.2) > 0.25
