"""The target's forward over the tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.core.context import ForwardContext, Rotation, TokenIndex
from serve_spec.core.draft import MAX_TREE_TOKENS, DraftShape
from serve_spec.kvcache.pool import FeaturePool, PagedKVPool
from serve_spec.models.interfaces import FeatureCapture, Target
from serve_spec.ops import acceptance, elementwise, paged_attention
from serve_spec.ops import layout as token_layout
from serve_spec.ops.acceptance import AcceptedPath, num_bits
from serve_spec.ops.layout import Sequences, TokenLayout
from serve_spec.ops.paged_attention import AttentionPlan
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.step_buffers import StepBuffers


@dataclass
class SlotAttention:
    """A `LayerAttention` whose layout is in device tensors, so that a CUDA graph can replay it.

    slots: int64 [T], KV slots of the tokens; padding tokens write to a scratch slot. queries: the
    tokens that attend, as in `plan`; None: all.
    """

    pool: PagedKVPool
    slots: Tensor
    plan: AttentionPlan
    queries: TokenIndex | None = None

    def run(
        self, layer: int, heads: Tensor, rotation: Rotation, sinks: Tensor | None = None
    ) -> Tensor:
        """See `LayerAttention`: [T, num_heads + 2·kv_heads, d] -> [R, num_heads, d]."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        cache = self.pool.caches[layer]
        query = elementwise.rotate_and_store(
            heads,
            rotation,
            self.slots,
            keys,
            values,
            heads.shape[-2] - 2 * cache.num_heads,
            self.pool.dtype,
            (cache.key_scale, cache.value_scale),
        )
        if self.queries is not None:
            query = query[self.queries]
        if not len(query):
            return query
        return paged_attention.paged_attention(query, keys, values, self.plan, cache, sinks)


@dataclass(frozen=True)
class TargetRunner:
    """The target on one rank: weights, KV pool, and the features that the draft model reads.

    Features are kept by KV slot, so draft extend can run at any later step: after steps without
    speculation, after a preemption, after a chunked prefill.
    """

    model: Target
    pool: PagedKVPool
    capture: FeatureCapture | None = None
    features: FeaturePool | None = None

    def keep(self, layout: TokenLayout, accepted: AcceptedPath) -> None:
        """Move the KV entries and features of accepted tree drafts next to each other."""
        pools = [*self.pool.tensors]
        if self.features is not None:
            pools.append(self.features.features)
        acceptance.move_accepted(
            pools, layout.slots, layout.query_starts, accepted.path, accepted.num_correct
        )


class QueryShape(NamedTuple):
    """The tokens of each request that draws: at most `width`; `is_tree`: its drafts form a tree."""

    width: int
    is_tree: bool = False

    @staticmethod
    def of(shape: DraftShape) -> QueryShape:
        """Return the query of a root and its drafts."""
        return QueryShape(shape.size + 1, not shape.is_chain)

    def __str__(self) -> str:
        """Return it as in the names of profiles."""
        return f"{'tree' if self.is_tree else 'chain'} of {self.width}"


@dataclass(frozen=True)
class VerifiedTokens:
    """Output of a target forward: T tokens of the requests that draw.

    `token_ids` int64 [T]: each request's root, then its drafts (-1: no token), then padding.
    `layout`: with slot -1 for tokens that do not draw. `logits` float32 [T, V]. For trees,
    `parents` int32 [T]: see `accept_path`, and `depths` int32 [T]: drafts on each token's path, its
    own included. `hidden` [*, H]: of all tokens of the forward.
    """

    token_ids: Tensor
    layout: TokenLayout
    logits: Tensor
    hidden: Tensor
    parents: Tensor | None = None
    depths: Tensor | None = None


