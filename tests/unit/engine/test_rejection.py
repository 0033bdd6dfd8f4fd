"""Rejection sampling of sampled drafts: other texts, the same distribution."""

from collections import Counter

import pytest
import torch
from scipy import stats

from serve_spec.core.request import SamplingParams
from serve_spec.ops.rejection import DraftLogits
from tests.helpers.engines import texts

METHODS = ["standard", "block"]
STEPS = 4


def requests():
    prompts = [[3 + i, *range(20, 21 + 3 * i)] for i in range(6)]
    return prompts, [SamplingParams(max_tokens=20 + i, seed=i, ignore_eos=True) for i in range(6)]


@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_never_drafts_has_the_text_of_its_seed(make_llm, method):
    llm = make_llm("EAGLE3", 0, rejection_sample_method=method)
    assert texts(llm.generate(*requests())) == texts(make_llm().generate(*requests()))


@pytest.mark.parametrize("method", METHODS)
def test_neighbours_that_leave_and_prefixes_that_are_known_change_no_text_of_a_seed(
    make_llm, method
):
    """The last tokens depend on how deep the last rounds draft."""
    prompts, params = requests()
    llm = make_llm("EAGLE3", STEPS, rejection_sample_method=method, async_scheduling=False)
    alone = [text[:-10] for text in texts(llm.generate(prompts[:3], params[:3]))]
    for number in range(3):
        engine = llm.engine
        engine.add(engine.new_sequence(f"leaves {number}", prompts[number], params[5]))
        engine.step()
    for number in range(3):
        assert llm.engine.abort(f"leaves {number}") is not None
    outputs = llm.generate(prompts, params)
    assert [text[:-10] for text in texts(outputs[:3])] == alone
    assert outputs[2].num_cached_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_is_the_target_is_always_kept(make_llm, method):
    """Both distributions are equal but for the last bits: one draft in some hundreds of thousands
    is lost to rounding."""
    llm = make_llm("STANDALONE", STEPS, rejection_sample_method=method, async_scheduling=False)
    outputs = llm.generate(*requests())
    for output in outputs:
        assert output.speculation.num_correct_drafts == output.speculation.num_draft_tokens > 0


NUM_TEXTS = 1000


def count_texts(llm, first_seed):
    """Count the second to fourth tokens of requests with penalties, bias and filters."""
    edits = {"top_k": 3, "repetition_penalty": 1.4, "logit_bias": {7: 1.5}, "temperature": 1.2}
    params = [
        SamplingParams(max_tokens=4, seed=first_seed + i, ignore_eos=True, **edits)
        for i in range(NUM_TEXTS)
    ]
    outputs = llm.generate([[3, 9, 20, 21]] * NUM_TEXTS, params)
    drafted = sum(output.speculation.num_correct_drafts for output in outputs)
    return Counter(text[1:] for text in texts(outputs)), drafted


LARGE = {"max_num_seqs": 128, "num_pages": 1024}


@pytest.fixture(scope="module")
def without_drafts(make_llm):
    return count_texts(make_llm(**LARGE), NUM_TEXTS)[0]


@pytest.mark.parametrize(("method", "ahead"), [("standard", False), ("block", True)])
def test_texts_of_engines_follow_one_distribution(make_llm, without_drafts, method, ahead):
    """Texts with speculation against texts without.

    Two-sample chi-square over 1,000 requests each, of other seeds; fails one choice of seeds in a
    million.
    """
    keys = {"rejection_sample_method": method, "async_scheduling": ahead, **LARGE}
    with_drafts, drafted = count_texts(make_llm("STANDALONE", 3, **keys), 0)
    assert drafted > 0.05 * NUM_TEXTS, "the test needs drafts that are kept"
    both = with_drafts + without_drafts
    common = [key for key, count in both.items() if count >= 10]
    table = [[c[key] for key in common] for c in (with_drafts, without_drafts)]
    rest = [NUM_TEXTS - sum(row) for row in table]
    if sum(rest) >= 10:
        table = [[*row, left] for row, left in zip(table, rest, strict=True)]
    assert len(table[0]) > 8, "the test needs many texts"
    assert stats.chi2_contingency(table).pvalue > 1e-6


def test_a_device_without_room_for_draft_logits_is_refused_with_what_to_lower(
    make_llm, monkeypatch
):
    def create(*args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(DraftLogits, "create", create)
    with pytest.raises(MemoryError, match=r"num_steps=4, max_num_seqs=8: .* MiB.*coupled"):
        make_llm("EAGLE3", 4, rejection_sample_method="block", max_num_seqs=8)
