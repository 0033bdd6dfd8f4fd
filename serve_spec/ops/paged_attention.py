"""Attention over a paged cache: decode tokens, drafts to verify (chains, trees), prefill chunks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from serve_spec.core.caches import PagedCache
from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.ops.attention import attend
from serve_spec.ops.dispatch import has_kernel

# The reference attends requests of up to this many query tokens in padded batches, others alone.
_MAX_BATCHED_QUERY_LEN = 16
# Caches of up to 2^8 entries share a batch. Longer ones share it with those of the same power of
# two, so that padding at most doubles the work.
_MIN_LENGTH_CLASS = 8

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Where the tokens and cache entries of B requests are, shared by all layers of one forward.

    `tables` int32 [B, P]: page ids of positions `0 ..`; entries past the table are not seen.
    `query_starts` int32 [B + 1]: request b owns tokens `query_starts[b] .. query_starts[b + 1] - 1`
    (none, if it is padding). `kv_lens` int32 [B]: its cache entries, its tokens included; its token
    i is at position kv_len - query_len + i. Tensors are dense and on the device of the pool.

    `groups`: (requests, most query tokens of each) for requests of about the same length, in order;
    together they are B requests. They change how work is cut, not what is computed.

    `tree_mask` int64 [T]: bit j is set if a token sees entry j of the tree of its request, itself
    included. The tree is the last `tree_len` entries of every request (None: its query tokens). All
    entries before it are seen. A token's depth is the number of its other bits, and a window is
    counted from there; trees lie within a window. Requests in groups of more than MAX_TREE_TOKENS
    query tokens are chains, whatever their mask. None: all requests are chains.

    Work that layers share is prepared by the first one, so a plan serves one forward only.
    """

    tables: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    page_size: int
    groups: tuple[tuple[int, int], ...]
    tree_mask: Tensor | None = None
    tree_len: int | None = None
    _prepared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the groups."""
        num_requests = sum(count for count, _ in self.groups)
        assert num_requests == len(self.kv_lens), (
            f"groups={self.groups}: {num_requests} requests, but {len(self.kv_lens)} lengths"
        )

    def prepared(self, key: Hashable, prepare: Callable[[], T]) -> T:
        """Return what `prepare` returned for this key the first time."""
        if key not in self._prepared:
            self._prepared[key] = prepare()
        value: T = self._prepared[key]
        return value


@has_kernel
def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    cache: PagedCache,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention [T, heads, dv] of query [T, heads, dk] over one layer's cache.

    keys [num_slots, kv_heads, dk], values [num_slots, kv_heads, dv]; slot = page · page_size +
    offset. They may be float8_e4m3fn, of which every number is one of query's dtype, too: it is
    converted when it is read, and `cache` has its scales. sinks: float [heads], of a layer that has
    them. Tokens that no request owns, or that see nothing, get anything finite. Nothing beyond a
    request's length is read, neither pages nor entries.
    """
    if keys.dtype == torch.float8_e4m3fn and query.dtype == torch.float32:
        # What differs by the batch would move later keys and values to other numbers of FP8. In
        # float64 it is far below the last place of float32.
        return _attend(query.double(), keys, values, plan, cache, sinks).float()
    return _attend(query, keys, values, plan, cache, sinks)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    cache: PagedCache,
    sinks: Tensor | None,
) -> Tensor:
    window, group = cache.window, query.shape[1] // keys.shape[1]
    batches = plan.prepared(
        (window, group, query.dtype), lambda: _plan_batches(plan, window, group, query)
    )
    if len(batches) == 1 and batches[0].holds_all:
        return batches[0].attend(query, keys, values, cache, sinks)
    out = query.new_zeros((*query.shape[:2], values.shape[2]))
    for batch in batches:
        out[batch.tokens] = batch.attend(query[batch.tokens], keys, values, cache, sinks)
    return out


