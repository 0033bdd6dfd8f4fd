"""Which prompt tokens a step computes: the order of prompts, their number, and their rows.

A prompt's turn is the number of prompt tokens planned before it was admitted and its own missing
ones. So a short prompt passes a long one, and the long one lets pass as many tokens as it has.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from serve_spec.config import SchedulerConfig
from serve_spec.core.plan import ScheduledRequest
from serve_spec.core.round import PendingPrompt
from serve_spec.core.sequence import Sequence
from serve_spec.scheduler.requests import SHORT_EXTEND, edited_text, generated_ids


@dataclass(frozen=True)
class Prompt:
    """A sequence whose tokens are not computed from position `start` on."""

    seq: Sequence
    start: int

    @property
    def num_pending(self) -> int:
        """Tokens that the target has not computed."""
        return len(self.seq) - self.start


def in_turn(prompts: SequenceOf[Prompt]) -> list[Prompt]:
    """Return prompts in the order in which their tokens are computed."""
    return sorted(prompts, key=lambda each: (each.seq.params.priority, each.seq.prefill_turn))


def max_prompt_tokens(
    limits: SchedulerConfig, room: int, num_decoding: int, chosen: int | None = None
) -> int:
    """Return the most prompt tokens of a round with `room` tokens left.

    chosen: by the policy, for chunks of size auto; None: as many as there is room for.
    """
    size = limits.chunked_prefill_size
    if size is None or not num_decoding:
        return room
    if size == "auto":
        return room if chosen is None else min(room, chosen)
    return min(room, size)


def pending_prompts(
    prompts: SequenceOf[Prompt], limits: SchedulerConfig, room: int, num_decoding: int
) -> tuple[list[PendingPrompt], int]:
    """Return prompts for the policy, and the most tokens of them that a step may compute."""
    pending = [PendingPrompt(prompt.start, prompt.num_pending) for prompt in prompts]
    most = max_prompt_tokens(limits, max(0, room), num_decoding)
    return pending, min(most, sum(prompt.num_tokens for prompt in pending))


def prefill_requests(
    prompts: SequenceOf[Prompt], budget: int, limits: SchedulerConfig
) -> list[ScheduledRequest]:
    """Return prefill chunks of prompts that hold pages, in their order, of `budget` tokens.

    The first may exceed the budget, by one token or, without chunking, by the whole prompt.
    Otherwise decoding requests could starve it.
    """
    reqs: list[ScheduledRequest] = []
    for prompt in prompts:
        seq, start, count = prompt.seq, prompt.start, prompt.num_pending
        is_first = not reqs
        if limits.chunked_prefill_size is not None:
            count = min(count, max(budget, 1 if is_first else 0))
        elif count > budget and not is_first:
            count = 0
        if count > 0 and seq.page_ids:
            reqs.append(prefill_request(seq, start, count, samples=count == prompt.num_pending))
            budget -= count
    return reqs


def prefill_request(seq: Sequence, start: int, count: int, *, samples: bool) -> ScheduledRequest:
    """Return a prefill chunk of `count` tokens. If it `samples`, its last token draws."""
    end = start + count
    scored = seq.unscored(start, end)
    is_sent = end - 1 - seq.num_draft_computed <= SHORT_EXTEND
    return ScheduledRequest(
        request_id=seq.request_id,
        token_ids=tuple(seq.token_ids[start:end]),
        start=start,
        samples=samples,
        page_ids=tuple(seq.page_ids),
        params=seq.params,
        seed=seq.seed,
        draft_start=seq.num_draft_computed,
        extend_ids=tuple(seq.token_ids[seq.num_draft_computed + 1 : end]) if is_sent else (),
        request_slot=seq.request_slot,
        scored_start=scored.start,
        scored_ids=tuple(seq.token_ids[scored.start : scored.stop]),
        edited=edited_text(seq) if samples else None,
        generated_ids=generated_ids(seq) if samples else (),
    )
