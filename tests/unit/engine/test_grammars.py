"""Texts by a grammar: legal, complete where they end, and the same whatever speculation does."""

import json
from dataclasses import replace

import pytest

from serve_spec import LLM
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import FinishReason, SamplingParams
from tests.helpers.checkpoints import EOS_ID
from tests.helpers.grammars import check_text, is_of, is_valid
from tests.helpers.plain_logprobs import close
from tests.unit.engine.test_conformance import requests


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
    """Other rules yield where they leave nothing; elsewhere they hold."""
    grammar = Grammar.regex("(ab|cd){3}")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, grammar=grammar, **extra)
    for output in make_llm("EAGLE3", 7).generate([[1, 2], [9]], params):
        assert is_of(output.text, grammar)
        assert (len(output.token_ids), output.finish_reason) == (7, FinishReason.STOP)


def test_trained_drafts_of_the_shipped_model_write_valid_json():
    """A vocabulary with merges, where most of a text's tokens are drawn among few."""
    grammar = Grammar.json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": False,
        }
    )
    params = [
        SamplingParams(max_tokens=90, grammar=grammar, seed=3, temperature=t) for t in (0.0, 0.8)
    ]
    keys = {"device": "cpu", "dtype": "float32", "speculative_adaptive": False}
    plain, drafted = (
        LLM("configs/tiny.yaml", speculative_num_steps=steps, **keys).generate(
            ["def main(x):\n    return"] * 2, params
        )
        for steps in (0, 3)
    )
    close(drafted, plain)
    assert all(is_valid(output.text, json.loads(grammar.text)) for output in drafted)
    assert sum(output.speculation.num_correct_drafts for output in drafted) > 0


@pytest.mark.parametrize("method", ["standard", "block"])
def test_texts_of_sampled_drafts_judged_by_rejection_are_of_the_grammar(make_llm, method):
    """They are others than without speculation, so that validity is what is left to ask."""
    asked = requests(("grammar",))
    params = [replace(request.params, temperature=1.0) for request in asked]
    llm = make_llm("EAGLE3", 4, rejection_sample_method=method)
    outputs = llm.generate([request.prompt for request in asked], params)
    for output, request in zip(outputs, asked, strict=True):
        assert request.params.grammar is not None
        check_text(output.token_ids, request.params.grammar)
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 0


def test_where_acceptance_is_forced_no_grammar_can_hold(make_llm):
    llm = make_llm("EAGLE3", 3, synthetic_acceptance=2.0)
    with pytest.raises(InvalidRequest, match="forces acceptance"):
        llm.generate([[1]], SamplingParams(grammar=Grammar.json_object()))
