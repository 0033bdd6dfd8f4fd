"""Prefill chunks of a step, within the token budget."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from serve_spec.core.plan import ScheduledRequest
from serve_spec.core.sequence import Sequence
from serve_spec.scheduler.requests import prefill_request


@dataclass(frozen=True)
class Prompt:
    """A sequence whose tokens are not computed from position `start` on."""

    seq: Sequence
    start: int

    @property
    def num_pending(self) -> int:
        """Tokens that the target has not computed."""
        return len(self.seq) - self.start


def prefill_requests(
    prompts: SequenceOf[Prompt], budget: int, *, chunked: bool
) -> list[ScheduledRequest]:
    """Return prefill chunks of prompts that hold pages, the oldest first, of `budget` tokens.

    The first may exceed the budget, by one token or, without chunking, by the whole prompt.
    Otherwise decoding requests could starve it.
    """
    reqs: list[ScheduledRequest] = []
    for prompt in prompts:
        seq, start, count = prompt.seq, prompt.start, prompt.num_pending
        is_first = not reqs
        if chunked:
            count = min(count, max(budget, 1 if is_first else 0))
        elif count > budget and not is_first:
            count = 0
        if count > 0 and seq.page_ids:
            reqs.append(prefill_request(seq, start, count, samples=count == prompt.num_pending))
            budget -= count
    return reqs
