"""The Responses API, asked by the official client."""

import asyncio
import json
from dataclasses import replace
from typing import get_type_hints

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import BaseModel

from serve_spec.core.request import FinishReason, SpeculativeOptions
from serve_spec.serving.messages import Accepted
from serve_spec.serving.protocols.fields import UNSUPPORTED
from serve_spec.serving.protocols.openai import ChatRequest
from serve_spec.serving.protocols.responses import ResponsesRequest, messages_of
from tests.serving.asgi import client_of, saying
from tests.serving.conftest import MODEL
from tests.serving.fakes import ScriptedFleet, delta, lost
from tests.serving.texts import write_text_files


def create(server, given="a b c", **fields):
    return asyncio.run(client_of(server).responses.create(model=MODEL, input=given, **fields))


def events_of(server, given="a b c", **fields):
    async def listen():
        stream = await client_of(server).responses.create(
            model=MODEL, input=given, stream=True, **fields
        )
        return [event async for event in stream]

    return asyncio.run(listen())


def post(server, **body):
    return server.ask("POST", "/v1/responses", json=body)


def test_every_field_that_the_official_client_can_send_is_known():
    theirs = set(get_type_hints(ResponseCreateParamsStreaming))
    not_texts = {"access_programs", "image"}
    assert theirs - not_texts <= {*ResponsesRequest.model_fields, *UNSUPPORTED}


def test_an_answer_is_a_message_with_its_usage(server):
    response = create(server, max_output_tokens=5, metadata={"k": "v"}, store=False)
    assert response.output_text == "a b c a b "
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.status) == ("response", MODEL, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"k": "v"}
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 5, 8)
    assert usage.speculation["num_rounds"] == 3
    assert (response.model_extra, [*usage.model_extra]) == ({}, ["speculation"])


def test_a_stream_is_the_events_of_one_item_between_those_of_the_response(server):
    events = events_of(server, max_output_tokens=5)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == "a b c a b "
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    whole = create(server, max_output_tokens=5)
    assert last.output_text == whole.output_text
    assert last.usage.output_tokens == 5
    assert {event.item_id for event in events[3:9] if hasattr(event, "item_id")} == {
        last.output[0].id
    }


def test_items_of_a_conversation_are_messages_of_a_chat(server):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"role": "user", "content": "on"},
    ]
    answered = create(server, items, instructions="a", max_output_tokens=4)
    assert answered.output_text == "a b c on "
    assert answered.instructions == "a"
    output = create(server, "a", max_output_tokens=1).output
    sent_back = [{"role": "user", "content": "a"}, *[item.model_dump() for item in output]]
    assert create(server, sent_back, max_output_tokens=1).usage.input_tokens == 2


def test_calls_and_their_results_are_messages_of_a_chat():
    body = ResponsesRequest(
        input=[
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ]
    )
    messages, places = messages_of(body)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    assert places == ["input.0", "input.1", "input.3"]


SAID = (
    '<think>\nhm\n</think>\n\nSee.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
)
TEMPLATE = "<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}</think>"
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}


@pytest.fixture
def checkpoint(config):
    write_text_files(config.model.folder, TEMPLATE, max_position_embeddings=4096)
    return config


def test_reasoning_and_calls_are_items_of_their_own_and_streamed_alike(checkpoint):
    asked = {"tools": [FUNCTION], "tool_choice": "auto", "reasoning": {"effort": "high"}}
    whole = create(saying(checkpoint, SAID), **asked)
    reasoning, message, call = whole.output
    assert reasoning.content[0].text == "hm"
    assert message.content[0].text == "See."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "f", {"a": 1})
    assert (whole.status, whole.tools[0].name) == ("completed", "f")
    events = events_of(saying(checkpoint, SAID), **asked)
    kinds = [event.type for event in events]
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    )
    streamed = events[-1].response.output
    assert [item.type for item in streamed] == ["reasoning", "message", "function_call"]
    assert (streamed[0].content, streamed[1].content) == (reasoning.content, message.content)
    sent = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(sent) == streamed[2].arguments == call.arguments
    (done,) = (e for e in events if e.type == "response.function_call_arguments.done")
    assert (done.name, done.arguments) == ("f", call.arguments)


