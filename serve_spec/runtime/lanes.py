"""Lanes: what the device knows of every running sequence, so that rounds need no host between them.

A lane is a row of device tensors. Rounds read lengths and last tokens from it and leave new ones
there; the host learns of them later. What only the host decides (pages, parameters, a sequence
that moves in) reaches the device in `LaneKeeper.sync`, ordered with the rounds by the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.core.plan import RowPlan
from serve_spec.core.request import SamplingParams
from serve_spec.ops.draw import DrawParams
from serve_spec.ops.noise import seed_words
from serve_spec.ops.score_edits import ScoreEdits
from serve_spec.ops.sending import sent
from serve_spec.runtime.score_edits import write_edits

RING_TOKENS = 64
"""Newest tokens a lane keeps: a power of two, more than any backlog a round makes up."""


@dataclass(frozen=True)
class Lanes:
    """Device tensors, one row per lane; the last lane stands for padding and never moves.

    `pages` int32 [L, P]: page ids of positions `0 ..`. `lengths` int32 [L]: committed tokens.
    `draft_lengths` int32 [L]: draft entries made. `recent` int32 [L, RING_TOKENS]: the token at
    position p is in column p mod RING_TOKENS. `params`: [L] each. `edits`: 8 bytes per lane and
    token id.
    """

    pages: Tensor
    lengths: Tensor
    draft_lengths: Tensor
    recent: Tensor
    params: DrawParams
    edits: ScoreEdits

    @classmethod
    def create(
        cls,
        num_lanes: int,
        max_pages: int,
        scratch_page: int,
        vocab_size: int,
        device: torch.device,
    ) -> Lanes:
        """`num_lanes` lanes and the one for padding; every page is the scratch page at first."""
        rows = num_lanes + 1

        def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        return cls(
            pages=full(max_pages, value=scratch_page),
            lengths=full(value=1),
            draft_lengths=full(),
            recent=full(RING_TOKENS),
            params=DrawParams(
                inverse_temperature=full(dtype=torch.float32),
                seeds=full(2),
                top_k=full(),
                top_p=full(value=1, dtype=torch.float32),
                min_p=full(dtype=torch.float32),
            ),
            edits=ScoreEdits.create(rows, vocab_size, device),
        )

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self.edits.bias.shape[1]

    @property
    def padding(self) -> int:
        """The lane of rows that stand for nobody."""
        return self.lengths.shape[0] - 1


@dataclass
class _Tenant:
    """The sequence of a lane, and the pages the device knows of."""

    request_id: str
    page_ids: tuple[int, ...]


class LaneKeeper:
    """Keeps lanes in step with the host's sequences, sending only what the device can not know."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self._device = lanes.lengths.device
        self._tenants: dict[int, _Tenant] = {}

    def forget(self, rows: Iterable[RowPlan]) -> None:
        """These sequences move on without their lanes; a round that uses them again starts anew."""
        for row in rows:
            self._tenants.pop(row.lane, None)

    def sync(self, rows: Iterable[RowPlan]) -> None:
        """Before a round of `rows`: new pages, and the state of sequences that are new here."""
        moved_in = []
        new_pages: list[tuple[int, int, int]] = []
        for row in rows:
            tenant = self._tenants.get(row.lane)
            if tenant is None or tenant.request_id != row.request_id:
                tenant = self._tenants[row.lane] = _Tenant(row.request_id, ())
                moved_in.append(row)
            if tenant.page_ids == row.page_ids:  # as a rule they are
                continue
            first = _first_difference(tenant.page_ids, row.page_ids)
            if first < len(row.page_ids):
                fresh = row.page_ids[first:]
                tenant.page_ids = tenant.page_ids[:first] + fresh
                new_pages += ((row.lane, i, page) for i, page in enumerate(fresh, first))
        if new_pages:
            lane, column, page = self._send(new_pages).unbind(1)
            self.lanes.pages.index_put_((lane.long(), column.long()), page)
        if moved_in:
            self._move_in(moved_in)

    def caught_up(self, rows: Iterable[RowPlan]) -> None:
        """Their drafts have the entries before `draft_start`, made outside their lanes."""
        lane, made = self._send([(row.lane, row.draft_start) for row in rows]).unbind(1)
        self.lanes.draft_lengths.index_copy_(0, lane.long(), made)

    def _move_in(self, rows: Sequence[RowPlan]) -> None:
        """Writes all but the pages of sequences the device does not know."""
        lanes, params = self.lanes, self.lanes.params
        numbers = self._send([_numbers(row) for row in rows])
        at = numbers[:, 0].long()
        lanes.lengths[at] = numbers[:, 1]
        lanes.draft_lengths[at] = numbers[:, 2]
        params.seeds[at] = numbers[:, 3:5]
        params.top_k[at] = numbers[:, 5]
        shares = self._send([_shares(row.params) for row in rows], torch.float32)
        params.inverse_temperature[at] = shares[:, 0]
        params.top_p[at] = shares[:, 1]
        params.min_p[at] = shares[:, 2]
        tokens = self._send([token for row in rows for token in _known_tokens(row)]).long()
        lanes.recent.index_put_((tokens[:, 0], tokens[:, 1]), tokens[:, 2].to(torch.int32))
        lanes.edits.is_on.index_fill_(0, at, 0)
        for row in rows:
            if row.edited is not None:
                write_edits(lanes.edits, row.lane, row)
            else:
                edits = row.samples and row.params.edits_scores
                assert not edits, "who moves in and edits scores brings its text"

    def _send(self, rows: Sequence[tuple[float, ...]], dtype: torch.dtype = torch.int32) -> Tensor:
        """[len(rows), columns] on the device, in the stream's order; the host does not wait."""
        return sent(torch.tensor(rows, dtype=dtype), self._device)


def _first_difference(known: tuple[int, ...], pages: tuple[int, ...]) -> int:
    """Where `pages` stops being what is known.

    Behind it, some may be the same again: of the pages that a sequence gives back it may get one
    anew, at its old place.
    """
    same = min(len(known), len(pages))
    if known[:same] == pages[:same]:
        return same
    return next(i for i in range(same) if known[i] != pages[i])


def _numbers(row: RowPlan) -> tuple[int, ...]:
    low, high = seed_words(row.seed)
    return (row.lane, row.length, row.draft_start, low, high, max(0, row.params.top_k))


def _shares(params: SamplingParams) -> tuple[float, float, float]:
    inverse = 0.0 if params.is_greedy else 1.0 / params.temperature
    return (inverse, params.top_p, params.min_p)


def _known_tokens(row: RowPlan) -> list[tuple[int, int, int]]:
    """(lane, column, token) of the newest tokens: the backlog of the draft, or the last one."""
    tokens = (row.catch_up_ids or row.token_ids)[-RING_TOKENS:]
    first = row.length - len(tokens)
    return [(row.lane, (first + i) % RING_TOKENS, token) for i, token in enumerate(tokens)]
