"""What the rows of draft trees see, as FlashInfer's packed bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_spec.attention.page_table import starts


@dataclass(frozen=True)
class PackedMask:
    """One bit per row and cache entry of its sequence, lowest bit first; on the host.

    The rows of a sequence follow each other without padding; those of sequence b begin at byte
    `byte_starts[b]` (int32 [B + 1]) of `bits` (uint8).
    """

    bits: Tensor
    byte_starts: Tensor


def pack_tree_mask(
    tree_mask: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int], window: int | None
) -> PackedMask:
    """The mask of a batch whose rows are trees, in the terms of `ops/paged_attention.py`.

    tree_mask: int64 [T], on the host: bit j says that a row sees row j of its own sequence, itself
    included. All entries before a sequence's rows are seen, inside `window` counted from the row's
    depth, which is the number of its other bits. Trees are shallower than a window.
    """
    parts = [
        np.packbits(_sees(masks.numpy(), kv_len, window), bitorder="little")
        for masks, kv_len in zip(tree_mask.split(list(query_lens)), kv_lens, strict=True)
    ]
    return PackedMask(
        bits=torch.from_numpy(np.concatenate(parts)),
        byte_starts=starts([len(part) for part in parts]),
    )


def _sees(masks: npt.NDArray[np.int64], kv_len: int, window: int | None) -> npt.NDArray[np.bool_]:
    """Whether each row of one sequence sees each of its entries: [len(masks), kv_len]."""
    first = kv_len - len(masks)
    is_ancestor = (masks[:, None] >> np.arange(len(masks))) & 1
    sees = np.ones((len(masks), kv_len), dtype=np.bool_)
    sees[:, first:] = is_ancestor
    if window is not None:
        own = first + is_ancestor.sum(axis=1, keepdims=True) - 1
        sees[:, :first] = np.arange(first) > own - window
    return sees
