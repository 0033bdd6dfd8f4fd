"""Rounds as a policy sees them, without an engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch


def decode_batch(
    size: int,
    *,
    max_steps: int = 100,
    context: int = 128,
    sampled: bool = False,
    max_draft_tokens: int = 100_000,
    first: int = 0,
) -> DecodeBatch:
    """`size` rows named by number from `first`, alike in everything."""
    return DecodeBatch(
        request_ids=[str(first + i) for i in range(size)],
        max_steps=[max_steps] * size,
        num_tokens=size * context,
        num_sampled=size * sampled,
        max_draft_tokens=max_draft_tokens,
    )


def verified_round(
    row_correct_drafts: Sequence[int],
    batch_size: int,
    num_steps: int,
    *,
    row_steps: Sequence[int] | None = None,
    context: int = 128,
    **fields: Any,
) -> StepRecord:
    """The record of a step after which the first `len(row_correct_drafts)` requests go on.

    Without `row_steps` each of them drafted `num_steps`; the others emitted one token each.
    """
    live = len(row_correct_drafts)
    steps = [num_steps] * live if row_steps is None else list(row_steps)
    emitted = [kept + 1 for kept in row_correct_drafts]
    record = StepRecord(
        shape=DraftShape.chain(num_steps),
        request_ids=[str(i) for i in range(live)],
        row_steps=steps,
        row_correct_drafts=list(row_correct_drafts),
        accept_lengths=[*emitted, *[1] * (batch_size - live)],
        num_draft_tokens=sum(steps),
        num_tokens=batch_size * context,
        num_drafting=sum(k > 0 for k in steps),
        deepest=max(steps, default=0),
        num_pages=20,
    )
    return replace(record, **fields)
