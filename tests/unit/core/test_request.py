"""Laws of what a caller may ask for."""

import math
import pickle

import pytest

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.core.stats import SpeculationStats

INVALID = {
    "max_tokens": [0, 2**31, 3.5, True],
    "temperature": [-0.1, math.nan, math.inf, 10**400, None],
    "top_k": [-2, 2**63, 2.5],
    "top_p": [0.0, 1.1],
    "min_p": [-0.1, 2.0],
    "frequency_penalty": [2.01],
    "presence_penalty": [-2.01, "1"],
    "repetition_penalty": [0.0, math.inf],
    "logit_bias": [
        {5: 100.5}, {5: math.nan}, {"5": 1.0}, {5: True}, [5], dict.fromkeys(range(10**5), 200),
    ],
    "allowed_token_ids": [(), (1.0,)],
    "bad_token_ids": [None, (True,)],
    "min_tokens": [-1, 17, 1.0],
    "stop": [("a", ""), (5,)],
    "seed": [1.5],
    "grammar": ["a+"],
    "stop_token_ids": [("x",)],
    "ignore_eos": [1],
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [21, 2.5],
    "speculative": [{"enabled": True}],
    "n": [0, 129, True, None],
    "structured_outputs": [
        5, {}, {"json": {}, "regex": "a"}, {"xml": "a"}, {"json": None, "regex": False},
    ],
    "truncate_prompt_tokens": [0, -2, 1.5],
    "detokenize": [1],
    "output_kind": [1, "DELTA"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in INVALID.items() for value in values]
)
def test_a_parameter_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=field) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 1000


def test_parameters_that_leave_scores_alone_cost_no_edits():
    assert not SamplingParams(stop_token_ids=(5,), temperature=0.5, top_k=3).edits_scores
    biased = SamplingParams(logit_bias={5: 1.0}, min_tokens=1)
    assert (biased.edits_scores, biased.counts_tokens) == (True, False)


def test_parameters_keep_what_they_were_given_and_can_be_keys():
    biases, allowed = {5: 1.0}, [5, 6]
    params = SamplingParams(logit_bias=biases, allowed_token_ids=allowed)
    biases[6], allowed[0] = 2.0, 7
    assert params == SamplingParams(logit_bias={5: 1.0}, allowed_token_ids=(5, 6))
    assert {params: 1}[pickle.loads(pickle.dumps(params))] == 1
    assert SamplingParams(stop="END").stop == ("END",)
    grammar = Grammar.regex("a+")
    assert SamplingParams(structured_outputs={"regex": "a+"}).grammar == grammar


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"stop": "a", "detokenize": False}, "detokenize=False: stop strings need the text"),
        (
            {"grammar": Grammar.regex("a"), "structured_outputs": {"regex": "a"}},
            "structured_outputs=.*conflicts with grammar",
        ),
    ],
)
def test_parameters_that_exclude_each_other_are_refused(given, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        SamplingParams(**given)


def test_a_negative_depth_is_refused():
    with pytest.raises(InvalidRequest, match=r"speculative\.max_steps=-1"):
        SpeculativeOptions(max_steps=-1)


def test_a_refusal_survives_the_way_to_another_process():
    error = InvalidRequest("prompt", "x", "shorten it", too_long=True)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.field, copy.too_long) == (str(error), "prompt", True)


def test_accept_length_is_the_tokens_a_round_emits():
    stats = SpeculationStats()
    before = stats.copy()
    assert stats.accept_length == 1.0
    for num_steps, correct in ((3, 3), (3, 0), (0, 0), (7, 5)):
        stats.observe(num_steps, correct)
    assert stats.accept_length == (4 + 1 + 1 + 6) / 4
    assert stats.as_dict()["rounds_by_num_steps"] == {"0": 1, "3": 2, "7": 1}
    assert (stats.num_draft_tokens, stats.num_correct_drafts) == (13, 8)
    after = stats.copy()
    stats.observe(3, 1)
    assert after.rounds_by_correct == {3: {3: 1, 0: 1}, 0: {0: 1}, 7: {5: 1}}, "a copy stays"
    assert before == SpeculationStats()
    assert "synthetic_acceptance" not in stats.as_dict()
    assert SpeculationStats(synthetic_acceptance=True).as_dict()["synthetic_acceptance"] is True
