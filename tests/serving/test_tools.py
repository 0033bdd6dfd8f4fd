"""Chats call functions and reason, in the format of their checkpoint, as the OpenAI API has it."""

import asyncio
import json
from typing import get_args

import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from serve_spec.config import ServeSpecConfig
from serve_spec.config.engine import ModelConfig
from serve_spec.config.serving import RouterConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import FinishReason
from serve_spec.serving.messages import Accepted
from serve_spec.serving.protocols.fields import closed
from serve_spec.serving.protocols.model_text import ModelText
from serve_spec.serving.protocols.openai import ChatRequest
from serve_spec.serving.protocols.parsers import AnswerParser, AnswerSyntax
from serve_spec.serving.protocols.tools import (
    CALL_PARSERS,
    REASONING_PARSERS,
    Formats,
    Function,
    call_id,
)
from serve_spec.structured.compiler import GrammarCompiler
from tests.helpers.checkpoints import make_target
from tests.helpers.grammars import is_valid
from tests.helpers.local_engine import LocalEngine
from tests.serving.asgi import CHAT, Server, chunks_of, client_of, saying
from tests.serving.fakes import LoopFleet, ScriptedFleet, delta, lost
from tests.serving.texts import BOS, THINK, TURN, byte_tokenizer, write_text_files

HERMES = """
{{- bos_token }}
{%- if tools %}<|turn|>system: {% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}
{%- if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}
{%- if add_generation_prompt %}<|turn|>assistant: {% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{{- reasoning_effort }}"""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}, "days": {"enum": [1, 2]}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}
TOOLS = [WEATHER, CLOCK]
USER = {"role": "user", "content": "Will it rain?"}
ARGUMENTS = '{"city": "Rome", "days": 2}'
SAID = (
    "<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n"
    f'{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        (HERMES, "hermes", "think"),
        ("{{ '<tool_call>' }}<arg_key>", "hermes", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS][ARGS]", "mistral", None),
        ("[THINK][TOOL_CALLS]", "mistral", "mistral"),
        ('{"name": function name, "parameters": dictionary', "llama3_json", None),
        ("<|python_tag|>", "llama3_json", None),
        ("<|start|>assistant<|channel|>analysis", "openai", "openai"),
        ("{{ content.split('</think>')[-1] }}", None, "think"),
        ("{{ messages }}", None, None),
    ],
)
def test_a_template_tells_the_formats_of_calls_and_reasoning(template, calls, reasoning):
    formats = Formats.of(template, "auto", "auto")
    assert (formats.calls, formats.reasoning) == (calls, reasoning)
    assert formats.has_names_first == ("[ARGS]" in template)
    formats = Formats.of(template, "none", "none")
    assert (formats.calls, formats.reasoning) == (None, None)


def test_every_parser_that_can_be_configured_is_known():
    for key, parsers in (
        ("tool_call_parser", CALL_PARSERS),
        ("reasoning_parser", REASONING_PARSERS),
    ):
        assert set(get_args(RouterConfig.model_fields[key].annotation)) == {"auto", *parsers}


@pytest.mark.parametrize(
    ("parser", "end", "is_reasoning"),
    [
        ("qwen3", "", False),
        ("qwen3", "<think>\n", True),
        ("qwen3", "<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "", True),
        ("deepseek_r1", "<think></think>", False),
        ("mistral", "[THINK]", True),
        ("openai_gptoss", "", False),
        ("none", "<think>", False),
    ],
)
def test_an_answer_begins_within_its_reasoning_if_the_prompt_opens_it(parser, end, is_reasoning):
    assert Formats.of("", "none", parser).is_reasoning(f"Hi {end}") == is_reasoning


def converse(folder, *messages, router=None, **body):
    text = ModelText(ModelConfig(path=folder, max_model_len=4096), router)
    given = json.dumps({"messages": list(messages or [USER]), **body})
    request = ChatRequest.model_validate_json(given)
    return asyncio.run(text.conversation(request, request.sampling_params()))


def rendered(folder, *messages, **body):
    """The prompt as text, special tokens included."""
    token_ids, *_ = converse(folder, *messages, **body)
    return byte_tokenizer().decode(token_ids, skip_special_tokens=False)


CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "hm",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]}


