"""Texts by a grammar: legal, complete where they end, and the same whatever speculation does."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import FinishReason, RequestOutput, SamplingParams
from tests.helpers.checkpoints import EOS_ID
from tests.helpers.engines import (
    MakeLLM,
    Pair,
    checked,
    continued,
    llm_maker,
    switch_every_round,
    texts,
)
from tests.helpers.grammars import PARENTHESES, byte_compiler, ids_of, is_of, is_valid
from tests.helpers.plain_logprobs import close

SWITCHING = (0, 7, 1, 0, 3, 0, 0, 7)
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 6},
        "b": {"type": "array", "items": {"enum": [1, "é", None]}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS: list[Grammar | None] = [
    Grammar.json_schema(SCHEMA),
    Grammar.regex("[A-Z][a-z]{2,8} [0-9]{3}"),
    None,
    Grammar.choice(["yes", "no", "not sure", "nothing"]),
    Grammar.ebnf(PARENTHESES),
    Grammar.json_object(),
    Grammar.regex("(ab?|b)*c"),
    Grammar.json_schema({"type": "integer", "minimum": -5, "maximum": 2000}),
]
EXTRAS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"repetition_penalty": 1.3, "logprobs": 1},
    {"logit_bias": {7: 4.0}},
    {"min_tokens": 6},
    {"frequency_penalty": 0.4, "min_tokens": 8},
    {"bad_token_ids": [*b"abcdefghij"], "logprobs": 2},
    {"stop": "bb", "ignore_eos": True},
    {"top_k": 5, "stop_token_ids": [*b"7"]},
]


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every kind of grammar in one batch, with all that may come together with one."""
    rng = random.Random(1)
    lengths = [1, 2, 5, 11, 20, 33, 45, 16]
    prompts = [[rng.randrange(256) for _ in range(n)] for n in lengths]
    params = [
        SamplingParams(
            max_tokens=20 + 5 * i,
            temperature=(0.0, 0.7, 1.0)[i % 3],
            seed=40 + i,
            grammar=grammar,
            **extra,
        )
        for i, (grammar, extra) in enumerate(zip(GRAMMARS, EXTRAS, strict=True))
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


def check(output: RequestOutput, params: SamplingParams) -> None:
    """Whether every token was legal, and the text is one of the grammar if the grammar ended it.

    Tokens are judged one at a time, by a matcher of their own.
    """
    grammar = params.grammar
    if grammar is None:
        return
    matcher = byte_compiler().matcher(grammar)
    for token in output.token_ids:
        assert token in ids_of(matcher.mask())
        if token != EOS_ID:
            assert matcher.advance([token])
    if output.token_ids[-1] == EOS_ID:
        assert output.finish_reason is FinishReason.STOP
        assert is_of(bytes(output.token_ids[:-1]).decode(errors="surrogateescape"), grammar)
    else:
        assert EOS_ID not in output.token_ids


def test_without_speculation_every_text_is_legal_and_some_are_complete(
    off: list[RequestOutput],
) -> None:
    for output, params in zip(off, prompts_and_params()[1], strict=True):
        check(output, params)
    assert sum(output.token_ids[-1] == EOS_ID for output in off) > 3


@pytest.mark.parametrize(
    ("algorithm", "batch"),
    [
        ("NONE", 8),
        ("EAGLE3", 1),
        ("EAGLE3", 8),
        ("EAGLE", 8),
        ("STANDALONE", 3),
        ("MEDUSA", 8),
        ("NGRAM", 2),
    ],
)
def test_speculation_never_changes_a_text_by_a_grammar(
    make_llm: MakeLLM, off: list[RequestOutput], algorithm: str, batch: int
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, 0 if algorithm == "NONE" else 4, max_num_seqs=batch)
    outputs = llm.generate(prompts, params)
    close(outputs, off)
    assert llm.engine.worker.grammars.num_followed == 0, "who has left is forgotten"
    kept = [output.speculation.num_correct_drafts for output in outputs]
    assert algorithm == "NONE" or sum(kept) - kept[2] > 0, "some drafts must be kept by grammar"


@pytest.mark.parametrize("algorithm", ["EAGLE3", "MEDUSA", "NGRAM"])
def test_nothing_that_happens_to_a_request_changes_its_text_by_a_grammar(
    make_llm: MakeLLM, off: list[RequestOutput], algorithm: str
) -> None:
    """Another tier every round, ragged depths, prompts in pieces, and too few pages."""
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, 3, num_pages=28, max_model_len=112, max_num_batched_tokens=19)
    switch_every_round(llm, (0, 4, 1, 0, 3) if algorithm == "MEDUSA" else SWITCHING)
    close(llm.generate(prompts, params), off)
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "MEDUSA", "STANDALONE"])
def test_drafts_that_branch_change_no_text_by_a_grammar(
    make_llm: MakeLLM, off: list[RequestOutput], algorithm: str
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm(
        algorithm, 3, speculative_eagle_topk=3, speculative_num_draft_tokens=11, max_num_seqs=6
    )
    outputs = llm.generate(prompts, params)
    close(outputs, off)
    kept = [output.speculation.num_correct_drafts for output in outputs]
    assert sum(kept) - kept[2] > 0, "some drafts must be kept by grammar"
    switch_every_round(llm, (0, DraftShape(3, 9, 3), 2, DraftShape(2, 5, 3)))
    close(llm.generate(prompts, params), off)


def test_rounds_that_lanes_can_not_run_change_no_text_by_a_grammar(
    make_llm: MakeLLM, off: list[RequestOutput]
) -> None:
    """Whoever asks for the log-probabilities of a prompt takes all others along to the host."""
    prompts, params = prompts_and_params()
    llm = make_llm("EAGLE3", 3, max_num_seqs=3)
    asking = [replace(p, prompt_logprobs=0 if i > 2 else None) for i, p in enumerate(params)]
    outputs = llm.generate(prompts, asking)
    close([replace(output, prompt_logprobs=None) for output in outputs], off)


def test_who_has_no_grammar_keeps_its_text_beside_and_after_others(
    make_llm: MakeLLM, pair: Pair
) -> None:
    prompts, params = prompts_and_params()
    free = [replace(p, grammar=None) for p in params]
    alone = texts(llm_maker(pair, "cpu")().generate(prompts, free))
    llm = make_llm("EAGLE3", 3, max_num_seqs=3)
    mixed = [q for i, q in enumerate(params) for q in (q, free[i])]
    twice = [p for p in prompts for _ in range(2)]
    assert texts(llm.generate(twice, mixed)[1::2]) == alone


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
@pytest.mark.parametrize("num_emitted", [1, 4, 15])
def test_what_another_engine_generated_counts(
    make_llm: MakeLLM, off: list[RequestOutput], algorithm: str, num_emitted: int
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, 0 if algorithm == "NONE" else 3)
    assert continued(llm, prompts, params, off, num_emitted) == texts(off)


def test_an_aborted_request_leaves_nothing_behind(
    make_llm: MakeLLM, off: list[RequestOutput]
) -> None:
    prompts, params = prompts_and_params()
    engine = make_llm("EAGLE3", 3).engine
    for i, output in enumerate(off):
        engine.add(engine.new_sequence(str(i), prompts[i], params[i]))
        said = [t for _ in range(3) for delta in engine.step() for t in delta.token_ids]
        assert said == list(output.token_ids[: len(said)])
        engine.abort(str(i))
        assert engine.worker.grammars.num_followed == 0


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
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
def test_a_complete_text_ends_whatever_else_is_asked(
    make_llm: MakeLLM, algorithm: str, extra: dict[str, Any]
) -> None:
    """Other rules yield where they leave nothing; elsewhere they hold."""
    grammar = Grammar.regex("(ab|cd){3}")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, grammar=grammar, **extra)
    outputs = make_llm(algorithm, 0 if algorithm == "NONE" else 7).generate([[1, 2], [9]], params)
    for output in outputs:
        assert is_of(output.text, grammar)
        assert (len(output.token_ids), output.finish_reason) == (7, FinishReason.STOP)


