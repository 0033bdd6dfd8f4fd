"""Batches: random windows of a token stream, and rows of the on-policy pool."""

from __future__ import annotations

import torch
from torch import Tensor


def windows(stream: Tensor, rows: int, row_tokens: int, rng: torch.Generator) -> Tensor:
    """Return `rows` random windows of `stream` [N] as int64 [rows, row_tokens].

    Offsets come from the CPU generator `rng`, so they are the same on every device.

    Raises:
        ValueError: the stream is shorter than one row.
    """
    room = len(stream) - row_tokens
    if room <= 0:
        raise ValueError(f"row_tokens={row_tokens}: the stream has only {len(stream)}; add text")
    starts = torch.randint(0, room, (rows,), generator=rng).to(stream.device)
    return stream[starts[:, None] + torch.arange(row_tokens, device=stream.device)].long()


def pool_rows(pool: Tensor, rows: int, rng: torch.Generator) -> Tensor:
    """Return `rows` random rows of the on-policy pool [R, T] as int64 [rows, T]."""
    chosen = torch.randint(0, len(pool), (rows,), generator=rng).to(pool.device)
    return pool[chosen].long()


def mixed_rows(
    step: int,
    stream: Tensor,
    pool: Tensor,
    tokens_per_batch: int,
    row_tokens: int,
    rng: torch.Generator,
) -> Tensor:
    """Return corpus rows on odd steps, on-policy rows on even ones, with equal token counts."""
    if step % 2:
        return windows(stream, max(1, tokens_per_batch // row_tokens), row_tokens, rng)
    return pool_rows(pool, max(1, tokens_per_batch // pool.shape[1]), rng)
