"""Sampled drafts, kept or replaced so that the text follows the target's distribution.

A draft x drawn from q is kept with chance min(1, p(x) / q(x)), and what is emitted in place of the
first one that is not comes from norm((p - q)+): the most that any exact rule can keep of one draft
(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). Block verification decides on
the drafts together and never keeps fewer on average (Sun et al., arXiv 2403.10444).

Exact for any q, also where it is 0 and p is not, as long as the drafts were drawn from the very q
given here and the coins know nothing of them. p is the whole law of a row: edited, tempered,
filtered. Unlike the walk (`ops/acceptance.py`), whose tokens are draws of the target, these depend
on the draft: another draft, another text of the same distribution.

Everywhere: B sequences, K drafts of the longest, V tokens. `drafts` int64 [B, K]; `draft_probs` q
[B, K, V]; `target_probs` p [B, K + 1, V]; `num_steps` int64 [B], drafts of each sequence; what lies
beyond them is never looked at. Probabilities in any float dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.draw import (
    DrawParams,
    processed_scores,
    tempered,
)
from serve_spec.ops.noise import (
    Stream,
    gumbel_noise,
    row_keys_of,
    stream_seeds_of,
    uniform_noise,
)

ChancesOf: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(drafts, draft_probs, target_probs, num_steps) -> chances, weights."""