def test_a_conversation_with_tools_has_the_ids_that_transformers_gives_it(tmp_path):
    write_text_files(tmp_path, HERMES)
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token=BOS)
    theirs.chat_template = HERMES
    function = {"name": "weather", "arguments": json.loads(ARGUMENTS)}
    called = {**CALLED, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    hostile = {"name": TURN, "description": f"{BOS} {THINK}", "parameters": {TURN: [BOS, 1]}}
    tools = [*TOOLS, {"type": "function", "function": hostile}]
    expected = theirs.apply_chat_template(
        [USER, called, {**RESULT, "content": "rain"}],
        tools=tools,
        add_generation_prompt=True,
        return_dict=False,
    )
    token_ids, *_ = converse(tmp_path, USER, CALLED, RESULT, tools=tools)
    text = rendered(tmp_path, USER, CALLED, RESULT, tools=tools)
    assert text == byte_tokenizer().decode(expected, skip_special_tokens=False)
    # Only the template writes control tokens: the clients' are text.
    special = [byte_tokenizer().token_to_id(name) for name in (TURN, BOS, THINK)]
    assert [token_ids.count(token) for token in special] == [5, 1, 1]


def test_tools_and_reasoning_effort_reach_the_template_unless_they_are_none(tmp_path):
    write_text_files(tmp_path, HERMES)
    assert "weather" in rendered(tmp_path, tools=TOOLS)
    assert rendered(tmp_path, tools=TOOLS, tool_choice="none") == rendered(tmp_path)
    assert rendered(tmp_path, reasoning_effort="high").endswith("assistant: high")
    assert rendered(tmp_path, reasoning_effort="none").endswith("<think></think>")
    shown = rendered(
        tmp_path, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
    )
    assert shown.endswith("assistant: ")


def test_a_model_that_can_not_read_several_calls_makes_one(tmp_path):
    write_text_files(tmp_path, "<|python_tag|>")
    assert converse(tmp_path, tools=TOOLS).syntax.is_parallel
    write_text_files(tmp_path, "<|python_tag|>{# only supports single tool-calls at once! #}")
    assert not converse(tmp_path, tools=TOOLS).syntax.is_parallel


def test_special_tokens_are_kept_in_answers_that_are_parsed_by_them(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    write_text_files(tmp_path, "[TOOL_CALLS]", tokenizer=tokenizer)
    assert not converse(tmp_path, tools=TOOLS).params.skip_special_tokens
    assert converse(tmp_path, tools=TOOLS, tool_choice="none").params.skip_special_tokens
    write_text_files(tmp_path, HERMES)
    assert converse(tmp_path, tools=TOOLS).params.skip_special_tokens


def test_answers_in_channels_are_parsed_without_tools_too(config):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(CHANNELS))
    template = "{{ messages[0].content }}<|channel|>"
    write_text_files(config.model.folder, template, tokenizer=tokenizer)
    assert not converse(config.model.folder).params.skip_special_tokens
    server = saying(config, f"{ANALYSIS}<|channel|>final<|message|>Yes.")
    for kept, content in ((True, "Yes."), (False, "hmYes.")):
        message = server.chat("a", separate_reasoning=kept).json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning")) == (content, "hm" if kept else None)


def test_answers_without_calls_and_reasoning_are_not_parsed(tmp_path):
    write_text_files(tmp_path, "<tool_call>{{ messages[0].content }}")
    assert converse(tmp_path).syntax is None
    assert converse(tmp_path, tools=TOOLS, tool_choice="none").syntax is None
    assert converse(tmp_path, tools=TOOLS).syntax is not None
    assert converse(tmp_path, tools=TOOLS, guided_regex="a").syntax is None
    assert converse(tmp_path, tools=TOOLS, guided_json={}).syntax is None


def function(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


NESTED = json.loads('{"items": ' * 800 + "{}" + "}" * 800)

REFUSED = [
    ("tools.0.type", {"tools": [{"type": "web_search", "function": {"name": "f"}}]}),
    ("tools.0.function", {"tools": [{"type": "function"}]}),
    ("tools.0.function.name", {"tools": [function(name="")]}),
    ("tools.0.function.name", {"tools": [function(name="x" * 257)]}),
    ("tools.0.function.description", {"tools": [function(description=3)]}),
    ("tools.0.function.parameters", {"tools": [function(parameters=[1])]}),
    ("messages", {"tools": [function(parameters={"a": "\ud800"})]}),
    ("tools.0.function.parameters.type", {"tools": [function(parameters={"type": "string"})]}),
    ("tools", {"tools": [CLOCK] * 1025}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [], "tool_choice": NAMED}),
    ("tool_choice.function.name", {"tools": [WEATHER], "tool_choice": NAMED}),
    ("guided_regex", {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}),
    (
        "messages.0.tool_calls.0.function.arguments",
        {"messages": [{**CALLED, "tool_calls": [function(arguments="[1]")]}]},
    ),
    (
        "messages.0.tool_calls.0.function.arguments",
        {"messages": [{**CALLED, "tool_calls": [function(arguments="{")]}]},
    ),
    (
        "messages",
        {"messages": [{**CALLED, "tool_calls": [function(arguments='{"a": "\\ud800"}')]}]},
    ),
    ("messages.0.content", {"messages": [{"role": "tool", "tool_call_id": "c1"}]}),
]


@pytest.mark.parametrize(("field", "body"), REFUSED, ids=lambda given: repr(given)[:80])
def test_wrong_tools_are_refused_by_name(config, field, body):
    write_text_files(config.model.folder, HERMES, max_position_embeddings=2**16)
    content = json.dumps({"messages": [USER], **body})
    headers = {"content-type": "application/json"}
    answer = Server(config).ask("POST", CHAT, content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert len(answer.json()["error"]["message"]) < 300


def test_parameters_in_a_deep_nest_are_refused(config):
    """By Python's limit or, where that is further, as a prompt that is too long."""
    write_text_files(config.model.folder, HERMES)
    body = {"messages": [USER], "tools": [function(parameters=NESTED)]}
    answer = Server(config).ask("POST", CHAT, json=body)
    assert answer.status_code in (400, 413)
    assert answer.json()["error"]["param"] in ("messages", "prompt")
    assert len(answer.json()["error"]["message"]) < 300


def test_a_model_whose_format_is_not_known_can_only_be_made_to_call(tmp_path):
    write_text_files(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match=r"router\.tool_call_parser") as caught:
        converse(tmp_path, tools=TOOLS)
    assert caught.value.field == "tools"
    assert converse(tmp_path, tools=TOOLS, tool_choice="required").syntax.calls == "json"
    router = RouterConfig(tool_call_parser="hermes")
    assert converse(tmp_path, tools=TOOLS, router=router).syntax.calls == "hermes"


@pytest.fixture
def checkpoint(config):
    write_text_files(config.model.folder, HERMES, max_position_embeddings=4096)
    return config


def ask(server, *, stream=False, **body):
    """Ask with the official client; return the first choice, put together if it is streamed."""

    async def run():
        chats = client_of(server).chat.completions
        asked = {"model": "fake", "messages": [USER], "tools": TOOLS, **body}
        if not stream:
            return await chats.create(**asked)
        async with chats.stream(**asked) as events:
            return await events.get_final_completion()

    return asyncio.run(run()).choices[0]


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_reads_calls_and_reasoning(checkpoint, stream):
    choice = ask(saying(checkpoint, SAID), stream=stream)
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("Let me see.", "hm")
    calls = [
        (call.type, call.function.name, call.function.arguments) for call in message.tool_calls
    ]
    assert calls == [("function", "weather", ARGUMENTS), ("function", "clock", "{}")]
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_do_without_calls_or_consist_of_them(checkpoint, stream):
    choice = ask(saying(checkpoint, "No."), stream=stream)
    assert (choice.finish_reason, choice.message.content) == ("stop", "No.")
    assert not choice.message.tool_calls
    only = SAID[SAID.index("<tool_call>") :]
    choice = ask(saying(checkpoint, only), parallel_tool_calls=False, stream=stream)
    assert choice.message.content in (None, "")
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    choice = ask(saying(checkpoint, SAID), tool_choice="none", stream=stream)
    assert choice.finish_reason == "stop"
    assert choice.message.content.startswith("Let me see.\n<tool_call>")


ONCE = {
    "hermes": (HERMES, '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'),
    "qwen3-coder": (
        "<tool_call> <function=",
        "<tool_call><function=clock></function></tool_call>",
    ),
    "glm": ("<tool_call> <arg_key>", "<tool_call>clock</tool_call>"),
    "llama": ("<|python_tag|>", '{"name": "clock", "parameters": {}}'),
    "mistral": ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "clock", "arguments": {}}'),
    "channels": ("<|channel|>", "<|channel|>commentary to=functions.clock<|message|>{}<|call|>"),
}


@pytest.mark.parametrize("name", ONCE)
def test_without_parallel_calls_an_answer_ends_with_its_first_call(config, name):
    """The choice is cancelled at its replica."""
    template, call = ONCE[name]
    write_text_files(config.model.folder, template, max_position_embeddings=4096)
    rounds = [delta(call, 1, 2)] * 9
    last = delta("", finish=FinishReason.LENGTH)
    fleet = ScriptedFleet([Accepted(1, "r"), *rounds, last])
    server = Server(config, fleet)
    whole = server.chat(tools=TOOLS).json()["choices"][0]
    assert len(whole["message"]["tool_calls"]) == 9
    once = {"tools": TOOLS, "parallel_tool_calls": False}
    answer = server.chat(**once).json()
    (choice,) = answer["choices"]
    (called,) = choice["message"]["tool_calls"]
    assert (called["function"]["name"], called["function"]["arguments"]) == ("clock", "{}")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert answer["usage"]["completion_tokens"] == 2
    *_, named, arguments, end = chunks(server, **once)
    assert named["delta"]["tool_calls"][0]["function"]["name"] == "clock"
    assert arguments["delta"]["tool_calls"][0]["function"] == {"arguments": "{}"}
    assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"input": "a", **once, "tools": tools}
    response = server.ask("POST", "/v1/responses", json=asked).json()
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert fleet.num_open == 0


