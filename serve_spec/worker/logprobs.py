"""Log-probabilities of emitted tokens and of prompts, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from serve_spec.core.plan import ScheduledBatch, ScheduledRequest
from serve_spec.core.request import TokenLogprob
from serve_spec.ops.dispatch import to_device
from serve_spec.ops.draw import DrawParams, score_in_slices
from serve_spec.worker.step_buffers import StepBuffers

Logprobs: TypeAlias = Mapping[str, tuple[TokenLogprob, ...]]
"""By request id."""


class EmittedLogprobs:
    """Log-probabilities of the tokens that a step in flight may emit.

    Every token of a chain is scored as if its draft were accepted; of a tree, as many as its path
    may have. Create it after the verification, before any other stage runs, and read it
    after the step's results.
    """

    def __init__(
        self,
        reqs: Sequence[ScheduledRequest],
        logits: Tensor,
        buffers: StepBuffers,
        *,
        has_trees: bool,
    ) -> None:
        """Start scoring. reqs: the drawing requests. logits: float32 [T, V] of their tokens."""
        self._asking = [*_asking(reqs)]
        places = [(one.number, i) for one in self._asking for i in range(one.req.num_steps + 1)]
        number, column = to_device(torch.tensor(places), logits.device).unbind(1)
        # How many drafts were verified, the device may know alone.
        lens = buffers.query_lens
        first = (lens.cumsum(0) - lens)[number]
        paths = buffers.paths if has_trees else None
        at = first + (column if paths is None else paths[number, column])
        at = at.clamp(max=len(logits) - 1)
        vocab_size = logits.shape[1]
        table = score_in_slices(
            lambda part: logits.index_select(0, at[part]),
            vocab_size,
            # Behind the count and the flags; -1 is a token that could not be drawn.
            buffers.results[number, column + 2].clamp(min=0).long(),
            buffers.slots.params.of(buffers.request_slots[number]),
            min(max(one.num_top for one in self._asking), vocab_size),
            has_filters=any(one.req.params.filters for one in self._asking),
        )
        self._table = _start_reading(table)

    def read(self, token_ids: Sequence[Sequence[int]]) -> Logprobs:
        """Return those of the tokens that every request of the step emitted."""
        found = {}
        first = 0
        for one in self._asking:
            tokens = token_ids[one.number]
            table = self._table[first : first + len(tokens)]
            found[one.req.request_id] = _entries(table, tokens, one.num_top)
            first += one.req.num_steps + 1
        return found


class PromptLogprobs:
    """Log-probabilities of prompt tokens in flight, without temperature or filters.

    Create it on every rank right after the target's forward.
    """

    def __init__(
        self,
        plan: ScheduledBatch,
        hidden: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        vocab_size: int,
    ) -> None:
        """Start scoring. hidden: [T, H] of all tokens of the step; logits_of: [n, H] -> [n, V]."""
        self._reqs = [req for req in plan.requests if req.scored_ids]
        at = torch.tensor(_scored_places(plan), device=hidden.device)
        tokens = [token for req in self._reqs for token in req.scored_ids]
        self._table = _start_reading(
            score_in_slices(
                lambda part: logits_of(hidden[at[part]]),
                vocab_size,
                torch.tensor(tokens, device=hidden.device),
                _plain_params(len(tokens), hidden.device),
                min(max(_num_top(req) for req in self._reqs), vocab_size),
                has_filters=False,
            )
        )

    def read(self) -> Logprobs:
        """Return them by request, aligned with `ScheduledRequest.scored_ids`."""
        parts = self._table.split([len(req.scored_ids) for req in self._reqs])
        return {
            req.request_id: _entries(part, req.scored_ids, _num_top(req))
            for req, part in zip(self._reqs, parts, strict=True)
        }


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


def _num_top(req: ScheduledRequest) -> int:
    assert req.params.prompt_logprobs is not None, "only requests that ask are scored"
    return req.params.prompt_logprobs


def _plain_params(count: int, device: torch.device) -> DrawParams:
    """Return parameters of `count` draws at temperature 1, without filters."""

    def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((count, *shape), value, dtype=dtype, device=device)

    one, zero = (full(value=x, dtype=torch.float32) for x in (1.0, 0.0))
    return DrawParams(one, full(2), full(), one, zero)


class _Asking(NamedTuple):
    """A request that asks, and its index among those that draw."""

    req: ScheduledRequest
    number: int
    num_top: int


def _asking(reqs: Sequence[ScheduledRequest]) -> Iterator[_Asking]:
    """Yield the drawing requests that ask."""
    for number, req in enumerate(reqs):
        if req.params.logprobs is not None:
            yield _Asking(req, number, req.params.logprobs)


def _entries(table: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Return one entry per row of a `score_tokens` table on the host."""
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
    return tuple(sorted(left, key=lambda entry: (-entry[1], entry[0]))[:num_top])


def _start_reading(table: Tensor) -> Tensor:
    """Start a copy to the host, complete once the stream has passed this point."""
    if not table.is_cuda:
        return table
    read_back = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    return read_back.copy_(table, non_blocking=True)