def run_target(
    target: TargetRunner, buffers: StepBuffers, size: StepSize, query: QueryShape
) -> VerifiedTokens:
    """Run the target over the roots and drafts of a step, and over its prefill chunks.

    size: with padding, if any. query: of the requests that draw. Chunks come last; their logits are
    not computed. (The last token of a prompt is a root: it draws.)
    """
    num_requests = size.requests
    layout = _lay_out_step(target.pool, buffers, size)
    groups: tuple[tuple[int, int], ...] = ((num_requests, query.width),)
    # Only the first tokens can draw.
    num_drawn = min(size.tokens, num_requests * query.width)
    drawn = layout.first(num_drawn, num_requests)
    token_ids = token_layout.read_tokens(
        buffers.slots.recent, layout, drafts=buffers.drafts if buffers.max_drafts else None
    )
    if size.chunks:
        # Chunks are chains, also in a step with trees: a group with more tokens than a tree is one.
        groups += ((size.chunks, max(size.tokens, MAX_TREE_TOKENS + query.is_tree)),)
        draws = drawn.owners < num_requests
        drawn = drawn._replace(request_slots=drawn.request_slots.where(draws, -1))
        index = torch.arange(size.tokens, device=token_ids.device)
        given = buffers.chunks.tokens_of(index - layout.query_starts[num_requests])
        token_ids = torch.where(layout.owners < num_requests, token_ids, given)
    positions, tree = layout.positions, None
    if query.is_tree:
        tree = _tree_layout(buffers, drawn)
        drawn = drawn._replace(positions=tree.positions)
        positions = torch.cat([tree.positions, positions[num_drawn:]])
    plan = AttentionPlan(
        layout.tables,
        layout.query_starts,
        layout.kv_lens,
        target.pool.page_size,
        groups,
        None if tree is None else tree.masks,
    )
    attention = SlotAttention(target.pool, layout.slots, plan)
    output = target.model.forward(token_ids, ForwardContext(positions, attention), target.capture)
    # First, so that its weights are fetched while the last norm still runs.
    logits = target.model.logits(output.hidden[:num_drawn])
    features = output.features
    if target.features is not None:
        assert features is not None, "the draft model needs features"
        target.features.write(layout.slots, features)
    return VerifiedTokens(
        token_ids[:num_drawn],
        drawn,
        logits,
        output.hidden,
        None if tree is None else tree.parents,
        None if tree is None else tree.depths,
    )


def _lay_out_step(pool: PagedKVPool, buffers: StepBuffers, size: StepSize) -> TokenLayout:
    """Lay out the tokens of a step's requests, then those of its prefill chunks."""
    slots, chunks = buffers.slots, buffers.chunks
    request_slots = buffers.request_slots[: size.requests]
    query_lens = buffers.query_lens[: size.requests]
    sequences = Sequences(request_slots, slots.lengths, query_lens, offset=-1, by_slot=True)
    if size.chunks:
        starts = slots.lengths.index_select(0, request_slots) - 1
        sequences = Sequences(
            torch.cat([request_slots, chunks.request_slots[: size.chunks]]),
            torch.cat([starts, chunks.starts[: size.chunks]]),
            torch.cat([query_lens, chunks.lens[: size.chunks]]),
        )
    return token_layout.lay_out_tokens(
        slots.pages, pool.page_size, pool.scratch_slot, sequences, size.tokens
    )


class _TreeLayout(NamedTuple):
    """Positions of tokens in their trees; each [T], see `VerifiedTokens`."""

    parents: Tensor
    masks: Tensor
    depths: Tensor
    positions: Tensor


def _tree_layout(buffers: StepBuffers, layout: TokenLayout) -> _TreeLayout:
    """Lay out the trees of drawing requests."""
    assert buffers.parents is not None, "buffers without parents hold chains"
    draws = layout.request_slots >= 0
    drafts = _of_drafts(buffers.parents, layout)
    parents = drafts.where(draws & (layout.offsets > 0), layout.offsets - 1)
    masks = acceptance.tree_masks(parents, layout.query_starts)
    depths = num_bits(masks).to(torch.int32) - 1
    # The root of a tree is at the position of its offset.
    positions = (layout.positions - layout.offsets + depths).clamp_min(0)
    return _TreeLayout(
        parents, masks, depths.where(draws, 0), positions.where(draws, layout.positions)
    )


def _of_drafts(table: Tensor, layout: TokenLayout) -> Tensor:
    """Return the values of a table [B, N] of drafts for tokens [T]; any value for roots."""
    most, width = table.shape
    owners = layout.owners.clamp(0, most - 1)
    return table[owners.long(), (layout.offsets - 1).clamp(0, width - 1).long()]