@dataclass(frozen=True)
class _Batch:
    """B requests of Q query tokens each, attended in one call over L cache entries each.

    `tokens`: theirs in the forward. `holds_all`: there are no others. `slots` int64 [B·L]. `mask`:
    what is added to the scores, [B, 1, Q·group, L] for short queries, else [Q, L]. None: every
    token sees all L entries, or those up to its own if `is_causal`.

    Keys and values are never expanded to the query heads: for short queries the heads of a group
    become query rows, for long ones they share keys and values through a stride of zero.
    """

    tokens: slice | Tensor
    holds_all: bool
    num_requests: int
    query_len: int
    slots: Tensor
    mask: Tensor | None
    is_causal: bool

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, cache: PagedCache, sinks: Tensor | None
    ) -> Tensor:
        """Return [B·Q, heads, dv] of query [B·Q, heads, dk]."""
        keys, values = (x.index_select(0, self.slots).to(query.dtype) for x in (keys, values))
        if self.query_len <= _MAX_BATCHED_QUERY_LEN:
            return self._batched(query, keys, values, cache, sinks)
        return self._alone(query, keys, values, cache, sinks)

    def _batched(
        self, query: Tensor, keys: Tensor, values: Tensor, cache: PagedCache, sinks: Tensor | None
    ) -> Tensor:
        batch, length = self.num_requests, self.query_len
        (num_heads, width), kv_heads = query.shape[1:], keys.shape[1]
        group = num_heads // kv_heads
        # Rows of a kv head: query token, then head of its group.
        rows = query.reshape(batch, length, kv_heads, group, width).transpose(1, 2)
        if sinks is not None:
            sinks = sinks.view(kv_heads, 1, group).expand(-1, length, -1).reshape(kv_heads, -1, 1)
        out = attend(
            rows.reshape(batch, kv_heads, length * group, width),
            keys.view(batch, -1, kv_heads, width).transpose(1, 2),
            values.view(batch, -1, kv_heads, values.shape[2]).transpose(1, 2),
            cache,
            mask=self.mask,
            sinks=sinks,
        )
        out = out.view(batch, kv_heads, length, group, -1).transpose(1, 2)
        return out.reshape(batch * length, num_heads, -1)

    def _alone(
        self, query: Tensor, keys: Tensor, values: Tensor, cache: PagedCache, sinks: Tensor | None
    ) -> Tensor:
        (length, num_heads, width), kv_heads = query.shape, keys.shape[1]
        shared = (kv_heads, num_heads // kv_heads, -1, -1)
        out = attend(
            query.view(length, kv_heads, -1, width).permute(1, 2, 0, 3),
            keys.transpose(0, 1).unsqueeze(1).expand(shared),
            values.transpose(0, 1).unsqueeze(1).expand(shared),
            cache,
            mask=self.mask,
            is_causal=self.is_causal,
            sinks=None if sinks is None else sinks.view(*shared[:2], 1, 1),
        )
        return out.permute(2, 0, 1, 3).reshape(length, num_heads, -1)


@dataclass(frozen=True)
class _Request:
    """The lengths of a request. `newest`: entries of its tree, or its query tokens.

    `kv_len` may be past the table, `length` is not.
    """

    index: int
    start: int
    query_len: int
    kv_len: int
    length: int
    newest: int
    is_tree: bool

    @property
    def key(self) -> tuple[int, ...]:
        """Requests of one key share a batch."""
        if self.query_len > _MAX_BATCHED_QUERY_LEN:
            return -1, self.index
        return (
            self.query_len,
            max(_MIN_LENGTH_CLASS, (self.length - 1).bit_length()),
            self.newest,
            self.is_tree,
        )


def _plan_batches(
    plan: AttentionPlan, window: int | None, group: int, query: Tensor
) -> list[_Batch]:
    """Return the batches of a forward."""
    batches: dict[tuple[int, ...], list[_Request]] = {}
    for request in _requests(plan):
        batches.setdefault(request.key, []).append(request)
    return [_plan_batch(plan, members, window, group, query) for members in batches.values()]


def _requests(plan: AttentionPlan) -> list[_Request]:
    """Return the requests that have query tokens and something to see."""
    starts, kv_lens = plan.query_starts.tolist(), plan.kv_lens.tolist()
    capacity = plan.tables.shape[1] * plan.page_size
    requests, begin = [], 0
    for num_requests, max_query_len in plan.groups:
        is_tree = plan.tree_mask is not None and max_query_len <= MAX_TREE_TOKENS
        for index in range(begin, begin + num_requests):
            query_len, kv_len = starts[index + 1] - starts[index], kv_lens[index]
            if query_len > 0 and kv_len > 0:
                newest = plan.tree_len if is_tree and plan.tree_len is not None else query_len
                length = min(kv_len, capacity)
                requests.append(
                    _Request(index, starts[index], query_len, kv_len, length, newest, is_tree)
                )
        begin += num_requests
    return requests


def _plan_batch(
    plan: AttentionPlan, members: Sequence[_Request], window: int | None, group: int, query: Tensor
) -> _Batch:
    """Return the batch of these requests, of one key."""
    some, device = members[0], query.device
    query_len, newest = some.query_len, some.newest
    last = max(request.length for request in members)
    shortest = min(request.kv_len for request in members)
    # No token sees anything before the window of the first token of the shortest request.
    first = 0 if window is None else min(max(0, shortest - newest - window + 1), last - 1)
    is_causal = (
        query_len > _MAX_BATCHED_QUERY_LEN
        and query_len == some.kv_len == some.length
        and not some.is_tree
        and (window is None or window >= query_len)
    )
    tokens, index = _places(members, device)
    kv_lens = torch.tensor([request.kv_len for request in members], device=device).view(-1, 1, 1)
    positions = torch.arange(first, last, device=device)
    mask = None
    if not is_causal and (newest > 1 or any(request.kv_len != last for request in members)):
        if some.is_tree:
            assert plan.tree_mask is not None, "trees have masks"
            hidden = _hidden_in_tree(
                positions, plan.tree_mask[tokens].view(-1, query_len, 1), kv_lens, newest, window
            )
        else:
            own = kv_lens - query_len + torch.arange(query_len, device=device).unsqueeze(1)
            hidden = positions > own
            if window is not None:
                hidden |= positions <= own - window
        # A softmax over nothing is NaN.
        hidden &= ~hidden.all(dim=2, keepdim=True)
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=device)
        mask.masked_fill_(hidden, float("-inf"))
        if query_len <= _MAX_BATCHED_QUERY_LEN:
            mask = mask.repeat_interleave(group, dim=1)
        mask = mask.unsqueeze(1)
    inside = torch.minimum(positions, kv_lens.squeeze(1) - 1)
    pages = plan.tables[index].long().gather(1, inside // plan.page_size)
    slots = pages * plan.page_size + inside % plan.page_size
    return _Batch(
        tokens=tokens,
        holds_all=isinstance(tokens, slice) and tokens == slice(0, len(query)),
        num_requests=len(members),
        query_len=query_len,
        slots=slots.view(-1),
        mask=mask,
        is_causal=is_causal,
    )


def _places(
    members: Sequence[_Request], device: torch.device
) -> tuple[slice | Tensor, slice | Tensor]:
    """Return the tokens of these requests, and their numbers: slices if they are consecutive."""
    first, last = members[0], members[-1]
    if last.index - first.index == len(members) - 1:
        end = last.start + last.query_len
        return slice(first.start, end), slice(first.index, last.index + 1)
    tokens = [token + request.start for request in members for token in range(request.query_len)]
    return (
        torch.tensor(tokens, device=device),
        torch.tensor([request.index for request in members], device=device),
    )


def _hidden_in_tree(
    positions: Tensor, masks: Tensor, kv_lens: Tensor, tree_len: int, window: int | None
) -> Tensor:
    """Return which positions [L] tokens of trees do not see, bool [B, Q, L].

    masks [B, Q, 1], kv_lens [B, 1, 1].
    """
    first = kv_lens - tree_len
    draft = positions - first
    is_ancestor = ((masks >> draft.clamp(0, MAX_TREE_TOKENS - 1)) & 1).bool()
    hidden = (draft >= tree_len) | (draft >= 0) & ~is_ancestor
    if window is not None:
        bits = (masks >> torch.arange(MAX_TREE_TOKENS, device=masks.device)) & 1
        own = first + bits.sum(dim=2, keepdim=True) - 1
        hidden |= (draft < 0) & (positions <= own - window)
    return hidden