@pytest.mark.parametrize("name", ["hermes", "unknown", "newer mistral"])
def test_a_named_function_is_called_once(tmp_path, name):
    template, _, call, several = FORMS[name]
    tokenizer, compiler = compiling()
    write_text_files(tmp_path, f"{template}{{{{ messages[0].content }}}}")
    _, params, syntax = converse(tmp_path, tools=TOOLS, tool_choice=NAMED)
    assert not syntax.is_parallel
    one = call.format("clock", "{}")
    once, twice = f"[{one}]" if name == "unknown" else one, several.format(one, one)
    for text, is_valid_text in ((once, True), (twice, False)):
        matcher = compiler.matcher(params.grammar)
        is_taken = matcher.advance(tokenizer.encode(text).ids)
        assert (is_taken and bool((matcher.mask() & compiler.ends).any())) == is_valid_text


def test_the_end_of_the_tokens_is_told_from_a_finished_call(checkpoint):
    cut = saying(checkpoint, SAID, finish=FinishReason.LENGTH)
    assert ask(cut).finish_reason == chunks(cut)[-1]["finish_reason"] == "length"


def chunks(server, **body):
    return [chunk["choices"][0] for chunk in chunks_of(server.chat(stream=True, **body))]


def test_deltas_name_a_call_first_and_then_bring_its_arguments(checkpoint):
    answer = chunks(saying(checkpoint, SAID), tools=TOOLS)
    deltas = [each["delta"] for each in answer]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert {"reasoning_content": "h", "reasoning": "h"} in deltas
    (named, *fragments), (other, *_) = (
        [call for each in deltas for call in each.get("tool_calls", []) if call["index"] == index]
        for index in range(2)
    )
    assert named["function"] == {"name": "weather", "arguments": ""}
    assert len(fragments) > 3
    assert all(set(each) == {"index", "function"} for each in fragments)
    assert "".join(each["function"]["arguments"] for each in fragments) == ARGUMENTS
    assert other["function"]["name"] == "clock"
    assert (deltas[-1], answer[-1]["finish_reason"]) == ({}, "tool_calls")
    assert {each["finish_reason"] for each in answer[:-1]} == {None}


