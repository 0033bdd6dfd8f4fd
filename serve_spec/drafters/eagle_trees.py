"""Trees of drafts from the heads that draft chains (EAGLE-2, arXiv 2406.16858).

A level feeds its beam, one row a place. Every row of every level has a cache entry of its own
behind those of the text, so nothing is moved when a place goes on from another parent: a row sees
the text, its own path and itself, and sits where its depth says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from serve_spec.core.context import RaggedBatch
from serve_spec.core.draft import DraftTrees
from serve_spec.core.plan import RowPlan
from serve_spec.ops import draft_tree
from serve_spec.ops.draft_tree import root_beam
from serve_spec.runtime.layout import ragged_batch

Children = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]
"""Of hidden states [R, H], the draft's number, and draws [R]: ids and likelihoods [R, topk]."""

Feed = Callable[[Tensor, RaggedBatch, Tensor], Tensor]
"""Of tokens [R], their layout, and hidden states [R, H]: the hidden states after them."""


def draft_trees(
    rows: Sequence[RowPlan],
    root_draws: Sequence[int],
    slots: Tensor,
    shift: int,
    hidden: Tensor,
    children: Children,
    feed: Feed,
) -> DraftTrees:
    """The trees of rows that caught up.

    root_draws: see `Drafter.propose`. slots: their `slot_table`. hidden: [B, H] after the last
    entry of each row's text, which is followed at `row.start` + shift.
    """
    device = hidden.device
    steps = torch.tensor([row.num_steps for row in rows], device=device)
    num_steps = max(row.num_steps for row in rows)
    draws = torch.tensor(root_draws, device=device)
    beam = root_beam(len(rows), device)
    hidden = hidden.unsqueeze(1)
    levels = []
    for step in range(num_steps):
        width = hidden.shape[1]
        # Shallower rows have no draw of their own there; what they grow is not chosen.
        draw = (draws + steps.clamp(max=step)).repeat_interleave(width)
        ids, likely = children(hidden.flatten(0, 1), step, draw)
        level, beam = draft_tree.grow_beam(
            beam, ids.view(len(rows), width, -1), likely.view(len(rows), width, -1), step
        )
        levels.append(level)
        deeper = [b for b, row in enumerate(rows) if row.num_steps > step + 1]
        if deeper:
            at = torch.tensor(deeper, device=device)
            batch = _beam_batch([rows[b] for b in deeper], slots[at], shift, beam.masks[at], step)
            tokens = beam.token_ids[at].clamp(min=0).flatten()
            before = beam.befores.unsqueeze(2).expand(-1, -1, hidden.shape[2])
            hidden = hidden.gather(1, before)
            fed = feed(tokens, batch, hidden[at].flatten(0, 1))
            hidden = hidden.index_copy(0, at, fed.view(len(at), -1, fed.shape[1]))
    counts = tuple(row.tree_drafts for row in rows)
    wanted = torch.tensor(counts, device=device)
    token_ids, parents = draft_tree.choose_drafts(levels, steps, wanted, max(counts))
    return DraftTrees(token_ids, parents, counts)


def _beam_batch(
    rows: Sequence[RowPlan], slots: Tensor, shift: int, masks: Tensor, step: int
) -> RaggedBatch:
    """The rows of the beam of level `step`: behind the beams before it, at the depth of all."""
    topk = masks.shape[1]
    starts = [row.start + shift + step * topk for row in rows]
    batch = ragged_batch(slots, starts, [topk] * len(rows))
    positions = torch.tensor([row.start + shift + step for row in rows], device=slots.device)
    return replace(
        batch,
        positions=positions.repeat_interleave(topk),
        tree_mask=masks.flatten(),
        tree_lens=((step + 1) * topk,) * len(rows),
    )
