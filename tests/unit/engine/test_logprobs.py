"""Log-probabilities are the plain model's, whatever speculation does, and cost the text nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_spec import LLM
from serve_spec.core.logprobs import TokenLogprob
from serve_spec.core.request import RequestOutput, SamplingParams, SpeculativeOptions
from tests.helpers.engines import MakeLLM, Pair, llm_maker, switch_every_round
from tests.helpers.plain_logprobs import CLOSE, Distribution, PlainLogprobs, close

SWITCHING = (0, 7, 1, 0, 3, 0, 0, 7)
FILTERS = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02, "top_k": 50}, {}]
AS_THE_MODEL_GIVES = SamplingParams(temperature=1.0)


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every temperature and filter in one batch; one request in five asks for nothing."""
    rng = random.Random(0)
    lengths = [1, 2, 5, 11, 20, 33, 45, 16]
    prompts = [[rng.randrange(256) for _ in range(n)] for n in lengths]
    params = [
        SamplingParams(
            max_tokens=10 + 2 * i,
            temperature=(0.0, 0.7, 1.0)[i % 3],
            seed=40 + i,
            ignore_eos=True,
            logprobs=(0, 5, 20, 1, None)[i % 5],
            prompt_logprobs=(None, 2, 0)[i % 3],
            **FILTERS[i % 5],
        )
        for i in range(len(lengths))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def plain(pair: Pair) -> PlainLogprobs:
    return PlainLogprobs(pair.target)


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


def agrees(entry: TokenLogprob, token: int, expected: Distribution, num_top: int) -> None:
    """Whether an entry says what the distribution says of this token."""
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(expected[token], **CLOSE)
    assert entry.rank == list(expected).index(token) + 1
    assert [t for t, _ in entry.top] == list(expected)[:num_top]
    for other, logprob in entry.top:
        assert logprob == pytest.approx(expected[other], **CLOSE)


def check(output: RequestOutput, params: SamplingParams, plain: PlainLogprobs) -> None:
    """Whether an answer tells exactly what was asked, and the plain model's figures."""
    prompt, tokens = list(output.prompt_token_ids), list(output.token_ids)
    if params.logprobs is None:
        assert output.logprobs is None
    else:
        assert output.logprobs is not None
        expected = plain(prompt + tokens, params)[len(prompt) - 1 : -1]
        for entry, token, given_ in zip(output.logprobs, tokens, expected, strict=True):
            agrees(entry, token, given_, params.logprobs)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs is not None
        first, *rest = output.prompt_logprobs
        assert first is None
        expected = plain(prompt, AS_THE_MODEL_GIVES)[:-1]
        for entry, token, given_ in zip(rest, prompt[1:], expected, strict=True):
            assert entry is not None
            agrees(entry, token, given_, params.prompt_logprobs)


def test_without_speculation_they_are_the_plain_models(
    off: list[RequestOutput], plain: PlainLogprobs
) -> None:
    for output, params in zip(off, prompts_and_params()[1], strict=True):
        check(output, params, plain)


@pytest.mark.parametrize(
    ("algorithm", "num_steps"),
    [("NONE", 0), ("EAGLE3", 1), ("EAGLE3", 7), ("EAGLE", 1), ("EAGLE", 7)],
)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_speculation_never_changes_them(
    make_llm: MakeLLM, off: list[RequestOutput], algorithm: str, num_steps: int, batch: int
) -> None:
    prompts, params = prompts_and_params()
    outputs = make_llm(algorithm, num_steps, max_num_seqs=batch).generate(prompts, params)
    close(outputs, off)
    if num_steps:
        assert sum(output.speculation.num_correct_drafts for output in outputs) > 0


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
def test_nothing_that_happens_to_a_request_changes_them(
    make_llm: MakeLLM, off: list[RequestOutput], algorithm: str
) -> None:
    """Another tier every round, ragged depths, prompts in pieces, and too few pages."""
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, 3, num_pages=24, max_model_len=96, max_num_batched_tokens=19)
    switch_every_round(llm, SWITCHING)
    close(llm.generate(prompts, params), off)
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
def test_asking_never_changes_a_text_and_who_does_not_ask_gets_nothing(
    make_llm: MakeLLM, algorithm: str
) -> None:
    prompts, params = prompts_and_params()
    silent = [replace(p, logprobs=None, prompt_logprobs=None) for p in params]
    llm = make_llm(algorithm, 0 if algorithm == "NONE" else 3)
    asked, unasked = llm.generate(prompts, params), llm.generate(prompts, silent)
    assert [o.token_ids for o in asked] == [o.token_ids for o in unasked]
    assert all(o.logprobs is None and o.prompt_logprobs is None for o in unasked)


