"""Drafts of a draft model that reads its own drafts: EAGLE, EAGLE-3, MTP, stand-alone models.

Draft extend, then one forward for each further level. Every token of a tree's beam has a KV slot of
its own after the committed text, and attends to the text, its path and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from serve_spec.core.draft import DraftShape
from serve_spec.models.drafts.base import DraftHead
from serve_spec.ops import layout as token_layout
from serve_spec.ops.draft_tree import Beam
from serve_spec.worker.drafters.base import DraftMemory
from serve_spec.worker.drafters.draft_kv import DraftKV
from serve_spec.worker.drafters.grow import (
    ChainLogits,
    DraftingRequests,
    TreeLogits,
    draft_chains,
    draft_trees,
)
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.step_buffers import DraftVocabulary, StepBuffers


class AutoregressiveDrafter:
    """A draft head or a stand-alone model with its own paged KV pool. See `Drafter`."""

    keeps_kv = True
    has_constant_cost = False

    def __init__(self, head: DraftHead, memory: DraftMemory) -> None:
        self.head = head
        self.dtype = head.dtype
        self.first_entry = -head.shift
        self._kv = DraftKV(memory.pool, head.shift)
        self._features = memory.features
        # After draft extend: from it the first draft follows.
        self._hidden = torch.zeros(
            memory.max_requests, head.hidden_size, dtype=head.dtype, device=memory.pool.device
        )

    @torch.inference_mode()
    def vocabulary(self) -> DraftVocabulary:
        """See `Drafter`."""
        return DraftVocabulary(self.head.logits(self._hidden[:1]).shape[1], self.head.target_ids)

    def slots_past(self, shape: DraftShape) -> int:
        """See `Drafter`: the target's, or those of the beams of all levels but the last."""
        return max(shape.size, shape.topk * (shape.depth - 1))

    def extend_chunks(self, buffers: StepBuffers, size: StepSize) -> None:
        """See `Drafter`."""
        none = slice(0, 0) if self.head.ends_early else None
        layout, context = self._kv.of_chunks(buffers, size, queries=none)
        hidden = self.head.encode(self._features.read(layout.slots))
        index = torch.arange(size.tokens, device=hidden.device)
        self.head.forward(buffers.chunks.tokens_of(index), hidden, context)

    def extend(self, buffers: StepBuffers, num_requests: int, length: int) -> None:
        """See `Drafter`. Keeps the hidden state of each request's last entry."""
        last = slice(length - 1, None, length)
        queries = last if self.head.ends_early else None
        layout, context = self._kv.of_missing(buffers, num_requests, length, queries)
        ahead = 1 - self.head.shift
        tokens = token_layout.read_tokens(buffers.slots.recent, layout, ahead=ahead)
        hidden = self.head.encode(self._features.read(layout.slots))
        hidden = self.head.forward(tokens, hidden, context)
        self._hidden[:num_requests].copy_(hidden if self.head.ends_early else hidden[last])

    def draft(self, buffers: StepBuffers, num_requests: int, shape: DraftShape) -> None:
        """See `Drafter`."""
        requests = DraftingRequests.first(buffers, num_requests, self.head.target_ids)
        if shape.is_chain:
            draft_chains(requests, shape.depth, self._chain_logits(requests))
        else:
            draft_trees(requests, shape, self._tree_logits(requests))

    def _chain_logits(self, requests: DraftingRequests) -> ChainLogits:
        hidden = self._hidden[: len(requests.slots)]

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            nonlocal hidden
            if drawn:
                level = len(drawn) - 1
                _, context = self._kv.after_text(requests.buffers, requests.slots, level)
                hidden = self.head.forward(drawn[-1], hidden, context)
            return self.head.logits(hidden, len(drawn))

        return next_logits

    def _tree_logits(self, requests: DraftingRequests) -> TreeLogits:
        hidden = self._hidden[: len(requests.slots)].unsqueeze(1)

        def next_logits(step: int, beam: Beam) -> Tensor:
            nonlocal hidden
            if step:
                hidden = self._after_beam(requests, beam, hidden, step - 1)
            return self.head.logits(hidden.flatten(0, 1), step)

        return next_logits

    def _after_beam(
        self, requests: DraftingRequests, beam: Beam, hidden: Tensor, level: int
    ) -> Tensor:
        """Return hidden states [B, topk, H] after the beam of a level, from [B, W, H]."""
        buffers, slots, lengths, _ = requests
        topk = beam.token_ids.shape[1]
        depth = lengths.long() - 1 + self.head.shift + level
        _, context = self._kv.after_text(buffers, slots, level, topk, beam.masks.flatten())
        context = replace(context, positions=depth.repeat_interleave(topk))
        before = beam.befores.unsqueeze(2).expand(-1, -1, hidden.shape[2])
        hidden = hidden.gather(1, before).flatten(0, 1)
        hidden = self.head.forward(beam.token_ids.flatten(), hidden, context)
        return hidden.view(len(slots), topk, -1)
