"""Rounds as a policy sees them, without an engine."""

from collections.abc import Sequence

from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.round import DecodeBatch, RoundTimes, VerifiedRound


def decode_batch(
    size: int,
    *,
    max_steps: int = 100,
    context: int = 128,
    sampled: bool = False,
    max_draft_tokens: int = 100_000,
    first: int = 0,
    may_draft: bool = True,
) -> DecodeBatch:
    """`size` rows named by number from `first`, alike in everything."""
    return DecodeBatch(
        request_ids=[str(first + i) for i in range(size)],
        max_steps=[max_steps] * size,
        num_tokens=size * context,
        num_sampled=size * sampled,
        max_draft_tokens=max_draft_tokens,
        may_draft=may_draft,
    )


def verified_round(
    num_correct_drafts: Sequence[int],
    batch_size: int,
    num_steps: int,
    *,
    row_steps: Sequence[int] | None = None,
    times: RoundTimes | None = None,
    context: int = 128,
) -> VerifiedRound:
    """The result of a round whose live rows are the first `len(num_correct_drafts)` of it.

    Without `row_steps` every row drafted the whole tier.
    """
    live = len(num_correct_drafts)
    steps = [num_steps] * live if row_steps is None else list(row_steps)
    return VerifiedRound(
        shape=DraftShape.chain(num_steps),
        batch_size=batch_size,
        num_tokens=batch_size * context,
        num_sampled=0,
        request_ids=[str(i) for i in range(live)],
        row_steps=steps,
        num_correct_drafts=list(num_correct_drafts),
        num_drafting=sum(k > 0 for k in steps),
        deepest=max(steps, default=0),
        num_draft_tokens=sum(steps),
        num_output_tokens=batch_size + sum(num_correct_drafts),
        num_catch_up=0,
        times=times,
    )
