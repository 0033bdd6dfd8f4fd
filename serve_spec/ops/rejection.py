"""Rejection sampling: accept sampled drafts or replace them, for the target's distribution.

A draft x drawn from q is accepted with probability min(1, p(x) / q(x)); in place of the first
rejected one, a recovered token is drawn from norm((p - q)+) (Leviathan et al., arXiv 2211.17192;
Chen et al., arXiv 2302.01318). Block verification decides on the drafts together and accepts at
least as many on average (Sun et al., arXiv 2403.10444).

This is exact for any q, if the drafts were drawn from it and the uniform numbers are independent of
them. p is edited, tempered and filtered. Unlike draws of the target (`ops/acceptance.py`), the
tokens depend on the draft: another draft gives another text of the same distribution.

Shapes: B sequences, at most K drafts, V tokens. `drafts` int64 [B, K]; `draft_probs` q [B, K, V];
`target_probs` p [B, K + 1, V]; `num_steps` int64 [B], drafts of each sequence; values beyond them
are ignored. Probabilities in any float dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.draw import DrawParams, processed_scores, tempered
from serve_spec.ops.noise import Stream, gumbel_noise, noise_keys, stream_seeds, uniform_noise

ProbabilitiesOf: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(drafts, draft_probs, target_probs, num_steps) -> probabilities, weights."""

Keep: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(probabilities, uniforms, num_steps) -> number of accepted drafts."""


def token_probabilities(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, num_steps: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the acceptance probability [B, K] of each draft, if those before are accepted.

    All weights [B, K + 1] are 1; see `leftover`.
    """
    probabilities = _ratios(drafts, draft_probs, target_probs).clamp(max=1)
    return probabilities, torch.ones_like(target_probs[:, :, 0])


