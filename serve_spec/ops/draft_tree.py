"""Trees of drafts: a beam that grows level by level, and the best of all it met.

EAGLE-2 (arXiv 2406.16858): every level has the topk likeliest children of each token of the beam;
the topk likeliest of them, by the product of probabilities from the root on, are the next beam.
Of all candidates of all levels the likeliest make the tree.

    topk = 2      root ─┬─ a ─┬─ c        level 0: a b       beam a b
                        │     └─ d        level 1: c d e f   beam c e
                        └─ b ─┬─ e        the 4 likeliest: a c b e
                              └─ f

A score is a logarithm: a child's is its parent's and something not above 0. So the likeliest
candidates hold their parents, too, if equal scores rank by number, and parents have the smaller
one. All shapes are fixed: a GPU replays this without asking the host.
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
    """The candidates of one level, C of them: topk of the first one, topk² of each other.

    token_ids: int64 [B, C], -1 for none. scores: float32 [B, C], sums of logarithms; -inf for none.
    parents: int64 [B, C], each one's parent among the candidates of all levels; -1 for the root.
    shares: float32 [B, C], the candidate's own logarithm.
    """

    token_ids: Tensor
    scores: Tensor
    parents: Tensor
    shares: Tensor


class Beam(NamedTuple):
    """Candidates of a level that have children, W of them; they take cache entries.

    token_ids, scores: as in `Level`, [B, W]. numbers: int64 [B, W], which candidates they are.
    befores: int64 [B, W], the place of each one's parent in the beam before.
    masks: int64 [B, W], the entries on each one's path, its own included: bit l·topk + i stands for
    place i of the beam of level l.
    """

    token_ids: Tensor
    scores: Tensor
    numbers: Tensor
    befores: Tensor
    masks: Tensor


def root_beam(batch_size: int, device: torch.device) -> Beam:
    """The roots alone: what comes before the first level. They take no entry of the beams'."""
    none = torch.full((batch_size, 1), -1, dtype=torch.int64, device=device)
    zero = torch.zeros_like(none)
    return Beam(none, zero.float(), none, zero, zero)


@has_kernel
def grow_beam(before: Beam, token_ids: Tensor, scores: Tensor, step: int) -> tuple[Level, Beam]:
    """The level number `step`, and its beam.

    token_ids: int64 [B, W, topk], the children of every place of the beam `before`, -1 for none.
    scores: float32 [B, W, topk], the logarithm of something that says how likely each is.
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
    """The likeliest candidates, a tree: parents are among them, and come before their children.

    num_steps, num_draft_tokens: [B], the levels of each sequence that count, and how many drafts
    are wanted, no more than those levels have, at most `width`.
    Returns token ids int64 [B, width], parents int32 [B, width], the draft before each, counted
    from 1, 0 for the root, and shares float32 [B, width]; what stands past `num_draft_tokens` is
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
    # In order of their numbers; those that are not wanted stand last.
    chosen = ranked.where(place < count, num_candidates).sort(dim=1).values
    numbers = chosen.clamp(max=num_candidates - 1)
    # Where each candidate went, counted from 1; the last column is the root's.
    places = torch.zeros_like(scores[:, :1], dtype=torch.int64).repeat(1, num_candidates + 2)
    places.scatter_(1, chosen, (place + 1).expand_as(chosen))
    before = parents.gather(1, numbers)
    before = before.where(before >= 0, num_candidates + 1)
    shares = torch.cat([level.shares for level in levels], dim=1)
    return (
        token_ids.gather(1, numbers),
        places.gather(1, before).to(torch.int32),
        shares.gather(1, numbers),
    )


def likeliest_children(
    scores: Tensor, topk: int, target_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The topk best of every row, and the logarithm of its share of exp(scores).

    scores: float32 [R, Vd], tempered, with the noise of their position where a row is random: what
    the target will draw there is then told by these, not by probabilities alone. (Ranked by those,
    trees kept 10 to 15% less of the shipped pair's drafts at temperature 0.7.)
    Equal scores rank by column, so that the first child is the draft of a chain.
    target_ids: as in `draw.draw_drafts`. Returns int64 and float32 [R, topk]; the ids of a
    row that holds a NaN, or nothing finite, are -1, and so are those of children scored -inf.
    """
    top = scores.amax(dim=1, keepdim=True)
    total = (scores - top).exp_().sum(dim=1, keepdim=True).log_()
    left, children = scores, []
    for _ in range(topk):
        if children:
            left = left.scatter(1, children[-1], _NEVER)
        # The first of equals, which torch's topk and argmax need not give.
        children.append(torch.from_numpy(on_host(left).argmax(axis=1)).to(left.device).unsqueeze(1))
    columns = torch.cat(children, dim=1)
    likely = scores.gather(1, columns) - top - total
    ids = columns if target_ids is None else target_ids[columns]
    return ids.where(likely.isfinite(), -1), likely
