"""Every sampling parameter means with any drafter, in chains and in trees, what it means without.

One request for each, so that a parameter that is added is missed here before it is missed by a
drafter. What they mean together, and through preemption, the tests of each and `tests/fuzz` ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest

from serve_spec import LLM
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import RequestOutput, SamplingParams, SpeculativeOptions
from tests.helpers.checkpoints import EOS_ID, VOCAB
from tests.helpers.engines import MakeLLM
from tests.helpers.plain_logprobs import close

EXECUTIONS = ["eager", "lanes"]
BASE: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "seed": 1, "ignore_eos": True}
# What each is set to, and what is set beside it with and without it.
EACH: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_tokens": (7, {}),
    "temperature": (1.6, {}),
    "top_k": (2, {"temperature": 1.5}),
    "top_p": (0.3, {"temperature": 1.5}),
    "min_p": (0.4, {"temperature": 1.5}),
    "frequency_penalty": (1.8, {}),
    "presence_penalty": (1.8, {}),
    "repetition_penalty": (1.5, {}),
    "logit_bias": ({9: 4.0, 50: 5.0, 100: -100.0}, {}),
    "allowed_token_ids": (tuple(range(40, 90)), {}),
    "bad_token_ids": (tuple(range(0, VOCAB, 3)), {}),
    "min_tokens": (9, {"logit_bias": {EOS_ID: 100.0}, "ignore_eos": False}),
    "grammar": (Grammar.regex("(ab?|b){6,}c"), {}),
    "seed": (2, {"temperature": 1.5}),
    "stop": (("bca", "cc"), {"allowed_token_ids": tuple(b"abc"), "temperature": 4.0}),
    "stop_token_ids": (tuple(range(0, VOCAB, 7)), {"min_tokens": 4}),
    "ignore_eos": (False, {"logit_bias": {EOS_ID: 9.0}}),
    "logprobs": (3, {}),
    "prompt_logprobs": (2, {}),
    "speculative": (SpeculativeOptions(max_steps=1), {}),
}
# These keep the rounds of all others off lanes, or from being started ahead.
APART = ("grammar", "prompt_logprobs")

NGRAM = {"speculative_ngram_min_match_window_size": 1}
TREE = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 11}
DRAFTERS = [
    *((name, keys) for name in ("EAGLE3", "EAGLE", "MEDUSA", "STANDALONE") for keys in ({}, TREE)),
    *(("NGRAM", {**NGRAM, **keys}) for keys in ({}, TREE)),
    *(("EAGLE3", {**NGRAM, **keys, "speculative_ngram_first": True}) for keys in ({}, TREE)),
]


def request(name: str, *, is_set: bool = True) -> SamplingParams:
    value, beside = EACH[name]
    return SamplingParams(**{**BASE, **beside, **({name: value} if is_set else {})})


def answers(llm: LLM, *, are_set: bool = True) -> dict[str, RequestOutput]:
    """The answer to the request for each parameter."""
    together = [name for name in EACH if name not in APART]
    found: dict[str, RequestOutput] = {}
    for names in (together, APART):
        prompts = [[5 + i, 7, 9 + i, 11] * 3 + [5 + i, 7] for i in range(len(names))]
        params = [request(name, is_set=are_set) for name in names]
        found |= zip(names, llm.generate(prompts, params), strict=True)
    return found


@pytest.fixture(scope="module")
def off(make_llm: MakeLLM) -> dict[str, RequestOutput]:
    return answers(make_llm())


def said(outputs: Sequence[RequestOutput]) -> list[tuple[object, ...]]:
    return [(o.text, o.token_ids, o.finish_reason) for o in outputs]


def test_every_parameter_is_here_and_matters_to_its_request(
    make_llm: MakeLLM, off: dict[str, RequestOutput]
) -> None:
    assert set(EACH) == {field.name for field in fields(SamplingParams)}
    without = answers(make_llm(), are_set=False)
    silent = {"logprobs", "prompt_logprobs", "speculative"}  # of the text, not of the answer
    same = {name for name in EACH if said([off[name]]) == said([without[name]])}
    assert same == silent
    assert off["logprobs"].logprobs is not None is not off["prompt_logprobs"].prompt_logprobs


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    ("algorithm", "keys"),
    DRAFTERS,
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "chains",
)
def test_it_means_the_same_with_drafts_as_without(
    make_llm: MakeLLM,
    off: dict[str, RequestOutput],
    algorithm: str,
    keys: dict[str, Any],
    execution: str,
) -> None:
    on = answers(make_llm(algorithm, 4, execution=execution, max_num_seqs=32, **keys))
    close([*on.values()], [*off.values()])
    assert said([*on.values()]) == said([*off.values()])
    stats = [output.speculation for output in on.values()]
    kept = sum(one.num_correct_drafts for one in stats)
    assert 0 < kept < sum(one.num_draft_tokens for one in stats)
    assert max(on["speculative"].speculation.rounds_by_num_steps) <= 1