def test_reasoning_may_stay_in_the_content_or_be_left_out(checkpoint):
    server = saying(checkpoint, "<think>\nhm\n</think>\n\nYes.")
    message = server.chat().json()["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    assert message["content"] == "Yes."
    message = server.chat(include_reasoning=False).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    message = server.chat(separate_reasoning=False).json()["choices"][0]["message"]
    assert message["content"] == "<think>\nhm\n</think>\n\nYes."


@pytest.mark.parametrize(
    ("body", "num_tokens"), [({}, 13), ({"chat_template_kwargs": {"enable_thinking": False}}, 0)]
)
def test_usage_counts_the_tokens_of_the_reasoning(checkpoint, body, num_tokens):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["</think>"])
    write_text_files(
        checkpoint.model.folder, HERMES, tokenizer=tokenizer, max_position_embeddings=4096
    )
    end = tokenizer.token_to_id("</think>")
    thought = [delta("<think>", 1), delta("hm", *range(9)), delta("", 9)]  # part of a character
    items = [*thought, delta("</think>Ye", 2, end, 3)] if num_tokens else [delta("Ye", 3)]
    last = delta("s", 4, finish=FinishReason.STOP)
    server = Server(checkpoint, ScriptedFleet([Accepted(1, "r"), *items, last]))
    details = {"reasoning_tokens": num_tokens}
    assert server.chat(**body).json()["usage"]["completion_tokens_details"] == details
    usage = {"include_usage": True}
    answer = server.chat(stream=True, stream_options=usage, **body)
    assert chunks_of(answer)[-1]["usage"]["completion_tokens_details"] == details
    asked = {"input": "a", "stream": True, **body}
    events = server.ask("POST", "/v1/responses", json=asked).text.split("data: ")
    usage = json.loads(events[-1])["response"]["usage"]
    assert usage["output_tokens_details"] == details


