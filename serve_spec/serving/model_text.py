"""What the router knows of the model's text: how conversations become prompts, what token ids say.

Everything is read from the checkpoint folder when it is first asked for, and tokenizers work in
threads of their own, so that streams go on meanwhile.
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

# What a config.json without the key means, here as in `models.shape`.
_DEFAULT_MODEL_LEN = 2048
# Shorter texts are for the replica to refuse, which has to encode them in any case.
_UNUSUAL_CHARS = 65_536
# Likely tokens come again and again: an answer with 20 alternatives spells 21 of them per token.
_NUM_CACHED_TOKENS = 2**16


class ModelText:
    """Prompts and texts of one served model."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._loading = threading.Lock()
        self._loaded: _Loaded | None = None

    async def conversation(
        self, request: ChatRequest, params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        """The conversation as token ids; `params` with as many tokens as asked for or possible.

        Raises:
            InvalidRequest: the template refuses it, or it leaves no room for an answer.
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        loaded = await asyncio.to_thread(self._files)
        num_chars = sum(len(message.content) for message in request.messages)
        token_ids = await encode_async(num_chars, partial(loaded.conversation, request))
        room = loaded.room_for_answer(token_ids, request)
        limit = request.limit[1]
        return token_ids, replace(params, max_tokens=room if limit is None else limit)

    async def texts(self, prompts: Sequence[Prompt]) -> list[str]:
        """What prompts say.

        Raises:
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        return [
            prompt if isinstance(prompt, str) else await self._text(prompt) for prompt in prompts
        ]

    async def token_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Prompts as the engine would encode them; an empty text has no tokens.

        Raises:
            InvalidRequest: one is too long for the model.
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        return [
            await self._encoded(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
        ]

    async def refuse_long(self, prompts: Sequence[Prompt]) -> None:
        """Refuse texts that are too long by far before they travel to a replica.

        Raises:
            InvalidRequest: one is too long for the model.
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > _UNUSUAL_CHARS:
                loaded = await asyncio.to_thread(self._files)
                await encode_async(len(prompt), partial(loaded.refuse_long, prompt))

    async def token_bytes(self) -> TokenBytesLookup:
        """What spells single tokens.

        Raises:
            ApiError: 500, the checkpoint's files cannot be used here.
        """
        loaded = await asyncio.to_thread(self._files)
        return loaded.token_bytes

    async def _encoded(self, prompt: str) -> list[int]:
        if not prompt:  # for the engine to refuse, whatever special tokens would be added
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
    """The checkpoint's files that have to do with text."""

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
        """Raise InvalidRequest for a text that is too long by far."""
        try:
            self.tokenizer.refuse_long(text, self._max_model_len - 1)
        except TextTooLong as error:
            raise self._too_long("prompt", error.at_least) from None

    def conversation(self, request: ChatRequest) -> list[int]:
        """Token ids of the prompt that the template makes of a conversation.

        Raises:
            InvalidRequest: the template refuses it, or it is too long for the model.
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
        """Tokens that the context has room for after the conversation.

        Raises:
            InvalidRequest: there is less than the request wants.
        """
        if not token_ids:
            raise InvalidRequest("messages", _summary(request), "give at least one token of text")
        room = self._max_model_len - len(token_ids)
        field, limit = request.limit
        if limit is not None and limit > room:
            fix = f"messages of {len(token_ids)} tokens leave room for {room}; ask for less"
            raise InvalidRequest(field, limit, fix)
        return room

    def _too_long(self, field: str, at_least: int) -> InvalidRequest:
        fix = f"shorten to at most {self._max_model_len - 1} tokens (max_model_len - 1)"
        return InvalidRequest(field, f"<at least {at_least} tokens>", fix, too_long=True)

    def _variables(self, given: Mapping[str, object]) -> dict[str, object]:
        for name in given:
            if name in RESERVED:
                fix = f"say this with the request's own fields; reserved are {sorted(RESERVED)}"
                raise InvalidRequest("chat_template_kwargs", name, fix)
        return {
            name: self._control.mark(value) if isinstance(value, str) else value
            for name, value in given.items()
        }


def _summary(request: ChatRequest) -> str:
    return f"<{len(request.messages)} messages>"


def _max_model_len(folder: Path) -> int:
    """What the model allows, as the engine reads it.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    path = folder / "config.json"
    try:
        return int(json.loads(path.read_text()).get("max_position_embeddings", _DEFAULT_MODEL_LEN))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
