"""Tokens and log-probabilities are those of the plain model's distribution, edited as asked."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import FinishReason, SamplingParams
from tests.helpers.checkpoints import EOS_ID, VOCAB
from tests.helpers.grammars import is_of
from tests.helpers.plain_edits import edited
from tests.helpers.plain_logprobs import CLOSE, PlainLogprobs, processed

AS_THE_MODEL_GIVES = SamplingParams(temperature=1.0)


def span(start, end):
    return list(range(start, end))


@pytest.fixture(scope="module")
def plain(pair):
    return PlainLogprobs(pair.target)


def agrees(scored, token, expected, num_top):
    """Compare the scored of a token with its distribution."""
    assert scored.token_id == token
    assert scored.logprob == pytest.approx(expected[token], **CLOSE)
    # Tokens with nearly the same logprob may be in any order.
    by_rank = list(expected.values())
    assert by_rank[scored.rank - 1] == pytest.approx(expected[token], **CLOSE)
    possible = [logprob for logprob in by_rank if logprob > float("-inf")]
    assert len({other for other, _ in scored.top}) == len(scored.top) == min(num_top, len(possible))
    for (other, logprob), at_rank in zip(scored.top, possible, strict=False):
        assert logprob == pytest.approx(expected[other], **CLOSE)
        assert logprob == pytest.approx(at_rank, **CLOSE)


def check(output, params, plain):
    """Assert that the plain distribution could give every token, and has its log-probabilities."""
    prompt, tokens = list(output.prompt_token_ids), list(output.token_ids)
    rows = plain.logits(prompt + tokens)[len(prompt) - 1 : -1]
    assert (output.logprobs is None) == (params.logprobs is None)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        scores = edited(row, prompt, tokens[:i], params, [EOS_ID])
        expected = processed(scores, params)
        assert token in expected
        assert scores[token] > float("-inf"), "an edit forbids it"
        if params.is_greedy:
            assert max(scores) - scores[token] < 1e-4
        if output.logprobs is not None:
            assert params.logprobs is not None
            agrees(output.logprobs[i], token, expected, params.logprobs)
    assert output.logprobs is None or len(output.logprobs) == len(tokens)
    assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
    if output.prompt_logprobs is not None:
        assert params.prompt_logprobs is not None
        first, *rest = output.prompt_logprobs
        assert first is None
        of_prompt = plain(prompt, AS_THE_MODEL_GIVES)[:-1]
        for scored, token, expected in zip(rest, prompt[1:], of_prompt, strict=True):
            assert scored is not None
            agrees(scored, token, expected, params.prompt_logprobs)


@pytest.fixture(scope="module")
def drafting(make_llm):
    return make_llm("EAGLE3", 3, num_pages=40, max_num_seqs=3, max_num_batched_tokens=24)


token_ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 255), min_size=1, max_size=20),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(8, 14),
            temperature=st.sampled_from([0.0, 0.3, 0.8, 1.3, 1.7]),
            top_k=st.sampled_from([-1, 1, 3, 40]),
            top_p=st.sampled_from([1.0, 0.9, 0.4]),
            min_p=st.sampled_from([0.0, 0.05]),
            frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, 2.0, -1.0]),
            presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.4]),
            repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.7]),
            logit_bias=st.dictionaries(
                st.just(EOS_ID) | st.integers(0, VOCAB - 1),
                st.sampled_from([-100.0, 3.0, 6.5]),
                max_size=4,
            ),
            allowed_token_ids=st.none() | token_ids.map(lambda ids: [*ids, 5, 77]),
            bad_token_ids=st.lists(st.integers(80, VOCAB - 1), max_size=6),
            min_tokens=st.sampled_from([0, 0, 3, 8]),
            ignore_eos=st.booleans(),
            stop_token_ids=st.lists(st.integers(80, VOCAB - 1), max_size=3),
            seed=st.integers(0, 1000),
            logprobs=st.sampled_from([None, 0, 1, 20]),
            prompt_logprobs=st.sampled_from([None, 0, 3]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=24,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests)
def test_any_requests_together_get_tokens_of_the_plain_distribution(drafting, plain, batch):
    """And the same tokens without log-probabilities."""
    prompts, params = [p for p, _ in batch], [q for _, q in batch]
    outputs = drafting.generate(prompts, params)
    for output, asked in zip(outputs, params, strict=True):
        check(output, asked, plain)
    silent = [replace(p, logprobs=None, prompt_logprobs=None) for p in params]
    unasked = drafting.generate(prompts, silent)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in unasked]
    assert all(o.logprobs is None and o.prompt_logprobs is None for o in unasked)


def test_forced_tokens_have_their_log_probabilities_and_no_grammar(make_llm, plain):
    llm = make_llm("EAGLE3", 3, synthetic_acceptance=[0.9])
    params = SamplingParams(max_tokens=24, seed=5, logprobs=3, ignore_eos=True)
    output = llm.generate([[1, 2, 3]], params)[0]
    assert output.speculation.accept_length > 2
    check(output, params, plain)
    with pytest.raises(InvalidRequest, match="forces acceptance"):
        llm.generate([[1]], SamplingParams(grammar=Grammar.json_object()))


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("bad_token_ids", {"bad_token_ids": [3, VOCAB]}),
        ("allowed_token_ids", {"allowed_token_ids": [3, -1]}),
        ("allowed_token_ids", {"allowed_token_ids": [3], "bad_token_ids": [3]}),
        ("allowed_token_ids", {"allowed_token_ids": [EOS_ID], "min_tokens": 1}),
        ("bad_token_ids", {"bad_token_ids": span(0, VOCAB)}),
        (
            "bad_token_ids",
            {"bad_token_ids": span(0, EOS_ID) + span(EOS_ID + 1, VOCAB), "min_tokens": 1},
        ),
    ],
)
def test_edits_that_no_vocabulary_can_serve_are_refused_by_name(drafting, field, params):
    with pytest.raises(InvalidRequest) as refusal:
        drafting.generate([[1]], SamplingParams(**params))
    assert refusal.value.field == field


def test_stop_tokens_of_another_vocabulary_hold_nothing_back(make_llm):
    params = SamplingParams(min_tokens=2, stop_token_ids=(VOCAB + 7, 2**40), seed=0)
    assert len(make_llm().generate([[1]], params)[0].token_ids) >= 2


def test_extreme_edits_leave_scores_from_which_a_token_can_be_drawn(make_llm):
    extremes = [
        {"repetition_penalty": penalty, "logit_bias": dict.fromkeys(range(VOCAB), bias)}
        for penalty in (0.01, 100)
        for bias in (-100, 100)
    ]
    params = [
        SamplingParams(temperature=t, seed=1, frequency_penalty=-2, ignore_eos=True, **edits)
        for t in (2e-5, 100)
        for edits in extremes
    ]
    outputs = make_llm("EAGLE3", 3).generate([[1, 2]] * len(params), params)
    assert all(len(output.token_ids) == 16 for output in outputs)
    assert torch.tensor([o.token_ids for o in outputs]).max() < VOCAB


@pytest.mark.parametrize(
    "extra",
    [
        {"ignore_eos": True},
        {"min_tokens": 30},
        {"bad_token_ids": [*range(256)]},
        {"allowed_token_ids": [0]},
        {"bad_token_ids": [EOS_ID], "min_tokens": 12},
    ],
    ids=repr,
)
def test_a_complete_text_ends_whatever_else_is_asked(make_llm, extra):
    """Other rules yield if they would leave no token."""
    grammar = Grammar.regex("(ab|cd){3}")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, grammar=grammar, **extra)
    for output in make_llm("EAGLE3", 7).generate([[1, 2], [9]], params):
        assert is_of(output.text, grammar)
        assert (len(output.token_ids), output.finish_reason) == (7, FinishReason.STOP)