Keep: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(chances, coins, num_steps) -> drafts kept."""


def token_chances(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, num_steps: Tensor
) -> tuple[Tensor, Tensor]:
    """Standard rule: the chance [B, K] of each draft, if those before it are kept; all weights 1.

    Weights [B, K + 1]: see `leftover`.
    """
    chances = _ratios(drafts, draft_probs, target_probs).clamp(max=1)
    return chances, torch.ones_like(target_probs[:, :, 0])


def block_chances(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, num_steps: Tensor
) -> tuple[Tensor, Tensor]:
    """Block rule: the chance [B, K] that the first i drafts are kept, if no more are.

    Weights [B, K + 1]: the share of the target's mass that the first i drafts stand for.
    """
    weights = [torch.ones_like(target_probs[:, 0, 0])]
    for ratio in _ratios(drafts, draft_probs, target_probs).unbind(1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    weight = torch.stack(weights, dim=1)
    # Of the row after i drafts: what the target has left beyond the next draft's law.
    surplus = (weight[:, :-1, None] * target_probs[:, :-1] - draft_probs).clamp(min=0).sum(dim=2)
    surplus, kept = surplus[:, 1:], weight[:, 1:]
    missing = surplus + 1 - kept[:, :-1]
    chances = kept.clone()
    chances[:, :-1] = (surplus / missing).where(missing > 0, 1)
    number = torch.arange(1, chances.shape[1] + 1, device=drafts.device)
    # The last draft of a sequence has none after it.
    return chances.where(number < num_steps.unsqueeze(1), kept), weight


def keep_in_order(chances: Tensor, coins: Tensor, num_steps: Tensor) -> Tensor:
    """How many drafts are kept, int64 [B]: up to the first whose coin [B, K], in [0, 1), is not
    below its chance."""
    return _won(chances, coins, num_steps).long().cumprod(dim=1).sum(dim=1)


def keep_longest(chances: Tensor, coins: Tensor, num_steps: Tensor) -> Tensor:
    """The same: as many as the last draft whose coin is below its chance."""
    number = torch.arange(1, chances.shape[1] + 1, device=chances.device)
    return (_won(chances, coins, num_steps) * number).amax(dim=1)


RULES: dict[str, tuple[ChancesOf, Keep]] = {
    "standard": (token_chances, keep_in_order),
    "block": (block_chances, keep_longest),
}
"""By `rejection_sample_method`."""


class DraftLogits(NamedTuple):
    """From what the drafts of N sequences were drawn: their softmax at each one's temperature.

    logits: float32 [N, K, Vd], over draft ids; draft_ids: int32 [V], the draft's id of each of the
    target's ids, -1 where it has none.
    """

    logits: Tensor
    draft_ids: Tensor

    @classmethod
    def create(
        cls,
        shape: tuple[int, int, int],
        target_ids: Tensor | None,
        vocab_size: int,
        device: torch.device,
    ) -> DraftLogits:
        """Return room for [N, K, Vd] logits of drafts for a target of `vocab_size` tokens.

        target_ids: int64 [Vd], the target's id of each draft id; None where they are the same.
        """
        if target_ids is None:
            target_ids = torch.arange(min(shape[2], vocab_size), device=device)
        numbers = torch.arange(len(target_ids), dtype=torch.int32, device=device)
        draft_ids = torch.full((vocab_size,), -1, dtype=torch.int32, device=device)
        return cls(torch.zeros(shape, device=device), draft_ids.index_copy_(0, target_ids, numbers))


@has_kernel
def reject_drafts(
    logits: Tensor,
    row_tokens: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    request_slots: Tensor,
    positions: Tensor,
    params: DrawParams,
    drafted: DraftLogits,
    method: str,
) -> Tensor:
    """How many drafts each of B sequences keeps, int32 [B]: what `accept_path` is then to force.

    Sampled drafts are judged by `method`, and what is drawn in place of one that is lost goes into
    `drawn`, to the row before it. Greedy ones are kept while they equal what is drawn.

    logits: float32 [T, V], edited and masked. row_tokens, drawn: int64 [T] and query_starts: int32
    [B + 1], of chains, as for `accept_path`. request_slots: int32 [B], the row of each in `params`.
    positions: int64 [T], the position each row's draw decides.
    """
    depth = drafted.logits.shape[1]
    first = query_starts[:-1].long()
    counts = (query_starts[1:] - query_starts[:-1] - 1).long().clamp(min=0)
    column = torch.arange(depth + 1, device=logits.device)
    rows = first.unsqueeze(1) + torch.minimum(column, counts.unsqueeze(1))
    rows = rows.clamp(max=len(drawn) - 1)
    drafts = row_tokens[rows[:, 1:]].where(column[:-1] < counts.unsqueeze(1), -1)
    # A chain ends before a draft that is none, as if no more had been asked for.
    steps = (drafts >= 0).long().cumprod(dim=1).sum(dim=1)
    equal = (drafts == drawn[rows[:, :-1]]) & (column[:-1] < steps.unsqueeze(1))
    kept = equal.long().cumprod(dim=1).sum(dim=1)
    sampled = (
        ((params.inverse_temperature[request_slots.long()] > 0) & (steps > 0)).nonzero().flatten()
    )
    if len(sampled):
        rows, drafts, steps, request_slots = (
            x[sampled] for x in (rows, drafts, steps, request_slots)
        )
        target = _laws(
            logits[rows.flatten()], params.of(request_slots.repeat_interleave(depth + 1))
        )
        scale = params.inverse_temperature[request_slots.long()].repeat_interleave(depth)
        draft = tempered(drafted.logits[sampled].flatten(0, 1), scale).softmax(dim=-1)
        at, roots = params.of(request_slots).seeds, positions[rows[:, 0]]
        seeds = stream_seeds_of(Stream.ACCEPT, at, roots).repeat_interleave(depth, dim=0)
        decided = (roots.unsqueeze(1) + column[:-1]).flatten()
        correct, recovered = keep_or_replace(
            method,
            drafts,
            _over_draft_ids(draft.view(-1, depth, draft.shape[1]), drafted.draft_ids),
            target.view(-1, depth + 1, logits.shape[1]),
            steps,
            uniform_noise(row_keys_of(seeds, decided)).view(-1, depth),
            row_keys_of(stream_seeds_of(Stream.RECOVER, at, roots), roots),
        )
        last = rows.gather(1, correct.unsqueeze(1)).squeeze(1)
        drawn.index_copy_(0, last, recovered.where(correct < steps, drawn[last]))
        kept.index_copy_(0, sampled, correct)
    return kept.to(torch.int32)


def keep_or_replace(
    method: str,
    drafts: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    num_steps: Tensor,
    coins: Tensor,
    keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """How many drafts are kept, and the token in place of the first that is not, int64 [B] each.

    method: a key of `RULES`. coins: [B, K], in [0, 1). keys: int32 [B, 2], of the noise that token
    is drawn with. It is -1 where the target gave NaN; past the last draft it means nothing.
    """
    chances_of, keep = RULES[method]
    chances, weights = chances_of(drafts, draft_probs, target_probs, num_steps)
    correct = keep(chances, coins, num_steps)
    left = leftover(draft_probs, target_probs, weights, correct, num_steps)
    best, replaced = (left.log() + gumbel_noise(keys, left.shape[1])).max(dim=1)
    return correct, replaced.masked_fill(~best.isfinite(), -1)


def leftover(
    draft_probs: Tensor,
    target_probs: Tensor,
    weights: Tensor,
    num_correct: Tensor,
    num_steps: Tensor,
) -> Tensor:
    """From what the token after the kept drafts is drawn: (w·p - q)+, not normalised, [B, V].

    After the last draft of a sequence that is p itself.
    """
    row = torch.arange(len(num_correct), device=num_correct.device)
    target, weight = target_probs[row, num_correct], weights[row, num_correct]
    draft = draft_probs[row, num_correct.clamp(max=draft_probs.shape[1] - 1)]
    left = (weight.unsqueeze(1) * target - draft).clamp(min=0)
    # Equal laws lose no draft; where rounding says they did, either is right.
    is_target = (num_correct == num_steps) | (left.sum(dim=1) <= 0)
    return target.where(is_target.unsqueeze(1), left)


def _ratios(drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """p(x) / q(x) of every draft, [B, K]; 0 where q is, as of padding."""
    at = drafts.clamp(min=0).unsqueeze(2)
    p = target_probs[:, :-1].gather(2, at).squeeze(2)
    q = draft_probs.gather(2, at).squeeze(2)
    return (p / q).where(q > 0, 0)


def _won(chances: Tensor, coins: Tensor, num_steps: Tensor) -> Tensor:
    column = torch.arange(chances.shape[1], device=chances.device)
    return (coins < chances) & (column < num_steps.unsqueeze(1))


def _laws(logits: Tensor, rows: DrawParams) -> Tensor:
    """What rows draw from: probabilities [T, V]."""
    return processed_scores(logits, rows, has_filters=rows.has_filters).softmax(dim=-1)


def _over_draft_ids(probs: Tensor, draft_ids: Tensor) -> Tensor:
    """Return draft distributions over target ids, [B, K, Vd] -> [B, K, V], 0 without a draft id.

    draft_ids: see `DraftLogits`. NaN, of tokens that gave no draft, becomes 0.
    """
    probs = probs.nan_to_num(0.0)
    return probs[:, :, draft_ids.clamp(min=0)].where(draft_ids >= 0, 0.0)
