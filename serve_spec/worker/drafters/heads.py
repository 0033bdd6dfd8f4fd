"""Drafts of heads that read one feature of the target and no drafts (Medusa)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_spec.core.draft import DraftShape
from serve_spec.models.drafts.base import DraftHead
from serve_spec.ops import layout as token_layout
from serve_spec.ops.draft_tree import Beam
from serve_spec.ops.layout import Sequences
from serve_spec.worker.drafters.base import DraftMemory
from serve_spec.worker.drafters.grow import DraftingRequests, draft_chains, draft_trees
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.step_buffers import DraftVocabulary, StepBuffers


class HeadsDrafter:
    """Heads that each draft one token from the newest feature. See `Drafter`."""

    keeps_kv = False
    first_entry = 0
    has_constant_cost = False

    def __init__(self, head: DraftHead, memory: DraftMemory) -> None:
        self.head = head
        self.dtype = head.dtype
        self._pool, self._features = memory.pool, memory.features

    @torch.inference_mode()
    def vocabulary(self) -> DraftVocabulary:
        """See `Drafter`."""
        features = self._features.features[:1]
        logits = self.head.logits(self.head.encode(features))
        return DraftVocabulary(logits.shape[1], self.head.target_ids)

    def slots_past(self, shape: DraftShape) -> int:
        """See `Drafter`: only the target's."""
        return shape.size

    def extend_chunks(self, buffers: StepBuffers, size: StepSize) -> None:
        """See `Drafter.keeps_kv`."""
        raise AssertionError("heads keep no draft KV")

    def extend(self, buffers: StepBuffers, num_requests: int, length: int) -> None:
        """See `Drafter.keeps_kv`."""
        raise AssertionError("heads keep no draft KV")

    def draft(self, buffers: StepBuffers, num_requests: int, shape: DraftShape) -> None:
        """See `Drafter`."""
        requests = DraftingRequests.first(buffers, num_requests, self.head.target_ids)
        hidden = self.head.encode(self._newest_features(buffers, num_requests))

        def chain_logits(drawn: Sequence[Tensor]) -> Tensor:
            return self.head.logits(hidden, len(drawn))

        def tree_logits(step: int, beam: Beam) -> Tensor:
            return self.head.logits(hidden.repeat_interleave(beam.token_ids.shape[1], 0), step)

        if shape.is_chain:
            draft_chains(requests, shape.depth, chain_logits)
        else:
            draft_trees(requests, shape, tree_logits)

    def _newest_features(self, buffers: StepBuffers, num_requests: int) -> Tensor:
        """Return the target's feature before the root of each request, [B, F]."""
        layout = token_layout.lay_out_tokens(
            buffers.slots.pages,
            self._pool.page_size,
            self._pool.scratch_slot,
            Sequences(
                buffers.request_slots[:num_requests], buffers.slots.lengths, 1, -2, by_slot=True
            ),
            num_requests,
        )
        return self._features.read(layout.slots)
