"""Log-probabilities of emitted tokens and of prompts, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from serve_spec.core.plan import ScheduledBatch, ScheduledRequest
from serve_spec.core.request import TokenLogprob
from serve_spec.ops.dispatch import to_device
from serve_spec.ops.draw import DrawParams, score_in_slices
from serve_spec.worker.step_buffers import StepBuffers

Logprobs: TypeAlias = Mapping[str, tuple[TokenLogprob, ...]]
"""By request id."""


def emitted_logprobs(
    reqs: Sequence[ScheduledRequest], logits: Tensor, buffers: StepBuffers, paths: Tensor | None
) -> Callable[[Sequence[Sequence[int]]], Logprobs]:
    """Start scoring the tokens that a step in flight may emit.

    Return a function from the tokens that every request has emitted to their log-probabilities, to
    be called after the step's results. Every token of a chain is scored as if its draft were
    accepted; of a tree, as many as its path may have. Call this after the verification, before any
    other stage runs. reqs: the drawing requests. logits: float32 [T, V] of their tokens.
    paths: `StepBuffers.paths` of trees; None for chains.
    """
    asking = [
        (number, req, req.params.logprobs)
        for number, req in enumerate(reqs)
        if req.params.logprobs is not None
    ]
    places = [(number, i) for number, req, _ in asking for i in range(req.num_steps + 1)]
    number, column = to_device(torch.tensor(places), logits.device).unbind(1)
    # How many drafts were verified, the device may know alone.
    lens = buffers.query_lens
    first = (lens.cumsum(0) - lens)[number]
    at = first + (column if paths is None else paths[number, column])
    at = at.clamp(max=len(logits) - 1)
    vocab_size = logits.shape[1]
    scores = score_in_slices(
        lambda part: logits.index_select(0, at[part]),
        vocab_size,
        # Behind the count and the flags; -1 is a token that could not be drawn.
        buffers.results[number, column + 2].clamp(min=0).long(),
        buffers.slots.params.of(buffers.request_slots[number]),
        min(max(num_top for _, _, num_top in asking), vocab_size),
        has_filters=any(req.params.filters for _, req, _ in asking),
    )
    table = _start_reading(scores)

    def read(token_ids: Sequence[Sequence[int]]) -> Logprobs:
        parts = table.split([req.num_steps + 1 for _, req, _ in asking])
        return {
            req.request_id: _logprobs(part[: len(token_ids[number])], token_ids[number], num_top)
            for (number, req, num_top), part in zip(asking, parts, strict=True)
        }

    return read


def prompt_logprobs(
    plan: ScheduledBatch, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int
) -> Callable[[], Logprobs]:
    """Start scoring prompt tokens in flight, without temperature or filters.

    Return a function that returns their log-probabilities, aligned with
    `ScheduledRequest.scored_ids`. Call this on every rank once the step's own logits are used up.
    hidden: [T, H] of all tokens of the step; logits_of: [n, H] -> [n, V].
    """
    scored = [(req, req.params.prompt_logprobs or 0) for req in plan.requests if req.scored_ids]
    at = torch.tensor(_scored_places(plan), device=hidden.device)
    tokens = [token for req, _ in scored for token in req.scored_ids]
    scores = score_in_slices(
        lambda part: logits_of(hidden[at[part]]),
        vocab_size,
        torch.tensor(tokens, device=hidden.device),
        _plain_params(len(tokens), hidden.device),
        min(max(num_top for _, num_top in scored), vocab_size),
        has_filters=False,
    )
    table = _start_reading(scores)

    def read() -> Logprobs:
        parts = table.split([len(req.scored_ids) for req, _ in scored])
        return {
            req.request_id: _logprobs(part, req.scored_ids, num_top)
            for (req, num_top), part in zip(scored, parts, strict=True)
        }

    return read


def _scored_places(plan: ScheduledBatch) -> list[int]:
    """Return the indices, among the tokens of a step, of those before the `scored_ids`.

    Roots and drafts of the drawing requests come first, then the chunks.
    """
    places: list[int] = []
    root = 0
    chunk = sum(req.num_draft_tokens + 1 for req in plan.sampling_requests)
    for req in plan.requests:
        num_chunk_tokens = len(req.token_ids) - req.samples
        if req.scored_ids:
            # A token is scored by the logits one position before it.
            wanted = range(req.scored_start - 1, req.scored_start - 1 + len(req.scored_ids))
            ends = req.start + num_chunk_tokens
            places += [root if p == ends else chunk + p - req.start for p in wanted]
        root += req.num_draft_tokens + 1 if req.samples else 0
        chunk += 0 if req.is_decode else num_chunk_tokens
    return places


def _plain_params(count: int, device: torch.device) -> DrawParams:
    def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((count, *shape), value, dtype=dtype, device=device)

    one, zero = (full(value=x, dtype=torch.float32) for x in (1.0, 0.0))
    return DrawParams(one, full(2), full(), one, zero)


def _logprobs(table: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Return a token per row of a `score_tokens` table on the host."""
    width = (table.shape[1] - 2) // 2
    logprobs = table.view(torch.float32)
    chosen, ranks = logprobs[:, 0].tolist(), table[:, 1].tolist()
    top_ids = table[:, 2 : 2 + width].tolist()
    top_logprobs = logprobs[:, 2 + width :].tolist()
    return tuple(
        TokenLogprob(token, logprob, rank, _top(ids, values, num_top))
        for token, logprob, rank, ids, values in zip(
            token_ids, chosen, ranks, top_ids, top_logprobs, strict=True
        )
    )


def _top(
    ids: Sequence[int], logprobs: Sequence[float], num_top: int
) -> tuple[tuple[int, float], ...]:
    """Return the likeliest `num_top` that the filters left; ties rank by token id."""
    left = [(t, p) for t, p in zip(ids, logprobs, strict=True) if p > float("-inf")]
    return tuple(sorted(left, key=lambda pair: (-pair[1], pair[0]))[:num_top])


def _start_reading(table: Tensor) -> Tensor:
    """Start a copy to the host, complete once the stream has passed this point."""
    if not table.is_cuda:
        return table
    read_back = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    return read_back.copy_(table, non_blocking=True)
