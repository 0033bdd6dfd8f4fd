"""Paged attention in plain torch: the reference for every other backend, and the one for CPUs.

Sequences that fit together are attended in one call. K and V are gathered from the pool once per
call and never expanded to the query heads: for short queries the heads of one group become query
rows, for long ones they share K and V through a stride of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.core.context import KVPool, RaggedBatch, Rotation, Rows
from serve_spec.ops import rotary

# Queries up to this long share a padded call; longer ones (prefill) are attended alone.
_MAX_SHARED_QUERY_LEN = 16
# Caches up to 2^8 entries share a call whatever their lengths; longer ones only with others of the
# same power of two, so that padding at most doubles the work.
_MIN_LENGTH_CLASS = 8


class HeadShape(Protocol):
    """What attention needs to know of a model."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def sliding_window(self) -> int | None: ...


class TorchAttention:
    """Plans attention of one model over its pool, on any device torch runs on."""

    name = "torch"

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        # cuDNN would compile a plan for every new shape, and every round has a new one.
        torch.backends.cuda.enable_cudnn_sdp(False)

    def plan(self, batch: RaggedBatch, pool: KVPool) -> PlannedAttention:
        """Groups the sequences and builds one mask per group, shared by all layers."""
        assert pool.keys.shape[2] == self._shape.num_kv_heads, (
            f"a backend for {self._shape.num_kv_heads} key heads was given a pool of "
            f"{pool.keys.shape[2]}: every model needs a backend of its own"
        )
        groups = [
            _plan_group(batch, members, self._shape, pool.keys.dtype)
            for members in _group_sequences(batch)
        ]
        return PlannedAttention(pool, batch.slots, groups, batch.asked)


