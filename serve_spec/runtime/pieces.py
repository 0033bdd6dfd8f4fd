"""Stretches of texts that the host knows, cut into pieces that a recorded stage can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_ROWS = 16
"""Rows of a text that attention reads the cache for together."""

_SHORT_PIECES = 16
"""Pieces that a stage has room for beyond its rows: every text may end with a short one."""

_LANE, _START, _LEN, _TOKENS = range(4)


class Stretch(NamedTuple):
    """What a forward is given at the positions `start ..` of a lane."""

    lane: int
    start: int
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Pieces:
    """Up to P pieces of up to PIECE_ROWS rows; a row's place within its piece is its offset.

    `table` int32 [3 + PIECE_ROWS, P]: lane, first position, rows (0 past the last piece), tokens.
    """

    table: Tensor
    max_rows: int

    @classmethod
    def create(cls, max_rows: int, max_stretches: int, device: torch.device) -> Pieces:
        """Room for `max_rows` rows of so many stretches; none at first."""
        num_pieces = max_rows // PIECE_ROWS + max_stretches
        shape = (_TOKENS + PIECE_ROWS, num_pieces)
        return cls(torch.zeros(shape, dtype=torch.int32, device=device), max_rows)

    @property
    def lanes(self) -> Tensor:
        """Whose piece: int32 [P]."""
        return self.table[_LANE]

    @property
    def starts(self) -> Tensor:
        """Position of the first row: int32 [P]."""
        return self.table[_START]

    @property
    def lens(self) -> Tensor:
        """Rows: int32 [P]."""
        return self.table[_LEN]

    def tokens(self, owners: Tensor, offsets: Tensor) -> Tensor:
        """int64 [T], of rows at `offsets` [T] of pieces `owners` [T]; anything where there is no
        such row."""
        table = self.table[_TOKENS:]
        width, most = table.shape
        return table[offsets.clamp(0, width - 1).long(), owners.clamp(0, most - 1).long()].long()

    def room(self, num_rows: int) -> int:
        """Pieces that a stage of so many rows takes; only the largest takes any."""
        if num_rows >= self.max_rows:
            return self.table.shape[1]
        return min(num_rows, num_rows // PIECE_ROWS + _SHORT_PIECES)

    def write(self, stretches: Iterable[Stretch]) -> int:
        """Cuts these, at most `max_rows` rows, without waiting for the device.

        Returns the fewest rows of a stage that takes them.
        """
        cut = [piece for stretch in stretches for piece in _cut(stretch)]
        written = torch.zeros(self.table.shape, dtype=torch.int32)
        if cut:
            written[:, : len(cut)] = torch.tensor(cut, dtype=torch.int32).t()
        if self.table.is_cuda:
            written = written.pin_memory()
        self.table.copy_(written, non_blocking=True)
        return max(sum(piece[_LEN] for piece in cut), self._rows_for(len(cut)))

    def _rows_for(self, num_pieces: int) -> int:
        """The fewest rows of a stage that has room for so many."""
        return min(max(num_pieces, (num_pieces - _SHORT_PIECES) * PIECE_ROWS), self.max_rows)


def parted(stretches: Iterable[Stretch], max_rows: int) -> Iterator[list[Stretch]]:
    """The same in order, as groups of at most `max_rows` rows each."""
    group: list[Stretch] = []
    room = max_rows
    for lane, start, token_ids in stretches:
        while len(token_ids) > room:
            group.append(Stretch(lane, start, token_ids[:room]))
            yield group
            start, token_ids = start + room, token_ids[room:]
            group, room = [], max_rows
        if token_ids:
            group.append(Stretch(lane, start, token_ids))
            room -= len(token_ids)
    if group:
        yield group


def _cut(stretch: Stretch) -> Iterator[list[int]]:
    """Columns of `Pieces.table`."""
    for first in range(0, len(stretch.token_ids), PIECE_ROWS):
        tokens = stretch.token_ids[first : first + PIECE_ROWS]
        spare = [0] * (PIECE_ROWS - len(tokens))
        yield [stretch.lane, stretch.start + first, len(tokens), *tokens, *spare]