@pytest.fixture(scope="module")
def engines(make_llm: MakeLLM) -> list[LLM]:
    """Small pools and batches, so that requests of any kind meet, wait and give way."""
    room = {"num_pages": 40, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    llms = [make_llm(), make_llm("EAGLE3", 3, **room), make_llm("EAGLE", 7, **room)]
    for llm in llms[1:]:
        switch_every_round(llm, SWITCHING)
    return llms


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 255), min_size=1, max_size=20),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 12),
            temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
            top_k=st.sampled_from([-1, 1, 3, 40]),
            top_p=st.sampled_from([1.0, 0.9, 0.4]),
            min_p=st.sampled_from([0.0, 0.05]),
            seed=st.integers(0, 1000),
            logprobs=st.sampled_from([None, 0, 1, 20]),
            prompt_logprobs=st.sampled_from([None, 0, 3]),
            speculative=st.builds(
                SpeculativeOptions, max_steps=st.sampled_from([None, None, 0, 2])
            ),
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
def test_any_requests_together_are_told_the_plain_models(
    engines: list[LLM], plain: PlainLogprobs, batch: list[tuple[list[int], SamplingParams]]
) -> None:
    prompts, params = [p for p, _ in batch], [q for _, q in batch]
    off, *on = [llm.generate(prompts, params) for llm in engines]
    for output, asked in zip(off, params, strict=True):
        check(output, asked, plain)
    for outputs in on:
        close(outputs, off)


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
def test_tokens_that_a_stop_cuts_off_have_none(
    make_llm: MakeLLM, off: list[RequestOutput], plain: PlainLogprobs, algorithm: str
) -> None:
    prompts, params = prompts_and_params()
    stopping = [
        replace(p, stop_token_ids=(output.token_ids[4],), logprobs=1)
        for p, output in zip(params, off, strict=True)
    ]
    outputs = make_llm(algorithm, 0 if algorithm == "NONE" else 7).generate(prompts, stopping)
    for output, asked in zip(outputs, stopping, strict=True):
        assert len(output.token_ids) <= 5
        check(output, asked, plain)


def test_deltas_carry_theirs_and_the_first_one_the_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm("EAGLE3", 3)
    params = SamplingParams(max_tokens=20, seed=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    llm.engine.add(llm.engine.new_sequence("a", [7, 8, 9], params))
    deltas = []
    while llm.engine.has_work:
        deltas += llm.engine.step()
    assert len(deltas) > 1
    for delta in deltas:
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
    first, *rest = deltas
    assert first.prompt_logprobs is not None
    assert [e and e.token_id for e in first.prompt_logprobs] == [None, 8, 9]
    assert all(delta.prompt_logprobs is None for delta in rest)


def test_a_request_that_another_engine_began_is_told_of_its_new_tokens(
    make_llm: MakeLLM, off: list[RequestOutput]
) -> None:
    prompts, params = prompts_and_params()
    whole, asked = off[6], params[6]
    assert whole.logprobs is not None
    seen = list(whole.token_ids[:4])
    rest = replace(asked, max_tokens=asked.max_tokens - 4, prompt_logprobs=None)
    second = make_llm("EAGLE3", 3).generate([prompts[6] + seen], rest)[0]
    close([second], [replace(whole, token_ids=whole.token_ids[4:], logprobs=whole.logprobs[4:])])


def test_forced_acceptance_tells_of_the_tokens_it_emits(
    make_llm: MakeLLM, plain: PlainLogprobs
) -> None:
    """Such a text is nobody's, but each of its tokens has its place in the plain distribution."""
    llm = make_llm("EAGLE3", 3, synthetic_acceptance=[0.9])
    params = SamplingParams(max_tokens=24, seed=5, logprobs=3, ignore_eos=True)
    output = llm.generate([[1, 2, 3]], params)[0]
    assert output.speculation.accept_length > 2
    check(output, params, plain)
