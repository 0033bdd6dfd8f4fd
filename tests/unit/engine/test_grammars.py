"""Texts by a grammar: legal, complete where they end, and the same whatever speculation does."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from serve_spec import LLM
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import FinishReason, RequestOutput, SamplingParams
from tests.helpers.checkpoints import EOS_ID
from tests.helpers.engines import (
    MakeLLM,
    checked,
)
from tests.helpers.grammars import PARENTHESES, byte_compiler, ids_of, is_of, is_valid
from tests.helpers.plain_logprobs import close

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


@pytest.fixture(scope="module")
def off(make_llm: MakeLLM) -> list[RequestOutput]:
    """Every request without speculation."""
    return make_llm().generate(*prompts_and_params())


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


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "MEDUSA", "STANDALONE", "NGRAM"])
def test_trained_drafts_of_the_shipped_model_write_valid_json(
    shipped_off: list[RequestOutput], algorithm: str
) -> None:
    """A vocabulary with merges, where most of a text's tokens are drawn among few."""
    outputs = shipped(algorithm, 3).generate(*shipped_requests())
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


def shipped(algorithm: str, num_steps: int) -> LLM:
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
    return checked(LLM(settings_, max_model_len=128, max_num_seqs=4))


@pytest.fixture(scope="module")
def shipped_off() -> list[RequestOutput]:
    outputs = shipped("NONE", 0).generate(*shipped_requests())
    for output, params in zip(outputs, shipped_requests()[1], strict=True):
        assert output.finish_reason is FinishReason.STOP
        assert params.grammar is not None
        assert is_of(output.text, params.grammar)
    assert all(is_valid(output.text, PERSON) for output in outputs[:2])
    return outputs


@pytest.mark.parametrize("method", ["standard", "block"])
def test_texts_of_sampled_drafts_judged_by_rejection_are_of_the_grammar(
    make_llm: MakeLLM, method: str
) -> None:
    """They are others than without speculation, so that validity is what is left to ask."""
    prompts, params = prompts_and_params()
    hot = [replace(p, temperature=1.0) for p in params]
    llm = make_llm("EAGLE3", 4, rejection_sample_method=method)
    outputs = llm.generate(prompts, hot)
    for output, asked in zip(outputs, hot, strict=True):
        check(output, asked)
    assert llm.engine.worker.grammars.num_followed == 0, "requests that ended are forgotten"
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