def test_bad_tokens_never_come_where_the_grammar_has_others(make_llm: MakeLLM) -> None:
    params = [
        SamplingParams(
            max_tokens=40,
            temperature=1.5,
            seed=seed,
            grammar=Grammar.regex("[a-z]{10,30}"),
            bad_token_ids=[*b"aeiou"],
            min_tokens=20,
        )
        for seed in range(6)
    ]
    for output in make_llm("EAGLE3", 3).generate([[1]] * 6, params):
        assert not set(output.text) & set("aeiou")
        assert len(output.token_ids) >= 20


def test_a_text_that_becomes_too_much_for_the_limits_ends_and_others_go_on(
    make_llm: MakeLLM,
) -> None:
    heavy = Grammar.regex("x((a{1,100}){1,100}){1,100}")
    params = [
        SamplingParams(max_tokens=60, temperature=0.0, grammar=grammar, min_tokens=50)
        for grammar in (heavy, Grammar.regex("[ab]{99}"))
    ]
    ended, other = make_llm("EAGLE3", 3).generate([[1, 2, 3]] * 2, params)
    assert (ended.token_ids[-1], ended.finish_reason) == (EOS_ID, FinishReason.STOP)
    assert ended.text == "x" + "a" * (len(ended.token_ids) - 2)
    assert len(other.text) == 60


