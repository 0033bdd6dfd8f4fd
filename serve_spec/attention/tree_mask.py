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
    tree_mask: Tensor,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    tree_lens: Sequence[int],
    window: int | None,
) -> PackedMask:
    """The mask of a batch with trees, in the terms of `core.context.RaggedBatch`.

    tree_mask: int64 [T], on the host. Entries before a tree are seen inside `window` counted from
    the row's depth, which is the number of its other bits. Trees are shallower than a window.
    """
    parts = [
        np.packbits(
            _sees(masks.numpy(), kv_len, tree_len, window)
            if tree_len
            else _sees_before(len(masks), kv_len, window),
            bitorder="little",
        )
        for masks, kv_len, tree_len in zip(
            tree_mask.split(list(query_lens)), kv_lens, tree_lens, strict=True
        )
    ]
    return PackedMask(
        bits=torch.from_numpy(np.concatenate(parts)),
        byte_starts=starts([len(part) for part in parts]),
    )


def _sees(
    masks: npt.NDArray[np.int64], kv_len: int, tree_len: int, window: int | None
) -> npt.NDArray[np.bool_]:
    """Whether each row of a tree sees each of its entries: [len(masks), kv_len]."""
    first = kv_len - tree_len
    is_ancestor = (masks[:, None] >> np.arange(tree_len)) & 1
    sees = np.ones((len(masks), kv_len), dtype=np.bool_)
    sees[:, first:] = is_ancestor
    if window is not None:
        own = first + is_ancestor.sum(axis=1, keepdims=True) - 1
        sees[:, :first] = np.arange(first) > own - window
    return sees


def _sees_before(query_len: int, kv_len: int, window: int | None) -> npt.NDArray[np.bool_]:
    """The same for the rows of a chain."""
    own = np.arange(kv_len - query_len, kv_len)[:, None]
    entries = np.arange(kv_len)
    return (entries <= own) & (window is None or entries > own - window)
