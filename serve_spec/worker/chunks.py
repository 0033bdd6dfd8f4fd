"""Prefill chunks in static buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """Consecutive tokens of one request, the first at position `start`."""

    request_slot: int
    start: int
    token_ids: Sequence[int]


_SLOT, _START, _LEN = range(3)


@dataclass(frozen=True)
class PrefillChunks:
    """The chunks of a step: at most P chunks and `max_tokens` tokens.

    `table` int32 [3, P]: request slot, first position, length (0 past the last chunk).
    `tokens` int64 [max_tokens]: the tokens of all chunks, one after another.
    """

    table: Tensor
    tokens: Tensor

    @classmethod
    def create(cls, max_tokens: int, max_chunks: int, device: torch.device) -> PrefillChunks:
        """Return buffers without chunks."""
        return cls(
            torch.zeros(3, max_chunks, dtype=torch.int32, device=device),
            torch.zeros(max_tokens, dtype=torch.int64, device=device),
        )

    @property
    def max_tokens(self) -> int:
        """Most tokens of all chunks together."""
        return self.tokens.shape[0]

    @property
    def max_chunks(self) -> int:
        """Most chunks."""
        return self.table.shape[1]

    @property
    def request_slots(self) -> Tensor:
        """int32 [P]."""
        return self.table[_SLOT]

    @property
    def starts(self) -> Tensor:
        """Position of each chunk's first token: int32 [P]."""
        return self.table[_START]

    @property
    def lens(self) -> Tensor:
        """Tokens of each chunk: int32 [P]."""
        return self.table[_LEN]

    def write(self, chunks: Iterable[Chunk]) -> int:
        """Write chunks without waiting for the device. Return their number."""
        given = [chunk for chunk in chunks if chunk.token_ids]
        table = torch.zeros(self.table.shape, dtype=torch.int32)
        if given:
            rows = [(slot, start, len(tokens)) for slot, start, tokens in given]
            table[:, : len(rows)] = torch.tensor(rows, dtype=torch.int32).t()
        tokens = torch.tensor([token for chunk in given for token in chunk.token_ids] or [0])
        if self.table.is_cuda:
            table, tokens = table.pin_memory(), tokens.pin_memory()
        self.table.copy_(table, non_blocking=True)
        self.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        return len(given)

    def tokens_of(self, index: Tensor) -> Tensor:
        """Return the chunk tokens int64 [T] at `index` [T]; any token if that is out of range."""
        return self.tokens[index.long().clamp(0, self.max_tokens - 1)]


def grouped(chunks: Iterable[Chunk], max_tokens: int, max_chunks: int) -> Iterator[list[Chunk]]:
    """Yield groups of chunks of at most `max_tokens` tokens, cutting chunks that do not fit."""
    group: list[Chunk] = []
    room = max_tokens
    for slot, start, token_ids in chunks:
        while token_ids:
            count = min(room, len(token_ids))
            group.append(Chunk(slot, start, token_ids[:count]))
            start, token_ids, room = start + count, token_ids[count:], room - count
            if not room or len(group) == max_chunks:
                yield group
                group, room = [], max_tokens
    if group:
        yield group
