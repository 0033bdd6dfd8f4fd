"""From page ids to a `RaggedBatch`: where every row's key and value live."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_spec.core.context import RaggedBatch


def slot_table(page_ids: Sequence[Sequence[int]], page_size: int, device: torch.device) -> Tensor:
    """Pool slots of positions 0, 1, ... for each sequence: int64 [B, max pages · page_size].

    Rows with fewer pages are padded with slot 0: a valid address that every mask hides.
    """
    width = max(len(pages) for pages in page_ids)
    padded = [[*pages, *[0] * (width - len(pages))] for pages in page_ids]
    pages = torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(padded), width, 1)
    offsets = torch.arange(page_size, device=device)
    return (pages * page_size + offsets).reshape(len(padded), width * page_size)


def ragged_batch(slots: Tensor, starts: Sequence[int], query_lens: Sequence[int]) -> RaggedBatch:
    """Rows at positions `starts[b] .. starts[b] + query_lens[b] - 1` of each sequence b.

    slots: [B, >= max end] from `slot_table`.
    """
    device = slots.device
    lens = torch.tensor(query_lens, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(query_lens)), lens)
    first_row = lens.cumsum(0) - lens
    offset = torch.arange(int(lens.sum())) - first_row[owner]
    positions = (torch.tensor(starts, dtype=torch.int64)[owner] + offset).to(device)
    return RaggedBatch(
        positions=positions,
        slots=slots[owner.to(device), positions],
        query_lens=tuple(query_lens),
        kv_lens=tuple(s + n for s, n in zip(starts, query_lens, strict=True)),
        slot_table=slots,
    )