def test_a_call_goes_on_with_the_same_id_when_its_replica_is_lost(checkpoint):
    rounds = [delta(SAID[at : at + 3], 65) for at in range(0, len(SAID), 3)]
    end = delta("", finish=FinishReason.STOP)
    middle = SAID.index("Rome") // 3
    fleet = ScriptedFleet([Accepted(1, "r"), *rounds[:middle], lost()])
    fleet.next = [Accepted(1, "s"), *rounds[middle:], end]
    asked = {"stream": True, "extra_body": {"request_id": "x"}}
    message = ask(Server(checkpoint, fleet), **asked).message
    assert message == ask(saying(checkpoint, SAID), **asked).message
    assert message.tool_calls[0].function.arguments == ARGUMENTS
    syntax = AnswerSyntax("hermes")
    assert len({call_id("a", i, j, syntax) for i in range(3) for j in range(3)}) == 9
    assert len(call_id("a", 0, 0, AnswerSyntax("mistral"))) == 9


def test_log_probabilities_of_all_tokens_are_returned(checkpoint):
    server = saying(checkpoint, SAID, logprobs=True)
    num_tokens = -(-len(SAID) // 3)
    (choice,) = server.chat(tools=TOOLS, logprobs=True).json()["choices"]
    assert len(choice["logprobs"]["content"]) == num_tokens
    answer = chunks(server, tools=TOOLS, logprobs=True)
    assert sum(len((each["logprobs"] or {}).get("content", [])) for each in answer) == num_tokens


def test_the_official_client_parses_arguments_into_its_own_types(checkpoint):
    class Weather(BaseModel):
        city: str
        days: int

    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    chats = client_of(saying(checkpoint, SAID)).chat.completions
    answer = asyncio.run(chats.parse(model="fake", messages=[USER], tools=tools))
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Rome", days=2)


def test_an_answer_with_calls_can_be_sent_back(checkpoint):
    message = ask(saying(checkpoint, SAID)).message
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls
    ]
    given = [USER, message.model_dump(), *answers]
    text = rendered(checkpoint.model.folder, *given, tools=TOOLS)
    assert f'"arguments": {ARGUMENTS}' in text
    assert all(f"({call.id})" in text for call in message.tool_calls)
    choice = ask(saying(checkpoint, "It will."), messages=given)
    assert choice.message.content == "It will."


