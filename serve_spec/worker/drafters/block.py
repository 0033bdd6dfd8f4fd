"""Drafts of block heads: one forward for all drafts, then one draw after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serve_spec.core.context import LayerAttention, Rotation
from serve_spec.core.draft import MAX_TREE_TOKENS, DraftShape
from serve_spec.models.block_head import BlockHead
from serve_spec.ops import layout as token_layout
from serve_spec.worker.drafters.base import DraftMemory
from serve_spec.worker.drafters.draft_kv import DraftKV
from serve_spec.worker.drafters.grow import DraftingRequests, draft_chains
from serve_spec.worker.forward import SlotAttention
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.step_buffers import DraftVocabulary, StepBuffers

_NO_TOKENS = slice(0, 0)


@dataclass(frozen=True)
class _BlockAttention:
    """A `LayerAttention` whose layers see a block causally or whole."""

    whole: SlotAttention
    causal: SlotAttention
    is_causal: Sequence[bool]

    def run(
        self, layer: int, heads: Tensor, rotation: Rotation, sinks: Tensor | None = None
    ) -> Tensor:
        """See `LayerAttention`."""
        attention = self.causal if self.is_causal[layer] else self.whole
        return attention.run(layer, heads, rotation, sinks)


class BlockDrafter:
    """A block head with its own paged KV pool. See `Drafter`.

    Draft KV entry j is the context token of position j. The block's own keys and values are behind
    them, and are overwritten by the next draft extend.
    """

    keeps_kv = True
    first_entry = 0
    has_constant_cost = True

    def __init__(self, head: BlockHead, memory: DraftMemory) -> None:
        assert head.block_size < MAX_TREE_TOKENS, "a token's mask has as many bits"
        self.head = head
        self.dtype = head.dtype
        self._kv = DraftKV(memory.pool)
        self._features = memory.features

    @torch.inference_mode()
    def vocabulary(self) -> DraftVocabulary:
        """See `Drafter`."""
        head, device = self.head, self._features.features.device
        size = 1, head.max_steps, head.hidden_size
        hidden = torch.zeros(size, dtype=self.dtype, device=device)
        return DraftVocabulary(head.logits(hidden).shape[2], head.target_ids)

    def slots_past(self, shape: DraftShape) -> int:
        """See `Drafter`: the target's, or those of the block, whose anchor is the last token."""
        return max(shape.size, self.head.block_size - 1) if shape.depth else 0

    def extend_chunks(self, buffers: StepBuffers, size: StepSize) -> None:
        """See `Drafter`."""
        layout, context = self._kv.of_chunks(buffers, size, _NO_TOKENS)
        self.head.enter(self._features.read(layout.slots), context)

    def extend(self, buffers: StepBuffers, num_requests: int, length: int) -> None:
        """See `Drafter`."""
        layout, context = self._kv.of_missing(buffers, num_requests, length, _NO_TOKENS)
        self.head.enter(self._features.read(layout.slots), context)

    def draft(self, buffers: StepBuffers, num_requests: int, shape: DraftShape) -> None:
        """See `Drafter`. Draws the drafts of a whole block, whatever the depth of the shape."""
        assert shape.is_chain, "block drafters draft chains"
        head = self.head
        requests = DraftingRequests.first(buffers, num_requests, head.target_ids)
        layout, context = self._kv.of_blocks(buffers, requests.slots, head.block_size)
        context = replace(context, attention=self._attention(context.attention))
        tokens = token_layout.read_tokens(buffers.slots.recent, layout)
        anchors = tokens.view(num_requests, head.block_size)[:, 0]
        hidden = head.block(anchors, context)[:, head.first_row :]
        logits = head.logits(hidden)
        depth = min(head.max_steps, buffers.max_depth)

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            before = torch.stack([anchors, *drawn], dim=1).clamp_min(0)
            return head.step_logits(logits, hidden, before).contiguous()

        draft_chains(requests, depth, next_logits)
        before = torch.cat([anchors.unsqueeze(1), buffers.drafts[:num_requests, :depth]], dim=1)
        confidence = head.confidence(hidden[:, :depth], before.clamp_min(0))
        if confidence is not None:
            buffers.draft_logprobs[:num_requests, :depth] = confidence.log()

    def _attention(self, whole: LayerAttention) -> LayerAttention:
        """Return the attention of a block whose layers may be causal."""
        if not any(self.head.is_causal):
            return whole
        assert isinstance(whole, SlotAttention)
        plan = replace(whole.plan, tree_mask=None, tree_len=None)
        return _BlockAttention(whole, replace(whole, plan=plan), self.head.is_causal)