def test_the_items_of_an_answer_may_be_sent_back_with_the_result_of_a_call(checkpoint):
    server = saying(checkpoint, SAID)
    first = create(server, tools=[FUNCTION])
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    conversation = [
        {"role": "user", "content": "a"},
        *[i.model_dump() for i in first.output],
        result,
    ]
    assert create(server, conversation, tools=[FUNCTION]).output_text == "See."


@pytest.mark.parametrize("text", [SAID, SAID[SAID.index("<tool_call>") :]])
def test_log_probabilities_of_other_items_leave_the_calls_whole(checkpoint, text):
    server = saying(checkpoint, text, logprobs=True)
    asked = {"tools": [FUNCTION], "include": ["message.output_text.logprobs"]}
    streamed = events_of(server, **asked)[-1].response.output
    for items in (create(server, **asked).output, streamed):
        *_, call = items
        kinds = ["reasoning", "message", "function_call"]
        assert [item.type for item in items] == kinds[-len(items) :]
        assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})


def test_an_empty_answer_is_an_empty_message(server):
    server.fleet = ScriptedFleet([Accepted(1, "r"), delta("", 1, finish=FinishReason.STOP)])
    for response in (create(server), events_of(server)[-1].response):
        assert [item.content[0].text for item in response.output] == [""]
        assert (response.status, response.incomplete_details) == ("completed", None)
    assert events_of(server)[-1].type == "response.completed"


def test_fields_of_sampling_mean_what_they_mean_in_chats():
    given = {"temperature": 0.5, "top_k": 3, "logit_bias": {"5": 2.0}, "stop": ["x"], "seed": 7}
    body = ResponsesRequest(input="a", speculative={"enabled": False}, **given)
    chat = ChatRequest(messages=[{"role": "user", "content": "a"}], **given)
    params = body.chat(messages_of(body)[0]).sampling_params()
    assert params == replace(chat.sampling_params(), speculative=SpeculativeOptions(enabled=False))


def test_log_probabilities_come_with_the_text(server):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    tokens = create(server, max_output_tokens=3, **asked).output[0].content[0].logprobs
    assert [scored.token for scored in tokens] == ["a", "b", "c"]
    assert [len(scored.top_logprobs) for scored in tokens] == [2] * 3
    events = events_of(server, max_output_tokens=3, **asked)
    sent = [scored for e in events if e.type.endswith("delta") for scored in e.logprobs]
    assert [scored.token for scored in sent] == ["a", "b", "c"]


def test_a_parsed_answer_asks_for_a_strict_schema(server):
    class Person(BaseModel):
        name: str

    texts = [delta('{"name": "x"}', 1, finish=FinishReason.STOP)]
    server.fleet = ScriptedFleet([Accepted(1, "r"), *texts])
    asked = []
    generate = server.fleet.generate
    server.fleet.generate = lambda request: asked.append(request) or generate(request)
    client = client_of(server)
    parsed = asyncio.run(client.responses.parse(model=MODEL, input="a", text_format=Person))
    assert parsed.output_parsed == Person(name="x")
    chat = asyncio.run(
        client_of(server).chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "a"}], response_format=Person
        )
    )
    assert chat.choices[0].message.parsed == Person(name="x")
    for request in asked:
        assert '"additionalProperties": false' in request.params.grammar.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": 3}, "input"),
        ({"input": "a", "store": True}, "store"),
        ({"input": "a", "conversation": "conv_1"}, "conversation"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"input": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "a", "tools": [{"type": "function", "name": 3}]}, "tools.0.name"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 99}, "max_output_tokens"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"role": "x", "content": "a"}], "instructions": "b"}, "input.0.role"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a " * 64}, "input"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ],
    ids=repr,
)
def test_what_cannot_be_is_refused_by_its_own_name(server, fields, param):
    answer = post(server, **fields)
    statuses = {"a " * 64: 413}
    status = 404 if "model" in fields else statuses.get(str(fields.get("input")), 400)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_stream_that_fails_ends_with_an_error(server):
    server.fleet = ScriptedFleet([Accepted(1, "r"), delta("a", 1), lost()])
    *_, first, error = events_of(server)
    assert (first.delta, error.type, error.code) == ("a", "error", "replicas_lost")


async def test_a_client_that_leaves_gives_its_place_back(server):
    stream = await client_of(server).responses.create(model=MODEL, input="hold a", stream=True)
    await stream.close()
    assert server.admission.in_flight == 0
