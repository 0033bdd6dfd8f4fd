"""The static tensors of a round on lanes: what its stages read, and leave for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.core.plan import RowPlan
from serve_spec.models.draft import DraftHead
from serve_spec.runtime.lanes import Lanes

PIECE_ROWS = 16
"""Rows of a prompt that attention reads the cache for together."""

_LANE, _START, _LEN, _TOKENS = range(4)


@dataclass(frozen=True)
class PromptPieces:
    """Prompt tokens that share a round with decode rows, in up to P pieces of PIECE_ROWS each.

    Of these the round wants keys, values and features alone. The last token of a prompt, which
    draws, is a decode row. `table` int32 [P, 3 + PIECE_ROWS]: lane, first position, rows (0 past
    the last piece), tokens.
    """

    table: Tensor

    @classmethod
    def create(cls, max_rows: int, max_prompts: int, device: torch.device) -> PromptPieces:
        """Room for `max_rows` rows of `max_prompts` prompts; none at first."""
        num_pieces = max_rows // PIECE_ROWS + max_prompts
        return cls(torch.zeros(num_pieces, _TOKENS + PIECE_ROWS, dtype=torch.int32, device=device))

    @property
    def lanes(self) -> Tensor:
        """Whose piece: int32 [P]."""
        return self.table[:, _LANE]

    @property
    def starts(self) -> Tensor:
        """Position of the first row: int32 [P]."""
        return self.table[:, _START]

    @property
    def lens(self) -> Tensor:
        """Rows: int32 [P]."""
        return self.table[:, _LEN]

    @property
    def token_ids(self) -> Tensor:
        """int32 [P, PIECE_ROWS]."""
        return self.table[:, _TOKENS:]

    def write(self, prompts: Sequence[RowPlan]) -> None:
        """Cuts what these rows compute into pieces, without waiting for the device."""
        written = torch.zeros(self.table.shape, dtype=torch.int32)
        cut = [piece for row in prompts for piece in _pieces(row)]
        if cut:
            written[: len(cut)] = torch.tensor(cut, dtype=torch.int32)
        if self.table.is_cuda:
            written = written.pin_memory()
        self.table.copy_(written, non_blocking=True)


@dataclass(frozen=True)
class LaneRound:
    """A round's inputs, hand-overs and outputs, for up to B sequences of K drafts.

    `members` int32 [B]: each sequence's lane, the padding lane past the last. `query_lens` int32
    [B]: rows the target verifies, num_steps + 1, and 0 past the last. `hidden` [B, H]: the draft
    head's state after catching up. `drafts` int64 [B, K]: -1 where the head gave no token.
    `verdicts` int32 [B, K + 3]: drafts kept, flags, then the tokens; see `ops.acceptance`.
    """

    lanes: Lanes
    members: Tensor
    query_lens: Tensor
    hidden: Tensor | None
    drafts: Tensor
    verdicts: Tensor
    pieces: PromptPieces

    @classmethod
    def create(
        cls, lanes: Lanes, max_steps: int, head: DraftHead | None, max_prompt_rows: int
    ) -> LaneRound:
        """Tensors for a round without sequences, for as many as there are lanes."""
        device, max_batch_size = lanes.lengths.device, lanes.padding

        def zeros(*shape: int, dtype: torch.dtype | None = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            lanes=lanes,
            members=torch.full_like(zeros(max_batch_size), lanes.padding),
            query_lens=zeros(max_batch_size),
            hidden=None
            if head is None
            else zeros(max_batch_size, head.hidden_size, dtype=head.dtype),
            drafts=zeros(max_batch_size, max_steps, dtype=torch.int64),
            verdicts=zeros(max_batch_size, max_steps + 3),
            pieces=PromptPieces.create(max_prompt_rows, max_batch_size, device),
        )

    @property
    def max_batch_size(self) -> int:
        """Most sequences of a round."""
        return self.members.shape[0]

    @property
    def max_steps(self) -> int:
        """Most drafts of a sequence."""
        return self.drafts.shape[1]

    def seat(self, lanes: Sequence[int], num_steps: Sequence[int]) -> None:
        """Writes who takes part and how many drafts of each are verified, without waiting."""
        empty = self.max_batch_size - len(lanes)
        members = [*lanes, *[self.lanes.padding] * empty]
        query_lens = [*(steps + 1 for steps in num_steps), *[0] * empty]
        seats = torch.tensor([members, query_lens], dtype=torch.int32)
        if self.members.is_cuda:
            seats = seats.pin_memory()
        self.members.copy_(seats[0], non_blocking=True)
        self.query_lens.copy_(seats[1], non_blocking=True)


def _pieces(row: RowPlan) -> Iterator[list[int]]:
    """What `PromptPieces.table` holds of a prompt: all that it computes but a row that draws."""
    tokens = row.token_ids[:-1] if row.samples else row.token_ids
    for first in range(0, len(tokens), PIECE_ROWS):
        piece = tokens[first : first + PIECE_ROWS]
        spare = [0] * (PIECE_ROWS - len(piece))
        yield [row.lane, row.start + first, len(piece), *piece, *spare]
