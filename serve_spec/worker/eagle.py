"""Chains and trees from a draft model: draft extend, then one forward per further level.

Chains have one token per level. Trees grow by beams (EAGLE-2, arXiv 2406.16858): every beam token
has a KV slot of its own after the committed text, and attends to the text, its path and itself.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from serve_spec.core.context import ForwardContext
from serve_spec.core.draft import DraftShape
from serve_spec.kvcache.pool import FeaturePool, PagedKVPool
from serve_spec.models.draft import DraftHead
from serve_spec.ops import draft_tree, draw
from serve_spec.ops import layout as token_layout
from serve_spec.ops.draft_tree import Beam, root_beam
from serve_spec.ops.layout import Extended, Followed, Sequences, TokenLayout
from serve_spec.ops.paged_attention import AttentionPlan
from serve_spec.worker.forward import SlotAttention
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.step_buffers import StepBuffers


class DraftModel:
    """A draft head or a standalone draft model with its own paged KV pool.

    Its KV is computed lazily: draft extend makes the missing entries before a step that drafts.
    """

    def __init__(self, head: DraftHead, pool: PagedKVPool, features: FeaturePool) -> None:
        self.head = head
        self.pool = pool
        self.features = features

    def extend_chunks(self, buffers: StepBuffers, size: StepSize) -> None:
        """Make the draft KV entries of `buffers.chunks`, for prompts and after long pauses.

        The tokens of a chunk are those after its positions.
        """
        chunks = buffers.chunks
        slots, starts, lens = (
            x[: size.chunks] for x in (chunks.request_slots, chunks.starts, chunks.lens)
        )
        layout, context = self._context(
            buffers,
            Sequences(slots, starts, lens, offset=self.head.shift),
            size.tokens,
            queries=slice(0, 0) if self.head.ends_early else None,
        )
        hidden = self.head.encode(self.features.read(layout.slots))
        index = torch.arange(size.tokens, device=hidden.device)
        self.head.forward(chunks.tokens_of(index), hidden, context)

    def extend(self, buffers: StepBuffers, num_requests: int, length: int) -> None:
        """Make each request's missing draft KV entries, up to `length`; write `buffers.hidden`.

        Every request gets `length` tokens that end at its last entry. Entries it already has are
        not written, and a request that lacks more writes none: it does not draft in this step.
        """
        assert buffers.hidden is not None, "draft extend needs a draft model"
        slots, shift = buffers.slots, self.head.shift
        request_slots = buffers.request_slots[:num_requests]
        last = slice(length - 1, None, length)
        layout, context = self._context(
            buffers,
            Sequences(request_slots, slots.lengths, length, shift - 1 - length, by_slot=True),
            num_requests * length,
            drafted=Extended(slots.draft_lengths, shift),
            queries=last if self.head.ends_early else None,
        )
        tokens = token_layout.read_tokens(slots.recent, layout, ahead=1 - shift)
        hidden = self.head.encode(self.features.read(layout.slots))
        hidden = self.head.forward(tokens, hidden, context)
        buffers.hidden[:num_requests].copy_(hidden if self.head.ends_early else hidden[last])

    def draft(self, buffers: StepBuffers, num_requests: int, shape: DraftShape) -> None:
        """Draft from `buffers.hidden`; write `drafts`, `draft_logprobs` and `parents` of trees.

        Requests of smaller depth or size get smaller trees; chains hold any token past their depth.
        Sampled drafts also write `buffers.draft_logits`.
        """
        assert buffers.hidden is not None, "drafting needs a draft model"
        request_slots = buffers.request_slots[:num_requests]
        lengths = buffers.slots.lengths.index_select(0, request_slots)
        if shape.is_chain:
            self._draft_chains(buffers, request_slots, lengths, shape.depth)
        else:
            self._draft_trees(buffers, request_slots, lengths, shape)

    def _draft_chains(
        self, buffers: StepBuffers, request_slots: Tensor, lengths: Tensor, depth: int
    ) -> None:
        assert buffers.hidden is not None
        num_requests = len(request_slots)
        hidden = buffers.hidden[:num_requests]
        steps = torch.arange(depth, device=lengths.device).unsqueeze(1)
        positions = lengths + steps
        drawn = []
        for step in range(depth):
            logits = self.head.logits(hidden, step)
            drawn.append(self._draw(buffers, logits, request_slots, positions, step))
            if step + 1 < depth:
                _, context = self._after_level(buffers, request_slots, step)
                hidden = self.head.forward(drawn[step][0], hidden, context)
        tokens, logprobs = zip(*drawn, strict=True)
        buffers.drafts[:num_requests, :depth] = torch.stack(tokens, dim=1)
        buffers.draft_logprobs[:num_requests, :depth] = torch.stack(logprobs, dim=1)

    def _draw(
        self, buffers: StepBuffers, logits: Tensor, slots: Tensor, positions: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Draw draft number `step` of each request from logits float32 [B, Vd].

        positions: int64 [steps, B], the position of each draft. Return int64 [B], and what
        `StepBuffers.draft_logprobs` keeps, float32 [B].
        """
        params, target_ids = buffers.slots.params, self.head.target_ids
        if buffers.draft_logits is None:
            children, logprobs = draw.draw_children(
                logits, slots, positions[step], params, buffers.sharpness, target_ids, 1
            )
            return children[:, 0], logprobs[:, 0]
        buffers.draft_logits.logits[: len(slots), step].copy_(logits)
        return draw.sample_drafts(logits, slots, positions[step], positions[0], params, target_ids)

    def _draft_trees(
        self, buffers: StepBuffers, request_slots: Tensor, lengths: Tensor, shape: DraftShape
    ) -> None:
        assert buffers.hidden is not None
        assert buffers.parents is not None, "buffers without parents hold chains"
        num_requests = len(request_slots)
        hidden = buffers.hidden[:num_requests].unsqueeze(1)
        beam = root_beam(num_requests, request_slots.device)
        levels = []
        for step in range(shape.depth):
            width = hidden.shape[1]
            children, likely = draw.draw_children(
                self.head.logits(hidden.flatten(0, 1), step),
                request_slots.repeat_interleave(width),
                (lengths.long() + step).repeat_interleave(width),
                buffers.slots.params,
                buffers.sharpness,
                self.head.target_ids,
                shape.topk,
            )
            by_parent = (num_requests, width, shape.topk)
            level, beam = draft_tree.grow_beam(
                beam, children.view(by_parent), likely.view(by_parent), step
            )
            levels.append(level)
            if step + 1 < shape.depth:
                hidden = self._follow(buffers, beam, hidden, request_slots, lengths, step)
        counts = buffers.query_lens[:num_requests] - 1
        token_ids, parents, logprobs = draft_tree.choose_drafts(
            levels, buffers.depths[:num_requests], counts, shape.size
        )
        buffers.drafts[:num_requests, : shape.size] = token_ids
        buffers.draft_logprobs[:num_requests, : shape.size] = logprobs
        buffers.parents[:num_requests, : shape.size] = parents

    def _follow(
        self,
        buffers: StepBuffers,
        beam: Beam,
        hidden: Tensor,
        request_slots: Tensor,
        lengths: Tensor,
        step: int,
    ) -> Tensor:
        """Return hidden states [B, topk, H] after the beam of level `step`, from [B, W, H]."""
        topk = beam.token_ids.shape[1]
        depth = lengths.long() - 1 + self.head.shift + step
        _, context = self._after_level(buffers, request_slots, step, topk, beam.masks.flatten())
        context = replace(context, positions=depth.repeat_interleave(topk))
        before = beam.befores.unsqueeze(2).expand(-1, -1, hidden.shape[2])
        hidden = hidden.gather(1, before).flatten(0, 1)
        hidden = self.head.forward(beam.token_ids.flatten(), hidden, context)
        return hidden.view(len(request_slots), topk, -1)

    def _after_level(
        self,
        buffers: StepBuffers,
        request_slots: Tensor,
        level: int,
        width: int = 1,
        tree_mask: Tensor | None = None,
    ) -> tuple[TokenLayout, ForwardContext]:
        """Lay out the `width` drafts of level `level` of each request, after those before.

        Requests whose drafts end there write nothing.
        """
        offset = self.head.shift - 1 + level * width
        return self._context(
            buffers,
            Sequences(request_slots, buffers.slots.lengths, width, offset, by_slot=True),
            len(request_slots) * width,
            drafted=Followed(buffers.depths[: len(request_slots)], level + 1),
            tree_mask=tree_mask,
            tree_len=None if tree_mask is None else (level + 1) * width,
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
        """Lay out the tokens that make draft KV entries.

        queries: the tokens that attend, the last of each request, or none; None: all of them.
        """
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