CHANNEL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FORMS = {
    "hermes": (
        "<tool_call>", "<think>hm</think>\n",
        '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>', "{}\n{}",
    ),
    "llama": ("<|python_tag|></think>", "<think>hm</think>",
              '{{"name": "{}", "parameters": {}}}', "{}; {}"),
    "mistral": ("[THINK][TOOL_CALLS]", "[THINK]hm[/THINK]",
                '{{"name": "{}", "arguments": {}}}', "[TOOL_CALLS][{}, {}]"),
    "mistral with a space": ("[THINK][TOOL_CALLS] [", "[THINK]hm[/THINK]",
                             '{{"name": "{}", "arguments": {}}}', "[TOOL_CALLS] [{}, {}]"),
    "newer mistral": ("[THINK][TOOL_CALLS][ARGS]", "[THINK]hm[/THINK]",
                      "[TOOL_CALLS]{}[ARGS]{}", "{}{}"),
    "channels": ("<|channel|>", ANALYSIS, CHANNEL, "{}"),
    "unknown": ("", "", '{{"name": "{}", "parameters": {}}}', "[{}, {}]"),
}  # fmt: skip


def compiling(special=()):
    """A tokenizer of bytes, and a compiler of grammars for it."""
    tokenizer = byte_tokenizer(adds_bos=False)
    tokenizer.add_special_tokens(list(special))
    return tokenizer, GrammarCompiler(tokenizer.to_str, tokenizer.get_vocab_size(), [256])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("are_tokens", [True, False])
def test_what_a_grammar_of_calls_allows_its_parser_reads(name, are_tokens):
    """Whether markers are special tokens or ordinary text."""
    template, thought, call, several = FORMS[name]
    special = ["[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|end|>"] if are_tokens else []
    tokenizer, compiler = compiling(special)
    parser = "none" if name == "unknown" else "qwen3" if name in ("hermes", "llama") else "auto"
    formats = Formats.of(template, "auto", parser)
    functions = [Function.model_validate(tool["function"]) for tool in TOOLS]
    schemas = {each.name: each.arguments_schema for each in functions}
    syntax = AnswerSyntax(formats.calls or "json", formats.reasoning, schemas)
    called = [("weather", ARGUMENTS), ("clock", "{}")][: several.count("{}")]
    text = thought + several.format(*(call.format(*each) for each in called))
    for content, is_valid_text in ((text, True), (text[:-1], False), (f"Hi {text}", False)):
        matcher = compiler.matcher(formats.of_calls(functions, syntax, "Hi"))
        is_taken = matcher.advance(tokenizer.encode(content).ids)
        assert (is_taken and bool((matcher.mask() & compiler.ends).any())) == is_valid_text
    parts = AnswerParser(syntax).feed(text, is_last=True)
    names = [part.text for part in parts if part.kind == "name"]
    arguments = [part.text for part in parts if part.kind == "arguments"]
    assert [*zip(names, arguments, strict=True)] == called
    assert {p.text for p in parts if p.kind == "reasoning"} == ({"hm"} if thought else set())
    assert not [part for part in parts if part.kind == "content"]


STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}


