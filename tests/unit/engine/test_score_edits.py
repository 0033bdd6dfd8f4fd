"""Bias, penalties and masks: the plain law's, whatever speculation does to the rounds."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_spec import LLM
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason, RequestOutput, SamplingParams
from tests.helpers.checkpoints import EOS_ID, VOCAB
from tests.helpers.engines import (
    MakeLLM,
    Pair,
    continued,
    llm_maker,
    switch_every_round,
    texts,
)
from tests.helpers.plain_edits import edited
from tests.helpers.plain_logprobs import CLOSE, PlainLogprobs, close, processed

SWITCHING = (0, 7, 1, 0, 3, 0, 0, 7)
EDITS: list[dict[str, object]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"logit_bias": {7: 4.0, 100: -100.0, 200: 2.5}},
    {},
    {"allowed_token_ids": [*range(40, 90)], "frequency_penalty": 0.3},
    {"bad_token_ids": [*range(0, 256, 3)], "repetition_penalty": 0.8},
    {"logit_bias": {EOS_ID: 100.0}, "min_tokens": 9},
    {"presence_penalty": 2.0, "repetition_penalty": 1.1, "logit_bias": {3: 5.0}},
]


def span(start: int, end: int) -> list[int]:
    return list(range(start, end))


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every kind of edit in one batch, at every temperature; some ask for log-probabilities."""
    rng = random.Random(1)
    lengths = [1, 2, 5, 11, 20, 33, 45, 16]
    prompts = [[rng.randrange(256) for _ in range(n)] for n in lengths]
    filters = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}]
    params = [
        SamplingParams(
            max_tokens=16 + 2 * i,
            temperature=(0.0, 0.7, 1.0)[i % 3],
            seed=40 + i,
            ignore_eos=bool(i % 2),
            logprobs=(3, None)[i % 2],
            **filters[i % 4],
            **EDITS[i],
        )
        for i in range(len(lengths))
    ]
    return prompts, params


@pytest.fixture(scope="module", params=["eager", "lanes"])
def make_llm(pair: Pair, request: pytest.FixtureRequest) -> MakeLLM:
    """Engines that know every length before a round, and engines that run ahead of the host."""
    return partial(llm_maker(pair, "cpu"), execution=request.param)


@pytest.fixture(scope="module")
def off(pair: Pair) -> list[RequestOutput]:
    """Every request alone, without speculation."""
    prompts, params = prompts_and_params()
    llm = llm_maker(pair, "cpu")()
    return [llm.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]


@pytest.fixture(scope="module")
def plain(pair: Pair) -> PlainLogprobs:
    return PlainLogprobs(pair.target)


def check(output: RequestOutput, params: SamplingParams, plain: PlainLogprobs) -> None:
    """Whether every token is one that the plain law could draw, and its log-probability the law's.

    At temperature 0 that is one token.
    """
    prompt, tokens = list(output.prompt_token_ids), list(output.token_ids)
    rows = plain.logits(prompt + tokens)[len(prompt) - 1 : -1]
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        scores = edited(row, prompt, tokens[:i], params, [EOS_ID])
        expected = processed(scores, params)
        assert token in expected
        if params.is_greedy:
            assert max(scores) - scores[token] < 1e-4
        if output.logprobs is not None:
            entry = output.logprobs[i]
            assert entry.logprob == pytest.approx(expected[token], **CLOSE)
            top = dict(entry.top)
            assert top == pytest.approx({t: expected[t] for t in top}, **CLOSE)


def test_without_speculation_tokens_and_log_probabilities_are_the_plain_laws(
    off: list[RequestOutput], plain: PlainLogprobs
) -> None:
    for output, params in zip(off, prompts_and_params()[1], strict=True):
        check(output, params, plain)


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3", "EAGLE"])
@pytest.mark.parametrize("num_steps", [1, 7])
@pytest.mark.parametrize("batch", [1, 8])
def test_speculation_never_changes_an_edited_text(
    make_llm: MakeLLM, off: list[RequestOutput], algorithm: str, num_steps: int, batch: int
) -> None:
    prompts, params = prompts_and_params()
    steps = 0 if algorithm == "NONE" else num_steps
    outputs = make_llm(algorithm, steps, max_num_seqs=batch).generate(prompts, params)
    close(outputs, off)
    if steps == 7:
        kept = [output.speculation.num_correct_drafts for output in outputs]
        assert sum(kept) - kept[3] > 0, "the test needs drafts kept in texts that are edited"


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
def test_nothing_that_happens_to_a_request_changes_its_edited_text(
    make_llm: MakeLLM, off: list[RequestOutput], algorithm: str
) -> None:
    """Another tier every round, ragged depths, prompts in pieces, and too few pages."""
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, 3, num_pages=24, max_model_len=96, max_num_batched_tokens=19)
    switch_every_round(llm, SWITCHING)
    close(llm.generate(prompts, params), off)
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"


def test_rounds_that_lanes_can_not_run_change_no_edited_text(
    make_llm: MakeLLM, off: list[RequestOutput]
) -> None:
    """Whoever asks for the log-probabilities of a prompt takes all others along to the host."""
    prompts, params = prompts_and_params()
    llm = make_llm("EAGLE3", 3, max_num_seqs=3)
    asking = [replace(p, prompt_logprobs=0 if i > 2 else None) for i, p in enumerate(params)]
    outputs = llm.generate(prompts, asking)
    close([replace(output, prompt_logprobs=None) for output in outputs], off)