def block_probabilities(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, num_steps: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the block rule's probability [B, K] to accept the first i drafts, if no more are.

    Weights [B, K + 1]: the running products of p / q, each cut at 1.
    """
    weights = [torch.ones_like(target_probs[:, 0, 0])]
    for ratio in _ratios(drafts, draft_probs, target_probs).unbind(1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    weight = torch.stack(weights, dim=1)
    # After i drafts: the target's mass beyond the next draft's distribution.
    residual = (weight[:, :-1, None] * target_probs[:, :-1] - draft_probs).clamp(min=0).sum(dim=2)
    residual, kept = residual[:, 1:], weight[:, 1:]
    missing = residual + 1 - kept[:, :-1]
    probabilities = kept.clone()
    probabilities[:, :-1] = (residual / missing).where(missing > 0, 1)
    number = torch.arange(1, probabilities.shape[1] + 1, device=drafts.device)
    # The last draft of a sequence has no draft after it.
    return probabilities.where(number < num_steps.unsqueeze(1), kept), weight


def keep_in_order(probabilities: Tensor, uniforms: Tensor, num_steps: Tensor) -> Tensor:
    """Return how many drafts are accepted, int64 [B]: all before the first whose uniform number
    [B, K], in [0, 1), is not below its probability."""
    return _accepted(probabilities, uniforms, num_steps).long().cumprod(dim=1).sum(dim=1)


def keep_longest(probabilities: Tensor, uniforms: Tensor, num_steps: Tensor) -> Tensor:
    """Return the accepted drafts: all up to the last whose uniform is below its probability."""
    number = torch.arange(1, probabilities.shape[1] + 1, device=probabilities.device)
    return (_accepted(probabilities, uniforms, num_steps) * number).amax(dim=1)


RULES: dict[str, tuple[ProbabilitiesOf, Keep]] = {
    "standard": (token_probabilities, keep_in_order),
    "block": (block_probabilities, keep_longest),
}
"""By `rejection_sample_method`."""


class DraftLogits(NamedTuple):
    """Logits that the drafts of N sequences were drawn from, before temperature.

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


class Chains(NamedTuple):
    """Roots and drafts of B sequences, and their request slots.

    input_ids: int64 [T]. query_starts: int32 [B + 1]; both as for `accept_path`.
    request_slots: int32 [B], the row of each in `DrawParams`.
    """

    input_ids: Tensor
    query_starts: Tensor
    request_slots: Tensor


@has_kernel
def reject_drafts(
    logits: Tensor,
    chains: Chains,
    drawn: Tensor,
    positions: Tensor,
    params: DrawParams,
    drafted: DraftLogits,
    method: str,
) -> Tensor:
    """Return how many drafts each of B sequences accepts, int32 [B], as `accept_path`'s `forced`.

    Sampled drafts are verified by `method`, and the recovered token is written to `drawn`, before
    the rejected draft. Greedy ones are accepted while they equal the draw.

    logits: float32 [T, V], edited and masked. drawn: int64 [T], as for `accept_path`.
    positions: int64 [T], the position of each drawn token.
    """
    input_ids, query_starts, request_slots = chains
    depth = drafted.logits.shape[1]
    first = query_starts[:-1].long()
    counts = (query_starts[1:] - query_starts[:-1] - 1).long().clamp(min=0)
    column = torch.arange(depth + 1, device=logits.device)
    rows = first.unsqueeze(1) + torch.minimum(column, counts.unsqueeze(1))
    rows = rows.clamp(max=len(drawn) - 1)
    drafts = input_ids[rows[:, 1:]].where(column[:-1] < counts.unsqueeze(1), -1)
    # A chain ends before a broken draft (-1).
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
        target = _target_probs(
            logits[rows.flatten()], params.of(request_slots.repeat_interleave(depth + 1))
        )
        scale = params.inverse_temperature[request_slots.long()].repeat_interleave(depth)
        draft = tempered(drafted.logits[sampled].flatten(0, 1), scale).softmax(dim=-1)
        at, roots = params.of(request_slots).seeds, positions[rows[:, 0]]
        seeds = stream_seeds(Stream.ACCEPT, at, roots).repeat_interleave(depth, dim=0)
        decided = (roots.unsqueeze(1) + column[:-1]).flatten()
        correct, recovered = accept_or_recover(
            method,
            drafts,
            _over_draft_ids(draft.view(-1, depth, draft.shape[1]), drafted.draft_ids),
            target.view(-1, depth + 1, logits.shape[1]),
            steps,
            uniform_noise(noise_keys(seeds, decided)).view(-1, depth),
            noise_keys(stream_seeds(Stream.RECOVER, at, roots), roots),
        )
        last = rows.gather(1, correct.unsqueeze(1)).squeeze(1)
        drawn.index_copy_(0, last, recovered.where(correct < steps, drawn[last]))
        kept.index_copy_(0, sampled, correct)
    return kept.to(torch.int32)


def accept_or_recover(
    method: str,
    drafts: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    num_steps: Tensor,
    uniforms: Tensor,
    keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return how many drafts are accepted, and the recovered token, int64 [B] each.

    method: a key of `RULES`. uniforms: [B, K], in [0, 1). keys: int32 [B, 2], noise keys of the
    recovered token, which is -1 if the target gave NaN, and undefined if all drafts are accepted.
    """
    probabilities_of, keep = RULES[method]
    probabilities, weights = probabilities_of(drafts, draft_probs, target_probs, num_steps)
    correct = keep(probabilities, uniforms, num_steps)
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
    """Return what the token after the accepted drafts is drawn from, not normalised: [B, V].

    That is (w·p - q)+, or p after the last draft.
    """
    row = torch.arange(len(num_correct), device=num_correct.device)
    target, weight = target_probs[row, num_correct], weights[row, num_correct]
    draft = draft_probs[row, num_correct.clamp(max=draft_probs.shape[1] - 1)]
    left = (weight.unsqueeze(1) * target - draft).clamp(min=0)
    # If p equals q no draft is rejected, except by rounding.
    is_target = (num_correct == num_steps) | (left.sum(dim=1) <= 0)
    return target.where(is_target.unsqueeze(1), left)


def _ratios(drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return p(x) / q(x) of every draft, [B, K]; 0 if q(x) is 0, as for padding."""
    at = drafts.clamp(min=0).unsqueeze(2)
    p = target_probs[:, :-1].gather(2, at).squeeze(2)
    q = draft_probs.gather(2, at).squeeze(2)
    return (p / q).where(q > 0, 0)


def _accepted(probabilities: Tensor, uniforms: Tensor, num_steps: Tensor) -> Tensor:
    column = torch.arange(probabilities.shape[1], device=probabilities.device)
    return (uniforms < probabilities) & (column < num_steps.unsqueeze(1))


def _target_probs(logits: Tensor, rows: DrawParams) -> Tensor:
    """Return the probabilities [T, V] that rows draw from."""
    return processed_scores(logits, rows, has_filters=rows.has_filters).softmax(dim=-1)


def _over_draft_ids(probs: Tensor, draft_ids: Tensor) -> Tensor:
    """Return draft distributions over target ids, [B, K, Vd] -> [B, K, V], 0 without a draft id.

    draft_ids: see `DraftLogits`. NaN becomes 0.
    """
    probs = probs.nan_to_num(0.0)
    return probs[:, :, draft_ids.clamp(min=0)].where(draft_ids >= 0, 0.0)
