"""Drafts are drawn at the sharpness of the configuration, and no text notices."""

import pytest

from serve_spec.core.request import SamplingParams
from tests.helpers.engines import heard_steps, texts

PROMPTS = [[3 + i, *range(20, 26)] for i in range(4)]
PARAMS = [SamplingParams(max_tokens=40, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
TREE = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}


@pytest.mark.parametrize(("num_steps", "keys"), [(4, {}), (2, TREE)], ids=["chain", "tree"])
def test_a_sharpness_changes_which_drafts_are_accepted_and_no_text(make_llm, num_steps, keys):
    """The target is its own draft: at sharpness 1 it knows every token, at 0.2 it does not.

    Of a tree with all that its beams meet, the first branch is the chain.
    """
    plain = texts(make_llm().generate(PROMPTS, PARAMS))

    def lost_share(sharpness):
        llm = make_llm("STANDALONE", num_steps, speculative_draft_sharpness=sharpness, **keys)
        steps = heard_steps(llm)
        assert texts(llm.generate(PROMPTS, PARAMS)) == plain
        drafted = sum(sum(step.steps_per_req) for step in steps)
        return 1 - sum(sum(step.correct_per_req) for step in steps) / drafted

    assert lost_share(1.0) == 0
    assert lost_share(0.2) > 0.25
