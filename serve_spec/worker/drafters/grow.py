"""Chains and trees of drafts from the logits of a draft model, one level after another.

Trees grow by beams (EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from serve_spec.core.draft import DraftShape
from serve_spec.ops import draft_tree, draw
from serve_spec.ops.draft_tree import Beam, root_beam
from serve_spec.worker.step_buffers import StepBuffers


class DraftingRequests(NamedTuple):
    """The first B requests of a step. slots: int32 [B]. lengths: int32 [B], committed tokens.

    target_ids: the target's id of each draft id, int64 [Vd]; None if both are the same.
    """

    buffers: StepBuffers
    slots: Tensor
    lengths: Tensor
    target_ids: Tensor | None

    @staticmethod
    def first(
        buffers: StepBuffers, num_requests: int, target_ids: Tensor | None
    ) -> DraftingRequests:
        """Return the first `num_requests` requests."""
        slots = buffers.request_slots[:num_requests]
        lengths = buffers.slots.lengths.index_select(0, slots)
        return DraftingRequests(buffers, slots, lengths, target_ids)


ChainLogits: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Returns float32 [B, Vd] of the draft after those drawn so far, int64 [B] each."""

TreeLogits: TypeAlias = Callable[[int, Beam], Tensor]
"""Returns float32 [B·W, Vd] of the children of the W tokens of each beam, at this level."""


def draft_chains(requests: DraftingRequests, depth: int, next_logits: ChainLogits) -> None:
    """Draw chains of `depth` drafts. Write `drafts`, `draft_logprobs` and `draft_logits`.

    Those of each request that are given already stand in place of what is drawn there.
    """
    buffers, num_requests = requests.buffers, len(requests.slots)
    steps = torch.arange(depth, device=requests.lengths.device).unsqueeze(1)
    positions = requests.lengths + steps
    given = buffers.given[:num_requests]
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for step in range(depth):
        drawn, likely = _draw(requests, next_logits(tokens), positions, step)
        tokens.append(drawn.where(given <= step, buffers.drafts[:num_requests, step]))
        logprobs.append(likely)
    buffers.drafts[:num_requests, :depth] = torch.stack(tokens, dim=1)
    buffers.draft_logprobs[:num_requests, :depth] = torch.stack(logprobs, dim=1)


def _draw(
    requests: DraftingRequests, logits: Tensor, positions: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """Draw draft number `step` of each request from logits float32 [B, Vd].

    positions: int64 [steps, B], the position of each draft. Return int64 [B], and what
    `StepBuffers.draft_logprobs` keeps, float32 [B].
    """
    buffers, slots, _, target_ids = requests
    params = buffers.slots.params
    if buffers.draft_logits is None:
        children, logprobs = draw.draw_children(
            logits, slots, positions[step], params, buffers.sharpness, target_ids, 1
        )
        return children[:, 0], logprobs[:, 0]
    buffers.draft_logits.logits[: len(slots), step].copy_(logits)
    return draw.sample_drafts(logits, slots, positions[step], positions[0], params, target_ids)


def draft_trees(requests: DraftingRequests, shape: DraftShape, next_logits: TreeLogits) -> None:
    """Grow trees. Write `drafts`, `draft_logprobs` and `parents`.

    Requests of smaller depth or size get smaller trees. Drafts of a request that are given already
    are the trunk of its tree.
    """
    buffers, request_slots, lengths, target_ids = requests
    assert buffers.parents is not None, "buffers without parents hold chains"
    num_requests = len(request_slots)
    given = buffers.given[:num_requests]
    # The trunk is the first child of the first token of each beam.
    is_first = (torch.arange(shape.topk**2, device=given.device) == 0).view(shape.topk, shape.topk)
    beam = root_beam(num_requests, request_slots.device)
    levels = []
    for step in range(shape.depth):
        logits = next_logits(step, beam)
        width = len(logits) // num_requests
        children, likely = draw.draw_children(
            logits,
            request_slots.repeat_interleave(width),
            (lengths.long() + step).repeat_interleave(width),
            buffers.slots.params,
            buffers.sharpness,
            target_ids,
            shape.topk,
        )
        by_parent = (num_requests, width, shape.topk)
        children, likely = children.view(by_parent), likely.view(by_parent)
        is_given = (given > step).view(-1, 1, 1)
        trunk = buffers.drafts[:num_requests, step].view(-1, 1, 1)
        children = children.where(~is_given, trunk.where(is_first[:width], -1))
        likely = likely.masked_fill(is_given, 0.0)
        level, beam = draft_tree.grow_beam(beam, children, likely, step)
        levels.append(level)
    counts = buffers.query_lens[:num_requests] - 1
    token_ids, parents, logprobs = draft_tree.choose_drafts(
        levels, buffers.depths[:num_requests], counts, shape.size
    )
    buffers.drafts[:num_requests, : shape.size] = token_ids
    buffers.draft_logprobs[:num_requests, : shape.size] = logprobs
    buffers.parents[:num_requests, : shape.size] = parents
