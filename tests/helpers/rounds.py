"""Rounds as a policy sees them, without an engine."""

from dataclasses import replace

from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch


def decode_batch(size, *, max_steps=100, max_draft_tokens=100_000):
    """`size` greedy rows named by number, alike in everything."""
    return DecodeBatch(
        request_ids=[str(i) for i in range(size)],
        max_steps=[max_steps] * size,
        num_tokens=size * 128,
        num_sampled=0,
        max_draft_tokens=max_draft_tokens,
    )


def verified_round(
    correct_per_req, batch_size, num_steps, *, steps_per_req=None, context=128, **fields
):
    """The record of a step after which the first `len(correct_per_req)` requests go on.

    Without `steps_per_req` each of them drafted `num_steps`; the others emitted one token each.
    """
    live = len(correct_per_req)
    steps = [num_steps] * live if steps_per_req is None else list(steps_per_req)
    emitted = [kept + 1 for kept in correct_per_req]
    record = StepRecord(
        shape=DraftShape.chain(num_steps),
        request_ids=[str(i) for i in range(live)],
        steps_per_req=steps,
        correct_per_req=list(correct_per_req),
        accept_lengths=[*emitted, *[1] * (batch_size - live)],
        num_draft_tokens=sum(steps),
        num_tokens=batch_size * context,
        num_drafting=sum(k > 0 for k in steps),
        deepest=max(steps, default=0),
        num_pages=20,
    )
    return replace(record, **fields)
