"""From a prompt and sampling parameters to a checked request of an engine."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from serve_spec.config.engine import ModelConfig
from serve_spec.core.errors import CheckpointError, InvalidRequest, TextTooLong
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import Prompt, SamplingParams
from serve_spec.core.sequence import Sequence
from serve_spec.core.stats import SpeculationStats
from serve_spec.engine.tokenizer import Tokenizer

# Keys of generation_config.json that vLLM reads, and our names.
_SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_RECOMMENDED = {**{name: name for name in _SAME_NAMES}, "max_new_tokens": "max_tokens"}


def sampling_defaults(model: ModelConfig) -> dict[str, Any]:
    """Return the checkpoint's sampling parameters for requests, or raise CheckpointError.

    Empty with `generation_config=none`. As in vLLM, `do_sample` is not read.
    """
    path = model.metadata_folder / "generation_config.json"
    if model.generation_config == "none" or not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text())
        given = {ours: stored.get(key) for key, ours in _RECOMMENDED.items()}
        given = {name: value for name, value in given.items() if value is not None}
        SamplingParams(**given)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: {error}; correct it, or set generation_config=none"
        ) from error
    return given


def held_token_ids(
    params: SamplingParams, eos_token_ids: Collection[int], num_ids: int
) -> tuple[int, ...]:
    """Return the tokens masked until `min_tokens`: end-of-text and stop tokens below `num_ids`."""
    if not params.min_tokens:
        return ()
    return tuple(sorted(t for t in {*eos_token_ids, *params.stop_token_ids} if 0 <= t < num_ids))


def check_token_ids(params: SamplingParams, held: Collection[int], num_ids: int) -> None:
    """Raise InvalidRequest if score edits name unknown tokens, or leave only `held`."""
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_token_ids": params.bad_token_ids,
    }
    for field, token_ids in named.items():
        unknown = next((t for t in token_ids if not 0 <= t < num_ids), None)
        if unknown is not None:
            raise InvalidRequest(field, unknown, f"token ids must be in [0, {num_ids})")
    if params.allowed_token_ids is not None:
        left = set(params.allowed_token_ids) - set(params.bad_token_ids)
        if not left - set(held):
            fix = "bad_token_ids and min_tokens mask all of them; allow other tokens, too"
            raise InvalidRequest("allowed_token_ids", f"<{len(params.allowed_token_ids)}>", fix)
    elif len({*params.bad_token_ids, *held}) >= num_ids:
        fix = "no token is left until min_tokens are generated; name fewer"
        raise InvalidRequest("bad_token_ids", f"<{len(params.bad_token_ids)}>", fix)


class EngineLimits(msgspec.Struct, frozen=True):
    """Limits that an engine sets to requests."""

    vocab_size: int
    num_ids: int
    """Token ids below are real, those from here on padding."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    forces_acceptance: bool = False
    """Acceptance is forced for a load test."""


@dataclass(eq=False, repr=False)
class InputProcessor:
    """Checks requests and encodes prompts. Safe to call from any thread.

    compile_grammar: raises InvalidRequest if it cannot be compiled.
    """

    tokenizer: Tokenizer
    limits: EngineLimits
    compile_grammar: Callable[[Grammar], object]

    def new_sequence(
        self, request_id: str, prompt: Prompt, params: SamplingParams, emitted: Collection[int] = ()
    ) -> Sequence:
        """Return a checked request, its grammar excepted, or raise InvalidRequest.

        emitted: tokens that another engine generated; they count for `max_tokens` and the rest.
        """
        limits = self.limits
        token_ids = self.token_ids(prompt, params)
        shown = f"<{len(token_ids)} tokens>"
        if not token_ids:
            raise InvalidRequest("prompt", prompt, "give at least one token of text")
        if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
            unknown = next(t for t in token_ids if not 0 <= t < limits.vocab_size)
            fix = f"token ids must be in [0, {limits.vocab_size})"
            if 0 <= unknown < self.tokenizer.vocab_size:
                name = self.tokenizer.token_bytes(unknown).data.decode()
                fix = f"{fix}, but {name!r} is {unknown} in the tokenizer; leave it out"
            raise InvalidRequest("prompt", shown, fix)
        if len(token_ids) >= limits.max_model_len:
            raise self._too_long(shown)
        if len(token_ids) + params.max_tokens > limits.max_model_len:
            room = limits.max_model_len - len(token_ids)
            fix = f"a prompt of {len(token_ids)} tokens leaves room for {room}; ask for less"
            raise InvalidRequest("max_tokens", params.max_tokens, fix)
        params = self._with_word_ids(params)
        held = held_token_ids(params, limits.eos_token_ids, limits.num_ids)
        check_token_ids(params, held, limits.num_ids)
        ends = {t for t in params.stop_token_ids if 0 <= t < limits.vocab_size}
        if not params.ignore_eos or params.grammar is not None:
            ends.update(limits.eos_token_ids)
        if params.truncate_prompt_tokens is not None:
            params = replace(params, truncate_prompt_tokens=None)
        if emitted:  # prompt log-probabilities came with the first of these
            params = replace(params, prompt_logprobs=None)
        return Sequence(
            request_id,
            params,
            [*token_ids, *emitted],
            len(token_ids),
            secrets.randbits(63) if params.seed is None else params.seed & (2**64 - 1),
            held_token_ids=held,
            end_token_ids=frozenset(ends),
            reports_stats=bool(params.stop),
            stats=SpeculationStats(rounds=[] if params.speculative.lists_rounds else None),
        )

    def _with_word_ids(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with `bad_words` as token ids; single tokens are bad tokens."""
        if not params.bad_words:
            return params
        found: set[tuple[int, ...]] = set()
        for word in params.bad_words:
            if isinstance(word, str):
                texts = (word.lstrip(), f" {word.lstrip()}")
                ids = (self.tokenizer.encode(text, add_special_tokens=False) for text in texts)
                found.update(map(tuple, ids))
            else:
                found.add(tuple(word))
        singles = sorted(word[0] for word in found if len(word) == 1)
        longer = sorted(word for word in found if len(word) > 1)
        bad_token_ids = (*params.bad_token_ids, *singles)
        return replace(params, bad_token_ids=bad_token_ids, bad_words=longer)

    def token_ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Return a prompt's token ids after `truncate_prompt_tokens`; raise as `encode`."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if keep < 0:
            keep = max(1, self.limits.max_model_len - params.max_tokens)
        ids = self.encode(prompt, any_length=True) if isinstance(prompt, str) else prompt
        return list(ids[-keep:])

    def encode(self, prompt: str, *, any_length: bool = False) -> list[int]:
        """Return a text's token ids; raise InvalidRequest if it is not Unicode or too long."""
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            fix = f"character {error.start} is half of a surrogate pair; send valid text"
            raise InvalidRequest("prompt", prompt, fix) from error
        if not prompt:  # without the special tokens that the checkpoint would add
            return []
        try:
            most = None if any_length else self.limits.max_model_len - 1
            return self.tokenizer.encode(prompt, max_tokens=most)
        except TextTooLong as error:
            raise self._too_long(f"<at least {error.at_least} tokens>") from None

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar, which may take a second; InvalidRequest if it cannot be served."""
        if self.limits.forces_acceptance:
            raise grammar.refusal("this engine forces acceptance, for load tests; leave it out")
        self.compile_grammar(grammar)

    def _too_long(self, shown: str) -> InvalidRequest:
        fix = f"shorten it to at most {self.limits.max_model_len - 1} tokens (max_model_len - 1)"
        return InvalidRequest("prompt", shown, fix, too_long=True)