def test_requests_that_edit_nothing_keep_their_text_beside_others(
    make_llm: MakeLLM, pair: Pair
) -> None:
    prompts, params = prompts_and_params()
    alone = llm_maker(pair, "cpu")().generate([prompts[3]], params[3])[0]
    assert not params[3].edits_scores
    beside = make_llm("EAGLE3", 3).generate(prompts, params)[3]
    assert beside.token_ids == alone.token_ids


def test_a_lane_forgets_the_edits_of_who_had_it_before(
    make_llm: MakeLLM, off: list[RequestOutput]
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm("EAGLE3", 3, max_num_seqs=1)
    order = [7, 3, 4, 3, 5, 3, 0]
    outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    close(outputs, [off[i] for i in order])


@pytest.fixture(scope="module")
def engines(make_llm: MakeLLM) -> list[LLM]:
    """Small pools and batches, so that requests of any kind meet, wait and give way."""
    room = {"num_pages": 40, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    llms = [make_llm(), make_llm("EAGLE3", 3, **room), make_llm("EAGLE", 7, **room)]
    for llm in llms[1:]:
        switch_every_round(llm, SWITCHING)
    return llms


token_ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 255), min_size=1, max_size=20),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(8, 14),
            temperature=st.sampled_from([0.0, 0.8, 1.3]),
            top_k=st.sampled_from([-1, 3]),
            top_p=st.sampled_from([1.0, 0.9]),
            frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, 2.0, -1.0]),
            presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.4]),
            repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.7]),
            logit_bias=st.dictionaries(
                st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0, 6.5]), max_size=4
            ),
            allowed_token_ids=st.none() | token_ids.map(lambda ids: [*ids, 5, 77]),
            bad_token_ids=st.lists(st.integers(80, VOCAB - 1), max_size=6),
            min_tokens=st.sampled_from([0, 0, 3, 8]),
            stop_token_ids=st.lists(st.integers(80, VOCAB - 1), max_size=3),
            seed=st.integers(0, 1000),
            logprobs=st.sampled_from([None, 0, 4]),
            prompt_logprobs=st.sampled_from([None, None, 0]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests)
def test_any_requests_together_get_the_text_they_get_alone_without_speculation(
    engines: list[LLM], plain: PlainLogprobs, batch: list[tuple[list[int], SamplingParams]]
) -> None:
    prompts, params = [p for p, _ in batch], [q for _, q in batch]
    plainly, *on = engines
    off = [plainly.generate([p], q)[0] for p, q in batch]
    for output, asked in zip(off, params, strict=True):
        check(output, asked, plain)
    for llm in on:
        close(llm.generate(prompts, params), off)


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
def test_every_token_is_allowed_and_none_is_bad(make_llm: MakeLLM, algorithm: str) -> None:
    prompts, _ = prompts_and_params()
    params = SamplingParams(
        max_tokens=30,
        temperature=1.5,
        seed=1,
        ignore_eos=True,
        allowed_token_ids=span(60, 70),
        bad_token_ids=span(64, 68),
    )
    llm = make_llm(algorithm, 0 if algorithm == "NONE" else 7)
    drawn = {token for output in llm.generate(prompts, params) for token in output.token_ids}
    assert drawn == {60, 61, 62, 63, 68, 69}


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
@pytest.mark.parametrize("min_tokens", [0, 1, 6])
@pytest.mark.parametrize("end", [{}, {"stop_token_ids": (80,), "ignore_eos": True}])
def test_a_text_that_wants_to_end_ends_right_after_min_tokens(
    make_llm: MakeLLM, algorithm: str, min_tokens: int, end: dict[str, object]
) -> None:
    wanted = 80 if end else EOS_ID
    params = SamplingParams(
        max_tokens=30, temperature=0.0, logit_bias={wanted: 100.0}, min_tokens=min_tokens, **end
    )
    llm = make_llm(algorithm, 0 if algorithm == "NONE" else 7)
    for output in llm.generate([[1, 2, 3], [9] * 30], params):
        assert output.token_ids.index(wanted) == len(output.token_ids) - 1 == min_tokens
        assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
def test_no_stop_string_ends_a_text_before_min_tokens(make_llm: MakeLLM, algorithm: str) -> None:
    params = SamplingParams(
        max_tokens=30, temperature=0.0, allowed_token_ids=[ord("a")], stop="aa", min_tokens=7
    )
    llm = make_llm(algorithm, 0 if algorithm == "NONE" else 7)
    output = llm.generate([[1, 2, 3]], params)[0]
    assert (output.text, len(output.token_ids)) == ("a" * 6, 8)


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
@pytest.mark.parametrize("num_emitted", [1, 7, 15])
def test_what_another_engine_generated_counts_as_generated(
    make_llm: MakeLLM, off: list[RequestOutput], algorithm: str, num_emitted: int
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, 0 if algorithm == "NONE" else 3)
    assert continued(llm, prompts, params, off, num_emitted) == texts(off)


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
def test_edits_that_no_vocabulary_can_serve_are_refused_by_name(
    make_llm: MakeLLM, field: str, params: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        make_llm().generate([[1]], SamplingParams(**params))
    assert refusal.value.field == field


def test_stop_tokens_of_another_vocabulary_hold_nothing_back(make_llm: MakeLLM) -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(VOCAB + 7, 2**40), seed=0)
    assert len(make_llm().generate([[1]], params)[0].token_ids) >= 2


def test_extreme_edits_leave_scores_from_which_a_token_can_be_drawn(make_llm: MakeLLM) -> None:
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
