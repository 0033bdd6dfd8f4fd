"""KV of the accepted drafts of a tree moves to where a chain has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel


@has_kernel
def move_accepted(
    pools: Sequence[Tensor],
    slots: Tensor,
    query_starts: Tensor,
    path: Tensor,
    num_correct: Tensor,
) -> None:
    """Move the entry of token path[j] of each sequence to the slot of its token j, in place.

    pools: contiguous tensors, [num_slots, F] or [num_layers, num_slots, ...].
    slots: int64 [T], the slot of each token; query_starts: int32 [B+1].
    path: int32 [B, D+1] and num_correct: int32 [B], as in `AcceptedPath`: j = 1 .. num_correct.

    A token comes after its path, so path[j] ≥ j. In a chain nothing moves.
    """
    column = torch.arange(path.shape[1], device=path.device)
    moves = (column > 0) & (column <= num_correct.unsqueeze(1))
    first = query_starts[:-1].long().unsqueeze(1)
    # All other entries copy the first token, a root, onto itself: no move ends there.
    source = slots[(first + path).where(moves, 0)].flatten()
    target = slots[(first + column).where(moves, 0)].flatten()
    for pool in pools:
        layers = pool.unsqueeze(0) if pool.dim() == 2 else pool
        layers[:, target] = layers[:, source]