class PlannedAttention:
    """Attention of one forward. Rounding aside, no row depends on what else is in the batch.

    Padding slots of `slot_table` are read and masked, so they must be valid and hold finite values.
    """

    def __init__(
        self, pool: KVPool, slots: Tensor, groups: Sequence[_Group], asked: Rows | None
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._groups = groups
        self._asked = asked

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """See `LayerAttention`: [T, num_heads + 2·kv_heads, d] -> [R, num_heads, d]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        num_heads = heads.shape[-2] - 2 * keys.shape[1]
        query = rotary.rotate_and_store(heads, rotation, self._slots, keys, values, num_heads)
        if self._asked is not None:
            query = query[self._asked]
        if len(self._groups) == 1:
            return self._groups[0].attend(query, keys, values)
        out = query.new_empty(query.shape)
        for group in self._groups:
            out[group.rows] = group.attend(query[group.rows], keys, values)
        return out


@dataclass(frozen=True)
class _Group:
    """B sequences with Q query rows each, attended in one call over L cache entries each.

    `rows`: their rows in the batch. `slots`: int64 [B·L]. `mask`: what is added to the scores,
    [B, 1, Q·group, L] when folded, else [1, 1, Q, L]; None when every row sees all L entries, or
    when `is_causal`.
    """

    rows: slice | Tensor
    num_sequences: int
    query_len: int
    kv_len: int
    num_kv_heads: int
    slots: Tensor
    mask: Tensor | None
    is_causal: bool
    folded: bool

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [B·Q, heads, d], keys/values [num_slots, kv_heads, d] -> [B·Q, heads, d]."""
        keys, values = keys.index_select(0, self.slots), values.index_select(0, self.slots)
        return (
            self._folded(query, keys, values) if self.folded else self._alone(query, keys, values)
        )

    def _folded(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_heads, head_dim = query.shape[1:]
        batch, length, kv_heads = self.num_sequences, self.query_len, self.num_kv_heads
        group = num_heads // kv_heads
        # Row order within a kv head: query position, then head of its group.
        rows = query.view(batch, length, kv_heads, group, head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rows.reshape(batch, kv_heads, length * group, head_dim),
            keys.view(batch, self.kv_len, kv_heads, head_dim).transpose(1, 2),
            values.view(batch, self.kv_len, kv_heads, head_dim).transpose(1, 2),
            attn_mask=self.mask,
        )
        out = out.view(batch, kv_heads, length, group, head_dim).transpose(1, 2)
        return out.reshape(batch * length, num_heads, head_dim)

    def _alone(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        length, num_heads, head_dim = query.shape
        group = num_heads // self.num_kv_heads
        shared = (self.num_kv_heads, group, self.kv_len, head_dim)
        out = F.scaled_dot_product_attention(
            query.view(length, self.num_kv_heads, group, head_dim).permute(1, 2, 0, 3),
            keys.transpose(0, 1).unsqueeze(1).expand(shared),
            values.transpose(0, 1).unsqueeze(1).expand(shared),
            attn_mask=self.mask,
            is_causal=self.is_causal,
        )
        return out.permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)


def _group_sequences(batch: RaggedBatch) -> list[list[int]]:
    """Indices of the sequences that share a call."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (query_len, kv_len) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
        key: tuple[int, ...] = (-1, index)
        if query_len <= _MAX_SHARED_QUERY_LEN:
            length_class = max(_MIN_LENGTH_CLASS, (kv_len - 1).bit_length())
            key = (query_len, length_class, _tree_len(batch, index))
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _tree_len(batch: RaggedBatch, index: int) -> int:
    return 0 if batch.tree_mask is None else batch.tree_lens[index]


def _plan_group(
    batch: RaggedBatch, members: Sequence[int], shape: HeadShape, dtype: torch.dtype
) -> _Group:
    query_len = batch.query_lens[members[0]]
    kv_lens = [batch.kv_lens[index] for index in members]
    window = shape.sliding_window
    tree_len = _tree_len(batch, members[0])
    # No row sees anything before the window of the shortest sequence's first row.
    newest = max(query_len, tree_len)
    first = 0 if window is None else max(0, min(kv_lens) - newest - window + 1)
    last = max(kv_lens)
    folded = query_len <= _MAX_SHARED_QUERY_LEN
    is_causal = not folded and window is None and query_len == last and not tree_len
    needs_mask = query_len > 1 or min(kv_lens) != last or tree_len > 1
    rows = _rows(batch.query_lens, members, batch.slots.device)
    mask = None
    if needs_mask and not is_causal:
        repeats = shape.num_heads // shape.num_kv_heads if folded else 1
        span = range(first, last)
        if tree_len:
            assert batch.tree_mask is not None, "a tree has masks"
            of_tree = batch.tree_mask[rows].view(len(members), query_len)
            mask = _tree_mask(kv_lens, of_tree, tree_len, span, window)
        else:
            mask = _mask(kv_lens, query_len, span, window, batch.slots.device)
        mask = mask.to(dtype).repeat_interleave(repeats, dim=2)
    return _Group(
        rows=rows,
        num_sequences=len(members),
        query_len=query_len,
        kv_len=last - first,
        num_kv_heads=shape.num_kv_heads,
        slots=_slots(batch.slot_table, members, first, last),
        mask=mask,
        is_causal=is_causal,
        folded=folded,
    )


def _mask(
    kv_lens: Sequence[int], query_len: int, span: range, window: int | None, device: torch.device
) -> Tensor:
    """Additive causal mask float32 [B, 1, Q, len(span)] over the cache positions in `span`.

    Row i of a sequence sits at position kv_len - Q + i and sees itself and what is before it, at
    most `window` entries in all. Example, Q = 2, kv_len = 4, no window:
        row 0 (position 2):  0  0  0  -inf
        row 1 (position 3):  0  0  0  0
    """
    ends = torch.tensor(kv_lens, device=device).view(-1, 1, 1, 1)
    queries = ends - query_len + torch.arange(query_len, device=device).view(-1, 1)
    keys = torch.arange(span.start, span.stop, device=device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _tree_mask(
    kv_lens: Sequence[int], masks: Tensor, tree_len: int, span: range, window: int | None
) -> Tensor:
    """The same for rows of trees, whose masks [B, Q] tell of the last `tree_len` entries.

    A row's position is that of the first of those and the number of its other bits.
    """
    first = torch.tensor(kv_lens, device=masks.device).view(-1, 1, 1, 1) - tree_len
    bits = masks.unsqueeze(2) >> torch.arange(tree_len, device=masks.device) & 1
    own = first + bits.sum(dim=2).unsqueeze(1).unsqueeze(3) - 1
    keys = torch.arange(span.start, span.stop, device=masks.device)
    place = (keys - first).expand(-1, 1, masks.shape[1], -1)
    on_path = bits.unsqueeze(1).gather(3, place.clamp(0, tree_len - 1)).bool()
    hidden = (place >= tree_len) | (place >= 0) & ~on_path
    if window is not None:
        hidden |= keys <= own - window
    return torch.zeros(hidden.shape, device=masks.device).masked_fill_(hidden, float("-inf"))


def _rows(
    query_lens: Sequence[int], members: Sequence[int], device: torch.device
) -> slice | Tensor:
    """The batch rows of `members`: a slice if they are consecutive sequences."""
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    if members[-1] - members[0] == len(members) - 1:
        return slice(starts[members[0]], starts[members[-1] + 1])
    rows = [row for index in members for row in range(starts[index], starts[index + 1])]
    return torch.tensor(rows, device=device)


def _slots(slot_table: Tensor, members: Sequence[int], first: int, last: int) -> Tensor:
    """Slots of cache positions first .. last-1 of every member, int64 [B · (last - first)]."""
    if members[-1] - members[0] == len(members) - 1:
        return slot_table[members[0] : members[-1] + 1, first:last].reshape(-1)
    index = torch.tensor(members, device=slot_table.device)
    return slot_table.index_select(0, index)[:, first:last].reshape(-1)
