"""What the endpoints that generate text have in common."""

from __future__ import annotations

import hmac
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Request

from serve_spec import __version__
from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.config.serving import RouterConfig
from serve_spec.core.request import SamplingParams
from serve_spec.metrics import IGNORED_FIELDS, Reading
from serve_spec.serving.errors import too_many_choices, unknown_model
from serve_spec.serving.messages import GenerateRequest, Prompt
from serve_spec.serving.protocols import answers
from serve_spec.serving.protocols.completion_answer import CompletionAnswer
from serve_spec.serving.protocols.fields import ignored_fields
from serve_spec.serving.protocols.logprobs import TokenBytesLookup, labelled
from serve_spec.serving.protocols.middleware import CLIENT, key_client, trace_id
from serve_spec.serving.protocols.model_text import ModelText
from serve_spec.serving.protocols.openai import (
    BaseRequest,
    ChatRequest,
    CompletionRequest,
    unknown_field,
)
from serve_spec.serving.protocols.tools import ParsedChatFormat
from serve_spec.serving.router.admission import Admission
from serve_spec.serving.router.completions import CompletionRunner, choices_of

if TYPE_CHECKING:
    from serve_spec.serving.router.fleet import RayFleet

_MOST_ID_CHARS = 64


class Frontend:
    """Code shared by the endpoints that generate text; `answer` returns a `CompletionAnswer`."""

    def __init__(
        self,
        config: ServeSpecConfig,
        fleet: RayFleet,
        admission: Admission,
        record: Callable[[Reading], None],
    ) -> None:
        self.text = ModelText(config.model, config.router)
        self._names = config.model.names
        self._is_strict = config.router.strict_fields
        self._salts = _salts(config.router)
        self._record = record
        self._fingerprint = answers.fingerprint(__version__, config.model.model_dump(mode="json"))
        self._has_metrics = config.router.per_request_spec_decode_metrics != "none"
        self._lists_rounds = config.router.per_request_spec_decode_metrics == "detailed"
        self._depth = PolicySettings.of(config.speculative).max_depth
        self._synthetic_acceptance = config.speculative.synthetic_acceptance is not None
        self._runner = CompletionRunner(
            fleet,
            admission,
            timeout_s=config.router.request_timeout_s,
            resume_timeout_s=config.router.resume_timeout_s,
            record=record,
        )
        self.answer = partial(CompletionAnswer, self._runner)

    def admit(self, body: BaseRequest, num_prompts: int) -> None:
        """Raise ApiError for another model, too many choices, or an unknown field if strict."""
        if ignored := [*ignored_fields(body)]:
            if self._is_strict:
                raise unknown_field(ignored[0], type(body))
            self._record(Reading(IGNORED_FIELDS, len(ignored)))
        self.check_model(body.model)
        most = self._runner.max_choices
        if num_prompts * body.num_candidates > most:
            raise too_many_choices(num_prompts, body.num_candidates, most)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model."""
        if name is not None and name not in self._names:
            raise unknown_model(name, self._names[0])

    def head(self, kind: str, body: BaseRequest, separator: str = "-") -> answers.AnswerHead:
        """Return the shared fields. The id is not x-request-id, which need not be unique."""
        return answers.AnswerHead(
            f"{kind}{separator}{body.request_id or uuid.uuid4().hex}",
            self._names[0],
            int(time.time()),
            self._fingerprint,
            include_usage=body.include_usage,
            has_continuous_usage=body.has_continuous_usage,
            synthetic_acceptance=self._synthetic_acceptance,
        )

    async def token_bytes(self, body: BaseRequest, *, is_wanted: bool) -> TokenBytesLookup | None:
        """Return the lookup of token bytes; None unless log-probabilities are requested."""
        if not is_wanted:
            return None
        token_bytes = await self.text.token_bytes()
        return labelled(token_bytes) if body.return_tokens_as_token_ids else token_bytes

    async def details(self, body: BaseRequest, prompts: Sequence[Prompt]) -> answers.Details:
        """Return what the answer holds in addition to the text."""
        is_scored = body.prompt_logprobs is not None
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        return answers.Details(
            body.num_choices,
            ids if body.return_token_ids else None,
            body.prompt_logprobs,
            await self.text.token_bytes() if is_scored else None,
            has_metrics=self._has_metrics,
            has_sglext=bool(body.return_spec_tokens_details),
            depth=self._depth,
        )

    async def prompts(self, body: CompletionRequest, max_tokens: int) -> list[Prompt]:
        """Return the prompts for the replica; as token ids if the answer or a limit needs them."""
        prompts = body.prompt
        if body.needs_token_ids:
            prompts = [*await self.text.token_ids(body, max_tokens)]
        await self.text.refuse_long(prompts)
        return prompts

    async def echoes(
        self, body: CompletionRequest, prompts: Sequence[Prompt]
    ) -> list[answers.Echo]:
        """Return the prompts to repeat before their choices; empty unless `echo` is set."""
        if not body.echo:
            return []
        is_cut = body.truncate_prompt_tokens is not None
        texts = await self.text.texts(prompts if is_cut else body.prompt)
        ids = [[] if isinstance(prompt, str) else prompt for prompt in prompts]
        return [answers.Echo(*echo) for echo in zip(texts, ids, strict=True)]

    async def chat(
        self, body: ChatRequest, head: answers.AnswerHead, request: Request
    ) -> tuple[list[GenerateRequest], answers.ChatFormat]:
        """Return the choices of a chat and the format of its answer."""
        prompt, params, syntax = await self.text.conversation(body, await self.text.params(body))
        choices = self.choices(head, request, [prompt], params, body.num_choices)
        token_bytes = await self.token_bytes(body, is_wanted=bool(body.logprobs))
        form = answers.ChatFormat(head, token_bytes)
        if syntax is not None:
            form = ParsedChatFormat(head, syntax, token_bytes)
        form.details = await self.details(body, [prompt])
        return choices, form

    def choices(
        self,
        head: answers.AnswerHead,
        request: Request,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        count: int,
    ) -> list[GenerateRequest]:
        """Return `count` requests per prompt; their ids are unique, unlike those of clients."""
        key = f"{head.id[:_MOST_ID_CHARS]}-{uuid.uuid4().hex}"
        if (salt := self._salts.get(CLIENT.get())) is not None:
            params = replace(params, cache_salt=f"{salt} {params.cache_salt or ''}")
        if self._lists_rounds:
            params = replace(params, speculative=replace(params.speculative, lists_rounds=True))
        return choices_of(key, trace_id(request), prompts, params, count)


def _salts(router: RouterConfig) -> dict[str, str]:
    """Return the cache salt of each client with an API key, the same in every router.

    Without one, a client could find out what others have sent.
    """
    if len(set(router.api_keys)) < 2 or router.share_prefix_cache:
        return {}
    return {
        key_client(index): hmac.digest(key.encode(), b"cache_salt", "sha256").hex()
        for index, key in enumerate(router.api_keys)
    }
