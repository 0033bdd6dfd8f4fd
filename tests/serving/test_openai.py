"""The request schema is closed, strict, and honest about what this version cannot do."""

import json
from typing import get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import MAX_GRAMMAR_CHARS, Grammar
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.serving.errors import refused
from serve_spec.serving.protocols import openai
from serve_spec.serving.protocols.fields import PRESENTATION, UNSUPPORTED, TextPart, ignored_fields
from serve_spec.serving.protocols.validation import invalid_body

USER = {"role": "user", "content": "a"}
TEXT_PART = {"type": "text", "text": "a"}


def parse(**body):
    """A body as it arrives: through JSON."""
    return openai.CompletionRequest.model_validate(json.loads(json.dumps({"prompt": "a", **body})))


def chat(*messages, **body):
    """A conversation as it arrives."""
    given = {"messages": list(messages or [USER])} | body
    return openai.ChatRequest.model_validate(json.loads(json.dumps(given)))


def refusal(make=parse, *messages, **body):
    """The error object for a body that the schema refuses, or what its fields mean."""
    with pytest.raises((ValidationError, InvalidRequest)) as caught:
        make(*messages, **body).sampling_params()
    if isinstance(caught.value, InvalidRequest):
        answer = refused(caught.value)
    else:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
        answer = invalid_body(errors)
    assert answer.status == 400
    return answer.body()["error"]


def test_a_bare_prompt_means_the_defaults_of_the_openai_api():
    params = parse().sampling_params()
    assert params == SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p) == (16, 1.0, 1.0)


def test_null_means_the_default_for_every_optional_field():
    optional = set(openai.CompletionRequest.model_fields) - {"prompt"}
    assert parse(**dict.fromkeys(optional)).sampling_params() == SamplingParams()
    optional = set(openai.ChatRequest.model_fields) - {"messages"}
    assert chat(**dict.fromkeys(optional)).sampling_params() == SamplingParams()


def test_every_sampling_field_reaches_the_engine():
    numbers = {
        "max_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1,
        "frequency_penalty": -1, "presence_penalty": 0.5, "repetition_penalty": 1.2,
        "min_tokens": 2, "seed": -3, "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "prompt_logprobs": 3, "priority": -5, "cache_salt": "s",
        "spaces_between_special_tokens": False,
    }  # fmt: skip
    lists = {
        "allowed_token_ids": [0, 5, 7], "bad_token_ids": [7], "stop": ["x", "yz"],
        "stop_token_ids": [1, 2], "bad_words": ["x", "y z"],
    }  # fmt: skip
    asked = {"enabled": False, "max_steps": 2}
    body = parse(**numbers, **lists, logit_bias={"5": -100, "0": 1.5}, speculative=asked)
    assert body.sampling_params() == SamplingParams(
        **numbers,
        **{name: tuple(values) for name, values in lists.items()},
        logit_bias={5: -100.0, 0: 1.5},
        speculative=SpeculativeOptions(enabled=False, max_steps=2),
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a b", ["a b"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
    ids=repr,
)
def test_prompts_come_in_the_four_shapes_of_the_api(given, meant):
    assert parse(prompt=given).prompt == meant


NEUTRAL = {"metadata": {"a": "b"}, "user": "me"}
NEUTRAL_COMPLETION = {**NEUTRAL, "best_of": 1, "echo": False, "logprobs": None, "suffix": ""}
NEUTRAL_CHAT = {
    **NEUTRAL, "audio": None, "function_call": "none", "functions": [], "logprobs": False,
    "modalities": ["text"], "moderation": None, "parallel_tool_calls": True,
    "prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h",
    "reasoning_effort": "none", "response_format": {"type": "text"}, "service_tier": "auto",
    "store": False, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (completion_create_params.CompletionCreateParamsStreaming, openai.CompletionRequest),
        (chat_params.CompletionCreateParamsStreaming, openai.ChatRequest),
        (ChatCompletionStreamOptionsParam, openai.StreamOptions),
        (ChatCompletionContentPartTextParam, TextPart),
        (ChatCompletionSystemMessageParam, openai.ChatMessage),
        (ChatCompletionDeveloperMessageParam, openai.ChatMessage),
        (ChatCompletionUserMessageParam, openai.ChatMessage),
        (ChatCompletionAssistantMessageParam, openai.ChatMessage),
        (ChatCompletionToolMessageParam, openai.ChatMessage),
    ],
)
def test_every_field_that_the_official_client_can_send_is_known(theirs, ours):
    """Known is not honoured: but what is not is refused with a reason, not as a misspelling."""
    assert set(get_type_hints(theirs)) <= {*ours.model_fields, *UNSUPPORTED}


