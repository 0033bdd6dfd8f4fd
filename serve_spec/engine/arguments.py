"""Arguments of `LLM` and `AsyncLLM`: vLLM's names, prompts in all forms, and seeds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.flags import keys_named, named_engine_keys
from serve_spec.config.root import Source, is_file
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import Prompt, SamplingParams

PromptForm = str | Iterable[int] | Mapping[str, Any]
"""A text, token ids, or as in vLLM `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

_FORMS = "give a text, token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def load_arguments(model: Source | None, arguments: Mapping[str, Any]) -> ServeSpecConfig:
    """Return the configuration of arguments, its checkpoints downloaded; raise ConfigError.

    `config`, another name of `model`, may be given beside it as a file, whose model it replaces.
    """
    given = dict(arguments)
    config: Source | None = given.pop("config", None)
    named = named_engine_keys("", given)
    if model is not None and config is not None:
        if not isinstance(config, str) or not is_file(config):
            raise ConfigError(f"model={model!r}: config={config!r} is given too; leave one out")
        named["path"] = "model", str(model)
        model = None
    source = config if model is None else model
    if source is None:
        raise ConfigError("model: missing; give a hub id, a folder, a file or asset:NAME")
    with keys_named({key: name for key, (name, _) in named.items()}):
        loaded = ServeSpecConfig.load(source, **{key: value for key, (_, value) in named.items()})
    return loaded.download()


def read_prompt(prompt: object) -> Prompt:
    """Return a prompt as a text or a list of token ids, or raise InvalidRequest."""
    if isinstance(prompt, Mapping):
        known = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        if other := sorted(set(prompt) - {"prompt", "prompt_token_ids"}):
            raise InvalidRequest(f"prompts.{other[0]}", "<given>", f"not supported; {_FORMS}")
        # As in vLLM, token ids win over the text that they are of.
        prompt = prompt[known[-1]] if known else None
    if isinstance(prompt, str):
        return prompt
    ids = list(prompt) if isinstance(prompt, Iterable) else None
    if ids is None or not all(type(each) is int for each in ids):
        raise InvalidRequest("prompts", f"<{type(prompt).__name__}>", _FORMS)
    return ids


class Seeds:
    """Seeds of requests that have none, drawn from the seed of an engine; None: at random."""

    def __init__(self, seed: int | None) -> None:
        if not (seed is None or type(seed) is int):
            raise ConfigError(f"seed={seed!r}: not an integer; give one, or None: random texts")
        self._random = None if seed is None else random.Random(seed)

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with a seed, if this engine has one."""
        if self._random is None or params.seed is not None:
            return params
        return replace(params, seed=self._random.getrandbits(63))