@pytest.fixture(scope="module")
def engines(make_llm: MakeLLM) -> list[LLM]:
    """Small pools and batches, so that requests of any kind meet, wait and give way."""
    room = {"num_pages": 40, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    llms = [make_llm(), make_llm("EAGLE3", 3, **room), make_llm("NGRAM", 7, **room)]
    for llm in llms[1:]:
        switch_every_round(llm, SWITCHING)
    return llms


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 255), min_size=1, max_size=20),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(8, 16),
            temperature=st.sampled_from([0.0, 0.8, 1.3]),
            top_p=st.sampled_from([1.0, 0.9]),
            frequency_penalty=st.sampled_from([0.0, 0.7]),
            bad_token_ids=st.lists(st.integers(40, 120), max_size=9),
            min_tokens=st.sampled_from([0, 3, 8]),
            seed=st.integers(0, 1000),
            logprobs=st.sampled_from([None, 2]),
            ignore_eos=st.booleans(),
            grammar=st.sampled_from(GRAMMARS),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(batch=requests)
def test_any_requests_together_get_the_text_they_get_alone_without_speculation(
    engines: list[LLM], batch: list[tuple[list[int], SamplingParams]]
) -> None:
    prompts, params = [p for p, _ in batch], [q for _, q in batch]
    plainly, *on = engines
    off = [plainly.generate([p], q)[0] for p, q in batch]
    for llm in on:
        close(llm.generate(prompts, params), off)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "MEDUSA", "STANDALONE", "NGRAM"])
@pytest.mark.parametrize("execution", ["eager", "lanes"])
def test_trained_drafts_of_the_shipped_model_write_valid_json(
    shipped_off: list[RequestOutput], algorithm: str, execution: str
) -> None:
    """A vocabulary with merges, where most of a text's tokens are drawn among few."""
    outputs = shipped(algorithm, 3, execution).generate(*shipped_requests())
    close(outputs, shipped_off)
    kept = sum(output.speculation.num_correct_drafts for output in outputs)
    assert kept > 0 or algorithm == "NGRAM", "such short texts hardly repeat themselves"


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def shipped_requests() -> tuple[list[str], list[SamplingParams]]:
    person = SamplingParams(max_tokens=90, grammar=Grammar.json_schema(PERSON), seed=3)
    grammars = [Grammar.regex(r"[A-Z][a-z]{2,8} [0-9]{3}"), Grammar.choice(["yes", "no", "well"])]
    params = [replace(person, temperature=t) for t in (0.0, 0.8)]
    params += [replace(person, grammar=grammar, temperature=0.9) for grammar in grammars]
    return ["def main(x):\n    return"] * len(params), params


def shipped(algorithm: str, num_steps: int, execution: str) -> LLM:
    speculative: dict[str, Any] = {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": num_steps,
        "speculative_adaptive": False,
        "speculative_draft_dtype": "float32",
    }
    if algorithm not in ("NONE", "NGRAM"):
        speculative["speculative_draft_model_path"] = f"asset:tiny/{algorithm.lower()}"
    model = {"path": "asset:tiny/target", "device": "cpu", "dtype": "float32"}
    cache = {"page_size": 16, "num_pages": 64}
    settings_ = {"model": model, "speculative": speculative, "cache": cache}
    return checked(LLM(settings_, execution=execution, max_model_len=128, max_num_seqs=4))


@pytest.fixture(scope="module")
def shipped_off() -> list[RequestOutput]:
    outputs = shipped("NONE", 0, "eager").generate(*shipped_requests())
    for output, params in zip(outputs, shipped_requests()[1], strict=True):
        assert output.finish_reason is FinishReason.STOP
        assert params.grammar is not None
        assert is_of(output.text, params.grammar)
    assert all(is_valid(output.text, PERSON) for output in outputs[:2])
    return outputs


@pytest.mark.parametrize("execution", ["eager", "lanes"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_texts_of_sampled_drafts_judged_by_rejection_are_of_the_grammar(
    pair: Pair, method: str, execution: str
) -> None:
    """They are others than without speculation, so that validity is what is left to ask."""
    prompts, params = prompts_and_params()
    hot = [replace(p, temperature=1.0) for p in params]
    llm = llm_maker(pair, "cpu")("EAGLE3", 4, rejection_sample_method=method, execution=execution)
    outputs = llm.generate(prompts, hot)
    for output, asked in zip(outputs, hot, strict=True):
        check(output, asked)
    kept = [output.speculation.num_correct_drafts for output in outputs]
    assert sum(kept) - kept[2] > 0


def test_a_grammar_is_refused_before_anything_runs(make_llm: MakeLLM) -> None:
    llm = make_llm()
    bad = replace(Grammar.regex("(a"), source="guided_regex")
    with pytest.raises(InvalidRequest) as refusal:
        llm.generate([[1]], SamplingParams(grammar=bad))
    assert refusal.value.field == "guided_regex"
    assert not llm.engine.has_work


def test_where_acceptance_is_forced_no_grammar_can_hold(make_llm: MakeLLM) -> None:
    llm = make_llm("EAGLE3", 3, synthetic_acceptance=2.0)
    with pytest.raises(InvalidRequest, match="forces acceptance"):
        llm.generate([[1]], SamplingParams(grammar=Grammar.json_object()))
