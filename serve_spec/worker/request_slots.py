"""Request slots: the state of every running request on the device.

A slot is a row of device tensors. A step reads lengths and last tokens there and writes new ones,
so the next can be launched before the host has read the results. What only the host has (pages,
sampling parameters, new requests) it sends in `RequestStates.sync`, in stream order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.core.plan import ScheduledRequest
from serve_spec.core.request import SamplingParams
from serve_spec.ops.dispatch import to_device
from serve_spec.ops.draw import DrawParams
from serve_spec.ops.noise import seed_words
from serve_spec.ops.score_edits import GENERATED_ONCE, HELD_BACK, IN_PROMPT, ScoreEdits

RING_TOKENS = 2 * MAX_TREE_TOKENS
"""Newest tokens kept for each request: a power of two, more than any draft extend reads, which
is one token more than a round commits."""


class RequestSlots:
    """Device tensors with one row per request slot; the last row belongs to padding.

    `pages` int32 [S, P]: page ids of positions `0 ..`. `lengths` int32 [S]: committed tokens.
    `draft_lengths` int32 [S]: draft KV entries. `recent` int32 [S, RING_TOKENS]: the token at
    position p is in column p mod RING_TOKENS. `params`: [S] each. `edits`: 8 bytes per slot and
    token id. `padding`: index of the padding slot, which is the number of the others.
    `vocab_size`: width of the logits.
    """

    def __init__(
        self, num_slots: int, max_pages: int, scratch: int, vocab_size: int, device: torch.device
    ) -> None:
        """Make `num_slots` slots and one for padding, whose pages are page `scratch`."""
        num_rows = num_slots + 1
        self.padding, self.vocab_size = num_slots, vocab_size

        def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((num_rows, *shape), value, dtype=dtype, device=device)

        self.pages = full(max_pages, value=scratch)
        self.lengths = full(value=1)
        self.draft_lengths = full()
        self.recent = full(RING_TOKENS)
        self.params = DrawParams(
            inverse_temperature=full(dtype=torch.float32),
            seeds=full(2),
            top_k=full(),
            top_p=full(value=1, dtype=torch.float32),
            min_p=full(dtype=torch.float32),
        )
        self.edits = ScoreEdits.create(num_rows, vocab_size, device)


class RequestStates:
    """Synchronizes request slots with the host, sending only what changed."""

    def __init__(self, slots: RequestSlots) -> None:
        self.slots = slots
        self._device = slots.lengths.device
        self._cached: dict[int, tuple[str, tuple[int, ...]]] = {}
        """By slot: the request in it, and its pages on the device."""

    def forget(self, reqs: Iterable[ScheduledRequest]) -> None:
        """Drop the cached state of requests, so that the next step sends all of it."""
        for req in reqs:
            self._cached.pop(req.request_slot, None)

    def forget_all(self) -> None:
        """Drop the state of every request."""
        self._cached.clear()

    def sync(self, reqs: Iterable[ScheduledRequest]) -> None:
        """Send new pages, and the whole state of requests that are new in their slot."""
        new_requests = []
        new_pages: list[tuple[int, int, int]] = []
        for req in reqs:
            request_id, page_ids = self._cached.get(req.request_slot, ("", ()))
            if request_id != req.request_id:
                page_ids = ()
                self._cached[req.request_slot] = req.request_id, page_ids
                new_requests.append(req)
            if page_ids == req.page_ids:
                continue
            first = _first_difference(page_ids, req.page_ids)
            if first < len(req.page_ids):
                fresh = req.page_ids[first:]
                self._cached[req.request_slot] = req.request_id, page_ids[:first] + fresh
                new_pages += ((req.request_slot, i, page) for i, page in enumerate(fresh, first))
        if new_pages:
            slot, column, page = self._send(new_pages).unbind(1)
            self.slots.pages.index_put_((slot.long(), column.long()), page)
        if new_requests:
            self._write(new_requests)

    def set_draft_lengths(self, reqs: Iterable[ScheduledRequest]) -> None:
        """Write that requests have the draft KV entries before their `draft_start`."""
        slot, made = self._send([(req.request_slot, req.draft_start) for req in reqs]).unbind(1)
        self.slots.draft_lengths.index_copy_(0, slot.long(), made)

    def _write(self, reqs: Sequence[ScheduledRequest]) -> None:
        """Write all but the pages of new requests."""
        slots, params = self.slots, self.slots.params
        numbers = self._send([_numbers(req) for req in reqs])
        at = numbers[:, 0].long()
        slots.lengths[at] = numbers[:, 1]
        slots.draft_lengths[at] = numbers[:, 2]
        params.seeds[at] = numbers[:, 3:5]
        params.top_k[at] = numbers[:, 5]
        numbers = self._send([_sampling_numbers(req.params) for req in reqs], torch.float32)
        params.inverse_temperature[at] = numbers[:, 0]
        params.top_p[at] = numbers[:, 1]
        params.min_p[at] = numbers[:, 2]
        tokens = self._send([token for req in reqs for token in _known_tokens(req)]).long()
        slots.recent.index_put_((tokens[:, 0], tokens[:, 1]), tokens[:, 2].to(torch.int32))
        slots.edits.is_on.index_fill_(0, at, 0)
        for req in reqs:
            if req.edited is not None:
                write_edits(slots.edits, req.request_slot, req)
            else:
                edits = req.samples and req.params.edits_scores
                assert not edits, "a new request that edits scores brings its text"

    def _send(self, rows: Sequence[tuple[float, ...]], dtype: torch.dtype = torch.int32) -> Tensor:
        """Return [len(rows), columns] on the device, in stream order, without waiting."""
        return to_device(torch.tensor(rows, dtype=dtype), self._device)


def write_edits(edits: ScoreEdits, slot: int, req: ScheduledRequest) -> None:
    """Write the score edits of a request, without waiting for the device."""
    params, text = req.params, req.edited
    assert text is not None, "a request that edits scores comes with its text"
    bias, marks = edits.bias[slot], edits.marks[slot]
    device = bias.device
    bias.fill_(0.0 if params.allowed_token_ids is None else float("-inf"))
    if params.allowed_token_ids is not None:
        bias.index_fill_(0, _to_device(params.allowed_token_ids, device), 0.0)
    if params.logit_bias:
        ids = _to_device([*params.logit_bias], device)
        bias[ids] += _to_device([*params.logit_bias.values()], device, torch.float32)
    if params.bad_token_ids:
        bias.index_fill_(0, _to_device(params.bad_token_ids, device), float("-inf"))
    marks.zero_()
    if text.token_ids:
        ids = _to_device(text.token_ids, device)
        marks.index_fill_(0, ids[: text.num_prompt_tokens], IN_PROMPT)
        generated = ids[text.num_prompt_tokens :]
        once = torch.full_like(generated, GENERATED_ONCE, dtype=torch.int32)
        marks.index_add_(0, generated, once)
    if text.held_ids:
        marks[_to_device(text.held_ids, device)] += HELD_BACK
    edits.repetition[slot] = params.repetition_penalty
    edits.frequency[slot] = params.frequency_penalty
    edits.presence[slot] = params.presence_penalty
    edits.min_lengths[slot] = text.num_prompt_tokens + params.min_tokens
    edits.is_on[slot] = 1


def _to_device(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)


def _first_difference(known: tuple[int, ...], pages: tuple[int, ...]) -> int:
    """Return the first index where `pages` differs from `known`; later ones may be equal again."""
    same = min(len(known), len(pages))
    if known[:same] == pages[:same]:
        return same
    return next(i for i in range(same) if known[i] != pages[i])


def _numbers(req: ScheduledRequest) -> tuple[int, ...]:
    low, high = seed_words(req.seed)
    return (req.request_slot, req.length, req.draft_start, low, high, max(0, req.params.top_k))


def _sampling_numbers(params: SamplingParams) -> tuple[float, float, float]:
    inverse = 0.0 if params.is_greedy else 1.0 / params.temperature
    return (inverse, params.top_p, params.min_p)


def _known_tokens(req: ScheduledRequest) -> list[tuple[int, int, int]]:
    """Return (slot, column, token) of the tokens without draft KV, or of the last one."""
    tokens = (req.extend_ids or req.token_ids)[-RING_TOKENS:]
    first = req.length - len(tokens)
    return [(req.request_slot, (first + i) % RING_TOKENS, token) for i, token in enumerate(tokens)]
