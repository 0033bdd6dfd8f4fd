"""Where the tokens of a draft model's forward are in its KV cache, and what they attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.core.context import ForwardContext
from serve_spec.kvcache.pool import PagedKVPool
from serve_spec.ops import layout as token_layout
from serve_spec.ops.layout import Extended, Followed, Sequences, TokenLayout
from serve_spec.ops.paged_attention import AttentionPlan
from serve_spec.worker.forward import SlotAttention
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.step_buffers import StepBuffers


@dataclass(frozen=True)
class DraftKV:
    """The KV pool of a draft model, and the layouts of its forwards.

    shift: the position of entry j minus j: 0, or 1 for whole models.

    Each method returns a layout of tokens and the context of a forward over them. `queries`: the
    tokens that attend, the last of each request, or none; None: all of them.
    """

    pool: PagedKVPool
    shift: int = 0

    def of_chunks(
        self, buffers: StepBuffers, size: StepSize, queries: slice | None
    ) -> tuple[TokenLayout, ForwardContext]:
        """Lay out the draft KV entries of `buffers.chunks`."""
        chunks = buffers.chunks
        slots, starts, lens = (
            x[: size.chunks] for x in (chunks.request_slots, chunks.starts, chunks.lens)
        )
        sequences = Sequences(slots, starts, lens, offset=self.shift)
        return self._context(buffers, sequences, size.tokens, queries=queries)

    def of_missing(
        self, buffers: StepBuffers, num_requests: int, length: int, queries: slice | None
    ) -> tuple[TokenLayout, ForwardContext]:
        """Lay out the last `length` draft KV entries of each request.

        Those it has are not written. A request that lacks more writes none.
        """
        slots, shift = buffers.slots, self.shift
        request_slots = buffers.request_slots[:num_requests]
        return self._context(
            buffers,
            Sequences(request_slots, slots.lengths, length, shift - 1 - length, by_slot=True),
            num_requests * length,
            drafted=Extended(slots.draft_lengths, shift),
            queries=queries,
        )

    def after_text(
        self,
        buffers: StepBuffers,
        request_slots: Tensor,
        level: int,
        width: int = 1,
        tree_mask: Tensor | None = None,
    ) -> tuple[TokenLayout, ForwardContext]:
        """Lay out the `width` tokens of level `level` of each request, after those before.

        Requests whose drafts end there write nothing.
        """
        offset = self.shift - 1 + level * width
        return self._context(
            buffers,
            Sequences(request_slots, buffers.slots.lengths, width, offset, by_slot=True),
            len(request_slots) * width,
            drafted=Followed(buffers.depths[: len(request_slots)], level + 1),
            tree_mask=tree_mask,
            tree_len=None if tree_mask is None else (level + 1) * width,
        )

    def of_blocks(
        self, buffers: StepBuffers, request_slots: Tensor, length: int
    ) -> tuple[TokenLayout, ForwardContext]:
        """Lay out `length` tokens of each request from its root on, which see each other.

        Requests without drafts write nothing.
        """
        num_tokens = len(request_slots) * length
        return self._context(
            buffers,
            Sequences(request_slots, buffers.slots.lengths, length, offset=-1, by_slot=True),
            num_tokens,
            drafted=Followed(buffers.depths[: len(request_slots)], level=0),
            tree_mask=torch.full((num_tokens,), (1 << length) - 1, device=request_slots.device),
            tree_len=length,
        )

    def _context(
        self,
        buffers: StepBuffers,
        sequences: Sequences,
        num_tokens: int,
        *,
        drafted: Extended | Followed | None = None,
        queries: slice | None = None,
        tree_mask: Tensor | None = None,
        tree_len: int | None = None,
    ) -> tuple[TokenLayout, ForwardContext]:
        layout = token_layout.lay_out_tokens(
            buffers.slots.pages,
            self.pool.page_size,
            self.pool.scratch_slot,
            sequences,
            num_tokens,
            drafted,
        )
        lens = sequences.query_lens
        query_starts = layout.query_starts
        max_query_len = lens if isinstance(lens, int) else num_tokens
        if queries is not None:
            query_starts = torch.arange(len(query_starts), out=torch.empty_like(query_starts))
            max_query_len = 1
        plan = AttentionPlan(
            layout.tables,
            query_starts,
            layout.kv_lens,
            self.pool.page_size,
            ((len(layout.kv_lens), max_query_len),),
            tree_mask,
            tree_len,
        )
        attention = SlotAttention(self.pool, layout.slots, plan, queries)
        return layout, ForwardContext(layout.positions, attention, queries)
