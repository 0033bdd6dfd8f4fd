"""The request schema is closed, strict, and honest about what this version can not do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.serving.openai import CompletionRequest, invalid_body


def parse(**body: Any) -> CompletionRequest:
    """A body as it arrives: through JSON."""
    return CompletionRequest.model_validate(json.loads(json.dumps({"prompt": "a", **body})))


def refusal(**body: Any) -> dict[str, Any]:
    """The error object for a body that the schema refuses."""
    with pytest.raises(ValidationError) as caught:
        parse(**body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    answer = invalid_body(errors)
    assert answer.status == 400
    error = answer.body()["error"]
    assert isinstance(error, dict)
    return error


def test_a_bare_prompt_means_the_defaults_of_the_openai_api() -> None:
    params = parse().sampling_params()
    assert params == SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p) == (16, 1.0, 1.0)


def test_null_means_the_default_for_every_optional_field() -> None:
    optional = set(CompletionRequest.model_fields) - {"prompt"}
    assert parse(**dict.fromkeys(optional)).sampling_params() == SamplingParams()


def test_every_sampling_field_reaches_the_engine() -> None:
    body = parse(
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=-3,
        stop=["x", "yz"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        speculative={"enabled": False, "max_steps": 2},
    )
    assert body.sampling_params() == SamplingParams(
        max_tokens=5,
        temperature=0,
        top_k=7,
        top_p=0.5,
        min_p=0.1,
        seed=-3,
        stop=("x", "yz"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        speculative=SpeculativeOptions(enabled=False, max_steps=2),
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [("a b", "a b"), ("", ""), ([1, 2], [1, 2]), (["a"], "a"), ([[1, 2]], [1, 2])],
    ids=repr,
)
def test_one_prompt_may_come_in_any_of_the_shapes_of_the_api(given: object, meant: object) -> None:
    assert parse(prompt=given).prompt == meant


@pytest.mark.parametrize(
    "given",
    [[], [[]], ["a", "b"], [[1], [2]], [1, "a"], [True], [1.0], 3, {"a": 1}, None],
    ids=repr,
)
def test_any_other_prompt_is_refused_by_name(given: object) -> None:
    assert refusal(prompt=given)["param"] == "prompt"


def test_several_prompts_are_refused_with_a_way_out() -> None:
    assert "send one each" in refusal(prompt=["a", "b"])["message"]


NEUTRAL = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1.0,
    "suffix": "",
}


def test_fields_that_are_not_available_are_taken_at_their_neutral_value() -> None:
    assert parse(**NEUTRAL).sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("echo", True),
        ("frequency_penalty", 0.1),
        ("logit_bias", {"5": 1.0}),
        ("logprobs", 0),
        ("n", 2),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("suffix", "end"),
    ],
)
def test_fields_that_are_not_available_are_refused_at_any_other_value(
    field: str, value: object
) -> None:
    with pytest.raises(InvalidRequest, match="not available") as caught:
        parse(**{field: value}).sampling_params()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "field", "suggestion"),
    [
        ({"max_token": 3}, "max_token", "max_tokens"),
        ({"speculative": {"max_step": 3}}, "speculative.max_step", "speculative.max_steps"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
    ],
)
def test_an_unknown_field_is_refused_and_the_nearest_known_one_named(
    body: dict[str, Any], field: str, suggestion: str
) -> None:
    error = refusal(**body)
    assert error["param"] == field
    assert suggestion in error["message"]


@pytest.mark.parametrize("field", ["prompt", "stop"])
def test_half_a_surrogate_pair_is_no_text(field: str) -> None:
    error = refusal(**{field: "a\ud800"})
    assert error["param"] == field
    assert "surrogates" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 10**30),
        ("top_k", 2**31),
        ("stop_token_ids", [1, 2**63]),
        ("speculative", {"max_steps": 2**31}),
        ("max_tokens", "3"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("stream", 1),
        ("stop", [1]),
        ("stop", {}),
        ("seed", 2**63),
        ("model", 3),
        ("speculative", True),
        ("stop_token_ids", ["a"]),
    ],
    ids=str,
)
def test_values_are_not_coerced(field: str, value: object) -> None:
    assert refusal(**{field: value})["param"].split(".")[0] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"stop": ""}, "stop"),
        ({"speculative": {"max_steps": -1}}, "speculative.max_steps"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**body).sampling_params()
    assert caught.value.field == field
