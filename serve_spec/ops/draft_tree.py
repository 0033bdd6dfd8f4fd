"""Draft trees: a beam grows level by level, and the likeliest candidates make the tree.

EAGLE-2 (arXiv 2406.16858): a level holds the topk likeliest children of each token of the beam; the
topk of them with the largest product of probabilities from the root on are the next beam. The
likeliest candidates of all levels make the tree.

    topk = 2      root ─┬─ a ─┬─ c        level 0: a b       beam a b
                        │     └─ d        level 1: c d e f   beam c e
                        └─ b ─┬─ e        the 4 likeliest: a c b e
                              └─ f

A score is a logarithm, and a child's is at most its parent's. So the likeliest candidates include
their parents, if ties rank by number, because parents have smaller numbers. All shapes are fixed,
so that a CUDA graph can replay this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.layout import on_host

_NEVER = float("-inf")


class Level(NamedTuple):
    """The C candidates of one level: topk of the first, topk² of each other.

    token_ids: int64 [B, C], -1 for none. scores: float32 [B, C], sums of logarithms; -inf for none.
    parents: int64 [B, C], each one's parent among the candidates of all levels; -1 for the root.
    logprobs: float32 [B, C], the candidate's own logarithm.
    """

    token_ids: Tensor
    scores: Tensor
    parents: Tensor
    logprobs: Tensor


class Beam(NamedTuple):
    """The W candidates of a level that have children; each takes a draft KV slot.

    token_ids, scores: as in `Level`, [B, W]. numbers: int64 [B, W], among the candidates of all
    levels. befores: int64 [B, W], index of the parent in the beam before.
    masks: int64 [B, W], the path of each, itself included: bit l·topk + i stands for candidate i of
    the beam of level l.
    """

    token_ids: Tensor
    scores: Tensor
    numbers: Tensor
    befores: Tensor
    masks: Tensor


def root_beam(batch_size: int, device: torch.device) -> Beam:
    """Return the beam before the first level: the roots."""
    none = torch.full((batch_size, 1), -1, dtype=torch.int64, device=device)
    zero = torch.zeros_like(none)
    return Beam(none, zero.float(), none, zero, zero)


@has_kernel
def grow_beam(before: Beam, token_ids: Tensor, scores: Tensor, step: int) -> tuple[Level, Beam]:
    """Return level `step` and its beam.

    token_ids: int64 [B, W, topk], the children of the beam `before`, -1 for none.
    scores: float32 [B, W, topk], their log-likelihoods, cut at 0.
    """
    topk = token_ids.shape[2]
    total = before.scores.unsqueeze(2) + scores.clamp(max=0.0)
    total = total.where((token_ids >= 0) & (total == total), _NEVER).flatten(1)
    parents = before.numbers.repeat_interleave(topk, dim=1)
    level = Level(token_ids.flatten(1), total, parents, scores.flatten(1))
    best = total.argsort(dim=1, descending=True, stable=True)[:, :topk]
    befores = best // topk
    first = topk + (step - 1) * topk * topk if step else 0
    own = torch.arange(step * topk, (step + 1) * topk, device=best.device)
    return level, Beam(
        token_ids=level.token_ids.gather(1, best),
        scores=total.gather(1, best),
        numbers=first + best,
        befores=befores,
        masks=before.masks.gather(1, befores) | torch.ones_like(own) << own,
    )


@has_kernel
def choose_drafts(
    levels: Sequence[Level], num_steps: Tensor, num_draft_tokens: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the likeliest candidates as a tree: each comes after its parent.

    num_steps, num_draft_tokens: [B], the levels of each sequence that count, and how many drafts
    are wanted, no more than those levels have, at most `width`.
    Returns token ids int64 [B, width], parents int32 [B, width], the draft before each, counted
    from 1, 0 for the root, and logprobs float32 [B, width]; what stands past `num_draft_tokens` is
    anything valid.
    """
    token_ids = torch.cat([level.token_ids for level in levels], dim=1)
    parents = torch.cat([level.parents for level in levels], dim=1)
    count = num_draft_tokens.unsqueeze(1)
    scores = torch.cat(
        [
            level.scores.where(step < num_steps.unsqueeze(1), _NEVER)
            for step, level in enumerate(levels)
        ],
        dim=1,
    )
    num_candidates = scores.shape[1]
    ranked = scores.argsort(dim=1, descending=True, stable=True)[:, :width]
    place = torch.arange(ranked.shape[1], device=scores.device)
    # In order of their numbers, those that are not wanted last.
    chosen = ranked.where(place < count, num_candidates).sort(dim=1).values
    numbers = chosen.clamp(max=num_candidates - 1)
    # The place of each candidate in the tree, counted from 1; the last column is the root's.
    places = torch.zeros_like(scores[:, :1], dtype=torch.int64).repeat(1, num_candidates + 2)
    places.scatter_(1, chosen, (place + 1).expand_as(chosen))
    before = parents.gather(1, numbers)
    before = before.where(before >= 0, num_candidates + 1)
    logprobs = torch.cat([level.logprobs for level in levels], dim=1)
    return (
        token_ids.gather(1, numbers),
        places.gather(1, before).to(torch.int32),
        logprobs.gather(1, numbers),
    )


def likeliest_children(
    scores: Tensor, topk: int, target_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the topk largest scores of every row, as token ids and log-softmax.

    scores: float32 [R, Vd], tempered, with the noise of their position if the request samples,
    because noise and probability together predict the target's draw. Ties rank by column, so that
    the first child is the draft of a chain. target_ids: as in `draw.draw_children`.
    Returns int64 and float32 [R, topk]; ids are -1 for children scored -inf, and in rows that hold
    NaN or nothing finite.
    """
    top = scores.amax(dim=1, keepdim=True)
    total = (scores - top).exp_().sum(dim=1, keepdim=True).log_()
    left = scores
    children: list[Tensor] = []
    for _ in range(topk):
        if children:
            left = left.scatter(1, children[-1], _NEVER)
        # The first of equals, which torch's topk and argmax need not give.
        children.append(torch.from_numpy(on_host(left).argmax(axis=1)).to(left.device).unsqueeze(1))
    columns = torch.cat(children, dim=1)
    likely = scores.gather(1, columns) - top - total
    ids = columns if target_ids is None else target_ids[columns]
    return ids.where(likely.isfinite(), -1), likely