def test_calls_that_the_model_chooses_are_of_the_schema_of_a_strict_function(tmp_path):
    write_text_files(tmp_path, HERMES)
    tokenizer, compiler = compiling()
    wrong, other = SAID.replace("2}", "7}"), SAID.replace("{}", '{"any": [1]}')
    calls = SAID.partition("</think>")[2]
    for body, valid, invalid in (
        ({}, ("", "No <tool", SAID, f"{SAID} Done.", other), (wrong, f"{SAID} <tool_call>x")),
        ({"parallel_tool_calls": False}, (SAID.partition("</tool_call>\n<")[0],), (SAID,)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ("No", calls), (wrong,)),
    ):
        grammar = converse(tmp_path, tools=[STRICT, CLOCK], **body).params.grammar
        for content in (*valid, *invalid):
            matcher = compiler.matcher(grammar)
            assert matcher.advance(tokenizer.encode(content).ids) == (content in valid), content
    assert converse(tmp_path, tools=TOOLS).params.grammar is None
    asked = converse(tmp_path, tools=[STRICT], guided_regex="ab").params.grammar
    assert asked == Grammar.regex("ab")
    for template in (
        "<|python_tag|>",
        "<|channel|>",
        "<tool_call> <function=",
        "<tool_call> <arg_key>",
    ):
        write_text_files(tmp_path, template)
        assert converse(tmp_path, tools=[STRICT]).params.grammar is None, "no marker before JSON"


@pytest.mark.parametrize("form", ["response_format", "guided_json"])
def test_json_of_a_schema_may_follow_reasoning(tmp_path, form):
    write_text_files(tmp_path, HERMES)
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    body = {form: asked if form == "response_format" else PARAMETERS}
    params, syntax = converse(tmp_path, **body)[1:]
    assert syntax.reasoning == "think"
    tokenizer, compiler = compiling()
    for text in ('{"city": "Rome"}', '<think>hm</think>\n\n{"city": "Rome"}'):
        assert compiler.matcher(params.grammar).advance(tokenizer.encode(text).ids)
    kept = converse(tmp_path, separate_reasoning=False, **body)
    schema = closed(PARAMETERS) if form == "response_format" else PARAMETERS
    assert (kept.syntax, kept.params.grammar) == (None, Grammar.json_schema(schema))


CHANNELS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
MODELS = {
    "hermes": ("<tool_call>", ()),
    "mistral": ("[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
    "channels": ("<|channel|>", CHANNELS),
    "unknown": ("", ()),
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def servers(request, tmp_path_factory):
    """A random model that writes calls in one format, with speculation and without."""
    template, special = request.param
    folder = make_target(tmp_path_factory.mktemp("model"), "llama2", layer_scale=0.3)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] += f"{{# {template} #}}"
    path.write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    loops = []
    for num_steps in (3, 0):
        model = {"path": str(folder), "device": "cpu", "dtype": "float32", "max_model_len": 512}
        speculative = {
            "speculative_algorithm": "NGRAM",
            "speculative_num_steps": num_steps,
            "speculative_adaptive": False,
        }
        parts = {"model": model, "speculative": speculative, "cache": {"num_pages": 64}}
        loops.append(LocalEngine(ServeSpecConfig.load(parts)))
    yield [Server(loop.config, LoopFleet(loop)) for loop in loops]
    for loop in loops:
        loop.shutdown()


@pytest.mark.parametrize("wanted", ["required", NAMED, {**NAMED, "function": {"name": "weather"}}])
def test_a_required_call_is_valid_and_the_same_with_and_without_speculation(servers, wanted):
    body = {"tools": TOOLS, "tool_choice": wanted, "max_tokens": 120, "seed": 5}
    # Random models like space, and would never end an analysis.
    body |= {"parallel_tool_calls": False, "bad_token_ids": [*b"\t\n a"]}
    calls = [
        f'"name": "{name}", "{key}": {{"city": "Bern", "days": 1}} commentary to=functions.{name} '
        for name in ("weather", "clock")
        for key in ("arguments", "parameters")
    ]
    off = body | {"speculative": {"enabled": False}}
    bodies = zip(servers, (body, off), strict=True)
    answer, other = (server.chat("".join(calls), **each).json() for server, each in bodies)
    found = [each["usage"]["speculation"] for each in (answer, other)]
    drafts = [each["num_draft_tokens"] + each.get("num_grammar_tokens", 0) for each in found]
    assert drafts[0] > drafts[1] == 0
    (choice,), (plain,) = answer["choices"], other["choices"]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [call["function"] for call in plain["message"]["tool_calls"]]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    for call in calls:
        assert is_valid(
            call["arguments"], closed(PARAMETERS) if call["name"] == "weather" else {"const": {}}
        )
    if wanted != "required":
        assert {call["name"] for call in calls} == {wanted["function"]["name"]}
