"""Chats in Python: messages and tools as the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_spec.config.engine import ModelConfig
from serve_spec.core.errors import CheckpointError, InvalidRequest
from serve_spec.engine.chat_template import ChatTemplate, ChatTemplateError, ControlTokens
from serve_spec.engine.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""`role`, `content` (a text, or parts of type text) and what else the template reads."""

_MESSAGE = 'give {"role": ..., "content": ...} with a text, or a list of {"type": "text", ...}'


def chat_token_ids(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], **options: Any
) -> list[int]:
    """Return the token ids of a conversation, or raise InvalidRequest.

    Special tokens in the texts of messages and tools are plain text. options: see
    `ChatTemplate.render`.
    """
    control = ControlTokens(tokenizer, template.source)
    if not messages:
        raise InvalidRequest("messages", messages, "give at least one message")
    conversation = [_message(index, each, control) for index, each in enumerate(messages)]
    if (tools := options.get("tools")) is not None:
        options["tools"] = _tools(tools, control)
    try:
        text = template.render(conversation, **options)
        text.encode()
    except ChatTemplateError as error:
        raise InvalidRequest("messages", f"<{len(messages)} messages>", str(error)) from None
    except UnicodeEncodeError as error:
        fix = f"not valid Unicode: {error.reason}"
        raise InvalidRequest("messages", f"<{len(messages)} messages>", fix) from None
    return control.encode(text, add_special_tokens=template.is_plain)


def template_of(model: ModelConfig, tokenizer: Tokenizer, source: str | None) -> ChatTemplate:
    """Return the template that `source` holds, else the model's.

    Raises InvalidRequest for a source that is no template, CheckpointError for the model's.
    """
    own = ChatTemplate.from_folder(model.tokenizer_folder, model.chat_template)
    if source is None:
        return own
    try:
        return own.with_source(source)
    except CheckpointError as error:
        raise InvalidRequest("chat_template", source[:80], str(error)) from None


def _message(index: int, message: Message, control: ControlTokens) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(where, f"<{type(message).__name__}>", _MESSAGE)
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_part(f"{where}.content", part) for part in content)
    if not isinstance(content, str | None):
        raise InvalidRequest(f"{where}.content", f"<{type(content).__name__}>", _MESSAGE)
    found = {key: control.mark_all(value) for key, value in message.items()}
    return {**found, "role": message["role"], "content": control.mark(content or "")}


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        shown = kind if isinstance(kind, str) else f"<{type(part).__name__}>"
        raise InvalidRequest(where, shown, "this model reads text; give parts of type text")
    return text


def _tools(tools: object, control: ControlTokens) -> object:
    are_functions = isinstance(tools, list | tuple) and all(
        isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools
    )
    if not are_functions:
        fix = 'give a list of {"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise InvalidRequest("tools", f"<{type(tools).__name__}>", fix)
    return control.mark_all(list(tools)) or None  # type: ignore[call-overload]