def test_fields_that_are_not_available_are_taken_at_their_neutral_value():
    assert parse(**NEUTRAL_COMPLETION).sampling_params() == SamplingParams()
    plain = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert chat(**NEUTRAL_CHAT, **plain).sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "alloy"}),
        ("function_call", {"name": "f"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("moderation", {"model": "omni-moderation-latest"}),
        ("prediction", {"type": "content", "content": "a"}),
    ],
)
def test_what_a_chat_can_not_do_is_refused_with_a_way_out(field, value):
    error = refusal(chat, **{field: value})
    assert error["param"] == field
    assert "omit it or use" in error["message"]


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}
IN_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": IN_FORMAT}, Grammar.json_schema(CLOSED)),
        ({"json_schema": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA)),
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA)),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"guided_choice": ["a", "é"]}, Grammar.choice(["a", "é"])),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"structured_outputs": {"json_object": False, "regex": None}}, None),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, Grammar.regex("a")),
    ],
    ids=repr,
)
@pytest.mark.parametrize("make", [parse, chat])
def test_the_form_of_a_text_is_asked_for_in_the_ways_of_openai_and_vllm(make, fields, meant):
    assert make(**fields).sampling_params() == SamplingParams(grammar=meant)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        ),
        (
            "response_format.json_schema",
            {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
        ),
        ("response_format.json_schema", {"response_format": {**IN_FORMAT, "type": "text"}}),
        ("guided_json", {"guided_json": ""}),
        ("guided_json", {"guided_json": "x" * (MAX_GRAMMAR_CHARS + 1)}),
        ("guided_json", {"guided_json": {"enum": ["x" * MAX_GRAMMAR_CHARS]}}),
        ("guided_regex", {"guided_regex": ""}),
        ("guided_regex", {"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}),
        ("guided_grammar", {"guided_grammar": ""}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_choice", {"guided_choice": ["a", ""]}),
        ("guided_choice", {"guided_choice": ["ab"] * MAX_GRAMMAR_CHARS}),
        ("guided_regex", {"guided_json": {}, "guided_regex": "a"}),
        ("guided_choice", {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}),
        ("structured_outputs.regex", {"guided_regex": "a", "structured_outputs": {"regex": "a"}}),
        ("structured_outputs", {"structured_outputs": {"structural_tag": "a"}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": [3] * 1000}}),
        ("structured_outputs.json", {"structured_outputs": {"json": ""}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": [1]}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": "ab"}}),
    ],
    ids=lambda given: repr(given)[:60],
)
@pytest.mark.parametrize("make", [parse, chat])
def test_a_form_that_can_not_be_is_refused_by_name(make, field, fields):
    error = refusal(make, **fields)
    assert error["param"] == field
    assert len(error["message"]) < 300


@pytest.mark.parametrize("count", [0, 5, 20])
def test_log_probabilities_are_reported_as_asked_and_of_an_echoed_prompt_too(count):
    assert parse(logprobs=count).sampling_params() == SamplingParams(logprobs=count)
    both = SamplingParams(logprobs=count, prompt_logprobs=count)
    assert parse(logprobs=count, echo=True).sampling_params() == both
    asked = chat(logprobs=True, top_logprobs=count or None)
    assert asked.sampling_params() == SamplingParams(logprobs=count)
    assert chat(logprobs=False, top_logprobs=0).sampling_params() == SamplingParams()


def test_no_tokens_may_be_asked_for_where_the_prompt_is_echoed():
    """The engine generates at least one; see `RunningAnswer`."""
    body = parse(max_tokens=0, echo=True, logprobs=1)
    assert body.is_prompt_only
    assert body.sampling_params() == SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)
    assert not parse(max_tokens=1, echo=True).is_prompt_only
    assert "echo=true" in refusal(max_tokens=0, logprobs=1)["message"]


def test_candidates_are_ranked_by_their_log_probabilities():
    assert parse(best_of=3, n=3).sampling_params() == SamplingParams()
    assert parse(best_of=3, n=2).sampling_params() == SamplingParams(logprobs=0)
    assert parse(best_of=3, logprobs=2).sampling_params() == SamplingParams(logprobs=2)
    assert (parse(best_of=3, n=2).num_candidates, parse(n=2).num_candidates) == (3, 2)
    assert refusal(best_of=2, n=3)["param"] == "best_of"
    assert "stream" in refusal(best_of=2, stream=True)["message"]


@pytest.mark.parametrize(
    "most",
    [
        {"stop": "s" * 1024},
        {"stop": ["s" * 1024] * 16},
        {"stop_token_ids": [1] * 1024},
        {"user": "u" * 1024},
        {"metadata": {"k": "v" * 1024}},
    ],
    ids=lambda most: repr(most)[:20],
)
def test_values_of_the_greatest_length_are_taken(most):
    assert parse(**most).sampling_params()
    assert chat(*[USER] * 2**14, **most).sampling_params()


@pytest.mark.parametrize(
    ("content", "meant"),
    [
        ("a", "a"),
        ("", ""),
        ([], ""),
        ([TEXT_PART], "a"),
        ([{**TEXT_PART, "prompt_cache_breakpoint": {"mode": "explicit"}}], "a"),
        ([TEXT_PART, {**TEXT_PART, "text": "b"}], "a\nb"),
    ],
    ids=repr,
)
def test_content_is_a_text_or_parts_of_text(content, meant):
    assert chat({"role": "user", "content": content}).messages[0].content == meant


def test_an_answer_of_ours_may_be_sent_back_as_a_message():
    answered = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": []}
    assert chat(USER, answered, USER).sampling_params() == SamplingParams()
    function = {"name": "f", "arguments": '{"a": 1}'}
    calling = {
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    answer = {"role": "tool", "tool_call_id": "x", "content": "2"}
    assert chat(USER, {**answered, **calling}, answer).sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("make", "body", "field", "suggestion"),
    [
        (parse, {"max_token": 3}, "max_token", "max_tokens"),
        (parse, {"speculative": {"max_step": 3}}, "speculative.max_step", "speculative.max_steps"),
        (parse, {"response_format": {"type": "text", "b": 1}}, "response_format.b", None),
        (chat, {"messages": [{**USER, "nam": "b"}]}, "messages.0.nam", "messages.name"),
        (parse, {"frobnicate": 1}, "frobnicate", None),
        (chat, {"max_completion_token": 3}, "max_completion_token", "max_completion_tokens"),
    ],
)
def test_an_unknown_field_changes_nothing_and_is_named(make, body, field, suggestion):
    asked = make(**body)
    assert asked.sampling_params() == make().sampling_params()
    (name,) = ignored_fields(asked)
    error = openai.unknown_field(name, type(asked)).body()["error"]
    assert error["param"] == field
    assert (f"did you mean {suggestion}?" in error["message"]) == (suggestion is not None)
    assert suggestion or "did you mean" not in error["message"]


def test_many_and_very_long_unknown_names_are_neither_compared_nor_sent_back_whole():
    (name,) = ignored_fields(parse(**{"a" * 10**6: 3}))
    assert len(openai.unknown_field(name, openai.CompletionRequest).message) < 1000
    assert len([*ignored_fields(parse(**{f"k{i}": 1 for i in range(10_000)}))]) == 10_000


def test_what_a_chat_may_say_in_several_ways():
    limits = chat(max_tokens=7), chat(max_completion_tokens=7)
    assert limits[0].sampling_params() == limits[1].sampling_params()
    assert limits[0].limit == ("max_tokens", 7)
    assert "newer name" in refusal(chat, max_tokens=7, max_completion_tokens=7)["message"]
    assert chat(min_tokens=40).sampling_params().min_tokens == 40
    assert chat().generation_prompt
    assert not chat(continue_final_message=True).generation_prompt
    assert not chat(add_generation_prompt=False).generation_prompt
    plain = {"a": "b", "c": 1, "d": 0.5, "e": True, "f": None}
    assert chat(chat_template_kwargs=plain).chat_template_kwargs == plain
    assert parse(stop="x").sampling_params().stop == ("x",)


@pytest.mark.parametrize("make", [parse, chat])
def test_foreign_fields_that_leave_the_text_as_it_is_are_taken_and_not_counted(make):
    asked = make(**dict.fromkeys(PRESENTATION, 5), **dict.fromkeys(UNSUPPORTED))
    assert asked.sampling_params() == make().sampling_params()
    assert not [*ignored_fields(asked)]


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_foreign_fields_that_would_change_the_text_are_refused_by_name(field):
    for nothing in (None, False, [], ""):
        assert parse(**{field: nothing}).sampling_params() == SamplingParams()
    error = refusal(**{field: "x" * 1000})
    assert error["param"] == field
    assert len(error["message"]) < 300


ONE = {"type": "object", "properties": {"a": {}}}
ONLY_ONE = {**ONE, "additionalProperties": False}
LONG = {"description": "x" * 2**10, "title": "y"}


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        (ONE, ONLY_ONE),
        ({**ONE, "additionalProperties": True}, {**ONE, "additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        (
            {"properties": {"b": ONE}},
            {"properties": {"b": ONLY_ONE}, "additionalProperties": False},
        ),
        ({"items": ONE, "$defs": {"x": ONE}}, {"items": ONLY_ONE, "$defs": {"x": ONLY_ONE}}),
        ({"anyOf": [ONE, {"type": "null"}]}, {"anyOf": [ONLY_ONE, {"type": "null"}]}),
        ({"allOf": [ONE], **ONE}, {"allOf": [ONE], **ONE}),
        ({"enum": [ONE], "const": ONE}, {"enum": [ONE], "const": ONE}),
        # Descriptions are for the model, and too long for a grammar.
        (
            {"properties": {"title": {"items": {}, **LONG}}, **LONG},
            {"properties": {"title": {"items": {}}}, "additionalProperties": False},
        ),
    ],
    ids=repr,
)
def test_objects_of_a_schema_are_closed_unless_it_is_not_strict(schema, meant):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    for strict in ({}, {"strict": None}, {"strict": True}):
        form["json_schema"] |= strict
        grammar = chat(response_format=form).sampling_params().grammar
        assert json.loads(grammar.text) == meant
    form["json_schema"]["strict"] = False
    assert json.loads(chat(response_format=form).sampling_params().grammar.text) == schema


NOT_TEXT = "a\ud800"
NO_IDS = [[-1], [2**31], ["5"], [True], [1.0]]
NUMBERS_OF_RIVALS = [-1, 21, True, 1.0, "5"]
REFUSED = {
    "prompt": [
        [], [[]], [1, "a"], [[1], "a"], [True], [-1], [2**31], [1.0], [[[1]]], 3, {"a": 1}, None,
        NOT_TEXT,
    ],
    "max_tokens": [0, 10**30, "3", 1.5, True],
    "min_tokens": [-1, 17],
    "temperature": [-1, "hot", float("nan")],
    "top_p": [0],
    "top_k": [-2, 2**31],
    "min_p": [2],
    "frequency_penalty": [2.1],
    "presence_penalty": [-2.1],
    "repetition_penalty": [0, -1.0, 101],
    "n": [0, -1, openai.MAX_CHOICES_PER_PROMPT + 1, 10**30, 1.5, True],
    "best_of": [0, -1, openai.MAX_CHOICES_PER_PROMPT + 1, 1.5, True],
    "bad_words": ["a", ["a"] * 129],
    "bad_words.0": [[""], [1], ["a" * 257]],
    "truncate_prompt_tokens": [-2, 2**31, True],
    "truncation_side": ["middle"],
    "prompt_logprobs": list(NUMBERS_OF_RIVALS),
    "priority": [2**63, -(2**63) - 1, 1.5, "1"],
    "request_id": ["x" * 257, NOT_TEXT],
    "cache_salt": ["", "x" * 1025, NOT_TEXT],
    "regex": [NOT_TEXT],
    "skip_special_tokens": [0],
    "spaces_between_special_tokens": [0],
    "stop": ["", [1], {}, NOT_TEXT, ["x"] * 17, "s" * 1025, ["s", "s" * 400_000]],
    "stop_token_ids": [[1] * 1025],
    "stop_token_ids.0": [["a"], [2**63]],
    "allowed_token_ids": [[], 5, [5] * 1025],
    "allowed_token_ids.0": NO_IDS,
    "bad_token_ids": [5, [5] * 1025],
    "bad_token_ids.0": NO_IDS,
    "logit_bias": [
        *({key: 1} for key in ("a", "-1", "1.0", "", "²", "9" * 4000)),
        *({"5": bias} for bias in (101, -101, 10**400, True, None, "1")),
        {str(token): 1 for token in range(1025)}, [5], "5",
    ],
    "logprobs": list(NUMBERS_OF_RIVALS),
    "seed": [2**63],
    "stream": [1],
    "stream_options": [{"include_usage": True}],
    "speculative": [True],
    "speculative.max_steps": [{"max_steps": -1}, {"max_steps": 2**31}],
    "model": [3, NOT_TEXT],
    "user": [NOT_TEXT, "u" * 1025],
    "suffix": [NOT_TEXT, "end"],
    "metadata.k": [{"k": "v" * 1025}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("param", "value"),
    [(param, value) for param, values in REFUSED.items() for value in values],
    ids=lambda given: repr(given)[:40],
)
def test_a_wrong_value_is_refused_by_name_and_not_coerced(param, value):
    error = refusal(**{param.split(".")[0]: value})
    assert error["param"] == param
    assert ("surrogates" in error["message"]) == (value == NOT_TEXT)
    assert len(error["message"]) < 300


CHAT_REFUSED = {
    "messages": [{"messages": []}, {"messages": [USER] * (2**14 + 1)}],
    "min_tokens": [{"min_tokens": 40, "max_tokens": 30}],
    "max_completion_tokens": [{"max_completion_tokens": 0}],
    "continue_final_message": [{"continue_final_message": True, "add_generation_prompt": True}],
    "logprobs": [{"logprobs": 5}],
    "top_logprobs": [
        *({"logprobs": True, "top_logprobs": number} for number in NUMBERS_OF_RIVALS),
        *({"logprobs": value, "top_logprobs": 3} for value in (None, False)),
    ],
    "stream_options.include_obfuscation": [
        {"stream": True, "stream_options": {"include_obfuscation": True}}
    ],
    "chat_template_kwargs": [
        {"chat_template_kwargs": variables}
        for variables in (
            {"a": []}, {"a": {}}, {"a": float("nan")}, {"a": NOT_TEXT}, {"\ud800": 1},
            {"a" * 257: 1}, {"k": "v" * (2**15 + 1)}, {str(i): i for i in range(1025)}, [], "a",
        )
    ],
    "messages.1": [{"messages": [USER, "a"]}],
    "messages.1.role": [
        {"messages": [USER, {"role": "function", "content": "a"}]},
        {"messages": [USER, {"content": "a"}]},
    ],
    "messages.1.content": [
        {"messages": [USER, {"role": "user"}]},
        *(
            {"messages": [USER, {"role": "user", "content": content}]}
            for content in (
                None, ["a"], NOT_TEXT, [{"type": "text"}], [{"text": "a"}],
                [{"type": "image_url"}], [{**TEXT_PART, "b": 1}], [{**TEXT_PART, "text": 1}],
            )
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("param", "body"),
    [(param, body) for param, bodies in CHAT_REFUSED.items() for body in bodies],
    ids=lambda given: repr(given)[:60],
)
def test_what_is_wrong_in_a_chat_is_refused_by_name(param, body):
    assert refusal(chat, **body)["param"] == param
