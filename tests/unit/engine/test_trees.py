"""Trees of drafts keep within their budget, and take fewer rounds than chains of their depth."""

from dataclasses import replace

import pytest

from serve_spec import LLM
from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.core.request import SamplingParams
from tests.helpers.engines import llm_maker, make_pair, sampled_requests, texts


def with_trees(make_llm, algorithm, shape, **overrides):
    """Build an engine. shape: steps, topk, tokens with the root."""
    steps, topk, num_tokens = shape
    return make_llm(
        algorithm,
        steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=num_tokens,
        **overrides,
    )


def num_accepted(outputs):
    return sum(output.speculation.num_correct_drafts for output in outputs)


def test_text_to_the_last_position_of_the_model_is_the_plain_one(make_llm):
    """Trees take cache entries for which the text has no positions any more."""
    prompt, params = [list(range(30, 60))], SamplingParams(max_tokens=34, temperature=0.0)
    sizes = {"max_model_len": 64, "num_pages": 16}
    expected = texts(make_llm(**sizes).generate(prompt, params))
    outputs = with_trees(make_llm, "STANDALONE", (4, 4, 20), **sizes).generate(prompt, params)
    assert texts(outputs) == expected
    assert num_accepted(outputs) > 0


def test_a_tree_of_the_shipped_pair_keeps_more_drafts_than_a_chain_of_its_depth():
    prompts = ["import os\n\n\ndef walk(", "class Graph:\n    def __init__(", "for key, value in "]
    params = [
        SamplingParams(max_tokens=24, temperature=0.5 * i, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]

    def kept(**tree):
        keys = {"speculative_adaptive": False, "speculative_num_steps": 3, **tree}
        llm = LLM("configs/tiny.yaml", device="cpu", dtype="float32", **keys)
        return texts(llm.generate(prompts, params)), llm.engine.counters.accept_length

    chain, of_chain = kept()
    tree, of_tree = kept(speculative_eagle_topk=4)
    assert tree == chain
    assert of_tree > of_chain + 0.1


@pytest.mark.parametrize("wanted", [1.0, 3.0])
def test_forced_acceptance_goes_along_first_children(make_llm, wanted):
    prompts, params = sampled_requests()
    params = [replace(p, max_tokens=40) for p in params]  # 13 rounds of 3 after the first
    llm = with_trees(make_llm, "EAGLE3", (2, 2, 7), synthetic_acceptance=wanted)
    outputs = llm.generate(prompts, params)
    rounds = sum(output.speculation.num_rounds for output in outputs)
    assert num_accepted(outputs) == (wanted - 1) * rounds


def test_trees_that_may_not_lie_within_a_window_are_refused(tmp_path):
    window = {"family": "mistral", "sliding_window": MAX_TREE_TOKENS - 1}
    make_llm = llm_maker(make_pair(tmp_path, **window), "cpu")
    message = r"topk=3.*sliding_window=63; use speculative_eagle_topk=1"
    with pytest.raises(ValueError, match=message):
        with_trees(make_llm, "EAGLE3", (4, 3, 12))
