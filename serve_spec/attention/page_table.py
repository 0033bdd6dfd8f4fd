"""A ragged batch as FlashInfer plans it: page ids of all sequences in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from serve_spec.core.context import RaggedBatch
from serve_spec.ops.sending import sent


@dataclass(frozen=True)
class PageTable:
    """Which pages every sequence of a batch reads. All int32.

    On the host, where plans are made: sequence b owns rows `query_starts[b] ..
    query_starts[b + 1] - 1` and pages `page_starts[b] .. page_starts[b + 1] - 1` ([B + 1] each);
    its last page holds `last_page_lens[b]` entries ([B]). On the device: `pages`, the page ids of
    all sequences, one after another.
    """

    query_starts: Tensor
    page_starts: Tensor
    last_page_lens: Tensor
    pages: Tensor


def page_table(batch: RaggedBatch, page_size: int) -> PageTable:
    """The pages of `batch`. Lengths are known on the host, so the device is never waited for."""
    num_pages = [-(-length // page_size) for length in batch.kv_lens]
    last_page_lens = [(length - 1) % page_size + 1 for length in batch.kv_lens]
    page_ids = (batch.slot_table[:, ::page_size] // page_size).to(torch.int32)
    is_used = torch.arange(page_ids.shape[1]) < torch.tensor(num_pages).unsqueeze(1)
    used = is_used.view(-1).nonzero().squeeze(1)
    return PageTable(
        query_starts=starts(batch.query_lens),
        page_starts=starts(num_pages),
        last_page_lens=torch.tensor(last_page_lens, dtype=torch.int32),
        pages=page_ids.view(-1).index_select(0, sent(used, page_ids.device)),
    )


def starts(lengths: Sequence[int]) -> Tensor:
    """Where each of B stretches begins, and where the last one ends: int32 [B + 1]."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
