"""Checks of the token ids that a request allows, biases or forbids, before it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import SamplingParams


def held_token_ids(
    params: SamplingParams, eos_token_ids: Collection[int], num_ids: int
) -> tuple[int, ...]:
    """Return the tokens masked until `min_tokens`: end-of-text and stop tokens below `num_ids`."""
    if not params.min_tokens:
        return ()
    return tuple(sorted(t for t in {*eos_token_ids, *params.stop_token_ids} if 0 <= t < num_ids))


def check_token_ids(params: SamplingParams, held: Collection[int], num_ids: int) -> None:
    """Raise InvalidRequest if score edits name an unknown token, or leave no token.

    held: see `held_token_ids`.
    """
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_token_ids": params.bad_token_ids,
    }
    for field, token_ids in named.items():
        unknown = next((t for t in token_ids if not 0 <= t < num_ids), None)
        if unknown is not None:
            raise InvalidRequest(field, unknown, f"token ids must be in [0, {num_ids})")
    _check_some_left(params, held, num_ids)


def _check_some_left(params: SamplingParams, held: Collection[int], num_ids: int) -> None:
    if params.allowed_token_ids is not None:
        left = set(params.allowed_token_ids) - set(params.bad_token_ids)
        if not left - set(held):
            fix = "bad_token_ids and min_tokens mask all of them; allow other tokens, too"
            raise InvalidRequest("allowed_token_ids", f"<{len(params.allowed_token_ids)}>", fix)
    elif len({*params.bad_token_ids, *held}) >= num_ids:
        fix = "no token is left until min_tokens are generated; name fewer"
        raise InvalidRequest("bad_token_ids", f"<{len(params.bad_token_ids)}>", fix)
