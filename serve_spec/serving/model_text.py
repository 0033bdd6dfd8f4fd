"""Tokenizer and chat template in the router.

The checkpoint's files are read on first use. Tokenizers run in threads, so that streams are not
delayed.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from serve_spec.config.engine import ModelConfig
from serve_spec.core.errors import CheckpointError, InvalidRequest, TextTooLong
from serve_spec.core.request import SamplingParams
from serve_spec.engine.messages import encode_async
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.serving.chat_template import (
    RESERVED,
    ChatTemplate,
    ChatTemplateError,
    ControlTokens,
)
from serve_spec.serving.errors import ApiError
from serve_spec.serving.fields import Prompt
from serve_spec.serving.logprobs import TokenBytesLookup
from serve_spec.serving.openai import ChatRequest

# Default of config.json, as in `models.shape`.
_DEFAULT_MODEL_LEN = 2048
# Shorter texts are rejected by the replica, which encodes them anyway.
_UNUSUAL_CHARS = 65_536
# Likely tokens repeat, and an answer with top_logprobs=20 needs 21 of them per token.
_NUM_CACHED_TOKENS = 2**16


class ModelText:
    """Encodes prompts and decodes tokens of the served model."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._loading = threading.Lock()
        self._loaded: _Loaded | None = None

    async def conversation(
        self, request: ChatRequest, params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        """Return the conversation as token ids, and `params` with `max_tokens` set.

        Raises:
            InvalidRequest: the template rejects it, or it leaves no room for an answer.
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        loaded = await asyncio.to_thread(self._files)
        num_chars = sum(len(message.content) for message in request.messages)
        token_ids = await encode_async(num_chars, partial(loaded.conversation, request))
        room = loaded.room_for_answer(token_ids, request)
        limit = request.limit[1]
        return token_ids, replace(params, max_tokens=room if limit is None else limit)

    async def texts(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return prompts as text.

        Raises:
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        return [
            prompt if isinstance(prompt, str) else await self._text(prompt) for prompt in prompts
        ]

    async def token_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return prompts as token ids, as the engine would encode them; an empty text has none.

        Raises:
            InvalidRequest: one is too long for the model.
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        return [
            await self._encoded(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
        ]

    async def refuse_long(self, prompts: Sequence[Prompt]) -> None:
        """Reject texts that are far too long before they are sent to a replica.

        Raises:
            InvalidRequest: one is too long for the model.
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > _UNUSUAL_CHARS:
                loaded = await asyncio.to_thread(self._files)
                await encode_async(len(prompt), partial(loaded.refuse_long, prompt))

    async def token_bytes(self) -> TokenBytesLookup:
        """Return the lookup of token bytes.

        Raises:
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        loaded = await asyncio.to_thread(self._files)
        return loaded.token_bytes

    async def _encoded(self, prompt: str) -> list[int]:
        if not prompt:  # the engine rejects it
            return []
        loaded = await asyncio.to_thread(self._files)
        return await encode_async(len(prompt), partial(loaded.prompt, prompt))

    async def _text(self, token_ids: list[int]) -> str:
        loaded = await asyncio.to_thread(self._files)
        return await asyncio.to_thread(loaded.tokenizer.decode, token_ids)

    def _files(self) -> _Loaded:
        with self._loading:
            if self._loaded is None:
                try:
                    self._loaded = _Loaded(self._model)
                except (CheckpointError, OSError) as error:
                    message = f"The router cannot read the model's tokenizer: {error}"
                    raise ApiError(500, message, kind="server_error", code="no_tokenizer") from None
            return self._loaded


class _Loaded:
    """The tokenizer, chat template and context length of a checkpoint."""

    def __init__(self, model: ModelConfig) -> None:
        self.tokenizer = Tokenizer(model.path)
        self.token_bytes: TokenBytesLookup = lru_cache(_NUM_CACHED_TOKENS)(
            self.tokenizer.token_bytes
        )
        self._template = ChatTemplate.from_folder(model.path)
        self._control = ControlTokens(self.tokenizer, self._template.source)
        self._max_model_len = model.max_model_len or _max_model_len(model.path)

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            InvalidRequest: it is too long for the model.
        """
        try:
            return self.tokenizer.encode(text, max_tokens=self._max_model_len - 1)
        except TextTooLong as error:
            raise self._too_long("prompt", error.at_least) from None

    def refuse_long(self, text: str) -> None:
        """Raise InvalidRequest for a text that is far too long."""
        try:
            self.tokenizer.refuse_long(text, self._max_model_len - 1)
        except TextTooLong as error:
            raise self._too_long("prompt", error.at_least) from None

    def conversation(self, request: ChatRequest) -> list[int]:
        """Render a conversation with the template and return its token ids.

        Raises:
            InvalidRequest: the template rejects it, or it is too long for the model.
        """
        messages = [
            {"role": message.role, "content": self._control.mark(message.content)}
            | ({"name": self._control.mark(message.name)} if message.name else {})
            for message in request.messages
        ]
        try:
            text = self._template.render(
                messages,
                add_generation_prompt=request.generation_prompt,
                continue_final_message=bool(request.continue_final_message),
                variables=self._variables(request.chat_template_kwargs or {}),
            )
        except ChatTemplateError as error:
            raise InvalidRequest("messages", _summary(request), str(error)) from None
        try:
            return self._control.encode(
                text,
                add_special_tokens=self._template.is_plain,
                max_tokens=self._max_model_len - 1,
            )
        except TextTooLong as error:
            raise self._too_long("messages", error.at_least) from None

    def room_for_answer(self, token_ids: list[int], request: ChatRequest) -> int:
        """Return the number of tokens left in the context after the conversation.

        Raises:
            InvalidRequest: it is less than the request's limit.
        """
        if not token_ids:
            raise InvalidRequest("messages", _summary(request), "give at least one token of text")
        room = self._max_model_len - len(token_ids)
        field, limit = request.limit
        if limit is not None and limit > room:
            fix = f"the messages have {len(token_ids)} tokens, which leaves {room}; lower {field}"
            raise InvalidRequest(field, limit, fix)
        return room

    def _too_long(self, field: str, at_least: int) -> InvalidRequest:
        fix = f"shorten to at most {self._max_model_len - 1} tokens (max_model_len - 1)"
        return InvalidRequest(field, f"<at least {at_least} tokens>", fix, too_long=True)

    def _variables(self, given: Mapping[str, object]) -> dict[str, object]:
        for name in given:
            if name in RESERVED:
                fix = f"reserved; use the request's own fields instead of {sorted(RESERVED)}"
                raise InvalidRequest("chat_template_kwargs", name, fix)
        return {
            name: self._control.mark(value) if isinstance(value, str) else value
            for name, value in given.items()
        }


def _summary(request: ChatRequest) -> str:
    return f"<{len(request.messages)} messages>"


def _max_model_len(folder: Path) -> int:
    """Return the context length in config.json, as the engine reads it.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    path = folder / "config.json"
    try:
        return int(json.loads(path.read_text()).get("max_position_embeddings", _DEFAULT_MODEL_LEN))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
