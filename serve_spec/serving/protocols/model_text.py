"""Tokenizer and chat template in the router.

The checkpoint's files are read on first use. Tokenizers run in threads, so that streams are not
delayed.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from serve_spec.config import ConfigError
from serve_spec.config.checkpoint import max_positions, text_config
from serve_spec.config.engine import ModelConfig
from serve_spec.config.serving import RouterConfig
from serve_spec.core.errors import CheckpointError, InvalidRequest, TextTooLong
from serve_spec.core.grammar import GrammarKind
from serve_spec.core.request import SamplingParams
from serve_spec.engine import chat_template
from serve_spec.engine.inputs import sampling_defaults
from serve_spec.engine.messages import encode_async
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.serving.errors import ApiError
from serve_spec.serving.messages import Prompt
from serve_spec.serving.protocols.logprobs import TokenBytesLookup
from serve_spec.serving.protocols.openai import ChatMessage, ChatRequest, CompletionRequest
from serve_spec.serving.protocols.parsers import AnswerSyntax
from serve_spec.serving.protocols.tools import Formats

# Shorter texts are rejected by the replica, which encodes them anyway.
_UNUSUAL_CHARS = 65_536
# Texts that are cut, or only counted, may be longer than the context, but have a limit.
_MOST_CONTEXTS = 8
# For texts in objects, which may have any length.
_LONG_CHARS = 2**20
# Likely tokens repeat, and an answer with top_logprobs=20 needs 21 of them per token.
_NUM_CACHED_TOKENS = 2**16

T = TypeVar("T")


class _Files(NamedTuple):
    tokenizer: Tokenizer
    token_bytes: TokenBytesLookup
    template: chat_template.ChatTemplate
    control: chat_template.ControlTokens
    formats: Formats
    max_model_len: int


class Conversation(NamedTuple):
    """A rendered conversation, and how to parse the answer; None: it is content only."""

    token_ids: list[int]
    params: SamplingParams
    syntax: AnswerSyntax | None


class ModelText:
    """Encodes prompts and decodes tokens of the served model; `router` names formats.

    All methods raise ApiError, 500, if the checkpoint's files cannot be used here.
    """

    def __init__(self, model: ModelConfig, router: RouterConfig | None = None) -> None:
        self._model = model
        self._router = router or RouterConfig()
        self._loading = threading.Lock()
        self._loaded: _Files | None = None
        self._defaults: dict[str, Any] | None = None

    async def params(self, request: CompletionRequest | ChatRequest) -> SamplingParams:
        """Return a request's parameters with the checkpoint's defaults, or raise InvalidRequest."""
        params = request.sampling_params()
        if self._defaults is None:
            self._defaults = await asyncio.to_thread(_readable, sampling_defaults, self._model)
        defaults = {
            name: value
            for name, value in self._defaults.items()
            if name != "max_tokens" and getattr(request, name) is None
        }
        return replace(params, **defaults) if defaults else params

    async def conversation(self, request: ChatRequest, params: SamplingParams) -> Conversation:
        """Return the conversation as token ids, and `params` with `max_tokens` and grammar set.

        InvalidRequest: the template rejects it, it leaves no room for an answer, or the format of
        the checkpoint's calls is not known.
        """
        files = await self._files()
        num_chars = _LONG_CHARS if request.tools else sum(map(_num_chars, request.messages))
        token_ids, params, syntax = await encode_async(
            num_chars, partial(_conversation, files, request, params)
        )
        token_ids = request.kept(token_ids, files.max_model_len - (request.limit[1] or 1))
        if not token_ids:
            raise InvalidRequest("messages", _summary(request), "give at least one token of text")
        room = files.max_model_len - len(token_ids)
        field, limit = request.limit
        if limit is not None and limit > room:
            fix = f"the messages have {len(token_ids)} tokens, which leaves {room}; lower {field}"
            raise InvalidRequest(field, limit, fix)
        default = (self._defaults or {}).get("max_tokens", room)
        most = min(room, max(default, params.min_tokens))
        params = replace(params, max_tokens=most if limit is None else limit)
        return Conversation(token_ids, params, syntax)

    async def texts(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return prompts as text."""
        return [
            prompt if isinstance(prompt, str) else await self.text(prompt) for prompt in prompts
        ]

    async def token_ids(self, request: CompletionRequest, max_tokens: int) -> list[list[int]]:
        """Return the prompts as token ids, with room for `max_tokens`; InvalidRequest: too long."""
        files = await self._files()
        room = files.max_model_len - max_tokens
        return [
            request.kept(
                await self._encoded(prompt, request) if isinstance(prompt, str) else prompt, room
            )
            for prompt in request.prompt
        ]

    async def refuse_long(self, prompts: Sequence[Prompt]) -> None:
        """Raise InvalidRequest for texts that are far too long before they reach a replica."""
        for prompt in prompts:
            if len(prompt) > _UNUSUAL_CHARS:
                await encode_async(len(prompt), partial(_refuse_long, await self._files(), prompt))

    async def encode(
        self, text: str, *, add_special_tokens: bool, contexts: int = _MOST_CONTEXTS
    ) -> list[int]:
        """Return the token ids of a text; raise InvalidRequest if it is longer than `contexts`."""
        files = await self._files()
        encode = partial(_encode, files, text, add_special_tokens, contexts)
        return await encode_async(len(text), encode)

    async def max_model_len(self) -> int:
        """Return the context length."""
        return (await self._files()).max_model_len

    async def token_bytes(self) -> TokenBytesLookup:
        """Return the lookup of token bytes."""
        return (await self._files()).token_bytes

    async def text(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return token ids as text."""
        decode = (await self._files()).tokenizer.decode
        return await asyncio.to_thread(decode, token_ids, skip_special_tokens=skip_special_tokens)

    async def _encoded(self, prompt: str, request: CompletionRequest) -> list[int]:
        if not prompt:  # the engine rejects it
            return []
        contexts = 1 if request.truncate_prompt_tokens is None else _MOST_CONTEXTS
        adds = request.add_special_tokens is not False
        return await self.encode(prompt, add_special_tokens=adds, contexts=contexts)

    async def _files(self) -> _Files:
        return await asyncio.to_thread(self._load) if self._loaded is None else self._loaded

    def _load(self) -> _Files:
        with self._loading:
            if self._loaded is None:
                self._loaded = _readable(partial(_read, router=self._router), self._model)
            return self._loaded


def _readable(read: Callable[[ModelConfig], T], model: ModelConfig) -> T:
    try:
        return read(model)
    except (CheckpointError, ConfigError, OSError) as error:
        message = f"The router cannot read the model's files: {error}"
        raise ApiError(500, message, kind="server_error", code="no_tokenizer") from None


def _read(model: ModelConfig, router: RouterConfig) -> _Files:
    tokenizer = Tokenizer(model.tokenizer_folder)
    token_bytes = lru_cache(_NUM_CACHED_TOKENS)(tokenizer.token_bytes)
    template = chat_template.ChatTemplate.from_folder(model.tokenizer_folder, model.chat_template)
    control = chat_template.ControlTokens(tokenizer, template.source)
    max_model_len = model.max_model_len or _max_model_len(model.metadata_folder)
    formats = Formats.of(template.source, router.tool_call_parser, router.reasoning_parser)
    return _Files(tokenizer, token_bytes, template, control, formats, max_model_len)


def _encode(files: _Files, text: str, add_special_tokens: bool, contexts: int) -> list[int]:
    """Return the token ids of a text that fits into so many contexts."""
    with _limit(files, "prompt", contexts) as max_tokens:
        return files.tokenizer.encode(
            text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )


def _refuse_long(files: _Files, prompt: Prompt) -> None:
    with _limit(files, "prompt") as max_tokens:
        if isinstance(prompt, str):
            files.tokenizer.refuse_long(prompt, max_tokens)
        elif len(prompt) > max_tokens:
            raise TextTooLong(len(prompt))


def _conversation(files: _Files, request: ChatRequest, params: SamplingParams) -> Conversation:
    """Render a conversation with the template; its token ids may be too many."""
    try:
        text = files.template.render(
            [_message(index, message, files) for index, message in enumerate(request.messages)],
            tools=_tools(request, files),
            add_generation_prompt=request.generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            variables=_variables(request, files),
        )
        text.encode()
        params, syntax = _parsed(files, request, params, text)
    except chat_template.ChatTemplateError as error:
        raise InvalidRequest("messages", _summary(request), str(error)) from None
    except (RecursionError, UnicodeEncodeError):
        fix = "the tools, or arguments of calls, are nested too deeply or not valid Unicode"
        raise InvalidRequest("messages", _summary(request), fix) from None
    add_special_tokens = request.add_special_tokens
    if add_special_tokens is None:
        add_special_tokens = files.template.is_plain
    contexts = 1 if request.truncate_prompt_tokens is None else _MOST_CONTEXTS
    with _limit(files, "messages", contexts) as max_tokens:
        token_ids = files.control.encode(
            text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )
    return Conversation(token_ids, params, syntax)


def _num_chars(message: ChatMessage) -> int:
    """Return the length of a message, or that of a long one if it has calls."""
    texts = message.content, message.reasoning_content, message.reasoning
    return _LONG_CHARS if message.tool_calls else sum(len(text or "") for text in texts)


def _message(index: int, message: ChatMessage, files: _Files) -> dict[str, Any]:
    mark = files.control.mark
    calls = [
        call.for_template(f"messages.{index}.tool_calls.{place}")
        for place, call in enumerate(message.tool_calls or ())
    ]
    content = mark(message.content or "")
    found: dict[str, Any] = {"role": message.role, "content": content}
    if reasoning := message.reasoning_content or message.reasoning:
        # gpt-oss reads `thinking`, and not beside content.
        names = ("reasoning_content", "reasoning", *(() if content else ("thinking",)))
        found |= dict.fromkeys(names, mark(reasoning))
    if calls:
        found["tool_calls"] = files.control.mark_all(calls)
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            found[name] = mark(value)
    return found


def _tools(request: ChatRequest, files: _Files) -> list[Any] | None:
    if not request.callable_functions:
        return None
    tools = [tool.for_template() for tool in request.tools or ()]
    return cast(list[Any], files.control.mark_all(tools))


def _variables(request: ChatRequest, files: _Files) -> dict[str, object]:
    variables: dict[str, object] = {}
    if request.reasoning_effort == "none":
        variables["enable_thinking"] = False
    elif request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    variables |= request.chat_template_kwargs or {}
    for name in variables:
        if name in chat_template.RESERVED:
            reserved = sorted(chat_template.RESERVED)
            fix = f"reserved; use the request's own fields instead of {reserved}"
            raise InvalidRequest("chat_template_kwargs", name, fix)
    return cast(dict[str, object], files.control.mark_all(variables))


def _parsed(
    files: _Files, request: ChatRequest, params: SamplingParams, prompt: str
) -> tuple[SamplingParams, AnswerSyntax | None]:
    """Return how to parse the answer to a rendered conversation, and parameters for that."""
    functions, formats, grammar = request.callable_functions, files.formats, params.grammar
    separates = request.separate_reasoning is not False
    if grammar is not None and not request.must_call:
        if grammar.kind is not GrammarKind.JSON_SCHEMA or not formats.reasoning or not separates:
            return params, None  # the whole text is of the grammar
        functions, grammar = [], formats.of_json(grammar, prompt)
    calls = formats.calls if functions or formats.reasoning == "openai" else None
    if functions and calls is None:
        if not request.must_call:
            fix = (
                "the format of the model's calls is not known, so it cannot choose to call; use "
                'tool_choice "required" or a name, or set router.tool_call_parser'
            )
            raise InvalidRequest("tools", f"<{len(functions)} functions>", fix)
        calls = "json"
    syntax = AnswerSyntax(
        calls,
        formats.reasoning if separates else None,
        {function.name: function.arguments_schema for function in functions},
        is_reasoning=separates and formats.is_reasoning(prompt),
        is_parallel=request.may_call_again and not formats.is_single,
        ends_itself=request.must_call,
        shows_reasoning=request.include_reasoning is not False,
        reasoning_end=_reasoning_end(files),
    )
    if request.must_call:
        if grammar is not None and not grammar.source.startswith("response_format"):
            raise grammar.refusal("conflicts with tool_choice; give only one of them")
        grammar = formats.of_calls(functions, syntax, prompt)
    elif formats.marks_json and any(function.strict for function in functions):
        grammar = formats.of_calls(functions, syntax, prompt, is_free=True)
    if not syntax.markers and calls is None:
        return params, None
    special = files.tokenizer.added_tokens
    is_special = any(special.get(marker) for marker in syntax.markers)
    skips = params.skip_special_tokens and not is_special
    return replace(params, grammar=grammar, skip_special_tokens=skips), syntax


def _reasoning_end(files: _Files) -> int | None:
    """Return the token that ends the reasoning, if it is one."""
    end = files.formats.reasoning_end
    token_ids = files.tokenizer.encode(end, add_special_tokens=False) if end else []
    return token_ids[0] if len(token_ids) == 1 else None


@contextmanager
def _limit(files: _Files, field: str, contexts: int = 1) -> Iterator[int]:
    """Yield the maximum number of tokens; convert TextTooLong to InvalidRequest."""
    most = contexts * files.max_model_len - 1
    try:
        yield most
    except TextTooLong as error:
        fix = f"shorten to at most {most} tokens ({contexts} x max_model_len - 1)"
        found = f"<at least {error.at_least} tokens>"
        raise InvalidRequest(field, found, fix, too_long=True) from None


def _summary(request: ChatRequest) -> str:
    return f"<{len(request.messages)} messages>"


def _max_model_len(folder: Path) -> int:
    """Return the context length in config.json, as the engine reads it."""
    path = folder / "config.json"
    try:
        return max_positions(text_config(json.loads(path.read_text())))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
